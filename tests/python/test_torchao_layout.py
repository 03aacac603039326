"""torchao's blobs against ExecuTorch's own operator, against bytes by hand, and there and back."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from moepack import ops
from moepack.errors import BadWeights, PackedFormatError, UnsupportedError
from moepack.packing import pack_experts, unpack
from moepack.quantizer import QuantizedMatrix, quantize
from moepack.schemes import scheme
from moepack.torchao_layout import (
    from_universal,
    install_packing_ops,
    pack_universal,
    to_universal,
    universal_bytes,
    unpack_universal,
)
from moepack.universal_blob import read_universal

INTEGER_SCHEMES = [f"int{bits}-g{group}" for bits in (4, 8) for group in (32, 64, 128)]


def made(name: str, rows: int, cols: int, seed: int = 0, exponent: int = -9) -> QuantizedMatrix:
    found = scheme(name)
    generator = torch.Generator().manual_seed(seed)
    low, high = found.code_min, found.code_max + 1
    codes = torch.randint(low, high, (rows, cols), generator=generator, dtype=torch.int8)
    scales = torch.rand(rows, found.groups(cols), generator=generator) + 0.1
    signs = torch.randint(0, 2, scales.shape, generator=generator) * 2 - 1
    return QuantizedMatrix(found, codes, (scales * signs).to(torch.float16), exponent)


def upstream(x: Tensor, w13: Tensor, w2: Tensor, matrix: QuantizedMatrix, inner: int) -> Tensor:
    """ExecuTorch's own operator with one expert; `matrix` says which codes the blobs hold."""
    import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401

    dim, found = x.shape[1], matrix.scheme
    result: Tensor = torch.ops.llama.quantized_moe_ffn(
        x, torch.zeros(1, dim), torch.empty(0), w13[None], w2[None],
        1, 1, inner, dim, found.group, found.bits, "softmax", 1.0,
    )  # fmt: skip
    return result


@pytest.mark.parametrize("name", INTEGER_SCHEMES)
@pytest.mark.parametrize(("dim", "inner"), [(128, 256), (384, 128)])
def test_the_operator_of_executorch_reads_what_is_packed(name: str, dim: int, inner: int) -> None:
    w13, w2 = made(name, 2 * inner, dim, 1), made(name, dim, inner, 2)
    x = torch.randn(3, dim, generator=torch.Generator().manual_seed(3))
    found = upstream(x, pack_universal(w13), pack_universal(w2), w13, inner)
    gate, up = (x.double() @ w13.dequantize().double().T).chunk(2, dim=1)
    expected = (F.silu(gate) * up) @ w2.dequantize().double().T
    # Both sides compute in floats of at least 24 bits; sums of a few hundred terms.
    torch.testing.assert_close(
        found.double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max())
    )


@pytest.mark.parametrize("name", ["int4-g32", "int8-g32"])
def test_both_operators_agree_on_converted_experts(name: str) -> None:
    dim, inner = 256, 128
    w13, w2 = made(name, 2 * inner, dim, 1), made(name, dim, inner, 2)
    x = torch.randn(4, dim, generator=torch.Generator().manual_seed(3))
    blobs13, blobs2 = pack_universal(w13)[None], pack_universal(w2)[None]
    theirs = upstream(x, blobs13[0], blobs2[0], w13, inner)
    packed13, error13 = from_universal(blobs13, 2 * inner, dim, w13.scheme.group, "gate_up")
    packed2, error2 = from_universal(blobs2, dim, inner, w2.scheme.group)
    ours = ops.quantized_moe_ffn(
        x, None, torch.zeros(1, dim), None, None, packed13, packed2, None, None, 1, inner, name
    )
    assert error13 == error2 == 0.0
    # int8 activations in groups of 128, twice in a row.
    assert 20 * torch.log10(theirs.norm() / (ours - theirs).norm()) > 35


