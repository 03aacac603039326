"""Calls of upstream's operator that are refused on moepack's kernels, and those that only trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moepack.acceleration import accelerate_upstream
from moepack.errors import UnsupportedError
from upstream_layer import export, layer, method_of, to_pte, tokens

pytestmark = pytest.mark.usefixtures("upstreams_operator")


def test_damaged_weights_of_a_program_are_an_error(tmp_path: Path) -> None:
    case = layer()
    case.packed_w2[:, 0] ^= 1
    with accelerate_upstream():
        method = method_of(to_pte(case, tmp_path / "damaged.pte"))
        with pytest.raises(RuntimeError, match="0x12"):
            method.execute((tokens(2, case.dim),))
        with pytest.raises(RuntimeError, match="not a universal blob"):
            case.call(tokens(2, case.dim))


BAD: dict[str, tuple[dict[int, Any], str]] = {
    "bf16": ({0: torch.ones(3, 256, dtype=torch.bfloat16)}, "x is torch.bfloat16"),
    "3-D": ({0: torch.ones(3, 1, 256)}, "x is torch.float32"),
    "K > E": ({5: 7}, "7 activated experts of 6"),
    "score_func": ({11: "tanh"}, "score_func 'tanh'"),
    "group": ({9: 48}, "int4-g48"),
    "bits": ({10: 3}, "int3-g32"),
    "short": ({3: torch.zeros(6, 64, dtype=torch.uint8)}, "packed_w13 has 64 bytes"),
    "bias": ({11: "softmax"}, "expert_bias with score_func 'softmax'"),
    "E": ({6: 5}, "gate_weight is"),
    "D": ({8: 128}, "x is"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_aborts_upstream_raises(name: str) -> None:
    case = layer()
    arguments = case.arguments(tokens(3, case.dim))
    changes, message = BAD[name]
    for position, value in changes.items():
        arguments[position] = value
    with accelerate_upstream(), pytest.raises((RuntimeError, UnsupportedError), match=message):
        torch.ops.llama.quantized_moe_ffn(*arguments)


TENSORS = ("x", "gate_weight", "expert_bias", "packed_w13", "packed_w2", "out")


@pytest.mark.parametrize("position", range(6))
def test_no_tensor_and_one_without_values_raise(position: int) -> None:
    """Upstream's Meta kernel would hand out memory that nobody wrote."""
    case = layer()
    *arguments, out = [*case.arguments(tokens(3, case.dim)), torch.empty(3, case.dim)]
    tensors = [*arguments[:5], out]
    op, name = torch.ops.llama.quantized_moe_ffn, TENSORS[position]
    for wrong, message in (
        (
            tensors[position].to("meta"),
            r"gate_weight: is on cpu, x is on meta"
            if position == 0
            else f"{name}: is on meta, x is on cpu",
        ),
        (None, f"{name} is None"),
    ):
        *changed, into = [wrong if i == position else tensor for i, tensor in enumerate(tensors)]
        with accelerate_upstream():
            with pytest.raises((RuntimeError, UnsupportedError), match=message):
                op.out(*changed, *arguments[5:], out=into)
            if name != "out":
                with pytest.raises((RuntimeError, UnsupportedError), match=message):
                    op(*changed, *arguments[5:])


def test_other_backends_do_not_reach_upstreams_kernel() -> None:
    case = layer()
    with accelerate_upstream(), pytest.raises(NotImplementedError, match=r"moepack::.*SparseCPU"):
        case.call(tokens(3, case.dim).to_sparse())


@pytest.mark.parametrize("group", [16, 32])
def test_tracing_is_upstreams(group: int) -> None:
    case = layer(group=group)
    x = tokens(4, case.dim)
    expected = export(case)
    meta = [a.to("meta") if isinstance(a, Tensor) else a for a in case.arguments(x)]
    with accelerate_upstream():
        assert str(export(case).graph) == str(expected.graph)
        assert torch.ops.llama.quantized_moe_ffn(*meta).is_meta
        out = torch.empty(4, case.dim, device="meta")
        assert torch.ops.llama.quantized_moe_ffn.out(*meta, out=out) is out
        with pytest.raises(UnsupportedError, match="out is"):
            torch.ops.llama.quantized_moe_ffn.out(*meta, out=out[:3])
