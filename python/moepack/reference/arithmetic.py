"""fp32 arithmetic as docs/reference/op.md defines it: one rounding per operation."""

from __future__ import annotations

import torch
from torch import Tensor

ACTIVATION_GROUP = 128

_LOG2_E = float.fromhex("0x1.715476p+0")
_LN2_HIGH = float.fromhex("0x1.63p-1")
_LN2_LOW_NEGATED = float.fromhex("0x1.bd0106p-13")
_EXP_POLYNOMIAL = (
    float.fromhex("0x1.6a2444p-10"),
    float.fromhex("0x1.1239d4p-7"),
    float.fromhex("0x1.5558f2p-5"),
    float.fromhex("0x1.555492p-3"),
    float.fromhex("0x1.fffffcp-2"),
    1.0,
    1.0,
)


def fp32(value: float) -> Tensor:
    """A scalar rounded once to fp32; torch keeps Python floats in double."""
    return torch.tensor(value, dtype=torch.float32)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of fp32 tensors, rounded once.

    The product of two fp32 numbers is exact in fp64, the sum is not: rounding it to fp64 and then
    to fp32 could round twice. So the sum is rounded to odd (of the two doubles around it, the one
    with an odd last bit), from which the rounding to fp32 is right because fp64 has more than two
    spare bits.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)  # exact: total + error == product + addend
    bits = total.view(torch.int64)
    toward_error = torch.where((error > 0) == (total > 0), 1, -1)
    is_even_and_inexact = (error.abs() > 0) & (bits & 1 == 0)
    return torch.where(is_even_and_inexact, bits + toward_error, bits).view(torch.float64).float()


def exp(x: Tensor) -> Tensor:
    """moepack's own exponential: the same bits on every instruction set."""
    x = x.clamp(-87.0, 88.0)
    n = (x * fp32(_LOG2_E)).round()
    r = fma(n, fp32(-_LN2_HIGH), x)
    r = fma(n, fp32(_LN2_LOW_NEGATED), r)
    p = fp32(_EXP_POLYNOMIAL[0]).expand_as(r)
    for coefficient in _EXP_POLYNOMIAL[1:]:
        p = fma(p, r, fp32(coefficient))
    return scale_by_power_of_two(p, n)


def scale_by_power_of_two(x: Tensor, exponent: Tensor | int) -> Tensor:
    """x * 2^exponent, rounded once (exact in fp64 for every exponent that occurs here)."""
    power = torch.exp2(torch.as_tensor(exponent, dtype=torch.float64))
    return (x.double() * power).float()


def sigmoid(x: Tensor) -> Tensor:
    return fp32(1.0) / (fp32(1.0) + exp(-x))


def sequential_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, from the first element to the last, each addition rounded."""
    total = torch.zeros_like(x[..., 0])
    for column in x.unbind(-1):
        total = total + column
    return total


def quantize_activations(v: Tensor) -> tuple[Tensor, Tensor]:
    """v [T, n] fp32 -> integer codes [T, A*128] held in fp32, scales [T, A]; A = ceil(n / 128)."""
    tokens, n = v.shape
    groups = -(-n // ACTIVATION_GROUP)
    padded = torch.nn.functional.pad(v, (0, groups * ACTIVATION_GROUP - n))
    grouped = padded.view(tokens, groups, ACTIVATION_GROUP)
    finite = grouped.isfinite().all(-1)
    amax = torch.where(finite, grouped.abs().amax(-1), fp32(0.0))
    usable = amax >= 2.0**-119
    scale = torch.where(usable, amax / fp32(127.0), fp32(0.0))
    inverse = fp32(127.0) / torch.where(usable, amax, fp32(1.0))
    codes = torch.where(usable[..., None], (grouped * inverse[..., None]).round(), fp32(0.0))
    scale = torch.where(finite, scale, fp32(float("nan")))
    return codes.flatten(1), scale
