"""The float values that FP8 and FP4 codes stand for, with their scales.

Exact but for one rounding to fp32, that of value * scale. Small formats widen by moving their bits
into fp16 and multiplying by the power of two between the two exponents' biases, in windows of rows
that stay in a core's cache: torch's own cast from FP8 takes as long as quantizing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moepack.errors import BadWeights
from moepack.quantizer import row_windows

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# In the order of their bytes: two 4-bit codes each, the even element in the low nibble.
BYTES = (torch.int8, torch.uint8)
_E4M3_SHIFT, _E4M3_MASK, _E4M3_BIAS = 7, -0x4001, 2.0**8
_E2M1_BIAS = 2.0**14


def decode_scaled(
    values: Tensor, scales: Tensor, name: str = "weight", out: Tensor | None = None
) -> Tensor:
    """values [..., N, K] in FP8 (or two FP4 codes a byte, [..., N, K / 2]) -> fp32 [..., N, K].

    `out`: contiguous, where the result goes.

    value * scale, one scale per tensor, per row, or per block: a scale grid of [n, k] means blocks
    of ceil-divided size, the last ones cut off. Blocks of 128 (FP8) or of 32 along K (FP4) are
    taken where they give that grid, else the size that divides evenly.
    """
    widen = _widen_e2m1 if values.dtype in BYTES else _WIDEN[values.dtype]
    codes = values.reshape(-1, *values.shape[-2:]) if values.dim() > 1 else values.view(1, 1, -1)
    rows, cols = codes.shape[1], codes.shape[2] * (2 if values.dtype in BYTES else 1)
    factors = power_of_two(scales) if scales.dtype == torch.uint8 else scales.float()
    if factors.numel() == 1:
        factors = factors.reshape(1, 1, 1)
    else:
        # Per channel, or per expert, where dimensions are missing.
        while factors.dim() < values.dim():
            factors = factors[..., None]
        factors = factors.expand(*values.shape[:-2], -1, -1).reshape(-1, *factors.shape[-2:])
    height = _block(factors.shape[1], rows, name)
    factors = _spread(factors, cols, name)
    made = torch.empty(len(codes), rows, cols) if out is None else out.view(len(codes), rows, cols)
    for index, matrix in enumerate(made):
        grid = factors[index if len(factors) > 1 else 0]
        for first, last in _windows(rows, cols, height):
            one = grid[first:last] if height == 1 else grid[first // height]
            widen(codes[index, first:last], matrix[first:last]).mul_(one)
    return made.view(*values.shape[:-1], cols)


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
    return decode_scaled(blocks.flatten(-2), scales, name).transpose(-1, -2)


def power_of_two(exponents: Tensor) -> Tensor:
    """uint8 with bias 127 -> fp32 2^(e - 127); 255 is NaN, as in e8m0."""
    return exponents.contiguous().view(torch.float8_e8m0fnu).float()


def _widen_e4m3(codes: Tensor, out: Tensor) -> Tensor:
    codes = codes.contiguous().view(torch.int8)
    if max(int(codes.max()), int((codes ^ -128).max())) == 127:  # NaN, which fp16 has elsewhere
        return out.copy_(codes.view(torch.float8_e4m3fn))
    # The shift leaves a second sign bit where fp16 has one more of the exponent.
    bits = codes.to(torch.int16).bitwise_left_shift_(_E4M3_SHIFT).bitwise_and_(_E4M3_MASK)
    return out.copy_(bits.view(torch.float16)).mul_(_E4M3_BIAS)


def _widen_e5m2(codes: Tensor, out: Tensor) -> Tensor:
    bits = codes.contiguous().view(torch.int8).to(torch.int16).bitwise_left_shift_(8)
    return out.copy_(bits.view(torch.float16))


def _widen_e2m1(codes: Tensor, out: Tensor) -> Tensor:
    """Sign, two bits of exponent, one of mantissa: the top bits of an fp16, sign apart."""
    wide = codes.contiguous().view(torch.int8).to(torch.int16)
    pairs = torch.empty(*codes.shape, 2, dtype=torch.int16)
    for place, (sign, rest) in enumerate(((12, 9), (8, 5))):
        magnitude = (wide << rest).bitwise_and_(0x0E00)
        torch.bitwise_or((wide << sign).bitwise_and_(-0x8000), magnitude, out=pairs[..., place])
    return out.copy_(pairs.view(torch.float16).view(out.shape)).mul_(_E2M1_BIAS)


_WIDEN: dict[torch.dtype, Callable[[Tensor, Tensor], Tensor]] = {
    torch.float8_e4m3fn: _widen_e4m3,
    torch.float8_e5m2: _widen_e5m2,
}


def _windows(rows: int, cols: int, height: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that fit a cache and do not cross a border of blocks; 1: rows have none."""
    block = rows if height == 1 else height
    for begin in range(0, rows, block):
        end = min(rows, begin + block)
        for window in row_windows(end - begin, max(1, cols)):
            yield begin + window.start, begin + window.stop


def _block(count: int, size: int, name: str) -> int:
    """How many elements of a dimension share a factor, of which there are `count`."""
    if count == size:
        return 1
    block = next((b for b in (size, 128, 64, 32, 16) if -(-size // b) == count), 0)
    if not block and size % count == 0:
        block = size // count
    if not block:
        raise BadWeights(
            f"{name}: {count} scales along a dimension of {size}; supported: one, one for each, "
            "or one per block of 128, 64, 32, 16 or of equal size"
        )
    return block


def _spread(factors: Tensor, cols: int, name: str) -> Tensor:
    """One factor per column, or one for all, from one per block of columns."""
    count = factors.shape[-1]
    if count in (1, cols):
        return factors
    block = _block(count, cols, name)
    return factors.repeat_interleave(block, dim=-1).narrow(-1, 0, cols)
