"""What a call writes, what it leaves alone and what it frees."""

import mmap
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from made_layers import Layer, experts, experts_arguments, ffn_arguments, layer, with_biases


@pytest.fixture(scope="module")
def small() -> Layer:
    return layer()


def test_out_variants_write_what_the_functions_return(small: Layer) -> None:
    x = small.x(4)
    arguments = ffn_arguments(small, x)
    expected = torch.ops.moepack.quantized_moe_ffn(*arguments)
    out = torch.empty_like(x)
    assert torch.ops.moepack.quantized_moe_ffn.out(*arguments, out=out) is out
    assert torch.equal(out, expected)
    strided = torch.empty(small.D, 4).T
    torch.ops.moepack.quantized_moe_ffn.out(*arguments, out=strided)
    assert torch.equal(strided, expected)
    torch.ops.moepack.quantized_moe_ffn.out(*arguments, out=x)
    assert torch.equal(x, expected)


def test_nothing_is_written_to_out_on_an_error(small: Layer) -> None:
    foreign = small.packed_w13.clone()
    foreign[:, 0] = 0
    out = torch.full((2, small.D), 7.0)
    arguments = ffn_arguments(replace(small, packed_w13=foreign), small.x(2))
    with pytest.raises(RuntimeError):
        torch.ops.moepack.quantized_moe_ffn.out(*arguments, out=out)
    assert out.eq(7.0).all()


def test_the_last_expert_beyond_2_gib_is_right() -> None:
    base = layer(E=1, D=2048, F=1024)
    size = base.packed_w13.shape[1]
    count = 2**31 // size + 2
    # Pages that nobody touches cost nothing.
    packed_w13 = torch.zeros(count, size, dtype=torch.uint8)
    packed_w2 = torch.zeros(count, base.packed_w2.shape[1], dtype=torch.uint8)
    packed_w13[-1], packed_w2[-1] = base.packed_w13[0], base.packed_w2[0]
    case = replace(base, packed_w13=packed_w13, packed_w2=packed_w2)
    x = base.x(1)
    last = experts(case, x, torch.tensor([[count - 1]]), torch.ones(1, 1))
    assert torch.equal(last, experts(base, x, torch.tensor([[0]]), torch.ones(1, 1)))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def test_calls_leave_no_memory_behind() -> None:
    case = layer(E=1, D=32, F=16)
    ffn_call = ffn_arguments(with_biases(case), case.x(1), K=1)
    one = torch.ones(1, 1)
    experts_call = experts_arguments(case, case.x(1), torch.zeros(1, 1, dtype=torch.int64), one)
    short = ffn_arguments(replace(case, packed_w2=case.packed_w2[:, 1:]), case.x(1), K=1)
    out = torch.empty(1, 32)

    def call() -> None:
        torch.ops.moepack.quantized_moe_ffn(*ffn_call)
        torch.ops.moepack.quantized_moe_ffn.out(*ffn_call, out=out)
        torch.ops.moepack.quantized_experts(*experts_call)
        with suppress(RuntimeError):
            torch.ops.moepack.quantized_moe_ffn(*short)

    for _ in range(2000):
        call()
    before = resident_bytes()
    calls = 20_000
    for _ in range(calls):
        call()
    assert resident_bytes() - before < 50 * calls  # a leaked string is 32 bytes, a call has six
