"""Perplexity of a language model, the same way for torch models and exported programs.

ppl = exp(-1/N * sum over scored tokens of log p(token | the tokens before it in its window)).
The text is cut into windows of `window` tokens that begin every `stride` tokens. Each token is
scored once, in the first window that holds it and at least one token before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moepack.checkpoint import load_model
from moepack.errors import MoePackError
from moepack.json_text import finite
from moepack.manifest import PROGRAM
from moepack.runtime import Program
from moepack.threads import require_threads

# Token ids [T] -> logits [T, vocabulary], row t for the token after t.
Scorer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Perplexity:
    value: float
    nats_per_token: float
    tokens: int
    windows: int
    window: int
    stride: int

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.value)

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is not finite becomes null."""
        values: dict[str, Any] = finite(asdict(self))
        return values


def perplexity(
    model: nn.Module | Program | Scorer,
    ids: Sequence[int],
    *,
    window: int,
    stride: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Perplexity:
    """`stride` is the window's length by default. `progress` is told the share that is done.

    Raises MoePackError for a text of fewer than 2 tokens, and for a program that was exported
    with the last logits only or with a shorter context.
    """
    step = window if stride is None else stride
    if window < 2 or not 1 <= step <= window:
        raise MoePackError(
            f"window {window}, stride {step}: need window >= 2 and 1 <= stride <= window"
        )
    if len(ids) < 2:
        raise MoePackError(f"the text has {len(ids)} tokens; perplexity needs at least 2")
    score = _scorer(model, window)
    tokens = torch.as_tensor(ids, dtype=torch.int64)
    total, scored, windows, done = 0.0, 0, 0, 0
    for begin in range(0, len(tokens) - 1, step):
        end = min(begin + window, len(tokens))
        if end - begin >= 2 and end > done:
            first = max(done, begin + 1)
            total -= _log_likelihood(score(tokens[begin:end]), tokens, begin, first, end)
            scored, windows, done = scored + end - first, windows + 1, end
        if progress is not None:
            progress(end / len(tokens))
        if end == len(tokens):
            break
    mean = total / scored
    try:
        value = math.exp(mean)
    except OverflowError:
        value = math.inf
    return Perplexity(value, mean, scored, windows, window, step)


def open_model(path: Path, threads: int | None = None) -> nn.Module | Program:
    """An exported program (.pte or its directory), or the model of a checkpoint directory."""
    require_threads(threads)
    if path.is_dir() and not (path / PROGRAM).exists():
        if threads is not None:
            torch.set_num_threads(threads)
        model: nn.Module = load_model(path)
        return model
    return Program.load(path, threads=threads)


def _log_likelihood(logits: Tensor, tokens: Tensor, begin: int, first: int, end: int) -> float:
    """Sum of log p(tokens[i]) for first <= i < end; row r of logits predicts begin + r + 1."""
    rows = logits[first - 1 - begin : end - 1 - begin].to(torch.float64)
    chosen = torch.log_softmax(rows, -1).gather(1, tokens[first:end, None])
    return float(chosen.sum())


def _scorer(model: nn.Module | Program | Scorer, window: int) -> Scorer:
    if isinstance(model, Program):
        if not model.all_logits:
            raise MoePackError(
                f"{model.file.path} gives the last logits only; export with --logits all to score"
            )
        if window > model.max_seq_len:
            raise MoePackError(
                f"window {window} is longer than the program's context {model.max_seq_len}"
            )
        return model.logits
    if isinstance(model, nn.Module):
        return _module_scorer(model)
    return model


def _module_scorer(model: nn.Module) -> Scorer:
    def score(ids: Tensor) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
        return logits

    return score
