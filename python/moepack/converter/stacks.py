"""Stacks of packed experts from one layout to the other: codes as they are, scales counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moepack import huge_pages, packing
from moepack.errors import PackedFormatError, UnsupportedError
from moepack.packing import RowOrder
from moepack.quantizer import QuantizedMatrix
from moepack.schemes import scheme
from moepack.universal_blob import (
    UniversalMatrix,
    kept_group,
    pack_universal,
    read_universal,
    universal_bytes,
)


@dataclass(frozen=True)
class StackForm:
    """What every blob of a stack [E, bytes] holds: a matrix [rows, cols] of codes in groups.

    `row_order` is that of moepack's layout; torchao's keeps the logical order.
    """

    layout: str
    bits: int
    group: int
    rows: int
    cols: int
    row_order: RowOrder

    @property
    def scheme(self) -> str:
        return f"int{self.bits}-g{self.group}"

    @property
    def blob_bytes(self) -> int:
        """Raises UnsupportedError where the layout cannot hold such a matrix."""
        if self.layout == "torchao":
            return universal_bytes(self.bits, self.rows, self.cols, self.group)
        return packing.packed_bytes(self.scheme, self.rows, self.cols, self.row_order)

    def converted(self, layout: str) -> StackForm:
        """The form in the other layout; torchao's groups may be multiples of moepack's."""
        group = self.group
        if layout == "moepack":
            group = kept_group(self.bits, self.group)
        form = replace(self, layout=layout, group=group)
        _ = form.blob_bytes  # refuses what cannot be held before any work is done
        return form


def integer_codes(scheme_name: str) -> tuple[int, int]:
    """Bits and group of a scheme that both layouts hold. Raises UnsupportedError on others."""
    form = scheme(scheme_name)
    packing.packed_bytes(form, form.group, form.group, "plain", "torchao")
    return form.bits, form.group


@dataclass
class ScaleChanges:
    """Scales that were converted, how many of them changed, and the largest relative change.

    fp16 to fp32 is exact. fp32 to fp16 with one exponent for the matrix rounds those that need more
    than 11 bits, by at most 2^-11, or that are far below the largest of their matrix.
    """

    scales: int = 0
    changed: int = 0
    largest: float = 0.0

    def note(self, before: Tensor, after: Tensor) -> None:
        """Both fp64 of one shape."""
        is_changed = before != after
        self.scales += before.numel()
        self.changed += int(is_changed.sum())
        if bool(is_changed.any()):
            relative = ((after - before).abs() / before.abs())[is_changed]
            self.largest = max(self.largest, float(relative.max()))


def convert_stack(
    packed: Tensor, form: StackForm, layout: str, changes: ScaleChanges, where: str
) -> Tensor:
    """packed [E, bytes] uint8 of `form` -> [E, bytes] in `layout`, on huge pages if there are any.

    Raises PackedFormatError on other bytes, UnsupportedError on what the layout cannot hold; both
    name `where` and the expert.
    """
    if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] != form.blob_bytes:
        raise PackedFormatError(
            f"{where}: {packed.dtype} {list(packed.shape)}; {form.scheme} of [{form.rows}, "
            f"{form.cols}] in the layout {form.layout!r} is uint8 [E, {form.blob_bytes}]"
        )
    result = huge_pages.empty(len(packed), form.converted(layout).blob_bytes)
    for expert, blob in enumerate(converted_blobs(packed, form, changes, where)):
        result[expert].copy_(blob)
    return result


def converted_blobs(
    blobs: Iterable[Tensor], form: StackForm, changes: ScaleChanges, where: str
) -> Iterator[Tensor]:
    """The experts of a stack, uint8 [bytes] each, one after the other; errors name the expert."""
    for expert, blob in enumerate(blobs):
        try:
            yield convert_blob(blob, form, changes)
        except (PackedFormatError, UnsupportedError) as error:
            raise type(error)(f"{where} expert {expert}: {error}") from error


def convert_blob(blob: Tensor, form: StackForm, changes: ScaleChanges) -> Tensor:
    """One blob of `form`, uint8 [bytes], in the other layout."""
    if form.layout == "moepack":
        matrix = _unpacked(blob, form)
        exact = _exact_scales(matrix)
        changes.note(exact, exact)  # pack_universal refuses what fp32 does not hold
        return pack_universal(matrix)
    universal = read_universal(blob, form.rows, form.cols, form.group)
    if universal.bits != form.bits:
        raise PackedFormatError(f"{universal.bits}-bit codes, expected {form.bits}-bit ones")
    matrix = universal.in_half()
    spread = form.group // matrix.scheme.group
    kept = _exact_scales(matrix)[:, ::spread]
    _require_kept(universal, kept)
    changes.note(universal.scales.double(), kept)
    return packing.pack(matrix, form.row_order)


def _unpacked(blob: Tensor, form: StackForm) -> QuantizedMatrix:
    header = packing.read_header(blob)
    found = (header.scheme.name, header.rows, header.cols, header.row_order)
    expected = (form.scheme, form.rows, form.cols, form.row_order)
    if found != expected:
        raise PackedFormatError(f"the blob's header says {found}, expected {expected}")
    packing.verify(blob)
    return packing.unpack(blob)


def _exact_scales(matrix: QuantizedMatrix) -> Tensor:
    return torch.ldexp(matrix.scales.double(), torch.tensor(matrix.exponent))


def _require_kept(universal: UniversalMatrix, kept: Tensor) -> None:
    """A scale that becomes 0 takes the weights of its group with it."""
    grouped = universal.codes.view(*universal.scales.shape, universal.group)
    lost = (kept == 0) & (universal.scales != 0) & (grouped != 0).any(-1)
    if bool(lost.any()):
        row, group = lost.nonzero()[0].tolist()
        raise UnsupportedError(
            f"the scale of row {row}, group {group} is {float(universal.scales[row, group]):g} and "
            f"the largest of the matrix {float(universal.scales.abs().max()):g}: too far apart for "
            "fp16 scales with one exponent; keep the layout 'torchao'"
        )
