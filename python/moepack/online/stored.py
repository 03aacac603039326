"""Tensors as a checkpoint stores them, read when they are needed, and what they stand for.

FP8 weights with their scales and MXFP4 blocks become the float tensors that they encode. The
arithmetic is exact up to one rounding to fp32: the product of an FP8 or FP4 value and its scale.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moepack.errors import BadWeights

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# In the order of the 4-bit code: sign, two bits of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_IGNORED = (".activation_scale", ".input_scale")
_BLOCKS, _SCALES = "_blocks", "_scales"
# How scales are named: a suffix, in the place of the suffix of the values.
_NAMES_OF_SCALES = (
    ("_scale_inv", ""),
    ("_scale", ""),
    (_SCALES, _BLOCKS),
    (".scale", ".weight"),
    (".qscale_weight", ".weight"),
)


@dataclass(frozen=True)
class StoredTensor:
    """`read()` gives the whole tensor; `part(i)` its entries `[i : i + 1]` along dimension 0.

    `is_encoded`: the values come from a quantized format, in fp32, and are not to be rounded.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    part: Callable[[int], Tensor]
    is_encoded: bool = False

    @staticmethod
    def of(name: str, tensor: Tensor) -> StoredTensor:
        return StoredTensor(
            name,
            tensor.dtype,
            tuple(tensor.shape),
            read=lambda: tensor,
            part=lambda i: tensor[i : i + 1],
        )


class Encoding(NamedTuple):
    """How two stored tensors make one: names, and the shape of what they stand for."""

    name: str
    values: StoredTensor
    scales: StoredTensor

    def stored(self) -> StoredTensor:
        decode = decode_mxfp4 if self.values.name.endswith(_BLOCKS) else decode_scaled
        shape = _decoded_shape(self.values)

        def part(i: int) -> Tensor:
            scales = self.scales
            # One scale for all experts, or some for each.
            one = scales.part(i) if scales.shape[:1] == shape[:1] else scales.read()
            return decode(self.values.part(i), one, self.name)

        return StoredTensor(
            self.name,
            torch.float32,
            shape,
            read=lambda: decode(self.values.read(), self.scales.read(), self.name),
            part=part,
            is_encoded=True,
        )


class Decoder:
    """Joins values and scales that arrive one by one, in any order; the rest passes through.

    `names`: all names of the checkpoint, where they are known before the tensors.
    """

    def __init__(self, names: frozenset[str] | None = None) -> None:
        self._names = names
        self._values: dict[str, StoredTensor] = {}
        self._scales: dict[str, StoredTensor] = {}

    def feed(self, stored: StoredTensor) -> Iterator[StoredTensor]:
        """The float tensors that `stored` completes: none or one."""
        name = stored.name
        if name.endswith(_IGNORED):
            return
        if (of := self._scale_of(name)) is not None:
            self._scales[of] = stored
        elif name.endswith(_BLOCKS) and stored.dtype == torch.uint8:
            of = name.removesuffix(_BLOCKS)
            self._values[of] = stored
        elif stored.dtype in FP8 or (
            stored.dtype in (torch.int8, torch.uint8) and self._has_scales(name)
        ):
            of = name
            self._values[of] = stored
        else:
            yield stored
            return
        if of in self._values and of in self._scales:
            yield Encoding(of, self._values.pop(of), self._scales.pop(of)).stored()

    def logical_name(self, name: str) -> str:
        """The name of what the tensor of that name becomes part of."""
        for ignored in _IGNORED:
            if name.endswith(ignored):
                return name.removesuffix(ignored) + ".weight"
        of = self._scale_of(name)
        if of is not None:
            return of
        return name.removesuffix(_BLOCKS) if self._has_scales(name) else name

    def logical_names(self, names: frozenset[str]) -> list[str]:
        """The names of what will come out if exactly `names` go in, in the order of numbers."""
        values = (n for n in names if not n.endswith(_IGNORED) and self._scale_of(n) is None)
        return sorted(map(self.logical_name, values), key=natural_key)

    def unfinished(self) -> list[str]:
        """Names whose values came without scales, or the other way round."""
        no_scale = [f"{name}: its scales are missing" for name in self._values]
        return no_scale + [f"{name}: only its scales came" for name in self._scales]

    def _scale_of(self, name: str) -> str | None:
        """What a tensor of this name scales, if it does: a model has other scales of its own."""
        if name.endswith(("weight_scale_inv", "proj_scale_inv", "weight_scale")):
            return name.removesuffix("_inv").removesuffix("_scale")
        for suffix, values in _NAMES_OF_SCALES:
            of = name.removesuffix(suffix) + values
            if name.endswith(suffix) and (of in self._values or self._is_known(of)):
                return of.removesuffix(_BLOCKS)
        return name.removesuffix(_SCALES) if name.endswith("proj_scales") else None

    def _has_scales(self, name: str) -> bool:
        """Are scales of `name` among the names, where these are known?"""
        return any(
            name.endswith(values) and self._is_known(name.removesuffix(values) + suffix)
            for suffix, values in _NAMES_OF_SCALES
        )

    def _is_known(self, name: str) -> bool:
        return self._names is not None and name in self._names


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Numbers in a name sort as numbers: layer 2 comes before layer 10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts]


