"""torchao's "universal" 4-bit blobs, as ExecuTorch's own MoE operator reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from moepack.quantizer import QuantizedMatrix

_NR, _KR = 8, 16
_MAGIC, _TYPE_UNIVERSAL = 6712, 1


def pack_universal(matrix: QuantizedMatrix) -> Tensor:
    """codes [N, K] of -8..7 -> uint8 [bytes]; K a multiple of the group.

    A 64-byte header of int32; then for every 8 rows and every group: group / 16 chunks of 8 rows by
    16 k, 8 fp32 scales, 8 int32 sums of the group's codes.
    """
    group = matrix.scheme.group
    n, k = matrix.codes.shape
    panels, groups = -(-n // _NR), k // group
    rows = torch.zeros(panels * _NR, k, dtype=torch.int32)
    rows[:n] = matrix.codes
    scales = torch.zeros(panels * _NR, groups)
    scales[:n] = torch.ldexp(matrix.scales.float(), torch.tensor(matrix.exponent))

    grouped = rows.view(panels, _NR, groups, group)
    # [panel, group, chunk, half of the chunk's k, row, 8 k]: the order in which codes are packed.
    ordered = grouped.view(panels, _NR, groups, group // _KR, 2, _KR // 2).permute(0, 2, 3, 4, 1, 5)
    runs = (ordered + 8).reshape(panels, groups, -1, 2, _KR)
    cells = (runs[..., 0, :] | runs[..., 1, :] << 4).to(torch.uint8).flatten(2)
    per_group = torch.cat(
        [
            cells,
            _bytes(scales.view(panels, _NR, groups).transpose(1, 2)),
            _bytes(grouped.sum(-1, dtype=torch.int32).transpose(1, 2)),
        ],
        dim=2,
    )
    header = torch.zeros(16, dtype=torch.int32)
    header[:8] = torch.tensor([_MAGIC, _TYPE_UNIVERSAL, 4, 0, 0, _NR, _KR, 2])
    return torch.cat([_bytes(header), per_group.flatten()])


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)
