"""Automatic differentiation meets a refusal, in every mode and for every overload."""

from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad

from made_layers import Layer, experts, experts_arguments, ffn, ffn_arguments, layer


@pytest.fixture(scope="module")
def small() -> Layer:
    return layer()


def test_gradients_are_refused(small: Layer) -> None:
    x = small.x(2).requires_grad_()
    result = ffn(small, x)
    with pytest.raises(NotImplementedError, match=r"quantized_moe_ffn has no gradient.*no_grad"):
        result.sum().backward()
    ids, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, requires_grad=True)
    with pytest.raises(NotImplementedError, match="quantized_experts has no gradient"):
        experts(small, small.x(2), ids, weights).sum().backward()
    with torch.no_grad():
        assert not ffn(small, x).requires_grad


@pytest.mark.parametrize("is_grad_on", [True, False])
def test_tangents_are_refused(small: Layer, is_grad_on: bool) -> None:
    x, ids, weights = small.x(2), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    expected = ffn(small, x)
    with torch.set_grad_enabled(is_grad_on), forward_ad.dual_level():
        assert torch.equal(ffn(small, x), expected)
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="quantized_moe_ffn has no gradient"):
            ffn(small, dual)
        dual = forward_ad.make_dual(weights, torch.ones_like(weights))
        with pytest.raises(NotImplementedError, match="quantized_experts has no gradient"):
            experts(small, x, ids, dual)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        torch.func.jvp(lambda v: ffn(small, v), (x,), (x,))


def test_a_refusal_in_part_of_a_graph_stops_all_of_it(small: Layer) -> None:
    x = small.x(2).requires_grad_()
    with pytest.raises(NotImplementedError, match="has no gradient"):
        (ffn(small, x) + x).sum().backward()
    assert x.grad is None


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd])
def test_function_transforms_are_refused(
    small: Layer, transform: Callable[..., Callable[..., object]]
) -> None:
    with pytest.raises(NotImplementedError, match="quantized_moe_ffn has no gradient"):
        transform(lambda x: ffn(small, x).sum())(small.x(2))


def test_outputs_that_callers_bring_carry_no_gradient(small: Layer) -> None:
    op, x, out = torch.ops.moepack.quantized_moe_ffn.out, small.x(2), torch.zeros(2, small.D)
    arguments = ffn_arguments(small, x)
    asking = [x.clone().requires_grad_(), *arguments[1:]]
    refused = pytest.raises(NotImplementedError, match="quantized_moe_ffn has no gradient")
    with refused:
        op(*asking, out=out)
    with refused:
        op(*arguments, out=out.clone().requires_grad_())
    for is_grad_on in (True, False):
        with torch.set_grad_enabled(is_grad_on), forward_ad.dual_level(), refused:
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            op(dual, *arguments[1:], out=out)
    ids, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, requires_grad=True)
    with pytest.raises(NotImplementedError, match="quantized_experts has no gradient"):
        torch.ops.moepack.quantized_experts.out(*experts_arguments(small, x, ids, weights), out=out)
    assert out.eq(0).all()
    with torch.no_grad():
        assert torch.equal(op(*asking, out=out), ffn(small, x))


def test_a_tensor_that_is_written_to_gets_a_new_version(small: Layer) -> None:
    kept = torch.zeros(2, small.D, requires_grad=True)
    out = torch.ones(2, small.D)
    product = kept * out
    torch.ops.moepack.quantized_moe_ffn.out(*ffn_arguments(small, small.x(2)), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_compiling_for_a_gradient_is_refused(small: Layer) -> None:
    compiled = torch.compile(lambda x: ffn(small, x), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="quantized_moe_ffn has no gradient"):
        compiled(small.x(2).requires_grad_()).sum().backward()
