"""The cache of exported decoders: every kind of layer against the model without a cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tiny_models
from moepack.errors import UnsupportedError
from moepack.exporter.attention import grouped_attention, slot_mask
from moepack.exporter.decoder import CachedDecoder, cached_decoder
from moepack.exporter.kv_cache import tokens_per_call
from tiny_families import ENCODER_DECODER

SLOTS, TOKENS = 24, 20
# Past their windows of 8 tokens: one of each kind of cache and of attention.
SHOWN = {
    "mixtral": "a window in every layer",
    "gpt_oss": "sinks, and a window in some layers",
    "gemma4_text": "two sizes of heads",
    "deepseek_v32": "an indexer's keys",
    "inkling_text": "states beside keys and values, a bias of positions",
    "qwen3_next": "linear attention",
    "nemotron_h": "Mamba, and layers without a cache",
    "lfm2_moe": "convolutions",
    "zaya": "states beside keys and values",
}
OF_ONE_TOKEN = ("inkling_text", "qwen3_next", "nemotron_h", "lfm2_moe", "zaya")
# Their own code: a cache of its own class, attention over layers, positions kept by the indexer.
REFUSED = ("minimax", "inkling2_text", "inkling2_loop_text", "qwen4_exp_text")


def decoded(decoder: CachedDecoder, ids: Tensor, sizes: list[int]) -> Tensor:
    pieces = zip(ids.split(sizes, 1), torch.arange(ids.shape[1]).split(sizes), strict=True)
    with torch.inference_mode():
        return torch.cat([decoder(some, at) for some, at in pieces], 1)


def check(family: str, sizes: list[int], ids: Tensor) -> None:
    model = tiny_models.build(family)
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits
    with cached_decoder(model, SLOTS, last_logits_only=False) as decoder:
        for _ in range(2):  # the second sequence finds what the first left in the cache
            found = decoded(decoder, ids, sizes)
            assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("family", SHOWN)
def test_one_token_at_a_time_is_as_without_a_cache(family: str) -> None:
    check(family, [1] * TOKENS, tiny_models.tokens(TOKENS))


@pytest.mark.parametrize("family", sorted({*SHOWN} - {*OF_ONE_TOKEN}))
def test_several_tokens_at_a_time_are_as_without_a_cache(family: str) -> None:
    check(family, [11, 1, 5, 3], tiny_models.tokens(TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("family", [*tiny_models.FUSED, *tiny_models.OUTSIDE])
def test_every_language_model_but_a_few_has_this_cache(family: str) -> None:
    model = tiny_models.build(family)
    if not hasattr(model, "lm_head") or family in ENCODER_DECODER or family in REFUSED:
        pytest.skip("no causal language model, or refused")
    check(family, [1] * TOKENS, tiny_models.tokens(TOKENS))


def test_a_pass_takes_one_token_where_the_cache_has_states() -> None:
    for family in SHOWN:
        config = tiny_models.build(family, device="meta").config
        assert tokens_per_call(config, SLOTS) == (1 if family in OF_ONE_TOKEN else SLOTS), family


@pytest.mark.parametrize("family", REFUSED)
def test_other_caches_are_refused(family: str) -> None:
    model = tiny_models.build(family)
    refused = pytest.raises(
        (UnsupportedError, ValueError), match=r"cannot be exported|cache of its own"
    )
    with refused, cached_decoder(model, SLOTS, last_logits_only=True):
        pass


def test_attention_refuses_what_it_does_not_know() -> None:
    q, kv, mask = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 5, 8), torch.zeros(1, 1, 3, 5)
    module = nn.Module()
    with pytest.raises(UnsupportedError, match="with block_indices"):
        grouped_attention(module, q, kv, kv, mask, block_indices=torch.zeros(1))
    with pytest.raises(UnsupportedError, match="without a mask"):
        grouped_attention(module, q, kv, kv, None)
    grouped_attention(module, q, kv, kv, mask, block_indices=None, sliding_window=3)


def test_attention_is_the_plain_formula() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v, bias, sinks = (
        draw(1, 4, 3, 8),
        draw(1, 2, 5, 8),
        draw(1, 2, 5, 6),
        draw(1, 4, 3, 5),
        draw(4),
    )
    indices = torch.tensor([[[0, 3], [1, 2], [4, 0]]])
    mask = slot_mask(3, 5, torch.tensor(2), lambda b, h, i, j: j <= i, torch.float32)
    found, _ = grouped_attention(
        nn.Module(),
        q,
        k,
        v,
        mask,
        0.5,
        softcap=2.0,
        s_aux=sinks,
        position_bias=bias,
        indices=indices,
    )
    for head in range(4):
        for token in range(3):
            seen = [s for s in indices[0, token].tolist() if s <= token + 2]
            scores = 2 * torch.tanh(k[0, head // 2, seen] @ q[0, head, token] * 0.5 / 2)
            scores = torch.cat([scores + bias[0, head, token, seen], sinks[head : head + 1]])
            expected = torch.softmax(scores, 0)[:-1] @ v[0, head // 2, seen]
            torch.testing.assert_close(found[0, token, head], expected)
