"""The float values that FP8 and FP4 codes stand for, with their scales.

Exact but for one rounding to fp32, that of value * scale.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from moepack import _core
from moepack.errors import BadWeights
from moepack.quantizer import code_values
from moepack.schemes import scheme

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# In the order of their bytes: two 4-bit codes each, the even element in the low nibble.
BYTES = (torch.int8, torch.uint8)


def decode_scaled(
    values: Tensor, scales: Tensor, name: str = "weight", out: Tensor | None = None
) -> Tensor:
    """values [..., N, K] in FP8 (or two FP4 codes a byte, [..., N, K / 2]) -> fp32 [..., N, K].

    `out`: contiguous, where the result goes.

    value * scale, one scale per tensor, per row, or per block: a scale grid of [n, k] means blocks
    of ceil-divided size, the last ones cut off. Blocks of 128 (FP8) or of 32 along K (FP4) are
    taken where they give that grid, else the size that divides evenly.
    """
    table = _byte_values(values.dtype)
    codes = values.reshape(-1, *values.shape[-2:]) if values.dim() > 1 else values.view(1, 1, -1)
    codes = codes.contiguous().view(torch.uint8)
    rows, cols = codes.shape[1], codes.shape[2] * table.shape[1]
    factors = power_of_two(scales) if scales.dtype == torch.uint8 else scales.float()
    if factors.numel() == 1:
        factors = factors.reshape(1, 1, 1)
    else:
        # Per channel, or per expert, where dimensions are missing.
        while factors.dim() < values.dim():
            factors = factors[..., None]
        factors = factors.expand(*values.shape[:-2], -1, -1).reshape(-1, *factors.shape[-2:])
    block = (_block(factors.shape[1], rows, name), _block(factors.shape[2], cols, name))
    if block[1] % table.shape[1]:
        raise BadWeights(f"{name}: one scale for {block[1]} columns, which are no whole bytes")
    made = torch.empty(len(codes), rows, cols) if out is None else out.view(len(codes), rows, cols)
    for index, matrix in enumerate(made):
        grid = factors[index if len(factors) > 1 else 0].contiguous()
        _core.decode(table.numpy(), codes[index].numpy(), grid.numpy(), *block, matrix.numpy())
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


@functools.cache
def _byte_values(dtype: torch.dtype) -> Tensor:
    """What each byte stands for: fp32 [256, 1], or [256, 2] where it holds two codes."""
    every = torch.arange(256, dtype=torch.uint8)
    if dtype not in BYTES:
        return every.view(dtype).float()[:, None]
    return code_values(scheme("mxfp4"), torch.stack([every & 15, every >> 4], dim=1))


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
