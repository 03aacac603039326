"""Perplexity: windows and strides score every token once; models and programs alike."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import moepack
from made_programs import CONTEXT, VOCAB, checkpoint, exported
from moepack.checkpoint import load_model
from moepack.errors import MoePackError
from moepack.evaluate import open_model, perplexity
from moepack.runtime import Program

TOKENS = 11


def uniform(ids: Tensor) -> Tensor:
    return torch.zeros(len(ids), TOKENS)


@given(
    length=st.integers(2, 200),
    window=st.integers(2, 60),
    share=st.floats(0.01, 1.0),
)
def test_every_token_but_the_first_is_scored_once(length: int, window: int, share: float) -> None:
    stride = max(1, int(share * (window - 1)))
    found = perplexity(uniform, [1] * length, window=window, stride=stride)
    assert found.tokens == length - 1
    assert math.isclose(found.value, TOKENS, rel_tol=1e-9)


@pytest.mark.parametrize(("size", "nats"), [(1e4, 1e4), (math.inf, None), (math.nan, None)])
def test_what_is_not_finite_is_null_in_json(size: float, nats: float | None) -> None:
    def never(ids: Tensor) -> Tensor:
        logits = torch.zeros(len(ids), TOKENS)
        logits[:, 0] = size
        return logits

    found = perplexity(never, [1] * 20, window=10)
    assert not found.is_finite
    values = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert values["value"] is None
    assert values["nats_per_token"] == nats


def test_windows_side_by_side_do_not_score_their_first_token() -> None:
    found = perplexity(uniform, [1] * 100, window=10)
    assert (found.windows, found.tokens, found.stride) == (10, 90, 10)


def test_score_is_that_of_the_next_token() -> None:
    def successor(ids: Tensor) -> Tensor:
        """Probability 1 - epsilon on id + 1."""
        return torch.nn.functional.one_hot((ids + 1) % TOKENS, TOKENS) * 100.0

    assert perplexity(successor, [i % TOKENS for i in range(50)], window=16).value < 1 + 1e-9
    assert perplexity(successor, [3] * 50, window=16).value > 1e9


def test_stride_gives_context() -> None:
    seen = []

    def note(ids: Tensor) -> Tensor:
        seen.append(ids.tolist())
        return uniform(ids)

    perplexity(note, list(range(10)), window=4, stride=2)
    assert seen == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7], [6, 7, 8, 9]]


def test_program_and_eager_packed_model_agree() -> None:
    ids = torch.randint(3, VOCAB, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    model = load_model(checkpoint("qwen3_moe"))
    floating = perplexity(model, ids, window=CONTEXT)
    moepack.quantize_(model)
    eager = perplexity(model, ids, window=CONTEXT)
    program = perplexity(Program.load(exported("qwen3_moe")), ids, window=CONTEXT)
    assert math.isclose(program.value, eager.value, rel_tol=2e-3)
    assert math.isclose(eager.value, floating.value, rel_tol=0.5)
    assert program.to_json()["windows"] == eager.windows == 3


@pytest.mark.parametrize(
    ("length", "window", "stride"), [(1, 8, 8), (9, 1, 1), (9, 8, 0), (9, 8, 9)]
)
def test_what_cannot_be_scored_is_refused(length: int, window: int, stride: int) -> None:
    with pytest.raises(MoePackError):
        perplexity(uniform, [1] * length, window=window, stride=stride)


def test_window_beyond_the_context_of_a_program_is_refused() -> None:
    with pytest.raises(MoePackError, match=str(CONTEXT)):
        perplexity(Program.load(exported()), [3] * 200, window=CONTEXT + 1)


def test_open_model_tells_programs_from_checkpoints() -> None:
    assert isinstance(open_model(exported()), Program)
    assert isinstance(open_model(checkpoint("qwen3_moe")), torch.nn.Module)
