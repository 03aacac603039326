"""Quantizing: the search against a plain reference, torchao's rule against torchao, bad weights."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.quantization.granularity import PerGroup, PerRow, PerTensor
from torchao.quantization.quant_primitives import (
    MappingType,
    choose_qparams_affine,
    dequantize_affine,
)
from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor
from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
    IntxUnpackedToInt8Tensor,
)

from moepack.errors import BadWeights, UnsupportedError
from moepack.quantizer import (
    QuantizedMatrix,
    Rule,
    from_torchao,
    quantize,
    quantize_experts,
    squares,
)
from moepack.schemes import SCHEMES, Scheme, scheme

RULES: list[Rule] = ["search", "torchao"]
INTEGER_SCHEMES = sorted(name for name, row in SCHEMES.items() if row.is_integer)
F32 = np.float32
INT4: torch.dtype = vars(torch)["int4"]  # not in torch's type hints


def searched_group(
    w: npt.NDArray[np.float32], found: Scheme
) -> tuple[npt.NDArray[np.int64], np.float16]:
    """packed-format.md, "How scales are chosen", for one group, all in fp32."""
    m = np.abs(w).max()
    best_error, best_codes, best_scale = F32(np.inf), np.zeros(len(w), np.int64), np.float16(0)
    if m == 0:
        return best_codes, best_scale
    for j in range(17):
        divisor = F32(5 + j / 4) if found.cell == "int4" else F32(124 + j / 2)
        candidate = np.float16(m / divisor)
        for scale in (candidate, -candidate) if found.cell == "int4" else (candidate,):
            if scale == 0:
                continue
            s = F32(scale)
            codes = np.clip(np.rint(w * (F32(1) / s)), found.code_min, found.code_max)
            d = w - codes * s
            t = [F32(0)] * 8
            for i, square in enumerate(d * d):
                t[i % 8] = t[i % 8] + square
            error = ((t[0] + t[4]) + (t[2] + t[6])) + ((t[1] + t[5]) + (t[3] + t[7]))
            if error < best_error:
                best_error, best_codes, best_scale = error, codes.astype(np.int64), scale
    return best_codes, best_scale


def searched(weight: torch.Tensor, found: Scheme) -> QuantizedMatrix:
    rows, cols = weight.shape
    amax = float(weight.abs().max())
    exponent = 0 if amax == 0 else max(-126, min(127, math.frexp(amax)[1] - 1 - 14))
    padded = np.zeros((rows, found.groups(cols) * found.group), np.float32)
    padded[:, :cols] = np.ldexp(weight.numpy(), -exponent)
    codes = np.zeros(padded.shape, np.int8)
    scales = np.zeros((rows, found.groups(cols)), np.float16)
    for n in range(rows):
        for g in range(found.groups(cols)):
            span = slice(g * found.group, (g + 1) * found.group)
            codes[n, span], scales[n, g] = searched_group(padded[n, span], found)
    return QuantizedMatrix(
        found,
        torch.from_numpy(codes[:, :cols].copy()),
        torch.from_numpy(scales),
        exponent,
    )


def assert_same(a: QuantizedMatrix, b: QuantizedMatrix) -> None:
    assert a.scheme == b.scheme
    assert a.exponent == b.exponent
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.scales.view(torch.uint16), b.scales.view(torch.uint16))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(INTEGER_SCHEMES),
    st.integers(1, 5),
    st.integers(1, 200),
    st.integers(-100, 100),
    st.sampled_from(["normal", "heavy", "sparse", "ties"]),
    st.integers(0, 2**30),
)
def test_search_gives_the_bytes_of_the_plain_reference(
    name: str, rows: int, cols: int, power: int, kind: str, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=random)
    if kind == "heavy":
        weight = weight**5
    if kind == "sparse":
        weight *= torch.rand(rows, cols, generator=random) < 0.05
    if kind == "ties":
        weight = (weight * 2).round() / 2
    weight = torch.ldexp(weight, torch.tensor(power))
    assert_same(quantize(weight, name), searched(weight, scheme(name)))


@pytest.mark.parametrize("name", INTEGER_SCHEMES)
def test_torchao_rule_is_torchaos_with_rounded_scales(name: str) -> None:
    found = scheme(name)
    weight = torch.randn(6, 3 * found.group, generator=torch.Generator().manual_seed(1))
    result = quantize(weight, name, rule="torchao")
    block = (1, found.group)
    scales, zeros = choose_qparams_affine(
        weight,
        MappingType.SYMMETRIC,
        block,
        torch.int8,
        found.code_min,
        found.code_max,
        keepdim=True,
    )
    given_scales = torch.ldexp(result.scales.float(), torch.tensor(result.exponent))
    assert ((given_scales - scales).abs() <= scales * 2.0**-11).all()
    expected = dequantize_affine(
        result.codes, block, given_scales, zeros, torch.int8, found.code_min, found.code_max
    )
    assert torch.equal(result.dequantize(), expected)
    step = given_scales.repeat_interleave(found.group, dim=1)
    # Half a step, and what the symmetric range clips: the amax's 7.5 or 127 steps to 7 or 127.
    assert ((result.dequantize() - weight).abs() <= 0.51 * step).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", INTEGER_SCHEMES)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 31), (5, 200), (2, 704)])
def test_any_shape_is_close(name: str, rule: Rule, rows: int, cols: int) -> None:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(cols))
    result = quantize(weight, name, rule)
    assert result.codes.shape == weight.shape
    assert result.scales.shape == (rows, scheme(name).groups(cols))
    error = (result.dequantize() - weight).norm() / weight.norm()
    assert error < (0.15 if scheme(name).bits == 4 else 0.01)


def test_search_is_no_worse_than_the_other_rule() -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(3))
    for name in INTEGER_SCHEMES:
        errors = [(quantize(weight, name, rule).dequantize() - weight).norm() for rule in RULES]
        assert errors[0] <= errors[1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["int4-g32", "int8-g128"])
def test_zero_rows_and_zero_matrices_stay_zero(name: str, rule: Rule) -> None:
    weight = torch.randn(4, 256)
    weight[1] = 0
    weight[2, 128:] = 0
    result = quantize(weight, name, rule)
    assert result.dequantize()[1].eq(0).all()
    assert result.dequantize()[2, 128:].eq(0).all()
    assert result.scales[1].eq(0).all()
    whole = quantize(torch.zeros(3, 40), name, rule)
    assert whole.exponent == 0
    assert whole.scales.eq(0).all()
    assert whole.dequantize().eq(0).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("power", [-76, 20, -100, 100])
@pytest.mark.parametrize("name", ["int4-g32", "int8-g32"])
def test_powers_of_two_change_the_exponent_only(name: str, rule: Rule, power: int) -> None:
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(4))
    base = quantize(weight, name, rule)
    scaled = quantize(torch.ldexp(weight, torch.tensor(power)), name, rule)
    assert torch.equal(base.codes, scaled.codes)
    assert torch.equal(base.scales, scaled.scales)
    assert scaled.exponent == base.exponent + power


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("factor", [1e-23, 1e6])
def test_scaled_experts_are_finite_and_proportionate(rule: Rule, factor: float) -> None:
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(5))
    expected = quantize(weight, "int4-g32", rule).dequantize() * factor
    found = quantize(weight * factor, "int4-g32", rule).dequantize()
    assert found.isfinite().all()
    assert (found - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", INTEGER_SCHEMES)
@pytest.mark.parametrize("value", [1.0, -1.0])
def test_constant_rows_lose_at_most_half_a_step(name: str, rule: Rule, value: float) -> None:
    result = quantize(torch.full((2, 128), value), name, rule)
    largest_code = -scheme(name).code_min
    assert (result.dequantize() - value).abs().max() <= 0.5 / (largest_code - 1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_named(rule: Rule, bad: float) -> None:
    weight = torch.randn(8, 96)
    weight[5, 77] = bad
    place = r"layers\.3\.mlp expert 5 w13: the weight at row 5, column 77 is "
    with pytest.raises(BadWeights, match=place):
        quantize(weight, "int4-g32", rule, where="layers.3.mlp expert 5 w13")


def test_fp64_beyond_fp32_is_not_finite() -> None:
    weight = torch.ones(2, 32, dtype=torch.float64)
    weight[1, 3] = 1e39
    with pytest.raises(BadWeights, match="row 1, column 3"):
        quantize(weight, "int4-g32")


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.empty(2, 32, device="meta"), "meta device"),
        (torch.ones(2, 32, dtype=torch.int8), r"int8 \[2, 32\], expected a float matrix"),
        (torch.ones(2, 2, 32), r"\[2, 2, 32\]"),
        (torch.ones(0, 32), "at least one row"),
    ],
)
def test_what_is_no_float_matrix_is_refused(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(BadWeights, match=message):
        quantize(weight, "int4-g32")


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'awq'; supported: search, torchao"):
        quantize(torch.ones(1, 1), "int4-g32", rule="awq")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types_are_taken_exactly(dtype: torch.dtype) -> None:
    weight = torch.randn(4, 64).to(dtype)
    assert_same(quantize(weight, "int4-g32"), quantize(weight.float(), "int4-g32"))
    assert_same(quantize(weight.T.contiguous().T, "int4-g32"), quantize(weight, "int4-g32"))


def test_many_matrices_come_in_order_and_a_few_at_a_time() -> None:
    weights = [torch.randn(8, 64) for _ in range(12)]
    alive = 0
    most = 0

    def read(i: int) -> torch.Tensor:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        return weights[i]

    items = ((f"expert {i}", lambda i=i: read(i)) for i in range(12))
    for i, result in enumerate(quantize_experts(items, "int4-g32", threads=2)):
        alive -= 1
        assert_same(result, quantize(weights[i], "int4-g32"))
    assert most <= 4


def test_one_bad_expert_of_many_is_named() -> None:
    weights = [torch.ones(2, 32) for _ in range(4)]
    weights[2][1, 7] = math.nan
    items = ((f"mlp expert {i} w2", lambda i=i: weights[i]) for i in range(4))
    with pytest.raises(BadWeights, match="mlp expert 2 w2: the weight at row 1, column 7"):
        list(quantize_experts(items, "int4-g32"))


def intx(weight: torch.Tensor, bits: int, group: int) -> Any:
    return IntxUnpackedToInt8Tensor.from_hp(weight, (1, group), vars(torch)[f"int{bits}"])


@pytest.mark.parametrize(
    ("bits", "group", "name"),
    [
        (4, 32, "int4-g32"),
        (4, 64, "int4-g64"),
        (4, 128, "int4-g128"),
        (8, 32, "int8-g32"),
        (2, 32, "int4-g32"),
        (6, 128, "int8-g128"),
        (4, 96, "int4-g32"),
        (4, 384, "int4-g128"),
    ],
)
def test_torchao_codes_are_kept(bits: int, group: int, name: str) -> None:
    weight = torch.randn(7, 384, generator=torch.Generator().manual_seed(6))
    tensor = intx(weight, bits, group)
    result = from_torchao(tensor)
    assert result.scheme.name == name
    assert torch.equal(result.codes, tensor.qdata)
    assert 0 < result.scale_error <= 2.0**-11
    exact = tensor.dequantize()
    # 2^-11 for the scale, and fp32 roundings of code * scale on torchao's side.
    bound = exact.abs() * (result.scale_error + 2.0**-22)
    assert ((result.dequantize() - exact).abs() <= bound).all()


def test_torchao_scales_that_fit_fp16_are_exact() -> None:
    weight = torch.randint(-7, 8, (4, 64)).float() * 0.25
    weight[:, ::32] = 7.5 * 0.25
    tensor = intx(weight, 4, 32)
    result = from_torchao(tensor)
    assert result.scale_error == 0.0
    assert torch.equal(result.dequantize(), tensor.dequantize())


def test_torchao_int8_keeps_minus_128() -> None:
    weight = torch.randn(4, 64)
    weight[2, 5] = -10
    tensor = intx(weight, 8, 64)
    assert int(tensor.qdata[2, 5]) == -128
    assert int(from_torchao(tensor).codes[2, 5]) == -128


@pytest.mark.parametrize("cols", [40, 256])
@pytest.mark.parametrize("granularity", [PerRow(), PerTensor()])
def test_torchao_scales_per_row_and_per_tensor(cols: int, granularity: object) -> None:
    weight = torch.randn(6, cols)
    tensor = Int8Tensor.from_hp(weight, granularity)
    result = from_torchao(tensor)
    assert result.scheme.name == "int8-g128"
    exact = tensor.dequantize()
    assert ((result.dequantize() - exact).abs() <= exact.abs() * 2.0**-10).all()


def test_tiny_torchao_scales_keep_their_precision() -> None:
    weight = torch.randn(4, 64) * 1e-20
    scales = (weight.abs().amax(1, keepdim=True) / 7.5).repeat(1, 2)
    tensor = IntxUnpackedToInt8Tensor(
        (weight / scales[:, :1]).round().clamp(-8, 7).to(torch.int8),
        scales,
        torch.zeros_like(scales, dtype=torch.int8),
        INT4,
        (1, 32),
        torch.float32,
        None,
    )
    assert from_torchao(tensor).scale_error <= 2.0**-11


def test_zero_points_are_refused_by_name() -> None:
    tensor = IntxUnpackedToInt8Tensor.from_hp(
        torch.randn(4, 64) + 3, (1, 32), INT4, mapping_type=MappingType.ASYMMETRIC
    )
    with pytest.raises(UnsupportedError, match="mlp expert 1 w2: has zero points"):
        from_torchao(tensor, where="mlp expert 1 w2")


def test_other_tensors_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="w2: a Tensor is not taken as it is"):
        from_torchao(torch.ones(2, 32), where="w2")
    with pytest.raises(UnsupportedError, match=r"block of \[1, 48\]"):
        from_torchao(intx(torch.randn(2, 96), 4, 48))
    wrong = intx(torch.randn(2, 64), 4, 32)
    wrong.scale[1, 1] = math.nan
    with pytest.raises(BadWeights, match="row 1, group 1"):
        from_torchao(wrong)


def test_int8_tensors_per_group() -> None:
    result = from_torchao(Int8Tensor.from_hp(torch.randn(4, 128), PerGroup(64)))
    assert result.scheme.name == "int8-g64"


@pytest.mark.parametrize("name", sorted(SCHEMES))
@pytest.mark.parametrize("factor", [1e-30, 1.0, 1e25])
def test_squares_are_those_of_the_weights_and_of_what_is_lost(name: str, factor: float) -> None:
    weight = factor * torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    matrix = quantize(weight, name)
    exact = weight.double()
    lost = exact - matrix.dequantize().double()
    signal, noise = squares(weight, matrix)
    # fp32: squares, of which eight sums take 25 each and then become one, and differences whose
    # rounding is that of the weights.
    rounding, roundings = 2**-24, 1 + 25 + 8
    above = math.sqrt(signal / noise)
    assert signal == pytest.approx(float(exact.square().sum()), rel=roundings * rounding)
    expected = float(lost.square().sum())
    assert noise == pytest.approx(expected, rel=(roundings + 8 * above) * rounding)
