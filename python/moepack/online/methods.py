"""What a float matrix becomes: a method is the arithmetic of a format, and nothing else.

Collecting weights, knowing when a layer is complete and keeping the result are `blocks`' and
`filling`'s. A new format is a subclass and a row of `METHODS`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from moepack import minifloat, packing, quantizer
from moepack.errors import UnsupportedError, VerificationError
from moepack.quantizer import QuantizedMatrix
from moepack.schemes import Scheme
from moepack.schemes import scheme as scheme_of
from moepack.verification import SQNR_FLOOR_DB


class OnlineMethod(ABC):
    """Turns a matrix [N, K] into the codes and scales of `scheme`, which names its kernel."""

    def __init__(self, scheme: str | Scheme) -> None:
        self.scheme = scheme_of(scheme)

    @abstractmethod
    def quantize(self, weight: Tensor, where: str) -> QuantizedMatrix:
        """Raises BadWeights, naming `where`, row and column, on a weight that is not finite."""

    def keep(self, weight: Tensor, scales: Tensor) -> QuantizedMatrix | None:
        """The numbers of a checkpoint that is in this format already, bit for bit.

        weight, scales fp32 [N, K]: values and the scale of each. None if the format differs, as it
        does unless a method says otherwise: then the weight is quantized.
        """
        return None

    @property
    def may_keep(self) -> bool:
        """Is there a `keep` of its own?"""
        return type(self).keep is not OnlineMethod.keep

    def floor_db(self) -> float:
        """The least signal to quantization noise that a sound matrix has."""
        return SQNR_FLOOR_DB[self.scheme.bits]


class IntegerMethod(OnlineMethod):
    """INT4 and INT8 in groups, by `quantizer.quantize`."""

    def __init__(self, scheme: str | Scheme, rule: quantizer.Rule = "search") -> None:
        super().__init__(scheme)
        self.rule: quantizer.Rule = rule

    def quantize(self, weight: Tensor, where: str) -> QuantizedMatrix:
        return quantizer.quantize(weight, self.scheme, self.rule, where)


class MinifloatMethod(OnlineMethod):
    """FP8 and MXFP4: the nearest of few floating-point numbers, by `quantizer.quantize`."""

    def quantize(self, weight: Tensor, where: str) -> QuantizedMatrix:
        return quantizer.quantize(weight, self.scheme, where=where)

    def keep(self, weight: Tensor, scales: Tensor) -> QuantizedMatrix | None:
        return minifloat.recovered(weight, scales, self.scheme)


# By the cell of the scheme: groups of any size share the arithmetic.
METHODS: dict[str, Callable[[Scheme], OnlineMethod]] = {
    "int4": IntegerMethod,
    "int8": IntegerMethod,
    "mxfp4": MinifloatMethod,
    "fp8": MinifloatMethod,
}


def method_for(scheme: str | Scheme) -> OnlineMethod:
    """The method of a scheme. Raises UnsupportedError where there is none."""
    found = scheme_of(scheme)
    if found.cell not in METHODS:
        raise UnsupportedError(
            f"scheme {found.name!r} cannot be made while loading; supported cells: "
            f"{', '.join(METHODS)}"
        )
    return METHODS[found.cell](found)


class Packed(NamedTuple):
    """What became of one matrix. `is_kept`: as it was stored; then its SQNR is infinite."""

    sqnr_db: float
    is_kept: bool


def pack_into(
    destination: Tensor,
    method: OnlineMethod,
    weight: Tensor,
    row_order: packing.RowOrder,
    where: str,
    floor_db: float | None = None,
    layout: str = "moepack",
    scales: Tensor | None = None,
) -> Packed:
    """Quantizes and packs one matrix into `destination`, uint8 [bytes], or keeps its numbers.

    `scales`: see `OnlineMethod.keep`.

    Raises VerificationError if that is below the floor: there is no original block to compare with
    while loading, so every matrix is compared with its own weights.
    """
    kept = None if scales is None else method.keep(weight, scales)
    if kept is not None:
        packing.pack(kept, row_order, layout, destination)
        return Packed(math.inf, is_kept=True)
    weight = weight.float().contiguous()  # once, for what follows
    matrix = method.quantize(weight, where)
    found = sqnr_db(weight, matrix)
    floor = method.floor_db() if floor_db is None else floor_db
    if not found >= floor:  # NaN is no answer
        raise VerificationError(
            f"{where}: {method.scheme.name} leaves {found:.1f} dB SQNR; the floor is {floor:g} dB. "
            "Use a finer scheme for this block, or lower the floor: sqnr_floor=..."
        )
    packing.pack(matrix, row_order, layout, destination)
    return Packed(found, is_kept=False)


def sqnr_db(weight: Tensor, matrix: QuantizedMatrix) -> float:
    """Signal to quantization noise of the weights: infinite without noise, 0 / 0 included."""
    signal, noise = quantizer.squares(weight, matrix)
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf
