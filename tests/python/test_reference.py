"""The torch reference: exact arithmetic, and its own reading of the packed format."""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import astuple, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moepack import ops, packing, quantizer, reference
from moepack.attributes import ExpertAttributes
from moepack.errors import PackedFormatError, UnsupportedError
from moepack.reference import exact, float_mode
from moepack.reference.arithmetic import exp, fma, quantize_activations
from moepack.reference.blobs import decode
from moepack.schemes import SCHEMES
from moepack.universal_blob import encode

finite_fp32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def round_to_fp32(value: Fraction) -> float:
    """The fp32 nearest to an exact number, ties to even, from integers alone."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(magnitude / step) * step  # Fraction rounds half to even
    result = math.inf if rounded >= Fraction(2) ** 128 else float(rounded)
    return math.copysign(result, value)


@settings(max_examples=400, deadline=None)
@given(finite_fp32, finite_fp32, finite_fp32)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    expected = round_to_fp32(Fraction(a) * Fraction(b) + Fraction(c))
    assert fma(torch.tensor([a]), torch.tensor([b]), torch.tensor([c])).item() == expected


def test_fma_where_rounding_twice_is_wrong() -> None:
    # The product is 2^-24 + 2^-60: 1 + product is just above a tie of fp32; fp64 lands on the tie.
    a, b, c = (
        torch.tensor([1 + 2.0**-12]),
        torch.tensor([(1 - 2.0**-12 + 2.0**-24) * 2.0**-24]),
        torch.ones(1),
    )
    assert (a.double() * b.double() + c.double()).float().item() == 1.0
    assert fma(a, b, c).item() == 1 + 2.0**-23


def test_fma_keeps_infinities_and_nan() -> None:
    inf, nan = math.inf, math.nan
    a, b, c = torch.tensor(
        [[inf, 2.0, inf, nan], [1.0, 3.0, 0.0, 1.0], [1.0, -inf, 1.0, 1.0]]
    ).unbind(0)
    result = fma(a, b, c)
    assert result[:2].tolist() == [inf, -inf]
    assert result[2:].isnan().all()


def test_exp_is_within_two_ulp_and_saturates() -> None:
    x = torch.linspace(-87, 88, 20001)
    expected = torch.exp(x.double())
    assert ((exp(x).double() - expected).abs() / expected).max() < 2 * 2.0**-23
    edge = exp(torch.tensor([0.0, -1e30, 1e30, math.inf, math.nan]))
    assert edge[0] == 1.0
    assert edge[1:4].isfinite().all()
    assert edge[4].isnan()


def test_quantizing_activations_isolates_what_is_not_finite() -> None:
    v = torch.ones(1, 300)
    v[0, 130] = math.nan
    v[0, 256:] = 2.0**-120
    codes, scales = quantize_activations(v)
    assert codes.shape == (1, 384)
    assert scales[0, 0] == torch.tensor(1.0) / 127
    assert scales[0, 1].isnan()
    assert (codes[0, :128] == 127).all()
    assert (codes[0, 128:] == 0).all()
    assert scales[0, 2] == 0


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**30), st.booleans())
@settings(max_examples=100, deadline=None)
def test_selected_ids_are_distinct_and_ties_go_to_the_lowest(
    top_k: int, kept: int, seed: int, grouped: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    palette = torch.tensor([0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf])
    choice = palette[torch.randint(0, 7, (5, 12), generator=generator)]
    ids = exact.select(choice, top_k, 3 if grouped else 1, kept if grouped else 1, "top2sum")
    for row, selected in zip(choice.tolist(), ids.tolist(), strict=True):
        assert len(set(selected)) == top_k
        ranks = [(-math.inf, 1) if math.isnan(row[i]) else (row[i], 0) for i in selected]
        order = [
            (math.isnan(row[i]), -row[i] if not math.isnan(row[i]) else 0.0, i) for i in selected
        ]
        assert order == sorted(order), ranks


def test_a_masked_group_never_wins() -> None:
    choice = torch.tensor([[-1.0, -2.0, -0.5, -9.0]])  # sums -3 and -9.5: experts 2 and 3 are out
    assert exact.select(choice, 2, 2, 1, "top2sum").tolist() == [[0, 1]]
    assert exact.select(choice, 2, 2, 1, "max").tolist() == [[2, 3]]


def handmade_blob(codes: list[list[int]], scales: list[list[float]], order: int) -> bytes:
    """int4, group 32, byte by byte in the words of docs/reference/packed-format.md."""
    rows, cols = len(codes), len(codes[0])
    halves = [codes] if order == 0 else [codes[: rows // 2], codes[rows // 2 :]]
    half_scales = [scales] if order == 0 else [scales[: rows // 2], scales[rows // 2 :]]
    payload = b""
    for first in range(0, len(halves[0]), 16):
        for half, scale in zip(halves, half_scales, strict=True):
            for group in range(-(-cols // 32)):
                for k in range(32 * group, 32 * group + 32, 8):
                    payload += bytes(
                        (code(half, first + c, k + j) + 8)
                        | (code(half, first + c, k + 4 + j) + 8) << 4
                        for c in range(16)
                        for j in range(4)
                    )
                present = [
                    scale[first + c][group] if first + c < len(scale) else 0.0 for c in range(16)
                ]
                payload += struct.pack("<16e", *present)
    header = struct.pack(
        "<4sHHIIIiIHH32x", b"MOEP", 1, 1, rows, cols, 32, -3, zlib.crc32(payload), order, 0
    )
    return header + payload


def code(matrix: list[list[int]], row: int, col: int) -> int:
    return matrix[row][col] if row < len(matrix) and col < len(matrix[0]) else 0


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize(("rows", "cols"), [(2, 32), (40, 70), (34, 33)])
def test_decodes_what_the_format_says(order: int, rows: int, cols: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(-8, 8, (rows, cols), generator=generator)
    scales = torch.rand(rows, -(-cols // 32), generator=generator).half().float()
    blob = torch.frombuffer(
        bytearray(handmade_blob(codes.tolist(), scales.tolist(), order)), dtype=torch.uint8
    )
    matrix = decode(blob)
    assert torch.equal(matrix.codes[:, :cols].long(), codes)
    assert torch.equal(matrix.scales, scales)
    weights = codes.double() * scales.double().repeat_interleave(32, 1)[:, :cols] / 8
    assert torch.equal(matrix.dequantize(), weights)


def test_refuses_foreign_bytes_and_unknown_attributes() -> None:
    with pytest.raises(PackedFormatError, match="magic"):
        decode(torch.zeros(352, dtype=torch.uint8))
    with pytest.raises(UnsupportedError, match="score_func"):
        exact.score(torch.zeros(1, 2), "tanh")


def packed_experts(
    scheme: str,
    experts: int,
    width: int,
    inner: int,
    seed: int = 0,
    gated: bool = True,
    layout: str = "moepack",
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def stack(rows: int, cols: int, order: packing.RowOrder) -> Tensor:
        weights = [torch.randn(rows, cols, generator=generator) for _ in range(experts)]
        matrices = (quantizer.quantize(w, scheme) for w in weights)
        return packing.pack_experts(matrices, order, experts, layout)

    w13 = stack(2 * inner, width, "gate_up") if gated else stack(inner, width, "plain")
    return w13, stack(width, inner, "plain")


def bit_equal(a: Tensor, b: Tensor) -> bool:
    """Equal values and signs of zero; NaN equals NaN."""
    nan = a.isnan() & b.isnan()
    return a.dtype == b.dtype and bool(((a == b) & (a.signbit() == b.signbit()) | nan).all())


EXPERT_ATTRIBUTES = ("moepack", "silu", 1.0, 0.0, 0.0, 0.0, False, False)


@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_experts_equal_the_kernel(scheme: str, tokens: int) -> None:
    experts, width, inner = 3, 200, 70
    w13, w2 = packed_experts(scheme, experts, width, inner)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, width, generator=generator)
    x[1::4] *= 1e18
    x[3::4, 5] = math.nan
    ids = torch.randint(0, experts, (tokens, 4), generator=generator)  # repeats within a token
    weights = torch.randn(tokens, 4, generator=generator)
    bias13 = torch.randn(experts, 2 * inner, generator=generator)
    bias2 = torch.randn(experts, width, generator=generator)
    for value in (x, x.bfloat16(), x.half()):
        for biases in ((None, None), (bias13, bias2)):
            call = (value, ids, weights, w13, w2, *biases, inner, scheme, *EXPERT_ATTRIBUTES)
            assert bit_equal(reference.quantized_experts(*call), ops.quantized_experts(*call))


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name.startswith("int")])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_torchaos_layout_equals_the_kernel(scheme: str, activation: str) -> None:
    experts, width, inner = 3, 384, 128
    attributes = ExpertAttributes(inner, scheme, "torchao", activation)
    w13, w2 = packed_experts(
        scheme, experts, width, inner, gated=attributes.is_gated, layout="torchao"
    )
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(9, width, generator=generator)
    x[3, 5] = math.nan
    ids = torch.randint(0, experts, (9, 2), generator=generator)
    weights = torch.randn(9, 2, generator=generator)
    for value in (x, x.bfloat16()):
        call = (value, ids, weights, w13, w2, None, None, *astuple(attributes))
        assert bit_equal(reference.quantized_experts(*call), ops.quantized_experts(*call))


def test_scales_of_torchaos_layout_are_used_unrounded() -> None:
    """fp32 scales of 24 bits, the lowest code included: kernel and reference keep them all."""
    width, inner = 128, 64
    generator = torch.Generator().manual_seed(6)

    def blob(rows: int, cols: int) -> Tensor:
        codes = torch.randint(-128, 128, (rows, cols), generator=generator, dtype=torch.int8)
        codes[:, 0] = -128
        return encode(codes, torch.rand(rows, cols // 32, generator=generator) / 100, 8, 32)

    w13, w2 = blob(2 * inner, width)[None], blob(width, inner)[None]
    x = torch.randn(5, width, generator=generator)
    ids, weights = torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1)
    attributes = astuple(ExpertAttributes(inner, "int8-g32", "torchao"))
    call = (x, ids, weights, w13, w2, None, None, *attributes)
    assert bit_equal(reference.quantized_experts(*call), ops.quantized_experts(*call))


# Per activation: alpha, limit, gate_softcap, up_softcap, limit_after_act.
ACTIVATIONS = {
    "clamped silu": ("silu", 1.0, 7.0, 0.0, 0.0, False),
    "silu, then clamped": ("silu", 1.0, 0.7, 0.0, 0.0, True),
    "softcapped silu": ("silu", 1.0, 0.0, 4.0, 25.0, False),
    "gelu": ("gelu_tanh", 1.0, 0.0, 0.0, 0.0, False),
    "clamped gelu": ("gelu_tanh", 1.0, 3.0, 0.0, 0.0, False),
    "oai": ("swiglu_oai", 1.702, 7.0, 0.0, 0.0, False),
    "oai without a limit": ("swiglu_oai", 0.5, 0.0, 0.0, 0.0, False),
    "relu": ("relu", 1.0, 0.0, 0.0, 0.0, False),
    "relu2": ("relu2", 1.0, 0.0, 0.0, 0.0, False),
}


@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_equals_the_kernel(activation: str, scheme: str) -> None:
    experts, width, inner = 3, 150, 37
    attributes = ExpertAttributes(inner, scheme, "moepack", *ACTIVATIONS[activation])
    w13, w2 = packed_experts(scheme, experts, width, inner, gated=attributes.is_gated)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, width, generator=generator) * torch.logspace(-2, 1, 8)[:, None]
    x[5, 7] = math.nan
    ids = torch.randint(0, experts, (8, 3), generator=generator)
    weights = torch.randn(8, 3, generator=generator)
    bias13 = torch.randn(experts, attributes.rows13, generator=generator)
    bias2 = torch.randn(experts, width, generator=generator)
    for case in ((None, None, False), (bias13, bias2, False), (None, bias2, True)):
        *biases, on_input = case
        values = astuple(replace(attributes, weight_on_input=on_input))
        call = (x, ids, weights, w13, w2, *biases, *values)
        found = ops.quantized_experts(*call)
        assert bit_equal(reference.quantized_experts(*call), found)
        assert sqnr_to_float(call, values, found) > 25


def sqnr_to_float(call: tuple[Any, ...], values: tuple[Any, ...], found: Tensor) -> float:
    """Of the kernel against plain torch with the packed weights, in dB, over finite rows."""
    x, ids, weights, w13, w2, bias13, bias2 = call[:7]
    reader = float_mode.ExpertReader(
        len(w13),
        w13=lambda e: packing.unpack(w13[e]).dequantize(),
        w2=lambda e: packing.unpack(w2[e]).dequantize(),
        bias13=lambda e: None if bias13 is None else bias13[e],
        bias2=lambda e: None if bias2 is None else bias2[e],
    )
    expected = float_mode.experts(x, ids, weights, reader, ExpertAttributes(*values))
    is_finite = expected.isfinite().all(-1)
    signal, noise = expected[is_finite].double(), (found - expected)[is_finite].double()
    return float(10 * torch.log10(signal.square().sum() / noise.square().sum()))


ROUTINGS = {
    # score_func, norm_topk, norm_eps, norm_clamp, route_scale, n_group, topk_group, group_score,
    # router_dtype
    "softmax": ("softmax", False, 0.0, False, 1.0, 1, 1, "top2sum", "float32"),
    "softmax_all": ("softmax_all", True, 0.0, False, 2.5, 1, 1, "top2sum", "bfloat16"),
    "sigmoid": ("sigmoid", True, 1e-20, False, 1.5, 4, 2, "top2sum", "float32"),
    "max_groups": ("softmax_all", False, 0.0, False, 16.0, 2, 1, "max", "float16"),
    "clamped": ("sigmoid", True, 1.1754943508222875e-38, True, 1.0, 1, 1, "top2sum", "float32"),
}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_whole_block_equals_the_kernel(routing: str, with_bias: bool) -> None:
    experts, width, inner = 8, 50, 40
    w13, w2 = packed_experts("int4-g32", experts, width, inner)
    generator = torch.Generator().manual_seed(7)
    gate = torch.randn(experts, width, generator=generator)
    gate[5] = gate[2]  # a tie in every token
    x = torch.randn(11, width, generator=generator) * torch.linspace(0.0, 40.0, 11)[:, None]
    x[3, 3], x[4, 0], x[5] = math.nan, math.inf, -1e38
    drawn = torch.randn(2, 8, generator=generator)
    biases = tuple(drawn) if with_bias else (None, None)
    call = (
        x, None, gate, *biases, w13, w2, None, None, 3, inner, "int4-g32", "moepack",
        *ROUTINGS[routing], "silu", 1.0, 0.0, 0.0, 0.0, False, False,
    )  # fmt: skip
    assert bit_equal(reference.quantized_moe_ffn(*call), ops.quantized_moe_ffn(*call))


def test_dequantizes_as_packing_does() -> None:
    w13, w2 = packed_experts("int8-g64", 1, 100, 33)
    for blob in (w13[0], w2[0]):
        assert torch.equal(decode(blob).dequantize().float(), packing.unpack(blob).dequantize())
