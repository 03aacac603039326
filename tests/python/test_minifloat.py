"""mxfp4 and fp8-b128: scales and codes against torch's roundings, and checkpoints kept as is."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moepack import packing
from moepack.errors import BadWeights, UnsupportedError
from moepack.minifloat import kept_mxfp4, recovered
from moepack.quantizer import code_values, quantize
from moepack.schemes import scheme

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def nearest_e2m1(values: Tensor) -> Tensor:
    """fp64 [...] -> the nearest values; of two, the one with an even code."""
    distance = (values.abs()[..., None] - E2M1).abs() + torch.tensor([0, 1] * 4) * 1e-12
    return E2M1[distance.argmin(-1)] * values.sign()


def random_matrix(rows: int, cols: int, power: int, seed: int) -> Tensor:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    return torch.ldexp(weight, torch.tensor(power))


matrices = st.builds(
    random_matrix,
    st.integers(1, 5),
    st.integers(1, 300),
    st.integers(-90, 90),
    st.integers(0, 2**30),
)


@settings(max_examples=30, deadline=None)
@given(matrices)
def test_fp8_rounds_as_torch_does(weight: Tensor) -> None:
    matrix = quantize(weight, "fp8-b128")
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 128))
    groups = padded.view(len(weight), -1, 128)
    scales = groups.abs().amax(2) / 448
    assert torch.equal(matrix.scales, scales)
    codes = (groups / scales[..., None]).to(torch.float8_e4m3fn).view(torch.int8)
    assert torch.equal(matrix.codes, codes.view(len(weight), -1)[:, : weight.shape[1]])
    assert matrix.exponent == 0


@settings(max_examples=30, deadline=None)
@given(matrices)
def test_mxfp4_takes_the_nearest_value_under_the_better_of_two_scales(weight: Tensor) -> None:
    matrix = quantize(weight, "mxfp4")
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32)).double()
    groups = padded.view(len(weight), -1, 32)
    lower = torch.floor(torch.log2(groups.abs().amax(2))) - 2
    candidates = torch.stack([lower, lower + 1]).exp2()[..., None]
    decoded = nearest_e2m1(groups / candidates) * candidates
    errors = (decoded - groups).square().sum(-1)
    best = decoded.gather(0, errors.argmin(0).expand(1, -1, -1)[..., None].expand(1, *groups.shape))
    found = torch.nn.functional.pad(matrix.dequantize(), (0, -weight.shape[1] % 32)).double()
    found_errors = (found.view(groups.shape) - groups).square().sum(-1)
    # The search sums errors in fp32: of two that are close either may win.
    assert (found_errors <= errors.amin(0) * (1 + 2.0**-18)).all()
    same = torch.equal(found.view(groups.shape), best[0])
    assert same or (errors[0] / errors[1] - 1).abs().min() < 2.0**-18


@pytest.mark.parametrize("name", ["mxfp4", "fp8-b128"])
def test_zeros_stay_zero_and_blobs_hold_what_they_were_given(name: str) -> None:
    weight = random_matrix(34, 200, 0, 1)
    weight[3] = 0
    weight[5, 128:] = 0
    matrix = quantize(weight, name)
    assert matrix.dequantize()[3].eq(0).all()
    assert matrix.scales[3].eq(0).all()
    again = packing.unpack(packing.pack(matrix, "gate_up"))
    assert torch.equal(again.codes, matrix.codes)
    assert torch.equal(again.scales, matrix.scales)
    assert torch.equal(again.dequantize(), matrix.dequantize())


@pytest.mark.parametrize("name", ["mxfp4", "fp8-b128"])
def test_the_integer_rule_and_layout_are_refused(name: str) -> None:
    weight = random_matrix(16, 128, 0, 2)
    with pytest.raises(UnsupportedError, match=f"'torchao' makes integer codes; {name}"):
        quantize(weight, name, "torchao")
    with pytest.raises(UnsupportedError, match=f"'{name}' in torchao's layout; supported there"):
        packing.pack(quantize(weight, name), layout="torchao")


def test_a_kept_mxfp4_matrix_has_its_values() -> None:
    random = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (6, 96), generator=random, dtype=torch.uint8)
    scales = torch.randint(100, 140, (6, 3), generator=random, dtype=torch.uint8)
    matrix = kept_mxfp4(codes, scales)
    values = torch.cat([E2M1, -E2M1])[codes.long()]
    expected = values * (scales.double() - 127).exp2().repeat_interleave(32, dim=1)
    assert torch.equal(matrix.dequantize().double(), expected)
    assert torch.equal(packing.unpack(packing.pack(matrix)).codes.view(torch.uint8), codes)


def test_the_smallest_mxfp4_scale_moves_into_the_exponent() -> None:
    codes = torch.full((2, 64), 7, dtype=torch.uint8)
    scales = torch.tensor([[0, 1], [3, 200]], dtype=torch.uint8)
    matrix = kept_mxfp4(codes, scales)
    assert matrix.exponent == -1
    expected = 6 * (scales.double() - 127).exp2()
    exact = matrix.codes.new_tensor(0).double() + expected
    stored = (matrix.scales.double() - 127).exp2() * 6 * 2.0**matrix.exponent
    assert torch.equal(stored, exact)


def test_mxfp4_scales_that_no_blob_can_hold_are_named() -> None:
    codes = torch.full((2, 32), 7, dtype=torch.uint8)
    with pytest.raises(BadWeights, match=r"layer 3: the scale of row 1, group 0 is NaN"):
        kept_mxfp4(codes, torch.tensor([[1], [255]], dtype=torch.uint8), "layer 3")
    with pytest.raises(BadWeights, match=r"span 2\^-127 to 2\^127"):
        kept_mxfp4(codes, torch.tensor([[0], [254]], dtype=torch.uint8))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), st.integers(1, 300), st.integers(0, 2**30))
def test_fp8_codes_are_found_again(rows: int, cols: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (rows, cols), generator=random, dtype=torch.int8)
    codes[(codes & 0x7F) == 0x7F] = -128  # no NaN; zeros of both signs stay
    by_group = (torch.randn(rows, -(-cols // 128), generator=random) * 20).exp2()
    scales = by_group.repeat_interleave(128, 1)[:, :cols]
    weight = code_values(scheme("fp8-b128"), codes) * scales
    matrix = recovered(weight, scales, scheme("fp8-b128"))
    assert matrix is not None
    assert torch.equal(matrix.codes, codes)
    assert torch.equal(matrix.scales, by_group)
    assert torch.equal(matrix.dequantize(), weight)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), st.integers(1, 100), st.integers(-127, 122), st.integers(0, 2**30))
def test_mxfp4_codes_are_found_again(rows: int, cols: int, power: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, cols), generator=random, dtype=torch.int8)
    shift = torch.randint(0, 4, (rows, -(-cols // 32)), generator=random)
    by_group = torch.ldexp(torch.ones(shift.shape), shift + power)
    scales = by_group.repeat_interleave(32, 1)[:, :cols]
    weight = code_values(scheme("mxfp4"), codes) * scales
    matrix = recovered(weight, scales, scheme("mxfp4"))
    assert matrix is not None
    assert torch.equal(matrix.codes, codes)
    assert torch.equal(matrix.dequantize(), weight)
    assert torch.equal(packing.unpack(packing.pack(matrix)).dequantize(), weight)


def test_what_is_in_another_format_is_not_found() -> None:
    weight, one = random_matrix(4, 256, 0, 7), torch.ones(4, 256)
    fp8, mxfp4 = scheme("fp8-b128"), scheme("mxfp4")
    assert recovered(weight, one, fp8) is None
    assert recovered(weight, one, mxfp4) is None
    assert recovered(one, one, mxfp4) is not None
    changed = one.clone()
    changed[2, 200] = 2.0  # within a group
    assert recovered(changed, changed, fp8) is None
    for bad in (math.nan, math.inf, 0.0, 2.0**-140, 3.0):
        scales = torch.full((4, 256), bad)
        assert recovered(scales * 6, scales, mxfp4) is None
    assert recovered(torch.full((4, 256), math.nan), one, fp8) is None
    assert recovered(one * 512, one, fp8) is None
    assert recovered(one, one * 0, fp8) is None


def test_a_scale_of_zero_is_found_again() -> None:
    scales = torch.ones(2, 256)
    scales[1, 128:] = 0.0
    matrix = recovered(3 * scales, scales, scheme("fp8-b128"))
    assert matrix is not None
    assert torch.equal(matrix.scales, torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    assert torch.equal(matrix.dequantize(), 3 * scales)


def test_mxfp4_scales_that_no_blob_can_hold_are_not_found() -> None:
    scales = torch.full((2, 32), 2.0**-127)
    scales[1] = 2.0**127
    assert recovered(scales, scales, scheme("mxfp4")) is None