def test_bytes_by_hand() -> None:
    """One row of 32 codes, k - 16 clipped to 4 bits: the first 8 rows x 16 k hold row 0 alone."""
    codes = (torch.arange(32) - 16).clamp(-8, 7).to(torch.int8)[None]
    scales = torch.tensor([[1.5]], dtype=torch.float16)
    blob = pack_universal(QuantizedMatrix(scheme("int4-g32"), codes, scales, 1))
    assert len(blob) == universal_bytes(4, 1, 32, 32) == 64 + 128 + 32 + 32
    assert blob[:64].view(torch.int32).tolist() == [6712, 1, 4, 0, 0, 8, 16, 2, *[0] * 8]
    nothing = 0x88  # two codes of 0
    assert blob[64:72].tolist() == [0x80] * 8  # k 0..7 of row 0 are -8; above them row 2's
    assert blob[72:96].tolist() == [nothing] * 24
    assert blob[96:104].tolist() == [0x80 + k for k in range(8)]  # k 8..15 are -8..-1
    assert blob[104:128].tolist() == [nothing] * 24
    # k 16..23 are 0..7, k 24..31 are 7.
    assert blob[128:136].tolist() == [0x88 + k for k in range(8)]
    assert blob[160:168].tolist() == [0x8F] * 8
    assert blob[192:224].view(torch.float32).tolist() == [3.0] + [0.0] * 7
    assert blob[224:256].view(torch.int32).tolist() == [int(codes.sum())] + [0] * 7

    wide = torch.arange(-16, 16, dtype=torch.int8)[None]
    blob = pack_universal(QuantizedMatrix(scheme("int8-g32"), wide, scales, 1))
    assert blob[64:72].view(torch.int8).tolist() == list(range(-16, -8))
    assert blob[64 + 64 : 64 + 72].view(torch.int8).tolist() == list(range(-8, 0))


