"""torchao's "universal" blobs, the weights of ExecuTorch's own `llama::quantized_moe_ffn`.

A blob holds one matrix W [N, K] of 4- or 8-bit codes, little-endian:

    header   16 int32: 6712, 1, bits, has_zeros, has_bias, nr = 8, kr = 16, sr = 2, then zeros
    panels   ceil(N / 8), of 8 rows each (rows are padded with zeros); a panel holds, for every
             group along K: the group's codes, 8 fp32 scales, 8 int32 sums of the group's codes

Codes come in chunks of 8 rows by 16 k, a chunk as two halves of its k, a half row after row. 8-bit
codes are stored in this order; 4-bit codes, + 8, in runs of 32: byte i of a run holds value i in
its low nibble and value 16 + i in its high nibble. Unlike moepack's blobs these do not say N, K and
the group, scales are fp32, and K has to be a multiple of the group.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.errors import PackedFormatError, UnsupportedError
from moepack.quantizer import QuantizedMatrix
from moepack.schemes import SCHEMES, Scheme, scheme

_NR, _KR, _SR = 8, 16, 2
_HEADER_BYTES = 64
_MAGIC, _UNIVERSAL = 6712, 1
UNIVERSAL_MAGIC = _MAGIC.to_bytes(4, "little")
BITS = (4, 8)
_RUN = 32  # 4-bit codes are packed so many at a time
_SCALE_AND_SUM_BYTES = 8


def require_integers(found: Scheme) -> None:
    if not found.is_integer:
        raise UnsupportedError(
            f"scheme {found.name!r} in torchao's layout; supported there: int4 and int8 schemes"
        )


@dataclass(frozen=True, eq=False)
class UniversalMatrix:
    """codes [N, K] int8 of `bits`, scales [N, K / group] fp32: W = codes * scales."""

    bits: int
    group: int
    codes: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """fp32 [N, K]: one rounding for each weight."""
        return self.codes.float() * self.scales.repeat_interleave(self.group, dim=1)

    def in_half(self) -> QuantizedMatrix:
        """The same codes with scales in fp16 and one exponent, unchanged where that holds them.

        `scale_error` of the result is the largest relative change. Groups that are a multiple of 32
        are taken apart. Raises UnsupportedError on others, PackedFormatError on a scale that is not
        finite.
        """
        kept = kept_group(self.bits, self.group)
        scales = self.scales.repeat_interleave(self.group // kept, dim=1)
        return _in_half(f"int{self.bits}-g{kept}", self.codes, scales)


def kept_group(bits: int, group: int) -> int:
    """The largest of moepack's groups that divides one of torchao's. Raises UnsupportedError."""
    groups = sorted(s.group for s in SCHEMES.values() if s.name.startswith(f"int{bits}-"))
    fitting = [g for g in groups if group % g == 0]
    if not fitting:
        raise UnsupportedError(
            f"groups of {group}; supported: {', '.join(map(str, groups))} and their multiples"
        )
    return fitting[-1]


def universal_bytes(bits: int, rows: int, cols: int, group: int) -> int:
    """Bytes of the blob of a [rows, cols] matrix. Raises UnsupportedError naming the bad size."""
    if bits not in BITS:
        raise UnsupportedError(f"{bits}-bit codes; supported in torchao's layout: 4, 8")
    if group < 1 or group % _KR:
        raise UnsupportedError(f"groups of {group}; torchao's layout needs a multiple of {_KR}")
    if rows < 1 or cols < 1 or cols % group:
        raise UnsupportedError(
            f"a [{rows}, {cols}] matrix in groups of {group}: torchao's layout has no incomplete "
            "groups; take a group that divides the columns, or the layout 'moepack'"
        )
    group_bytes = group * bits // 8 + _SCALE_AND_SUM_BYTES
    return _HEADER_BYTES + -(-rows // _NR) * _NR * (cols // group) * group_bytes


def pack_universal(matrix: QuantizedMatrix) -> Tensor:
    """A quantized matrix as one universal blob, uint8 [bytes]; codes and scales stay as they are.

    Raises UnsupportedError if the scheme has other codes than integers, K is not a multiple of the
    group, or a scale is beyond fp32.
    """
    require_integers(matrix.scheme)
    exact = torch.ldexp(matrix.scales.double(), torch.tensor(matrix.exponent))
    scales = exact.float()
    if not torch.equal(scales.double(), exact):
        raise UnsupportedError(
            f"scales around 2^{matrix.exponent} are beyond the fp32 of torchao's layout; "
            "take the layout 'moepack'"
        )
    return encode(matrix.codes, scales, matrix.scheme.bits, matrix.scheme.group)


def read_universal(blob: Tensor, rows: int, cols: int, group: int) -> UniversalMatrix:
    """The matrix [rows, cols] that a universal blob, uint8 or int8 [bytes], holds, unchanged.

    Raises PackedFormatError on bytes that are not such a blob of this shape, UnsupportedError on
    zero points, a bias or a group that is no multiple of 16.
    """
    data = _flat_bytes(blob)
    bits = read_header(data)
    if len(data) != universal_bytes(bits, rows, cols, group):
        raise PackedFormatError(
            f"the blob has {len(data)} bytes; {bits}-bit codes [{rows}, {cols}] in groups of "
            f"{group} take {universal_bytes(bits, rows, cols, group)}"
        )
    return UniversalMatrix(bits, group, *_decode(data, bits, rows, cols, group))


def unpack_universal(blob: Tensor, rows: int, cols: int, group: int) -> QuantizedMatrix:
    """`read_universal` and `in_half`: codes come back unchanged, scales in fp16."""
    return read_universal(blob, rows, cols, group).in_half()


def encode(codes: Tensor, scales: Tensor, bits: int, group: int) -> Tensor:
    """codes int8 [N, K] and N * K / group scales fp32 -> uint8 [bytes]."""
    n, k = codes.shape
    universal_bytes(bits, n, k, group)
    panels, groups = -(-n // _NR), k // group
    if scales.numel() != n * groups:
        raise PackedFormatError(f"{scales.numel()} scales for {n} rows of {groups} groups")
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if int(codes.min()) < low or int(codes.max()) > high:
        raise PackedFormatError(
            f"codes from {int(codes.min())} to {int(codes.max())}; "
            f"{bits}-bit codes lie in {low} .. {high}"
        )
    rows = torch.zeros(panels * _NR, k, dtype=torch.int8)
    rows[:n] = codes
    padded_scales = torch.zeros(panels * _NR, groups)
    padded_scales[:n] = scales.view(n, groups)
    grouped = rows.view(panels, _NR, groups, group)
    sums = grouped.sum(-1, dtype=torch.int32)
    per_group = [
        _code_bytes(grouped, bits),
        _bytes_of(padded_scales.view(panels, _NR, groups).transpose(1, 2)),
        _bytes_of(sums.transpose(1, 2)),
    ]
    header = struct.pack("<16i", _MAGIC, _UNIVERSAL, bits, 0, 0, _NR, _KR, _SR, *[0] * 8)
    return torch.cat(
        [torch.frombuffer(bytearray(header), dtype=torch.uint8), torch.cat(per_group, 2).flatten()]
    )


def _code_bytes(grouped: Tensor, bits: int) -> Tensor:
    """Codes int8 [panels, 8, groups, group] -> uint8 [panels, groups, bytes]."""
    panels, _, groups, group = grouped.shape
    halves = grouped.reshape(panels, _NR, groups, group // _KR, _SR, _KR // _SR)
    ordered = halves.permute(0, 2, 3, 4, 1, 5).reshape(panels, groups, -1)
    if bits == 8:
        return _bytes_of(ordered)
    runs = (ordered + 8).view(torch.uint8).view(panels, groups, -1, 2, _RUN // 2)
    return (runs[..., 0, :] | runs[..., 1, :] << 4).flatten(2)


def _decode(data: Tensor, bits: int, rows: int, cols: int, group: int) -> tuple[Tensor, Tensor]:
    """Codes int8 [N, K] and scales fp32 [N, K / group] of a blob whose size has been checked."""
    panels, groups = -(-rows // _NR), cols // group
    code_bytes = _NR * group * bits // 8
    per_group = data[_HEADER_BYTES:].view(panels, groups, -1)
    packed, scales, sums = per_group.split([code_bytes, 4 * _NR, 4 * _NR], dim=2)
    if bits == 8:
        ordered = packed.contiguous().view(torch.int8)
    else:
        nibbles = packed.reshape(panels, groups, -1, 1, _RUN // 2)
        ordered = torch.cat([nibbles & 15, nibbles >> 4], dim=3).view(torch.int8) - 8
    halves = ordered.reshape(panels, groups, group // _KR, _SR, _NR, _KR // _SR)
    grouped = halves.permute(0, 4, 1, 2, 3, 5).reshape(panels, _NR, groups, group)
    stored = sums.contiguous().view(torch.int32).transpose(1, 2)
    if not torch.equal(grouped.sum(-1, dtype=torch.int32), stored):
        raise PackedFormatError(
            "the sums that the blob stores are not those of its codes: it is damaged, or of "
            f"another shape than [{rows}, {cols}] in groups of {group}"
        )
    codes = grouped.reshape(panels * _NR, cols)[:rows].contiguous()
    values = scales.contiguous().view(torch.float32).transpose(1, 2)
    return codes, values.reshape(panels * _NR, groups)[:rows]


def _in_half(scheme_name: str, codes: Tensor, scales: Tensor) -> QuantizedMatrix:
    """Scales in fp16, under the exponent of packed-format.md or, where it keeps small scales
    better, the lowest that the largest scale allows."""
    finite = scales.isfinite()
    if not bool(finite.all()):
        row, group = (~finite).nonzero()[0].tolist()
        raise PackedFormatError(f"the scale of row {row}, group {group} is not finite")
    largest = scales.abs().max().double()
    log2 = int(torch.frexp(largest).exponent) - 1 if float(largest) else 0
    candidates = [_rounded(scheme_name, codes, scales, log2 - bits) for bits in (11, 15)]
    return min(candidates, key=lambda matrix: matrix.scale_error)


def _rounded(scheme_name: str, codes: Tensor, scales: Tensor, exponent: int) -> QuantizedMatrix:
    bounded = max(-126, min(127, exponent)) if bool(scales.any()) else 0
    exact = torch.ldexp(scales.double(), torch.tensor(-bounded))
    rounded = exact.to(torch.float16)
    error = ((rounded.double() - exact).abs() / exact.abs())[exact != 0]
    change = float(error.max()) if error.numel() else 0.0
    return QuantizedMatrix(scheme(scheme_name), codes, rounded, bounded, change)


def is_universal(blob: Tensor) -> bool:
    """Does a blob, uint8 [bytes], begin as one of torchao's does?"""
    return bytes(blob[:4].tolist()) == UNIVERSAL_MAGIC


