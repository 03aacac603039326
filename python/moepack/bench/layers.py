"""Layers of made experts, as many as no cache holds, and calls of the operator on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from moepack import _core, huge_pages, ops
from moepack.errors import VerificationError
from moepack.packing import pack
from moepack.quantizer import QuantizedMatrix, quantize
from moepack.schemes import Scheme

_CALLS = 8  # of one token, in a row
_DISTINCT = 2  # different experts; the others are their copies, in memory of their own


class Layers:
    """Copies of a layer of made experts on huge pages, and calls of the operators on them.

    `shape` is D, F, E, K. There are as many copies as `min_bytes` take, at least one.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        found: Scheme,
        min_bytes: int,
        layout: str = "moepack",
    ) -> None:
        self.shape, self.scheme, self.layout = shape, found, layout
        d, f, e, _ = shape
        distinct = range(min(_DISTINCT, e))
        w13 = [pack(_made(found, 2 * f, d, 2 * i), "gate_up", layout) for i in distinct]
        w2 = [pack(_made(found, d, f, 2 * i + 1), "plain", layout) for i in distinct]
        self.expert_bytes = w13[0].numel() + w2[0].numel()
        copies = max(1, -(-min_bytes // (e * self.expert_bytes)))
        self.copies = [(_stacked(w13, e), _stacked(w2, e)) for _ in range(copies)]
        self.gate_weight = torch.randn(e, d, generator=torch.Generator().manual_seed(0))

    def inputs(self, tokens: int, step: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """x, ids, weights and the copy that a step uses."""
        d, _, e, k = self.shape
        generator = torch.Generator().manual_seed(step)
        if tokens == 1:
            walk = step * k + torch.arange(k)
            ids, copy = (walk % e)[None], int(walk[0]) // e % len(self.copies)
        else:
            ids = torch.rand(tokens, e, generator=generator).argsort(1)[:, :k].contiguous()
            copy = step % len(self.copies)
        x = torch.randn(tokens, d, generator=generator)
        return x, ids, torch.full((tokens, k), 1 / k), copy

    def calls(self, tokens: int, step: int) -> list[tuple[Tensor, Tensor, Tensor, int]]:
        """The inputs of a step's calls in a row: a token goes through one layer after another."""
        count = max(1, _CALLS // tokens)
        return [self.inputs(tokens, step * count + i) for i in range(count)]

    def call(self, x: Tensor, ids: Tensor, weights: Tensor, copy: int) -> Tensor:
        w13, w2 = self.copies[copy]
        return ops.quantized_experts(
            x, ids, weights, w13, w2, None, None, self.shape[1], self.scheme.name, self.layout
        )

    def call_with_router(self, x: Tensor, copy: int) -> Tensor:
        w13, w2 = self.copies[copy]
        _, f, _, k = self.shape
        return ops.quantized_moe_ffn(
            x, None, self.gate_weight, None, None, w13, w2, None, None, k, f, self.scheme.name,
            self.layout,
        )  # fmt: skip

    def check(self, isa: str | None) -> None:
        """An instruction set gives the scalar kernel's bits, and is left in use.

        Raises VerificationError.
        """
        x, ids, weights, copy = self.inputs(3, 0)
        results = []
        for name in ("scalar", isa):
            ops.force_isa(name)
            results.append((self.call(x, ids, weights, copy), self.call_with_router(x, copy)))
        if not all(map(torch.equal, *results)):
            raise VerificationError(f"{_core.active_isa()} differs from the scalar kernel")


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call, by the clock."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def timed_in_a_row(call: Callable[..., object], inputs: Sequence[tuple[object, ...]]) -> float:
    """Mean seconds of calls, one after the other as in a model, after one that wakes threads."""
    call(*inputs[-1])
    return sum(timed(partial(call, *each)) for each in inputs) / len(inputs)


def _made(found: Scheme, rows: int, cols: int, seed: int) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(seed)
    if not found.is_integer:
        return quantize(torch.randn(rows, cols, generator=generator) / cols**0.5, found)
    codes = torch.randint(
        found.code_min, found.code_max + 1, (rows, cols), generator=generator, dtype=torch.int8
    )
    scales = torch.rand(rows, found.groups(cols), generator=generator) + 0.5
    step = found.code_max * cols**0.5
    return QuantizedMatrix(found, codes, (scales / step).to(torch.float16), 0)


def _stacked(blobs: list[Tensor], experts: int) -> Tensor:
    stacked = huge_pages.empty(experts, blobs[0].numel())
    for e in range(experts):
        stacked[e] = blobs[e % len(blobs)]
    return stacked
