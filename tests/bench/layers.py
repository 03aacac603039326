"""Made MoE layers in int4 groups of 32, the same numbers for every peer, and routings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

GROUP = 32
Codes = npt.NDArray[np.int8]
Halves = npt.NDArray[np.float16]
Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """D model width, F inner size, E experts, K of them per token, and copies of the layer.

    With one copy per so many bytes that a walk over all experts does not fit any cache.
    """

    D: int
    F: int
    E: int
    K: int
    copies: int = 1

    @property
    def macs_per_token(self) -> int:
        return 3 * self.K * self.D * self.F


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "olmoe": Shape(2048, 1024, 64, 8),
    "gpt-oss": Shape(2880, 2880, 32, 4),
    "small": Shape(768, 384, 32, 4, copies=16),
    "mixtral": Shape(4096, 14336, 8, 2),
}


@dataclass(frozen=True)
class Matrix:
    """W[n, k] = codes[n, k] * scales[n, k / 32], codes -8..7."""

    codes: Codes
    scales: Halves


@dataclass(frozen=True)
class Expert:
    gate: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True)
class Layer:
    """A few different experts; expert e is number e modulo their count, in memory of its own."""

    shape: Shape
    distinct: int = 2

    @cached_property
    def experts(self) -> list[Expert]:
        s = self.shape
        return [
            Expert(
                _matrix(s.F, s.D, 3 * e), _matrix(s.F, s.D, 3 * e + 1), _matrix(s.D, s.F, 3 * e + 2)
            )
            for e in range(min(self.distinct, s.E))
        ]

    def expert(self, e: int) -> Expert:
        return self.experts[e % len(self.experts)]


def _matrix(rows: int, cols: int, seed: int) -> Matrix:
    random = np.random.default_rng(seed)
    codes = random.integers(-8, 8, (rows, cols), dtype=np.int8)
    # About 1 / sqrt(cols) overall, so that hidden values stay near 1.
    scales = random.uniform(0.15, 0.3, (rows, cols // GROUP)) / np.sqrt(cols)
    return Matrix(codes, scales.astype(np.float16))


@dataclass(frozen=True)
class Work:
    """What one call computes: x [T, D], ids [T, K] without repeats, weights [T, K], and a copy."""

    x: Floats
    ids: Ids
    weights: Floats
    copy: int


def work(shape: Shape, tokens: int, step: int) -> Work:
    """The call of a step: one token walks over all experts and copies, more are random."""
    random = np.random.default_rng(step * 1000 + tokens)
    if tokens == 1:
        walk = step * shape.K + np.arange(shape.K)
        ids = (walk % shape.E)[None]
        copy = int(walk[0] // shape.E) % shape.copies
    else:
        ids = np.argsort(random.random((tokens, shape.E)), axis=1)[:, : shape.K]
        copy = step % shape.copies
    weights = random.uniform(0.1, 1.0, (tokens, shape.K))
    weights /= weights.sum(1, keepdims=True)
    x = random.standard_normal((tokens, shape.D))
    return Work(x.astype(np.float32), ids.astype(np.int64), weights.astype(np.float32), copy)
