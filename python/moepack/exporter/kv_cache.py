"""A key/value cache of fixed size whose storage belongs to the exported module.

Shapes: S slots (the longest sequence), T new tokens, H heads stored per layer, C channels per head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.configuration_utils import PreTrainedConfig

from moepack.errors import UnsupportedError

_UNBOUNDED = 1 << 40


class SlotLayer(StaticLayer):  # type: ignore[misc]
    """One layer's keys and values, [H, S, C] each, written at the slots named by `position`.

    The batch is always 1 and is left out of the storage: torch.export specializes the token count
    of a write below a batch of 1. The write is the operator itself, not `keys[:, position] = ...`,
    which would drop a leading size of 1 (MLA) that the in-place ExecuTorch kernel needs.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(max_cache_len=slots)
        self.position: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._storage_for(key_states)
        self.values = self._storage_for(value_states)
        self.is_initialized = True

    def _storage_for(self, states: Tensor) -> Tensor:
        _, heads, _, channels = states.shape
        return states.new_zeros(heads, self.max_cache_len, channels)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        write = torch.ops.aten.index_put_.default
        write(self.keys, [None, self.position], key_states[0])
        write(self.values, [None, self.position], value_states[0])
        # view and not unsqueeze: ExecuTorch aliases views and would copy the whole cache else.
        return self.keys.view(1, *self.keys.shape), self.values.view(1, *self.values.shape)


def attention_window(config: PreTrainedConfig) -> int | None:
    """The fewest tokens that a layer's attention can see; None where all layers see everything."""
    windows = [
        layer.get_max_length()
        for layer in StaticCache(config, max_cache_len=_UNBOUNDED).layers
        if isinstance(layer, StaticLayer)
    ]
    smallest = min(windows, default=_UNBOUNDED)
    return None if smallest == _UNBOUNDED else smallest


def slot_cache(config: PreTrainedConfig, slots: int) -> Cache:
    """An empty cache for a model of this config.

    Raises UnsupportedError where a layer keeps something else than plain keys and values, or would
    forget tokens before the sequence ends: the attention mask of the export is plainly causal.
    """
    layers = StaticCache(config, max_cache_len=slots).layers
    for index, layer in enumerate(layers):
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
            raise UnsupportedError(
                f"layer {index}: its cache is {type(layer).__name__}; the export supports layers "
                "with plain attention (keys and values of every token)"
            )
        if layer.get_max_length() < slots:
            raise UnsupportedError(
                f"layer {index}: attention sees a window of {layer.get_max_length()} tokens, fewer "
                f"than the {slots} of the export; export with --max-seq-len "
                f"{layer.get_max_length()} or less"
            )
    return Cache(layers=[SlotLayer(slots) for _ in layers])
