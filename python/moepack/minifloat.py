"""Weights that a checkpoint stores in e2m1 or e4m3: kept bit for bit, not quantized again.

`kept_mxfp4` takes codes and scales. `recovered` takes what they were decoded to and the scale of
each value: it finds the codes again whatever was done to both alike (transposed, joined, cut).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from moepack.errors import BadWeights
from moepack.quantizer import QuantizedMatrix, code_values, row_windows
from moepack.schemes import Scheme, scheme

_E8M0_BIAS, _E8M0_NAN = 127, 255
_E2M1_TO_FP16 = 2.0**-14


def kept_mxfp4(codes: Tensor, scales: Tensor, where: str = "weight") -> QuantizedMatrix:
    """codes uint8 [N, K], one e2m1 code 0 .. 15 each, and e8m0 scales uint8 [N, ceil(K / 32)].

    Raises BadWeights, naming `where`, on a NaN among the scales, and on scales that span all of
    e8m0: a blob's byte 0 stands for 0, so 2^-127 has to move into the exponent.
    """
    found = scheme("mxfp4")
    nan = (scales == _E8M0_NAN).nonzero()
    if len(nan):
        raise BadWeights(f"{where}: the scale of row {nan[0][0]}, group {nan[0][1]} is NaN")
    padded = pad(codes, (0, -codes.shape[1] % found.group))
    used = (padded.view(*scales.shape, found.group) & 7).ne(0).any(dim=2)
    exponent = 0
    if bool((used & (scales == 0)).any()):
        if bool((used & (scales == 2 * _E8M0_BIAS)).any()):
            raise BadWeights(f"{where}: scales span 2^-127 to 2^127; a blob holds one power less")
        scales, exponent = scales + 1, -1
    kept = torch.where(used, scales, torch.zeros_like(scales))
    return QuantizedMatrix(found, codes.view(torch.int8).contiguous(), kept, exponent)


def recovered(weight: Tensor, scales: Tensor, found: Scheme) -> QuantizedMatrix | None:
    """weight fp32 [N, K], each value code * scale rounded once, scales fp32 [N, K].

    The matrix of `found`, mxfp4 or fp8-b128, whose weights are exactly these; None if there is
    none: another format, or scales that differ within a group of columns.
    """
    weight, scales = weight.contiguous(), scales.contiguous()
    rows, cols = weight.shape
    codes = torch.empty(rows, cols, dtype=torch.int8)
    by_group = torch.empty(rows, found.groups(cols))
    for window in row_windows(rows, cols):
        values, factors = weight[window], scales[window]
        by_group[window] = factors[:, :: found.group]
        spread = by_group[window].repeat_interleave(found.group, dim=1)[:, :cols]
        codes[window] = _codes(values / factors, found)
        made = code_values(found, codes[window]) * factors
        if not (torch.equal(spread, factors) and torch.equal(made, values)):
            return None
    if found.cell == "fp8":
        return QuantizedMatrix(found, codes, by_group, 0)
    return _with_e8m0(codes, by_group)


def _codes(units: Tensor, found: Scheme) -> Tensor:
    """The codes int8 of values that codes stand for; any code where there is none."""
    units = units.nan_to_num(nan=0.0)  # 0 / 0, by a scale of 0
    if found.cell == "fp8":
        return units.to(torch.float8_e4m3fn).view(torch.int8)
    # The lowest exponents of fp16 are those of e2m1, its top bits of mantissa as well.
    bits = (units * _E2M1_TO_FP16).to(torch.float16).view(torch.int16)
    return (bits >> 9 & 7 | bits >> 12 & 8).to(torch.int8)


def _with_e8m0(codes: Tensor, scales: Tensor) -> QuantizedMatrix | None:
    mantissas, exponents = torch.frexp(scales)
    stored = exponents - 1 + _E8M0_BIAS
    if not bool(((mantissas == 0.5) & (stored >= 0)).all()):
        return None
    try:
        return kept_mxfp4(codes.view(torch.uint8), stored.to(torch.uint8))
    except BadWeights:  # scales that no blob can hold
        return None
