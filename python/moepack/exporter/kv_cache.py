"""A cache of fixed size whose storage belongs to the exported module.

Shapes: S slots (the longest sequence), T new tokens, H heads stored per layer, C channels per head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticCache,
    StaticIndexedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.configuration_utils import PreTrainedConfig

from moepack.errors import UnsupportedError


class SlotLayer(StaticLayer):  # type: ignore[misc]
    """One layer's keys and values, [H, S, C] each, written at the slots named by `position`.

    The batch is always 1 and is left out of the storage: torch.export specializes the token count
    of a write below a batch of 1. The write is the operator itself, not `keys[:, position] = ...`,
    which would drop a leading size of 1 (MLA) that the in-place ExecuTorch kernel needs.

    A layer with an attention window keeps all slots as well: the window is in the mask, which the
    model's own code makes.
    """

    def __init__(self, slots: int, is_sliding: bool = False) -> None:
        super().__init__(max_cache_len=slots)
        self.is_sliding = is_sliding
        self.position = torch.arange(1)

    def begin(self, position: Tensor) -> None:
        """Before each pass: the positions of its tokens, [T] int64."""
        self.position = position

    def stored(self) -> dict[str, Tensor]:
        return {"keys": self.keys, "values": self.values}

    def store(self, name: str, tensor: Tensor) -> None:
        setattr(self, name, tensor)

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
        return self._written(self.keys, key_states), self._written(self.values, value_states)

    def _written(self, storage: Tensor, states: Tensor) -> Tensor:
        torch.ops.aten.index_put_.default(storage, [None, self.position], states[0])
        # view and not unsqueeze: ExecuTorch aliases views and would copy the whole cache else.
        return storage.view(1, *storage.shape)

    def get_seq_length(self) -> Tensor:
        """How many tokens precede the new ones: scalar int64."""
        return self.position[0]


class IndexedSlotLayer(SlotLayer):
    """Beside keys and values those of a sparse attention's indexer, which has one head."""

    def stored(self) -> dict[str, Tensor]:
        return {**super().stored(), "indexer_keys": self.indexer_keys}

    @property
    def indexer_position_ids(self) -> None:
        raise UnsupportedError(
            "an indexer of sparse attention that keeps positions beside keys cannot be exported yet"
        )

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        if not hasattr(self, "indexer_keys"):
            self.indexer_keys = self._storage_for(indexer_key_states[None])
        return self._written(self.indexer_keys, indexer_key_states[None])[0]


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """States of linear attention and of convolutions: of a fixed size, whatever came before.

    The models' own code for one new token updates them in place.
    """

    def begin(self, position: Tensor) -> None:
        """A sequence that begins, at position 0, does so with zeros."""
        for name, state in StateLayer.stored(self).items():
            self.has_previous_state[int(name.rpartition("_")[2])] = True
            state.copy_(torch.where(position[0] > 0, state, torch.zeros_like(state)))

    def stored(self) -> dict[str, Tensor]:
        kinds = ("conv_states", "recurrent_states")
        return {f"{k}_{i}": t for k in kinds for i, t in getattr(self, k).items() if t is not None}

    def store(self, name: str, tensor: Tensor) -> None:
        kind, _, index = name.rpartition("_")
        getattr(self, kind)[int(index)] = tensor


class StateAndSlotLayer(StateLayer, SlotLayer):
    """Both in one layer."""

    def __init__(self, slots: int, is_sliding: bool, number_of_states: int) -> None:
        SlotLayer.__init__(self, slots, is_sliding)
        LinearAttentionLayer.__init__(self, number_of_states)

    def begin(self, position: Tensor) -> None:
        SlotLayer.begin(self, position)
        StateLayer.begin(self, position)

    def stored(self) -> dict[str, Tensor]:
        return {**SlotLayer.stored(self), **StateLayer.stored(self)}

    def store(self, name: str, tensor: Tensor) -> None:
        kept = SlotLayer if name in ("keys", "values") else StateLayer
        kept.store(self, name, tensor)

    def lazy_initialization(self, *states: Tensor, **named: Any) -> None:
        # Keys and values come by place, states by name.
        kept = SlotLayer if states else StateLayer
        kept.lazy_initialization(self, *states, **named)


def slot_cache(config: PreTrainedConfig, slots: int) -> Cache:
    """An empty cache for a model of this config.

    Raises UnsupportedError where a layer keeps something that is not known here.
    """
    layers = StaticCache(config, max_cache_len=slots).layers
    return Cache(layers=[_own_layer(index, layer, slots) for index, layer in enumerate(layers)])


def tokens_per_call(config: PreTrainedConfig, slots: int) -> int:
    """How many tokens a pass can take: with states in the cache one, else all."""
    layers = slot_cache(config, slots).layers
    return 1 if any(isinstance(layer, StateLayer) for layer in layers) else slots


def _own_layer(index: int, layer: Any, slots: int) -> SlotLayer | StateLayer | DummyLayer:
    kind = type(layer)
    if kind is DummyLayer:
        return layer
    if kind is LinearAttentionLayer:
        return StateLayer(layer.number_of_states)
    if kind is StaticIndexedLayer:
        return IndexedSlotLayer(slots)
    if kind in (StaticLayer, StaticSlidingWindowLayer):
        return SlotLayer(slots, layer.is_sliding)
    if kind in (
        LinearAttentionAndStaticFullAttentionLayer,
        LinearAttentionAndStaticSlidingWindowAttentionLayer,
    ):
        return StateAndSlotLayer(slots, layer.is_sliding, layer.number_of_states)
    raise UnsupportedError(
        f"layer {index}: its cache is {kind.__name__}; the export supports attention (plain, with "
        "a window, indexed), linear attention and convolutions"
    )
