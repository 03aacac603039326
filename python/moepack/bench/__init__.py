"""The operator's speed on this machine, next to what the machine can do at best.

One interleaved run: each round measures the limits (reading memory, the integer inner loop of a
tile) and then calls the operator for every number of tokens: of few tokens several times in a row,
as a model calls it layer after layer. One token walks over all experts, so that weights come from
memory; more tokens are routed at random. Results are compared with the
scalar kernel, bit for bit, before anything is timed. Times of other machines or other runs mean
little; the fraction of the limit is what counts.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from moepack import _core, huge_pages, ops
from moepack.bench.layers import Layers, timed, timed_in_a_row
from moepack.bench.overhead import Overhead, measured_overhead
from moepack.errors import UnsupportedError
from moepack.packing import packed_bytes
from moepack.schemes import Scheme, scheme
from moepack.threads import require_threads

SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "olmoe": (2048, 1024, 64, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "small": (768, 384, 32, 4),
    "mixtral-8x7b": (4096, 14336, 8, 2),
}

_MOST_TOKENS = 1 << 16
_MIN_LAYER_BYTES = 192 << 20  # copies of small layers, so that no cache holds what a walk reads
_READ_BYTES = 256 << 20  # far beyond any cache, and still quick
_PEAK_ROUNDS = 20_000


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
    overhead: Overhead | None = None

    def to_json(self) -> dict[str, Any]:
        rows = [{**asdict(row), "fraction_of_limit": row.fraction_of_limit} for row in self.rows]
        found = None if self.overhead is None else self.overhead.to_json()
        return {**asdict(self), "rows": rows, "overhead": found}


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
    if not all(part.isdecimal() and 0 < int(part) <= _MOST_TOKENS for part in parts):
        raise UnsupportedError(
            f"tokens {text!r}; expected numbers such as 1,16,512, none above {_MOST_TOKENS}"
        )
    return tuple(map(int, parts))


def bench(
    shape: tuple[int, int, int, int],
    tokens: tuple[int, ...] = (1, 4, 16, 128, 512),
    scheme_: str = "int4-g32",
    threads: int | None = None,
    isa: str | None = None,
    rounds: int = 15,
    progress: Callable[[float], None] | None = None,
    *,
    with_overhead: bool = False,
) -> BenchResult:
    """Measures one layer of made experts: D, F, E, K. Leaves torch's thread count as it was.

    `with_overhead` adds what a call costs besides its experts, which takes an export to ExecuTorch.
    Raises UnsupportedError on what cannot be measured here, VerificationError on wrong results.
    """
    require_threads(threads)
    if rounds < 1:
        raise UnsupportedError(f"rounds is {rounds}; it must be at least 1")
    _require_memory(shape, scheme(scheme_))
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads or threads_before)
    try:
        layers = Layers(shape, scheme(scheme_), _MIN_LAYER_BYTES)
        layers.check(isa)
        result = _measured(layers, tokens, rounds, progress or (lambda done: None))
        if with_overhead:
            result = replace(result, overhead=measured_overhead(layers, rounds))
        return result
    finally:
        ops.force_isa(None)
        torch.set_num_threads(threads_before)


def _require_memory(shape: tuple[int, int, int, int], found: Scheme) -> None:
    d, f, e, _ = shape
    needed = e * (packed_bytes(found, 2 * f, d, "gate_up") + packed_bytes(found, d, f, "plain"))
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > installed:
        raise UnsupportedError(
            f"shape {','.join(map(str, shape))}: a layer takes {needed:,} bytes packed; this "
            f"machine has {installed:,}"
        )


def _measured(
    layers: Layers, tokens: tuple[int, ...], rounds: int, progress: Callable[[float], None]
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
            seconds = min(
                timed(partial(_core.read_memory, array, threads, ahead)) for ahead in (False, True)
            )
            reads[name].append(_READ_BYTES / seconds / 1e9)
        macs = _core.int4_peak(1)
        peaks.append(macs * _PEAK_ROUNDS / timed(partial(_core.int4_peak, _PEAK_ROUNDS)) / 1e9)
        for count in tokens:
            inputs = layers.calls(count, step + 1)
            times[count].append(timed_in_a_row(layers.call, inputs))
            active[count].extend(ids.unique().numel() for _, ids, _, _ in inputs)
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


def _row(layers: Layers, limits: Limits, tokens: int, seconds: list[float], experts: float) -> Row:
    d, f, _, k = layers.shape
    macs, weights = 3 * tokens * k * d * f, experts * layers.expert_bytes
    median = statistics.median(seconds)
    shortest = max(weights / limits.read_huge_gb_per_s / 1e9, macs / limits.int4_gmac_per_s / 1e9)
    return Row(
        tokens, 1e3 * median, 1e3 * min(seconds), weights / median / 1e9, macs / median / 1e9,
        macs / weights, 1e3 * shortest,
    )  # fmt: skip
