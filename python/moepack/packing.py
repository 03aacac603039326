"""Packed blobs: quantized matrices as the bytes that a kernel reads.

Two layouts: moepack's own, which docs/reference/packed-format.md specifies, and torchao's
(`universal_blob`), which ExecuTorch's own operator reads too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moepack import _core, huge_pages
from moepack.errors import PackedFormatError, UnsupportedError
from moepack.quantizer import SCALE_DTYPES, QuantizedMatrix
from moepack.schemes import Scheme, scheme
from moepack.universal_blob import pack_universal, read_universal, require_integers, universal_bytes

RowOrder = Literal["plain", "gate_up"]
Layout = Literal["moepack", "torchao"]

LAYOUTS: tuple[Layout, ...] = ("moepack", "torchao")
_ROW_ORDERS: tuple[RowOrder, ...] = ("plain", "gate_up")


@dataclass(frozen=True)
class Header:
    """What a blob says of itself."""

    version: int
    scheme: Scheme
    rows: int
    cols: int
    exponent: int
    row_order: RowOrder
    crc32: int


def require_layout(name: str) -> None:
    """Raises UnsupportedError, naming the supported layouts."""
    if name not in LAYOUTS:
        raise UnsupportedError(f"layout {name!r}; supported: {', '.join(LAYOUTS)}")


def packed_bytes(
    scheme_: str | Scheme,
    rows: int,
    cols: int,
    row_order: RowOrder = "plain",
    layout: str = "moepack",
) -> int:
    """Bytes of a blob of a [rows, cols] matrix, header included.

    Raises UnsupportedError where torchao's layout cannot hold such a matrix.
    """
    require_layout(layout)
    form = scheme(scheme_)
    if layout == "torchao":
        require_integers(form)
        return universal_bytes(form.bits, rows, cols, form.group)
    try:
        return _core.packed_bytes(form.name, rows, cols, _order_number(row_order))
    except ValueError as error:
        raise PackedFormatError(str(error)) from None


def pack(
    matrix: QuantizedMatrix,
    row_order: RowOrder = "plain",
    layout: str = "moepack",
    out: Tensor | None = None,
) -> Tensor:
    """A quantized matrix as one blob, uint8 [bytes]; in `out`, contiguous, if it is given.

    `row_order="gate_up"`: the rows are [gate; up], an even number; torchao's layout keeps them in
    this order in the bytes as well. Raises PackedFormatError on codes outside the scheme's range
    and on shapes that do not fit each other, UnsupportedError on what the layout cannot hold.
    """
    if out is None:
        out = torch.empty(_size(matrix, row_order, layout), dtype=torch.uint8)
    _pack_into(matrix, row_order, layout, out)
    return out


def _size(matrix: QuantizedMatrix, row_order: RowOrder, layout: str) -> int:
    rows, cols = matrix.codes.shape
    return packed_bytes(matrix.scheme, rows, cols, row_order, layout)


def _pack_into(matrix: QuantizedMatrix, row_order: RowOrder, layout: str, blob: Tensor) -> None:
    if layout == "torchao":
        blob.copy_(pack_universal(matrix))
        return
    try:
        _core.pack(
            matrix.scheme.name,
            _order_number(row_order),
            matrix.codes.contiguous().numpy(),
            matrix.scales.contiguous().numpy(),
            matrix.exponent,
            blob.numpy(),
        )
    except ValueError as error:
        raise PackedFormatError(str(error)) from None


def pack_experts(
    matrices: Iterable[QuantizedMatrix],
    row_order: RowOrder = "plain",
    num_experts: int | None = None,
    layout: str = "moepack",
) -> Tensor:
    """The same matrix of every expert, packed and stacked: uint8 [E, bytes].

    The matrices are taken one by one; with `num_experts` given, each goes straight to its place, on
    huge pages where there are any. Raises PackedFormatError unless all have one scheme and one
    shape.
    """
    if num_experts is None:
        matrices = list(matrices)
        num_experts = len(matrices)
    stacked: Tensor | None = None
    first: tuple[str, list[int]] | None = None
    count = 0
    for matrix in matrices:
        found = (matrix.scheme.name, list(matrix.codes.shape))
        first = first or found
        if found != first:
            raise PackedFormatError(
                f"expert {count} is {found[0]} {found[1]}, expert 0 is {first[0]} {first[1]}: "
                "all experts of a layer need one scheme and one shape"
            )
        if stacked is None:
            stacked = huge_pages.empty(num_experts, _size(matrix, row_order, layout))
        if count < num_experts:
            _pack_into(matrix, row_order, layout, stacked[count])
        count += 1
    if stacked is None:
        raise PackedFormatError("no experts to pack")
    if count != num_experts:
        raise PackedFormatError(f"got {count} experts, expected {num_experts}")
    return stacked


def unpack(blob: Tensor) -> QuantizedMatrix:
    """The matrix that a blob holds; codes and scales come back unchanged.

    Raises PackedFormatError if the bytes are not a blob that this version reads.
    """
    header = read_header(blob)
    codes = torch.empty(header.rows, header.cols, dtype=torch.int8)
    groups = header.scheme.groups(header.cols)
    scales = torch.empty(header.rows, groups, dtype=SCALE_DTYPES[header.scheme.scale])
    _core.unpack(_bytes(blob), codes.numpy(), scales.numpy())
    return QuantizedMatrix(header.scheme, codes, scales, header.exponent)


def dequantize(blob: Tensor, layout: str, scheme_: str | Scheme, rows: int, cols: int) -> Tensor:
    """The weights fp32 [rows, cols] of a blob in either layout.

    Raises PackedFormatError if it is not a blob of such a matrix.
    """
    require_layout(layout)
    form = scheme(scheme_)
    if layout == "torchao":
        universal = read_universal(blob, rows, cols, form.group)
        found = (f"int{universal.bits}-g{form.group}", rows, cols)
        weights = universal.dequantize()
    else:
        matrix = unpack(blob)
        found = (matrix.scheme.name, *matrix.codes.shape)
        weights = matrix.dequantize()
    if found != (form.name, rows, cols):
        raise PackedFormatError(
            f"the blob holds {found[0]} {list(found[1:])}, not {form.name} [{rows}, {cols}]"
        )
    return weights


def read_header(blob: Tensor) -> Header:
    """The header of a blob. Raises PackedFormatError on foreign bytes, another version, a wrong
    length. The payload's checksum is verify()'s."""
    try:
        version, name, rows, cols, exponent, order, crc32 = _core.read_header(_bytes(blob))
    except ValueError as error:
        raise PackedFormatError(str(error)) from None
    return Header(version, scheme(name), rows, cols, exponent, _ROW_ORDERS[order], crc32)


def verify(blob: Tensor) -> None:
    """Raises PackedFormatError unless header, length and checksum of a blob are right."""
    try:
        _core.verify(_bytes(blob))
    except ValueError as error:
        raise PackedFormatError(str(error)) from None


def _bytes(blob: Tensor) -> "_core._Bytes":
    if blob.dtype != torch.uint8 or blob.dim() != 1:
        raise PackedFormatError(
            f"a blob is a one-dimensional uint8 tensor, not {blob.dtype} {list(blob.shape)}; "
            "index a stacked [E, bytes] tensor by the expert first"
        )
    array: _core._Bytes = blob.detach().cpu().contiguous().numpy()
    return array


def _order_number(row_order: RowOrder) -> int:
    if row_order not in _ROW_ORDERS:
        raise PackedFormatError(f"row order {row_order!r}; supported: {', '.join(_ROW_ORDERS)}")
    return _ROW_ORDERS.index(row_order)
