"""Decoders of both layouts of packed blobs, moepack's written from docs/reference/packed-format.md
alone; written for reading, not shared with `packing`."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.errors import PackedFormatError

HEADER_BYTES = 64
_PANEL = 16
_PLAIN, _GATE_UP = 0, 1
_INT4, _INT8, _MXFP4, _FP8 = 1, 2, 3, 4
_CELL_BITS = {_INT4: 4, _INT8: 8, _MXFP4: 4, _FP8: 8}
_SCALE_BYTES = {_INT4: 2, _INT8: 2, _MXFP4: 1, _FP8: 4}
_TWICE_E2M1 = torch.tensor(
    [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8
)


@dataclass(frozen=True)
class Matrix:
    """W[n, k] = codes[n, k] * scales[n, k / group] * 2^exponent.

    As the kernels take them: mxfp4's codes are twice their values, fp8's are fp32 values * 2^-8.
    """

    codes: Tensor  # [N, G * group] int8, or fp32 where activations are not quantized
    scales: Tensor  # [N, G] fp32
    group: int
    exponent: int
    columns: int  # K, before padding

    def dequantize(self) -> Tensor:
        """[N, K] fp64: exact."""
        scales = self.scales.double().repeat_interleave(self.group, dim=1)
        return (self.codes.double() * scales * 2.0**self.exponent)[:, : self.columns]


def decode(blob: Tensor) -> Matrix:
    """blob [bytes] uint8 -> the matrix that it holds."""
    raw = bytes(blob[:HEADER_BYTES].cpu().numpy().tobytes())
    magic, version, cell, rows, cols, group, exponent, _crc, order = struct.unpack(
        "<4sHHIIIiIH", raw[:30]
    )
    if (
        magic != b"MOEP"
        or version != 1
        or cell not in _CELL_BITS
        or order not in (_PLAIN, _GATE_UP)
    ):
        raise PackedFormatError(
            f"not a packed blob of version 1: magic {magic!r}, version {version}, cell {cell}, "
            f"row order {order}"
        )
    groups, scale_bytes = -(-cols // group), _SCALE_BYTES[cell] * _PANEL
    group_bytes = group * _CELL_BITS[cell] // 8 * _PANEL + scale_bytes
    panels = blob[HEADER_BYTES:].reshape(-1, groups, group_bytes)
    codes = _cells(panels[..., :-scale_bytes], cell, group)
    scales = _scales(panels[..., -scale_bytes:].contiguous(), cell).transpose(1, 2)
    return Matrix(
        _rows(codes.reshape(-1, groups * group), rows, order),
        _rows(scales.reshape(-1, groups), rows, order),
        group,
        exponent + {_MXFP4: -1, _FP8: 8}.get(cell, 0),
        cols,
    )


def decode_universal(blob: Tensor, rows: int, columns: int, bits: int, group: int) -> Matrix:
    """blob [bytes] uint8, torchao's "universal" one of a matrix [rows, columns] -> the matrix."""
    fields = struct.unpack("<16i", bytes(blob[:HEADER_BYTES].cpu().numpy().tobytes()))
    if fields != (6712, 1, bits, 0, 0, 8, 16, 2, *[0] * 8):
        raise PackedFormatError(f"not a universal blob of {bits}-bit codes: header {fields}")
    code_bytes = 8 * group * bits // 8
    per_group = blob[HEADER_BYTES:].reshape(-1, columns // group, code_bytes + 8 * 4 + 8 * 4)
    stored = per_group[..., :code_bytes]
    if bits == 4:  # in runs of 16 bytes: 16 values in the low nibbles, then 16 in the high ones
        runs = stored.reshape(*stored.shape[:2], -1, 16)
        values = torch.stack((runs & 15, runs >> 4), dim=3).to(torch.int8) - 8
    else:
        values = stored.contiguous().view(torch.int8)
    halves = values.reshape(-1, columns // group, group // 8, 8, 8)  # [panel, group, 8 k, row, k]
    codes = halves.permute(0, 3, 1, 2, 4).reshape(-1, columns)
    scales = per_group[..., code_bytes : code_bytes + 8 * 4].contiguous().view(torch.float32)
    scales = scales.transpose(1, 2).reshape(-1, columns // group)
    return Matrix(codes[:rows], scales[:rows], group, 0, columns)


def _scales(stored: Tensor, cell: int) -> Tensor:
    if cell == _MXFP4:
        return (stored.int() << 23).view(torch.float32)
    return stored.view(torch.float32 if cell == _FP8 else torch.float16).float()


def _cells(cells: Tensor, cell: int, group: int) -> Tensor:
    """[P, G, bytes] uint8 -> codes [P, 16, G, group]."""
    panels, groups, _ = cells.shape
    if cell == _FP8:
        values = cells.contiguous().view(torch.float8_e4m3fn).float() * 2.0**-8
        return values.reshape(panels, groups, group, _PANEL).permute(0, 3, 1, 2)
    if _CELL_BITS[cell] == 4:
        packed = cells.reshape(panels, groups, group // 8, _PANEL, 4)
        nibbles = torch.stack((packed & 15, packed >> 4), dim=4)  # [P, G, cells, 16, low|high, 4]
        codes = _TWICE_E2M1[nibbles.long()] if cell == _MXFP4 else nibbles.to(torch.int8) - 8
    else:
        codes = (
            cells.contiguous().view(torch.int8).reshape(panels, groups, group // 4, _PANEL, 1, 4)
        )
    return codes.permute(0, 3, 1, 2, 4, 5).reshape(panels, _PANEL, groups, group)


def _rows(panel_rows: Tensor, rows: int, order: int) -> Tensor:
    """Rows in the order of the panels -> the matrix's rows, padding removed."""
    if order == _PLAIN:
        return panel_rows[:rows].contiguous()
    pairs = panel_rows.reshape(-1, 2, _PANEL, panel_rows.shape[1])
    halves = pairs.transpose(0, 1).reshape(2, -1, panel_rows.shape[1])
    return halves[:, : rows // 2].reshape(rows, -1)
