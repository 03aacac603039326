"""What torch's own checks, torch.export and torch.compile make of the operators."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from made_layers import Layer, experts_arguments, ffn, ffn_arguments, layer, refusal, with_biases
from moepack import ops


@pytest.fixture(scope="module")
def small() -> Layer:
    return layer()


def test_opcheck(small: Layer) -> None:
    x = small.x(3)
    ids = torch.tensor([[0, 1], [2, 3], [4, 5]])
    torch.library.opcheck(
        torch.ops.moepack.quantized_moe_ffn.default, tuple(ffn_arguments(with_biases(small), x))
    )
    torch.library.opcheck(
        torch.ops.moepack.quantized_experts.default,
        tuple(experts_arguments(small, x, ids, torch.rand(3, 2))),
    )


def test_opcheck_of_out_variants(small: Layer) -> None:
    # torch functionalizes no custom operator that returns its output argument, as ExecuTorch's
    # convention for out variants wants it: only schema and fake tensors can be checked.
    x = small.x(3)
    torch.library.opcheck(
        torch.ops.moepack.quantized_moe_ffn.out,
        tuple(ffn_arguments(small, x)),
        {"out": torch.empty_like(x)},
        test_utils=("test_schema", "test_faketensor"),
    )


class Block(torch.nn.Module):
    """A layer as a module: what export and compile see."""

    packed_w13: Tensor
    packed_w2: Tensor
    gate_weight: Tensor

    def __init__(self, case: Layer) -> None:
        super().__init__()
        self.case = case
        for name in ("packed_w13", "packed_w2", "gate_weight"):
            self.register_buffer(name, getattr(case, name))

    def forward(self, x: Tensor) -> Tensor:
        routed = ops.quantized_moe_ffn(
            x,
            None,
            self.gate_weight,
            None,
            None,
            self.packed_w13,
            self.packed_w2,
            None,
            None,
            2,
            self.case.F,
            self.case.scheme,
        )
        scores = x @ self.gate_weight.T
        weights, ids = scores.topk(2)
        return routed + ops.quantized_experts(
            x,
            ids,
            weights,
            self.packed_w13,
            self.packed_w2,
            None,
            None,
            self.case.F,
            self.case.scheme,
        )


def test_export_keeps_the_token_count_dynamic(small: Layer) -> None:
    block = Block(small)
    tokens = torch.export.Dim("tokens", max=4096)
    program = torch.export.export(block, (small.x(2),), dynamic_shapes=({0: tokens},))
    assert "moepack.quantized_moe_ffn.default" in str(program.graph)
    for count in (1, 17, 300):
        assert torch.equal(program.module()(small.x(count)), block(small.x(count)))


def test_compile_with_a_dynamic_token_count(small: Layer) -> None:
    block = Block(small)
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for count in (3, 5, 17):
            torch.testing.assert_close(compiled(small.x(count)), block(small.x(count)))


def test_compile_refuses_what_eager_refuses(small: Layer) -> None:
    short = replace(small, packed_w2=small.packed_w2[:, :-32].contiguous())
    message = refusal(lambda: ffn(short, small.x(2)))
    compiled = torch.compile(lambda x: ffn(short, x), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=message.split(":")[-1].strip()[:40]):
        compiled(small.x(2))
