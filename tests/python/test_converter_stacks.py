"""Stacks of blobs from one layout to the other: codes, scales, what a layout cannot hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moepack import packing
from moepack.converter import ScaleChanges
from moepack.converter.stacks import StackForm, convert_blob, convert_stack
from moepack.errors import PackedFormatError, UnsupportedError
from moepack.quantizer import QuantizedMatrix, quantize
from moepack.schemes import scheme
from moepack.universal_blob import encode, read_universal


def test_a_blob_with_scales_that_fp16_does_not_hold() -> None:
    form = StackForm("torchao", 4, 32, 8, 64, "plain")
    codes = torch.randint(-8, 8, (8, 64), dtype=torch.int8)
    scales = torch.full((8, 2), 0.5)
    scales[3, 1] = 0.5 * (1 + 2**-12)  # between two fp16 numbers
    changes = ScaleChanges()
    new = packing.unpack(convert_blob(encode(codes, scales, 4, 32), form, changes))
    assert torch.equal(new.codes, codes)
    assert (changes.scales, changes.changed) == (16, 1)
    assert changes.largest == pytest.approx(2**-12 / (1 + 2**-12))


def test_codes_of_minus_128_are_kept() -> None:
    form = StackForm("torchao", 8, 64, 16, 64, "gate_up")
    codes = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).repeat(4).view(16, 64)
    new = convert_blob(encode(codes, torch.ones(16, 1), 8, 64), form, ScaleChanges())
    assert torch.equal(packing.unpack(new).codes, codes)


def test_scales_that_would_vanish_are_refused() -> None:
    form = StackForm("torchao", 4, 32, 8, 32, "plain")
    codes, scales = torch.ones(8, 32, dtype=torch.int8), torch.ones(8, 1)
    scales[5] = 1e-20
    with pytest.raises(UnsupportedError, match="row 5, group 0 is 1e-20 and the largest"):
        convert_blob(encode(codes, scales, 4, 32), form, ScaleChanges())
    codes[5] = 0  # then the scale says nothing
    convert_blob(encode(codes, scales, 4, 32), form, ScaleChanges())


def test_groups_that_are_multiples_are_taken_apart() -> None:
    form = StackForm("torchao", 4, 192, 8, 192, "plain")
    codes = torch.randint(-8, 8, (8, 192), dtype=torch.int8)
    scales = torch.rand(8, 1).half().float()
    changes = ScaleChanges()
    blob = convert_blob(encode(codes, scales, 4, 192), form, changes)
    assert form.converted("moepack").scheme == "int4-g64"
    assert torch.equal(packing.unpack(blob).dequantize(), codes * scales)
    assert changes.scales == 8


@pytest.mark.parametrize("name", ["int4-g32", "int8-g128"])
@pytest.mark.parametrize("order", ["plain", "gate_up"])
def test_stacks_there_and_back(name: str, order: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = [quantize(torch.randn(64, 256, generator=generator), name) for _ in range(3)]
    packed = packing.pack_experts(matrices, order)
    form = StackForm("moepack", scheme(name).bits, scheme(name).group, 64, 256, order)
    changes = ScaleChanges()
    there = convert_stack(packed, form, "torchao", changes, "w13")
    for blob, matrix in zip(there, matrices, strict=True):
        universal = read_universal(blob, 64, 256, form.group)
        assert torch.equal(universal.codes, matrix.codes)  # logical rows, in every order
    back = convert_stack(there, form.converted("torchao"), "moepack", changes, "w13")
    for blob, matrix in zip(back, matrices, strict=True):
        assert torch.equal(packing.unpack(blob).codes, matrix.codes)
        assert torch.equal(packing.unpack(blob).dequantize(), matrix.dequantize())
    assert changes.changed == 0
    assert changes.scales == 2 * 3 * 64 * 256 // form.group


def test_damaged_blobs_are_named() -> None:
    packed = packing.pack_experts([quantize(torch.randn(16, 32), "int4-g32") for _ in range(3)])
    form = StackForm("moepack", 4, 32, 16, 32, "plain")
    packed[2, 100] ^= 1
    with pytest.raises(PackedFormatError, match=r"layers.1 w2 expert 2: .*checksum"):
        convert_stack(packed, form, "torchao", ScaleChanges(), "layers.1 w2")
    other = StackForm("moepack", 4, 32, 32, 16, "plain")
    with pytest.raises(PackedFormatError, match="header says"):
        convert_blob(packed[0], other, ScaleChanges())
    with pytest.raises(PackedFormatError, match=r"w2: torch.uint8 \[3, 351\]"):
        convert_stack(packed[:, 1:], form, "torchao", ScaleChanges(), "w2")


def matrix_with_exponent(exponent: int) -> QuantizedMatrix:
    codes = torch.ones(16, 32, dtype=torch.int8)
    return QuantizedMatrix(scheme("int4-g32"), codes, torch.full((16, 1), 4.0).half(), exponent)


def test_scales_beyond_fp32_are_refused() -> None:
    packed = packing.pack_experts([matrix_with_exponent(0), matrix_with_exponent(127)])
    form = StackForm("moepack", 4, 32, 16, 32, "plain")
    with pytest.raises(UnsupportedError, match=r"w2 expert 1: scales around 2\^127"):
        convert_stack(packed, form, "torchao", ScaleChanges(), "w2")
