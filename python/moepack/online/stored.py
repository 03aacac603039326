"""Tensors as a checkpoint stores them, read when they are needed, and what they stand for.

FP8 weights join their scales, and MXFP4 blocks theirs, into the float tensors that they encode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from moepack.online.decoding import BYTES, FP8, decode_mxfp4, decode_scaled

_IGNORED = (".activation_scale", ".input_scale")
_BLOCKS, _SCALES = "_blocks", "_scales"
_TWO_ONES = 0x22  # e2m1, two codes a byte
# How scales are named: a suffix, in the place of the suffix of the values.
_NAMES_OF_SCALES = (
    ("_scale_inv", ""),
    ("_scale", ""),
    (_SCALES, _BLOCKS),
    (".scale", ".weight"),
    (".qscale_weight", ".weight"),
)


def _nothing() -> None: ...


@dataclass(frozen=True)
class StoredTensor:
    """`read()` gives the whole tensor; `part(i)` its entries `[i : i + 1]` along dimension 0.

    `read_once()` gives the whole tensor too, until the calling thread reads another this way.
    `read_ahead()` says that it will be read soon.
    `is_encoded`: the values come from a quantized format, in fp32, and are not to be rounded.
    `decode_into`: writes the whole tensor, if it is encoded and its rows lie as they are stored.
    `scales`: of an encoded tensor, the scale of each of its values, in its shape.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    part: Callable[[int], Tensor]
    is_encoded: bool = False
    decode_into: Callable[[Tensor], object] | None = None
    scales: StoredTensor | None = None
    read_once: Callable[[], Tensor] | None = None
    read_ahead: Callable[[], None] = _nothing

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

    def stored(self, *, ones: bool = False) -> StoredTensor:
        decode = decode_mxfp4 if self.values.name.endswith(_BLOCKS) else decode_scaled
        shape = _decoded_shape(self.values)

        def part(i: int) -> Tensor:
            scales = self.scales
            # One scale for all experts, or some for each.
            one = scales.part(i) if scales.shape[:1] == shape[:1] else scales.read()
            return decode(self.values.part(i), one, self.name)

        def decode_into(out: Tensor) -> Tensor:
            read = self.values.read_once or self.values.read
            return decode_scaled(read(), self.scales.read(), self.name, out)

        return StoredTensor(
            self.name,
            torch.float32,
            shape,
            read=lambda: decode(self.values.read(), self.scales.read(), self.name),
            part=part,
            is_encoded=True,
            decode_into=decode_into if decode is decode_scaled else None,
            scales=None if ones else self._of_ones().stored(ones=True),
            read_ahead=self.values.read_ahead,
        )

    def _of_ones(self) -> Encoding:
        """The same with the code of 1 in every place: it decodes to the scales."""
        values = self.values

        def ones(shape: tuple[int, ...]) -> Tensor:
            if values.dtype in BYTES:
                return torch.full(shape, _TWO_ONES, dtype=values.dtype)
            return torch.ones(shape).to(values.dtype)

        made = replace(
            values,
            read=lambda: ones(values.shape),
            part=lambda i: ones((1, *values.shape[1:])),
            read_once=None,
        )
        return Encoding(self.name, made, self.scales)


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
        elif stored.dtype in FP8 or (stored.dtype in BYTES and self._has_scales(name)):
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


def _decoded_shape(values: StoredTensor) -> tuple[int, ...]:
    shape = values.shape
    if values.name.endswith(_BLOCKS):
        return (*shape[:-3], shape[-2] * shape[-1] * 2, shape[-3])
    if values.dtype in BYTES:
        return (*shape[:-1], 2 * shape[-1])
    return shape
