"""A causal language model as a function of new tokens and their positions, with its own cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moepack.exporter import attention
from moepack.exporter.kv_cache import SlotLayer, StateLayer, slot_cache


class CachedDecoder(nn.Module):
    """(input_ids [1, T] int64, cache_position [T] int64) -> logits [1, T or 1, vocabulary] fp32.

    Tokens see the cache up to their own position. What the cache stores are buffers, so that the
    exported program carries them as state; nothing is returned but logits. A model with linear
    attention or convolutions takes one token in a pass, T = 1.
    """

    def __init__(self, model: PreTrainedModel, max_seq_len: int, last_logits_only: bool) -> None:
        super().__init__()
        self.model = model
        self.kept_logits = 1 if last_logits_only else 0
        self.cache = slot_cache(model.config, max_seq_len)
        # One pass tells the shapes of what is stored, whatever the kind of attention.
        with torch.no_grad():
            self._logits(torch.zeros(1, 2, dtype=torch.long), torch.arange(2))
        for index, layer in self._layers():
            for name, tensor in layer.stored().items():
                self.register_buffer(f"{name}_{index}", torch.zeros_like(tensor))

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        for index, layer in self._layers():
            for name in layer.stored():
                layer.store(name, getattr(self, f"{name}_{index}"))
        return self._logits(input_ids, cache_position)

    def _layers(self) -> Iterator[tuple[int, SlotLayer | StateLayer]]:
        for index, layer in enumerate(self.cache.layers):
            if isinstance(layer, SlotLayer | StateLayer):
                yield index, layer

    def _logits(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        for _, layer in self._layers():
            layer.begin(cache_position)
        output = self.model(
            input_ids=input_ids,
            position_ids=cache_position[None],
            cache=self.cache,
            use_cache=True,
            logits_to_keep=self.kept_logits,
        )
        logits: Tensor = output.logits
        return logits.float()


@contextmanager
def cached_decoder(
    model: PreTrainedModel, max_seq_len: int, last_logits_only: bool
) -> Iterator[CachedDecoder]:
    """`model` behind a cache, in evaluation mode; the model's own settings come back at the end."""
    config = model.config.get_text_config(decoder=True)
    kept_attention = config._attn_implementation
    kept_router_output = getattr(config, "output_router_logits", None)
    kept_gradients = {name: p.requires_grad for name, p in model.named_parameters()}
    training = model.training
    model.set_attn_implementation(attention.register())
    if kept_router_output:
        config.output_router_logits = False
    try:
        yield CachedDecoder(model, max_seq_len, last_logits_only).eval().requires_grad_(False)
    finally:
        model.set_attn_implementation(kept_attention)
        if kept_router_output:
            config.output_router_logits = kept_router_output
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(kept_gradients.get(name, False))
        model.train(training)
