"""The operator's speed on this machine, next to what the machine can do at best.

One interleaved run: each round measures the limits (reading memory, the integer inner loop of a
tile) and then calls the operator once for every number of tokens. One token walks over all experts,
so that weights come from memory; more tokens are routed at random. Results are compared with the
scalar kernel, bit for bit, before anything is timed. Times of other machines or other runs mean
little; the fraction of the limit is what counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moepack import _core, huge_pages, ops
from moepack.errors import UnsupportedError, VerificationError
from moepack.packing import pack
from moepack.quantizer import QuantizedMatrix
from moepack.schemes import Scheme, scheme
from moepack.threads import require_threads

SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "olmoe": (2048, 1024, 64, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "small": (768, 384, 32, 4),
    "mixtral-8x7b": (4096, 14336, 8, 2),
}

_DISTINCT = 2  # different experts; the others are their copies, in memory of their own
_READ_BYTES = 256 << 20  # far beyond any cache, and still quick
_PEAK_ROUNDS = 20_000
_MIN_LAYER_BYTES = 192 << 20  # copies of small layers, so that no cache holds what a walk reads


@dataclass(frozen=True)
class Limits:
    """GB/s of reading memory on 4 KiB and on huge pages; GMAC/s of the integer inner loop."""

    read_4k_gb_per_s: float
    read_huge_gb_per_s: float
    int4_gmac_per_s: float


@dataclass(frozen=True)
class Row:
    """One number of tokens: median and best time, what it read and computed, and of which limit."""

    tokens: int
    ms: float
    best_ms: float
    gb_per_s: float
    gmac_per_s: float
    macs_per_byte: float
    limit_ms: float

    @property
    def fraction_of_limit(self) -> float:
        return self.limit_ms / self.ms


@dataclass(frozen=True)
class BenchResult:
    """Medians of one run. `limits` are for all threads together."""

    shape: tuple[int, int, int, int]
    scheme: str
    isa: str
    threads: int
    limits: Limits
    rows: list[Row]

    def to_json(self) -> dict[str, Any]:
        rows = [{**asdict(row), "fraction_of_limit": row.fraction_of_limit} for row in self.rows]
        return {**asdict(self), "rows": rows}


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """A name of SHAPES, or "D,F,E,K". Raises UnsupportedError."""
    if text in SHAPES:
        return SHAPES[text]
    parts = text.split(",")
    if len(parts) != 4 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UnsupportedError(f"shape {text!r}; supported: D,F,E,K or {', '.join(SHAPES)}")
    d, f, e, k = map(int, parts)
    if k > e:
        raise UnsupportedError(f"shape {text!r}: {k} experts per token of {e}")
    return d, f, e, k


def parse_tokens(text: str) -> tuple[int, ...]:
    """Numbers of tokens, separated by commas. Raises UnsupportedError."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UnsupportedError(f"tokens {text!r}; expected numbers such as 1,16,512")
    return tuple(map(int, parts))


def bench(
    shape: tuple[int, int, int, int],
    tokens: tuple[int, ...] = (1, 4, 16, 128, 512),
    scheme_: str = "int4-g32",
    threads: int | None = None,
    isa: str | None = None,
    rounds: int = 15,
    progress: Callable[[float], None] | None = None,
) -> BenchResult:
    """Measures one layer of made experts: D, F, E, K. Leaves torch's thread count as it was."""
    require_threads(threads)
    if rounds < 1:
        raise UnsupportedError(f"rounds is {rounds}; it must be at least 1")
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads or threads_before)
    try:
        layers = _Layers(shape, scheme(scheme_))
        layers.check()
        ops.force_isa(isa)
        return _measured(layers, tokens, rounds, progress or (lambda done: None))
    finally:
        ops.force_isa(None)
        torch.set_num_threads(threads_before)


class _Layers:
    """Copies of a layer of made experts on huge pages, and calls of the operator on them."""

    def __init__(self, shape: tuple[int, int, int, int], found: Scheme) -> None:
        self.shape, self.scheme = shape, found
        d, f, e, k = shape
        w13 = [pack(_made(found, 2 * f, d, 2 * i), "gate_up") for i in range(min(_DISTINCT, e))]
        w2 = [pack(_made(found, d, f, 2 * i + 1)) for i in range(min(_DISTINCT, e))]
        self.expert_bytes = w13[0].numel() + w2[0].numel()
        copies = -(-_MIN_LAYER_BYTES // (e * self.expert_bytes))
        self.copies = [(_stacked(w13, e), _stacked(w2, e)) for _ in range(copies)]
        self.weights_bytes = k * self.expert_bytes

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

    def call(self, x: Tensor, ids: Tensor, weights: Tensor, copy: int) -> Tensor:
        w13, w2 = self.copies[copy]
        return ops.quantized_experts(
            x, ids, weights, w13, w2, None, None, self.shape[1], self.scheme.name
        )

    def check(self) -> None:
        """The instruction set in use gives the scalar kernel's bits. Raises VerificationError."""
        inputs = self.inputs(3, 0)
        found = self.call(*inputs)
        ops.force_isa("scalar")
        expected = self.call(*inputs)
        ops.force_isa(None)
        if not torch.equal(found, expected):
            raise VerificationError(f"{_core.active_isa()} differs from the scalar kernel")


def _measured(
    layers: _Layers, tokens: tuple[int, ...], rounds: int, progress: Callable[[float], None]
) -> BenchResult:
    threads = torch.get_num_threads()
    memory = {
        "4k": torch.zeros(_READ_BYTES, dtype=torch.uint8).numpy(),
        "huge": huge_pages.empty(_READ_BYTES).zero_().numpy(),
    }
    reads: dict[str, list[float]] = {name: [] for name in memory}
    peaks: list[float] = []
    times: dict[int, list[float]] = {count: [] for count in tokens}
    active: dict[int, list[int]] = {count: [] for count in tokens}
    for step in range(rounds):
        for name, array in memory.items():
            seconds = _seconds(partial(_core.read_memory, array, threads))
            reads[name].append(_READ_BYTES / seconds / 1e9)
        macs = _core.int4_peak(1)
        peaks.append(macs * _PEAK_ROUNDS / _seconds(partial(_core.int4_peak, _PEAK_ROUNDS)) / 1e9)
        for count in tokens:
            inputs = layers.inputs(count, step + 1)
            times[count].append(_seconds(partial(layers.call, *inputs)))
            active[count].append(inputs[1].unique().numel())
        progress((step + 1) / rounds)
    limits = Limits(
        statistics.median(reads["4k"]),
        statistics.median(reads["huge"]),
        threads * statistics.median(peaks),
    )
    rows = [
        _row(layers, limits, count, times[count], statistics.median(active[count]))
        for count in tokens
    ]
    return BenchResult(layers.shape, layers.scheme.name, _core.active_isa(), threads, limits, rows)


def _row(layers: _Layers, limits: Limits, tokens: int, seconds: list[float], experts: float) -> Row:
    d, f, _, k = layers.shape
    macs, weights = 3 * tokens * k * d * f, experts * layers.expert_bytes
    median = statistics.median(seconds)
    shortest = max(weights / limits.read_huge_gb_per_s / 1e9, macs / limits.int4_gmac_per_s / 1e9)
    return Row(
        tokens, 1e3 * median, 1e3 * min(seconds), weights / median / 1e9, macs / median / 1e9,
        macs / weights, 1e3 * shortest,
    )  # fmt: skip


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _made(found: Scheme, rows: int, cols: int, seed: int) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(seed)
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
