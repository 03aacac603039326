"""Grouped-query attention without repeated keys and values.

Shapes: T new tokens, S cache slots, H query heads, G key/value heads, R = H/G, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from moepack.errors import UnsupportedError

NAME = "moepack_grouped"

# What some models add to the scores; ignoring one of them would change the model silently.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **extras: Any,
) -> tuple[Tensor, None]:
    """softmax(q k^T * scaling + mask) v, the R heads of a group sharing one product with its keys.

    query [1, H, T, C], key [1, G, S, C], value [1, G, S, Cv], mask [1, 1, T, S] -> [1, T, H, Cv].
    """
    for name in _UNSUPPORTED:
        if extras.get(name) is not None:
            raise UnsupportedError(
                f"{type(module).__name__}: attention with {name} cannot be exported yet"
            )
    _, heads, tokens, channels = query.shape
    _, groups, slots, value_channels = value.shape
    per_group = heads // groups
    scale = channels**-0.5 if scaling is None else scaling
    q = (query * scale)[0].reshape(groups, per_group * tokens, channels)
    # Views, not indexing by [0]: ExecuTorch aliases views and would copy the cache else.
    k, v = key.view(groups, slots, channels), value.view(groups, slots, value_channels)
    scores = torch.bmm(q, k.transpose(1, 2)).view(groups, per_group, tokens, slots)
    weights = torch.softmax(scores + attention_mask.view(tokens, slots), -1)
    mixed = torch.bmm(weights.view(groups, per_group * tokens, slots), v)
    mixed = mixed.view(groups, per_group, tokens, value_channels).permute(2, 0, 1, 3)
    return mixed.reshape(1, tokens, heads, value_channels), None


def register() -> str:
    """Makes the function known to transformers, under the name that is returned."""
    AttentionInterface.register(NAME, grouped_attention)
    return NAME
