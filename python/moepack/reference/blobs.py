"""A decoder of packed blobs written from docs/reference/packed-format.md alone."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.errors import PackedFormatError

HEADER_BYTES = 64
_PANEL = 16
_PLAIN, _GATE_UP = 0, 1
_CELL_BITS = {1: 4, 2: 8}


@dataclass(frozen=True)
class Matrix:
    """W[n, k] = codes[n, k] * scales[n, k / group] * 2^exponent."""

    codes: Tensor  # [N, G * group] int8
    scales: Tensor  # [N, G] fp32, the values of the fp16 scales
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
    groups = -(-cols // group)
    group_bytes = group * _CELL_BITS[cell] // 8 * _PANEL + 2 * _PANEL
    panels = blob[HEADER_BYTES:].reshape(-1, groups, group_bytes)
    codes = _cells(panels[..., : -2 * _PANEL], cell, group)
    scales = panels[..., -2 * _PANEL :].contiguous().view(torch.float16).float().transpose(1, 2)
    return Matrix(
        _rows(codes.reshape(-1, groups * group), rows, order),
        _rows(scales.reshape(-1, groups), rows, order),
        group,
        exponent,
        cols,
    )


def _cells(cells: Tensor, cell: int, group: int) -> Tensor:
    """[P, G, bytes] uint8 -> codes [P, 16, G, group] int8."""
    panels, groups, _ = cells.shape
    if _CELL_BITS[cell] == 4:
        packed = cells.reshape(panels, groups, group // 8, _PANEL, 4)
        nibbles = torch.stack((packed & 15, packed >> 4), dim=4)  # [P, G, cells, 16, low|high, 4]
        codes = nibbles.to(torch.int8) - 8
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