@given(
    name=st.sampled_from(INTEGER_SCHEMES),
    rows=st.integers(1, 20),
    groups=st.integers(1, 3),
    exponent=st.integers(-100, 100),
    spread=st.integers(0, 20),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_there_and_back(
    name: str, rows: int, groups: int, exponent: int, spread: int, seed: int
) -> None:
    matrix = made(name, rows, groups * scheme(name).group, seed, exponent)
    # Scales of one matrix up to 2^spread apart; the smallest lose nothing either.
    matrix.scales[: rows // 2] *= 2.0**-spread
    group = scheme(name).group
    back = unpack_universal(pack_universal(matrix), rows, groups * group, group)
    assert torch.equal(back.codes, matrix.codes)
    assert back.scheme == matrix.scheme
    assert back.scale_error == 0.0
    assert torch.equal(back.dequantize(), matrix.dequantize())


@pytest.mark.parametrize("name", INTEGER_SCHEMES)
def test_stacks_are_converted_there_and_back(name: str) -> None:
    matrices = [made(name, 32, 256, seed) for seed in range(3)]
    packed = pack_experts(matrices, "gate_up")
    back, error = from_universal(to_universal(packed), 32, 256, scheme(name).group, "gate_up")
    assert error == 0.0
    for blob, matrix in zip(back, matrices, strict=True):
        assert torch.equal(unpack(blob).codes, matrix.codes)
        assert torch.equal(unpack(blob).dequantize(), matrix.dequantize())


def test_searched_weights_come_back_unchanged() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    packed = pack_experts([quantize(weight, "int4-g32")])
    back, _ = from_universal(to_universal(packed), 64, 128, 32)
    assert torch.equal(unpack(back[0]).dequantize(), unpack(packed[0]).dequantize())


def test_rounded_scales_are_reported() -> None:
    with install_packing_ops():
        codes = torch.ones(1, 64, dtype=torch.int8)
        scales = torch.tensor([1.0, 1.0 + 2**-12])
        blob = torch.ops.torchao._pack_8bit_act_4bit_weight(
            codes, scales, None, 32, None, "universal"
        )
    matrix = unpack_universal(blob, 1, 64, 32)
    assert matrix.scale_error == pytest.approx(2**-12 / (1 + 2**-12))
    assert matrix.dequantize().tolist() == [[1.0] * 64]


def test_groups_that_are_multiples_are_read() -> None:
    with install_packing_ops():
        codes = torch.arange(-96, 96, dtype=torch.int8)[None]
        blob = torch.ops.torchao._pack_8bit_act_8bit_weight(
            codes, torch.tensor([0.5]), None, 192, None, None
        )
    matrix = unpack_universal(blob, 1, 192, 192)
    assert matrix.scheme.name == "int8-g64"
    assert torch.equal(matrix.dequantize(), codes / 2)
    with pytest.raises(UnsupportedError, match="groups of 48"):
        unpack_universal(pack_48(), 1, 48, 48)


def pack_48() -> Tensor:
    with install_packing_ops():
        blob: Tensor = torch.ops.torchao._pack_8bit_act_4bit_weight(
            torch.zeros(1, 48, dtype=torch.int8), torch.ones(1), None, 48, None, None
        )
    return blob


def changed(blob: Tensor, word: int, value: int) -> Tensor:
    copy = blob.clone()
    copy.view(torch.int32)[word] = value
    return copy


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda b: changed(b, 0, 1), PackedFormatError, "begins with 1, not 6712"),
        (lambda b: changed(b, 1, 2), UnsupportedError, "type 2"),
        (lambda b: changed(b, 2, 3), UnsupportedError, "3 bits"),
        (lambda b: changed(b, 3, 1), UnsupportedError, "zero points"),
        (lambda b: changed(b, 4, 1), UnsupportedError, "bias"),
        (lambda b: changed(b, 5, 4), UnsupportedError, r"\[4, 16, 2\]"),
        (lambda b: changed(b, 16, -1), PackedFormatError, "sums"),
        (lambda b: changed(b, 48, 0x7FC00000), PackedFormatError, "row 0, group 0 is not finite"),
        (lambda b: b[:-1], PackedFormatError, "the blob has 447 bytes"),
        (lambda b: b[:63], PackedFormatError, "63 bytes"),
        (lambda b: b[None], PackedFormatError, "index a stacked"),
        (lambda b: b.float(), PackedFormatError, "uint8"),
    ],
)
def test_foreign_and_damaged_bytes(change: Any, error: type[Exception], message: str) -> None:
    blob = pack_universal(made("int4-g32", 8, 64))
    assert len(blob) == 64 + 2 * 192
    with pytest.raises(error, match=message):
        unpack_universal(change(blob), 8, 64, 32)


@given(st.binary(max_size=600))
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_refused(data: bytes) -> None:
    blob = torch.tensor(list(data), dtype=torch.uint8)
    with pytest.raises((PackedFormatError, UnsupportedError)):
        unpack_universal(blob, 8, 64, 32)


def test_what_the_layout_cannot_hold() -> None:
    with pytest.raises(UnsupportedError, match=r"\[4, 40\] matrix in groups of 32"):
        pack_universal(made("int4-g32", 4, 40))
    codes, scales = torch.ones(1, 32, dtype=torch.int8), torch.full((1, 1), 4.0).half()
    with pytest.raises(UnsupportedError, match="beyond the fp32"):
        pack_universal(QuantizedMatrix(scheme("int4-g32"), codes, scales, 127))


def test_packing_ops_refuse_what_they_do_not_write() -> None:
    codes, scales = torch.zeros(8, 32, dtype=torch.int8), torch.ones(8)
    with install_packing_ops():
        pack = torch.ops.torchao._pack_8bit_act_4bit_weight
        with pytest.raises(UnsupportedError, match="zero points"):
            pack(codes, scales, torch.zeros(8, dtype=torch.int8), 32, None, "universal")
        with pytest.raises(UnsupportedError, match="bias"):
            pack(codes, scales, None, 32, torch.zeros(8), "universal")
        with pytest.raises(UnsupportedError, match="kleidiai"):
            pack(codes, scales, None, 32, None, "kleidiai")
        with pytest.raises(UnsupportedError, match=r"int8 \[N, K\]"):
            pack(codes.float(), scales, None, 32, None, None)
        with pytest.raises(PackedFormatError, match=r"lie in -8 \.\. 7"):
            pack(codes + 8, scales, None, 32, None, None)