def decode_scaled(values: Tensor, scales: Tensor, name: str = "weight") -> Tensor:
    """values [..., N, K] in FP8 (or two FP4 codes a byte, [..., N, K / 2]) -> fp32 [..., N, K].

    value * scale, one scale per tensor, per row, or per block: a scale grid of [n, k] means blocks
    of ceil-divided size, the last ones cut off. Blocks of 128 (FP8) or of 32 along K (FP4) are
    taken where they give that grid, else the size that divides evenly.
    """
    exact = _unpack_e2m1(values) if values.dtype in (torch.int8, torch.uint8) else values.float()
    factors = power_of_two(scales) if scales.dtype == torch.uint8 else scales.float()
    if factors.dim() <= 1 and factors.numel() == 1:
        return exact * factors.reshape(())
    if factors.dim() == exact.dim() - 1:  # per channel, or per expert
        factors = factors[..., None]
    while factors.dim() < exact.dim():
        factors = factors[..., None]
    rows, cols = exact.shape[-2:]
    factors = _spread(factors, -2, rows, name)
    return exact * _spread(factors, -1, cols, name)


def decode_mxfp4(blocks: Tensor, scales: Tensor, name: str = "weight") -> Tensor:
    """blocks uint8 [E, R, G, 16], scales uint8 [E, R, G] -> fp32 [E, G * 32, R], a view.

    Two codes a byte, the even element in the low nibble; value * 2^(scale - 127). The rows of the
    blocks are output rows, which the model that ships them keeps last.
    """
    if scales.shape != blocks.shape[:-1]:
        raise BadWeights(
            f"{name}: blocks {list(blocks.shape)} need scales {list(blocks.shape[:-1])}, "
            f"found {list(scales.shape)}"
        )
    exact = _unpack_e2m1(blocks) * power_of_two(scales)[..., None]
    return exact.flatten(-2).transpose(-1, -2)


def power_of_two(exponents: Tensor) -> Tensor:
    """uint8 with bias 127 -> fp32 2^(e - 127); 255 is NaN, as in e8m0."""
    return exponents.contiguous().view(torch.float8_e8m0fnu).float()


def _unpack_e2m1(packed: Tensor) -> Tensor:
    table = torch.tensor(_E2M1)
    codes = packed.contiguous().view(torch.uint8)
    pairs = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return table[pairs.int()]


def _spread(factors: Tensor, dim: int, size: int, name: str) -> Tensor:
    """One factor per element of a dimension, from one per block."""
    count = factors.shape[dim]
    if count in (1, size):
        return factors
    block = next((b for b in (128, 64, 32, 16) if -(-size // b) == count), 0)
    if not block and size % count == 0:
        block = size // count
    if not block:
        raise BadWeights(
            f"{name}: {count} scales along a dimension of {size}; supported: one, one for each, "
            "or one per block of 128, 64, 32, 16 or of equal size"
        )
    return factors.repeat_interleave(block, dim=dim).narrow(dim, 0, size)


def _decoded_shape(values: StoredTensor) -> tuple[int, ...]:
    shape = values.shape
    if values.name.endswith(_BLOCKS):
        return (*shape[:-3], shape[-2] * shape[-1] * 2, shape[-3])
    if values.dtype in (torch.int8, torch.uint8):
        return (*shape[:-1], 2 * shape[-1])
    return shape
