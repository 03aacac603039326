"""Grouped-query attention without repeated keys and values, and the mask that it takes.

Shapes: T new tokens, S cache slots, H query heads, G key/value heads, R = H/G, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from moepack.errors import UnsupportedError

NAME = "moepack_grouped"

# What models hand on and attention needs no more: the mask has the window and the positions.
# Anything else would change the result, so it is refused.
_IGNORED = frozenset(
    {
        "is_causal",
        "output_attentions",
        "output_router_logits",
        "position_ids",
        "sliding_window",
        "use_cache",
    }
)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """softmax(cap(q k^T * scaling) + bias + mask) v, the R heads of a group sharing one product.

    query [1, H, T, C], key [1, G, S, C], value [1, G, S, Cv], mask [1, 1, T, S],
    position_bias [1, H, T, S] -> [1, T, H, Cv]. cap(x) = softcap * tanh(x / softcap).
    s_aux [H] or sinks [1, H, T, 1]: a logit that takes part in the softmax and has no value.
    indices [1, T, I]: the slots that sparse attention has chosen; the others are masked.
    """
    unknown = sorted(n for n, given in extras.items() if given is not None and n not in _IGNORED)
    if unknown or attention_mask is None:
        what = f"with {', '.join(unknown)}" if unknown else "without a mask"
        raise UnsupportedError(f"{type(module).__name__}: attention {what} cannot be exported yet")
    _, heads, tokens, channels = query.shape
    _, groups, slots, value_channels = value.shape
    per_group = heads // groups
    scale = channels**-0.5 if scaling is None else scaling
    q = (query * scale)[0].reshape(groups, per_group * tokens, channels)
    # Views, not indexing by [0]: ExecuTorch aliases views and would copy the cache else.
    k, v = key.view(groups, slots, channels), value.view(groups, slots, value_channels)
    scores = torch.bmm(q, k.transpose(1, 2)).view(groups, per_group, tokens, slots)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if position_bias is not None:
        scores = scores + position_bias.view(groups, per_group, tokens, slots)
    mask = attention_mask.view(tokens, slots)
    if indices is not None:
        mask = _chosen(mask, indices[0])
    if s_aux is not None:
        sinks = s_aux.view(1, heads, 1, 1).expand(-1, -1, tokens, -1)
    weights = _softmax(scores + mask, sinks)
    mixed = torch.bmm(weights.view(groups, per_group * tokens, slots), v)
    mixed = mixed.view(groups, per_group, tokens, value_channels).permute(2, 0, 1, 3)
    # Some models view the result in another shape.
    return mixed.reshape(1, tokens, heads, value_channels).contiguous(), None


def _chosen(mask: Tensor, indices: Tensor) -> Tensor:
    """mask [T, S], indices [T, I] -> [T, S], -inf at all other slots."""
    is_left_out = torch.ones_like(mask, dtype=torch.bool).scatter(-1, indices.long(), False)
    return mask.masked_fill(is_left_out, float("-inf"))


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """scores [G, R, T, S], sinks [1, H, T, 1] or None -> [G, R, T, S]."""
    if sinks is None:
        return torch.softmax(scores, -1)
    column = sinks.reshape(*scores.shape[:-1], 1).to(scores.dtype)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., : scores.shape[-1]]


def slot_mask(
    q_length: int,
    kv_length: int,
    q_offset: Tensor,
    mask_function: Callable[..., Tensor],
    dtype: torch.dtype,
    **settings: Any,
) -> Tensor:
    """[1, 1, T, S]: 0 where `mask_function`, the model's own, lets a token see a slot, else -inf.

    `q_offset`, scalar int64, is the position of the first token; slots are positions.
    """
    first = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    tokens = (torch.arange(q_length) + q_offset).view(1, 1, -1, 1)
    slots = torch.arange(kv_length).view(1, 1, 1, -1)
    visible = mask_function(first, first, tokens, slots)
    return torch.where(visible, 0.0, float("-inf")).to(dtype)


def register() -> str:
    """Makes both known to transformers, under the name that is returned."""
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, slot_mask)
    return NAME