@pytest.mark.parametrize(
    "scales",
    [
        torch.ones(127),
        torch.ones(2, 64),
        torch.ones(64, 2, 1),
        torch.ones(1, 128),
        torch.tensor(1.0),
        torch.ones(64, 2, dtype=torch.int32),
        torch.ones(64, 2, dtype=torch.complex64),
    ],
    ids=lambda scales: f"{scales.dtype} {list(scales.shape)}",
)
def test_packing_ops_refuse_other_scales(scales: Tensor) -> None:
    codes = torch.zeros(64, 64, dtype=torch.int8)
    with install_packing_ops():
        for pack in (
            torch.ops.torchao._pack_8bit_act_4bit_weight,
            torch.ops.torchao._pack_8bit_act_8bit_weight,
        ):
            with pytest.raises(UnsupportedError, match=r"floating point \[128\] or \[64, 2\]"):
                pack(codes, scales, None, 32, None, None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e300])
def test_packing_ops_refuse_scales_that_fp32_does_not_hold(value: float) -> None:
    codes, scales = torch.zeros(8, 32, dtype=torch.int8), torch.ones(8, dtype=torch.float64)
    scales[3] = value
    with (
        install_packing_ops(),
        pytest.raises(BadWeights, match="act_8bit_weight: a scale is not finite in fp32"),
    ):
        torch.ops.torchao._pack_8bit_act_8bit_weight(codes, scales, None, 32, None, None)


def test_packing_ops_take_scales_of_any_float_flat_or_by_row() -> None:
    codes = torch.arange(-64, 64, dtype=torch.int8).view(2, 64)
    scales = torch.tensor([[0.5, -1.0], [2.0, 0.0]])
    with install_packing_ops():
        pack = torch.ops.torchao._pack_8bit_act_8bit_weight
        expected = pack(codes, scales.flatten(), None, 32, None, None)
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            assert torch.equal(pack(codes, scales.to(dtype), None, 32, None, None), expected)
        assert torch.equal(pack(codes, scales.T.contiguous().T, None, 32, None, None), expected)
    matrix = read_universal(expected, 2, 64, 32)
    assert torch.equal(matrix.scales, scales)
    assert torch.equal(matrix.codes, codes)


def test_packing_ops_are_undone_and_never_doubled() -> None:
    from torchao.quantization.quantize_.workflows.intx import intx_opaque_tensor

    assert not intx_opaque_tensor._is_kernel_library_loaded()
    with install_packing_ops() as installed:
        assert installed.is_installed
        assert intx_opaque_tensor._is_kernel_library_loaded()
        second = install_packing_ops()
        assert not second.is_installed
        second.undo()
        assert intx_opaque_tensor._is_kernel_library_loaded()
    assert not installed.is_installed
    installed.undo()
    assert not intx_opaque_tensor._is_kernel_library_loaded()
    install_packing_ops().undo()  # again, after an undo


def test_all_of_upstreams_tests_run_and_pass() -> None:
    """Unmodified, in a process of its own; without the operators 17 of the 41 are skipped."""
    code = """
import logging, unittest
from moepack.torchao_layout import install_packing_ops
install_packing_ops()
logging.disable(logging.WARNING)
import executorch.extension.llm.custom_ops.test_quantized_moe as upstream
suite = unittest.defaultTestLoader.loadTestsFromModule(upstream)
result = unittest.TextTestRunner().run(suite)
print(result.testsRun, len(result.skipped), result.wasSuccessful())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "41 0 True", done.stderr