def read_header(blob: Tensor) -> int:
    """The bits of a code. Raises PackedFormatError or UnsupportedError on another header."""
    data = _flat_bytes(blob)
    if len(data) < _HEADER_BYTES:
        raise PackedFormatError(f"{len(data)} bytes; a universal blob begins with {_HEADER_BYTES}")
    fields = struct.unpack("<16i", bytes(data[:_HEADER_BYTES].tolist()))
    magic, kind, bits, has_zeros, has_bias, *geometry = fields
    if magic != _MAGIC:
        raise PackedFormatError(
            f"not a universal blob of torchao: it begins with {magic}, not {_MAGIC}"
        )
    if has_zeros or has_bias:
        raise UnsupportedError("the blob holds zero points or a bias; supported: neither")
    if kind != _UNIVERSAL or geometry != [_NR, _KR, _SR, *[0] * 8] or bits not in BITS:
        raise UnsupportedError(
            f"the blob has the type {kind}, {bits} bits, nr, kr, sr {geometry[:3]}; "
            f"supported: type {_UNIVERSAL}, 4 or 8 bits, {_NR}, {_KR}, {_SR}"
        )
    return int(bits)


def _flat_bytes(blob: Tensor) -> Tensor:
    if blob.dtype not in (torch.uint8, torch.int8) or blob.dim() != 1:
        raise PackedFormatError(
            f"a blob is a one-dimensional uint8 tensor, not {blob.dtype} {list(blob.shape)}; "
            "index a stacked [E, bytes] tensor by the expert first"
        )
    return blob.detach().cpu().contiguous().view(torch.uint8)


def _bytes_of(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)
