"""Float weights to codes and scales, per group along K.

W[n, k] = value(code[n, k]) * scale[n, k / group] * 2^exponent; an integer code is its own value.
The exponent is one per matrix and keeps fp16 scales in their normal range however small or large
the weights are. Two rules choose scales:

`search`   the scale of least squared error among a fixed set of candidates, in C++;
           docs/reference/packed-format.md defines it to the bit.
`torchao`  torchao's symmetric rule (scale = amax / ((code_max - code_min) / 2)), rounded to fp16;
           the codes are chosen by torchao against the rounded scale. Integer schemes only.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from moepack import _core
from moepack.errors import BadWeights, UnsupportedError
from moepack.schemes import Scheme, scheme

Rule = Literal["search", "torchao"]


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """codes [N, K] int8, scales [N, ceil(K / group)]: W = value(codes) * scales * 2^exponent.

    Scales are fp16; uint8 for mxfp4 (2^(scale - 127), and 0 for 0); fp32 for fp8.
    `scale_error`: the largest relative change of a scale that was given (a torchao tensor's) by
    its rounding to fp16; 0 where the scales were chosen in fp16.
    """

    scheme: Scheme
    codes: Tensor
    scales: Tensor
    exponent: int
    scale_error: float = 0.0

    def dequantize(self) -> Tensor:
        """fp32 [N, K]."""
        group, cols = self.scheme.group, self.codes.shape[1]
        made, scales = code_values(self.scheme, self.codes), scale_values(self.scales)
        whole = cols // group
        groups = made[:, : whole * group].unflatten(1, (whole, group))
        groups.mul_(scales[:, :whole, None])
        made[:, whole * group :] *= scales[:, whole:]
        return made.mul_(2.0**self.exponent)


_WINDOW = 1 << 17  # elements of a matrix that fit a core's cache

SCALE_DTYPES = {"fp16": torch.float16, "e8m0": torch.uint8, "fp32": torch.float32}

_E2M1_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def code_values(found: Scheme, codes: Tensor) -> Tensor:
    """What codes int8 [...] stand for, fp32, in units of their scale."""
    if found.cell == "mxfp4":
        return torch.cat([_E2M1_VALUES, -_E2M1_VALUES])[codes.long()]
    if found.cell == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    return codes.float()


def scale_values(scales: Tensor) -> Tensor:
    """Scales of any scheme as fp32."""
    if scales.dtype == torch.uint8:
        return (scales.int() << 23).view(torch.float32)
    return scales.float()


def squares(weight: Tensor, matrix: QuantizedMatrix) -> tuple[float, float]:
    """The sum of the squares of a float matrix [N, K], and of its difference to `matrix`."""
    return _core.compare(
        matrix.scheme.name,
        weight.to("cpu", torch.float32).contiguous().numpy(),
        matrix.codes.contiguous().numpy(),
        matrix.scales.contiguous().numpy(),
        matrix.exponent,
    )


def row_windows(rows: int, cols: int) -> Iterator[slice]:
    """All rows, in windows that fit a core's cache: torch's operators on a whole matrix wait for
    memory."""
    step = max(1, _WINDOW // cols)
    return (slice(first, min(rows, first + step)) for first in range(0, rows, step))


def quantize(
    weight: Tensor, scheme_: str | Scheme, rule: Rule = "search", where: str = "weight"
) -> QuantizedMatrix:
    """Quantizes a float matrix [N, K]; any N and K.

    `where` names the matrix in errors ("layers.3.mlp expert 5 w13"). Raises BadWeights, naming
    row and column, if a weight is NaN or infinite or if there are no values (meta device).
    """
    weights, found = _float_matrix(weight, where), scheme(scheme_)
    if rule == "search":
        return _search(weights, found, where)
    if rule == "torchao":
        if not found.is_integer:
            raise UnsupportedError(
                f"{where}: the rule 'torchao' makes integer codes; {found.name} is made by 'search'"
            )
        return _torchao_rule(weights, found, where)
    raise UnsupportedError(f"quantization rule {rule!r}; supported: search, torchao")


def quantize_experts(
    weights: Iterable[tuple[str, Callable[[], Tensor]]],
    scheme_: str | Scheme,
    rule: Rule = "search",
    threads: int | None = None,
) -> Iterator[QuantizedMatrix]:
    """Quantizes many matrices on a thread pool, in order; each item is (where, read the weight).

    Weights are read only when a thread is free, so that a few are in memory at a time.
    """
    workers = threads or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(workers) as pool:
        running: deque[Future[QuantizedMatrix]] = deque()
        for where, read in weights:
            if len(running) > workers:
                yield running.popleft().result()
            running.append(pool.submit(_read_and_quantize, read, scheme_, rule, where))
        while running:
            yield running.popleft().result()


def from_torchao(tensor: Tensor, where: str = "weight") -> QuantizedMatrix:
    """A matrix that torchao has quantized already, symmetrically: its codes are kept.

    Takes torchao's IntxUnpackedToInt8Tensor (1 to 8 bits) and Int8Tensor, [N, K], one scale per
    group of 32, 64 or 128 along K, or of any multiple, or per row. Scales are rounded to fp16
    (`scale_error`). Raises UnsupportedError on zero points, other layouts and other granularities,
    BadWeights on scales that are not finite.
    """
    source = _symmetric_source(tensor, where)
    found = scheme(f"int{4 if source.bits <= 4 else 8}-g{source.group}")
    scales = _given_scales(source, found)
    row_col = _first_non_finite(scales)
    if row_col:
        raise BadWeights(f"{where}: scale of row {row_col[0]}, group {row_col[1]} is not finite")
    exponent = _exponent_of_scales(scales)
    exact = torch.ldexp(scales, torch.tensor(-exponent))
    rounded = exact.to(torch.float16)
    nonzero = exact != 0
    error = ((rounded.double() - exact).abs() / exact.abs())[nonzero]
    return QuantizedMatrix(
        found,
        source.codes.contiguous(),
        rounded,
        exponent,
        float(error.max()) if error.numel() else 0.0,
    )


@dataclass(frozen=True)
class _Source:
    """What a torchao tensor holds: codes [N, K] of `bits`, fp64 scales [N, K / block].

    `group` is the largest of moepack's groups that fits the blocks.
    """

    codes: Tensor
    scales: Tensor
    block: int
    group: int
    bits: int


def _float_matrix(weight: Tensor, where: str) -> Tensor:
    if weight.is_meta:
        raise BadWeights(f"{where}: is on the meta device and has no values; load it first")
    if weight.dim() != 2 or 0 in weight.shape or not weight.is_floating_point():
        raise BadWeights(
            f"{where}: got {str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}, "
            "expected a float matrix [N, K] of at least one row and column"
        )
    return weight.detach().to("cpu", torch.float32).contiguous()


def _search(weights: Tensor, found: Scheme, where: str) -> QuantizedMatrix:
    rows, cols = weights.shape
    codes = torch.empty(rows, cols, dtype=torch.int8)
    scales = torch.empty(rows, found.groups(cols), dtype=SCALE_DTYPES[found.scale])
    array = weights.numpy()
    exponent = _core.scale_exponent(found.name, array)
    bad = _core.quantize_search(found.name, array, exponent, codes.numpy(), scales.numpy())
    if bad is not None:
        raise _not_finite(weights, bad, where)
    return QuantizedMatrix(found, codes, scales, exponent)


def _torchao_rule(weights: Tensor, found: Scheme, where: str) -> QuantizedMatrix:
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        quantize_affine,
    )

    bad = _first_non_finite(weights)
    if bad is not None:
        raise _not_finite(weights, bad, where)
    cols = weights.shape[1]
    exponent = _core.scale_exponent(found.name, weights.numpy())
    padded = F.pad(weights, (0, found.groups(cols) * found.group - cols))
    normal = torch.ldexp(padded, torch.tensor(-exponent))
    block = (1, found.group)
    scales, zero_points = choose_qparams_affine(
        normal,
        MappingType.SYMMETRIC,
        block,
        target_dtype=torch.int8,
        quant_min=found.code_min,
        quant_max=found.code_max,
        eps=torch.finfo(torch.float16).tiny * torch.finfo(torch.float16).eps,
        keepdim=True,
    )
    rounded = scales.to(torch.float16)
    codes = quantize_affine(
        normal,
        block,
        rounded.float(),
        zero_points,
        torch.int8,
        quant_min=found.code_min,
        quant_max=found.code_max,
    )
    # torchao has no scale of 0: a group of zeros gets the smallest one, and codes of 0.
    rounded[codes.view(*rounded.shape, found.group).eq(0).all(dim=2)] = 0
    return QuantizedMatrix(found, codes[:, :cols].contiguous(), rounded, exponent)


def _read_and_quantize(
    read: Callable[[], Tensor], scheme_: str | Scheme, rule: Rule, where: str
) -> QuantizedMatrix:
    return quantize(read(), scheme_, rule, where)


def _symmetric_source(tensor: Tensor, where: str) -> _Source:
    kind = type(tensor).__name__
    if kind not in ("IntxUnpackedToInt8Tensor", "Int8Tensor"):
        raise UnsupportedError(
            f"{where}: a {kind} is not taken as it is; supported: IntxUnpackedToInt8Tensor, "
            "Int8Tensor. Dequantize it and quantize the result instead"
        )
    codes, scales = tensor.qdata, tensor.scale  # type: ignore[attr-defined]
    zero_point, block_size = tensor.zero_point, list(tensor.block_size)  # type: ignore[attr-defined]
    if codes.dim() != 2:
        raise UnsupportedError(f"{where}: has the shape {list(codes.shape)}; supported: [N, K]")
    if zero_point is not None and bool((zero_point != 0).any()):
        raise UnsupportedError(
            f"{where}: has zero points (asymmetric quantization); supported: symmetric tensors, "
            "all zero points 0"
        )
    if getattr(tensor, "act_pre_scale", None) is not None:
        raise UnsupportedError(f"{where}: has an activation pre-scale; supported: none")
    cols, block = codes.shape[1], block_size[1]
    groups = [g for g in (128, 64, 32) if block % g == 0 or block == cols]
    if not groups or block_size[0] not in (1, codes.shape[0]):
        raise UnsupportedError(
            f"{where}: one scale per block of {block_size}; supported: per row, or groups of "
            "32, 64, 128 or a multiple of them along K"
        )
    target = getattr(tensor, "target_dtype", None)
    bits = int(str(target).removeprefix("torch.int")) if target is not None else 8
    per_row = scales.double().reshape(-1, -(-cols // block)).expand(codes.shape[0], -1)
    return _Source(codes, per_row, block, groups[0], bits)


def _given_scales(source: _Source, found: Scheme) -> Tensor:
    """One scale per group of the scheme, from one per block: fp64 [N, groups]."""
    first_columns = torch.arange(found.groups(source.codes.shape[1])) * found.group
    return source.scales[:, first_columns // source.block]


def _exponent_of_scales(scales: Tensor) -> int:
    largest = float(scales.abs().max())
    if largest == 0.0:
        return 0
    floor_log2 = int(torch.frexp(torch.tensor(largest, dtype=torch.float64)).exponent) - 1
    return max(-126, min(127, floor_log2 - 11))


def _first_non_finite(values: Tensor) -> tuple[int, int] | None:
    finite = values.isfinite()
    if bool(finite.all()):
        return None
    row, col = (~finite).nonzero()[0].tolist()
    return row, col


def _not_finite(weights: Tensor, place: tuple[int, int], where: str) -> BadWeights:
    row, col = place
    return BadWeights(
        f"{where}: the weight at row {row}, column {col} is {float(weights[row, col])}; "
        "only finite weights can be quantized. Check the checkpoint"
    )
