"""What the operators refuse: in eager, on meta and fake tensors alike."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from made_layers import (
    ISAS,
    Layer,
    experts,
    experts_arguments,
    ffn,
    ffn_arguments,
    layer,
    refusal,
    same,
    with_biases,
)
from moepack import ops
from moepack.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("default_isa_and_threads")


@pytest.fixture(scope="module")
def small() -> Layer:
    return layer()


Edit = Callable[[Layer], tuple[Layer, dict[str, Any]]]

BAD_ARGUMENTS: dict[str, Edit] = {
    "x of rank 3": lambda c: (c, {"x": torch.zeros(1, 2, c.D)}),
    "x of rank 1": lambda c: (c, {"x": torch.zeros(c.D)}),
    "x of int": lambda c: (c, {"x": torch.zeros(2, c.D, dtype=torch.int32)}),
    "x of fp64": lambda c: (c, {"x": torch.zeros(2, c.D, dtype=torch.float64)}),
    "x of another width": lambda c: (c, {"x": torch.zeros(2, c.D + 1)}),
    "router_x of other tokens": lambda c: (c, {"router_x": torch.zeros(3, c.D)}),
    "router_x of another dtype": lambda c: (
        c,
        {"router_x": torch.zeros(2, c.D, dtype=torch.bfloat16)},
    ),
    "gate of bf16": lambda c: (replace(c, gate_weight=c.gate_weight.bfloat16()), {}),
    "gate of other experts": lambda c: (replace(c, gate_weight=torch.zeros(5, c.D)), {}),
    "gate without experts": lambda c: (replace(c, gate_weight=torch.zeros(0, c.D)), {}),
    "gate bias of another length": lambda c: (replace(c, gate_bias=torch.zeros(5)), {}),
    "expert bias of rank 2": lambda c: (replace(c, expert_bias=torch.zeros(1, 6)), {}),
    "blob of int8": lambda c: (replace(c, packed_w13=c.packed_w13.view(torch.int8)), {}),
    "short blob": lambda c: (replace(c, packed_w13=c.packed_w13[:, :-32].contiguous()), {}),
    "long blob": lambda c: (replace(c, packed_w2=torch.cat([c.packed_w2] * 2, 1)), {}),
    "blobs of other experts": lambda c: (replace(c, packed_w2=c.packed_w2[:4]), {}),
    "blob of rank 1": lambda c: (replace(c, packed_w2=c.packed_w2[0]), {}),
    "bias13 of another width": lambda c: (replace(c, bias13=torch.zeros(6, c.F)), {}),
    "bias2 of another width": lambda c: (replace(c, bias2=torch.zeros(6, c.D + 1)), {}),
    "bias2 of fp16": lambda c: (replace(c, bias2=torch.zeros(6, c.D).half()), {}),
    "more activated than experts": lambda c: (c, {"K": 7}),
    "none activated": lambda c: (c, {"K": 0}),
    "negative activated": lambda c: (c, {"K": -3}),
    "hidden_dim 0": lambda c: (c, {"hidden_dim": 0}),
    "hidden_dim of others": lambda c: (c, {"hidden_dim": 400}),
    "hidden_dim beyond all": lambda c: (c, {"hidden_dim": 2**62}),
    "unknown scheme": lambda c: (c, {"scheme": "int3-g32"}),
    "scheme to come": lambda c: (c, {"scheme": "mxfp4"}),
    "another scheme": lambda c: (c, {"scheme": "int8-g32"}),
    "unknown layout": lambda c: (c, {"layout": "gguf"}),
    "unknown activation": lambda c: (c, {"activation": "tanh"}),
    "unknown score": lambda c: (c, {"score_func": "tanh"}),
    "unknown group score": lambda c: (c, {"group_score": "mean"}),
    "unknown router dtype": lambda c: (c, {"router_dtype": "float64"}),
    "groups that do not divide": lambda c: (c, {"n_group": 4}),
    "no groups": lambda c: (c, {"n_group": 0}),
    "more groups kept than there are": lambda c: (c, {"n_group": 2, "topk_group": 3}),
    "groups too few for K": lambda c: (c, {"n_group": 3, "topk_group": 1, "K": 3}),
    "negative act_limit": lambda c: (c, {"act_limit": -7.0}),
    "act_limit without a gate": lambda c: (c, {"activation": "relu2", "act_limit": 7.0}),
    "act_limit nan": lambda c: (c, {"act_limit": math.nan}),
    "act_alpha of silu": lambda c: (c, {"act_alpha": 1.702}),
    "softcap of gelu": lambda c: (c, {"activation": "gelu_tanh", "gate_softcap": 30.0}),
    "limit_after_act without a limit": lambda c: (c, {"limit_after_act": True}),
    "gated blobs without a gate": lambda c: (c, {"activation": "relu"}),
    "weight_on_input and bias13": lambda c: (
        replace(c, bias13=torch.zeros(6, 2 * c.F)),
        {"weight_on_input": True},
    ),
    "norm_eps nan": lambda c: (c, {"norm_eps": math.nan}),
    "route_scale inf": lambda c: (c, {"route_scale": math.inf}),
}


@pytest.mark.parametrize("name", sorted(BAD_ARGUMENTS))
def test_eager_and_meta_refuse_alike(small: Layer, name: str) -> None:
    case, keywords = BAD_ARGUMENTS[name](small)
    arguments = ffn_arguments(case, keywords.pop("x", small.x(2)), **keywords)
    op = torch.ops.moepack.quantized_moe_ffn
    message = refusal(lambda: op(*arguments))
    assert message.startswith("moepack::quantized_moe_ffn: ")
    meta = [a.to("meta") if isinstance(a, Tensor) else a for a in arguments]
    assert refusal(lambda: op(*meta)) == message
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        assert refusal(lambda: op(*fake)) == message
    assert refusal(lambda: op.out(*arguments, out=torch.empty(2, small.D))) == message


@pytest.mark.parametrize(
    ("ids", "weights"),
    [
        (torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2)),
        (torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)),
        (torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 3)),
        (torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.float64)),
        (torch.zeros(4, dtype=torch.int64), torch.ones(4)),
        (torch.zeros(2, 0, dtype=torch.int64), torch.ones(2, 0)),
    ],
)
def test_routing_tensors_are_refused_alike(small: Layer, ids: Tensor, weights: Tensor) -> None:
    arguments = experts_arguments(small, small.x(2), ids, weights)
    op = torch.ops.moepack.quantized_experts
    message = refusal(lambda: op(*arguments))
    meta = [a.to("meta") if isinstance(a, Tensor) else a for a in arguments]
    assert refusal(lambda: op(*meta)) == message


@pytest.mark.parametrize("name", ["quantized_moe_ffn", "quantized_experts"])
def test_no_tensor_where_one_is_needed_is_refused_alike(small: Layer, name: str) -> None:
    op, x = getattr(torch.ops.moepack, name), small.x(2)
    ids, weights = torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)
    arguments = (
        ffn_arguments(small, x)
        if name == "quantized_moe_ffn"
        else experts_arguments(small, x, ids, weights)
    )
    needed = [i for i, a in enumerate(op.default._schema.arguments) if str(a.type) == "Tensor"]
    assert len(needed) >= 4
    for i in needed:
        expected = f"moepack::{name}: {op.default._schema.arguments[i].name}: is None"
        without = [*arguments[:i], None, *arguments[i + 1 :]]
        assert refusal(partial(op, *without)).startswith(expected)
        assert refusal(partial(op.out, *without, out=torch.empty_like(x))).startswith(expected)
        meta = [a.to("meta") if isinstance(a, Tensor) else a for a in without]
        assert refusal(partial(op, *meta)).startswith(expected)
    assert "out: is None" in refusal(lambda: op.out(*arguments, out=None))


@pytest.mark.parametrize("out", [torch.empty(3, 96), torch.empty(2, 96, dtype=torch.float16)])
def test_outputs_that_do_not_fit_are_refused_alike(small: Layer, out: Tensor) -> None:
    arguments = ffn_arguments(small, small.x(2))
    op = torch.ops.moepack.quantized_moe_ffn.out
    message = refusal(lambda: op(*arguments, out=out))
    assert "out: got" in message
    meta = [a.to("meta") if isinstance(a, Tensor) else a for a in arguments]
    assert refusal(lambda: op(*meta, out=out.to("meta"))) == message


@pytest.mark.parametrize(
    ("offset", "value"),
    [(0, 0), (4, 2), (6, 2), (6, 9), (8, 79), (12, 97), (16, 64), (28, 0), (28, 7)],
)
def test_foreign_contents_are_refused_by_eager(small: Layer, offset: int, value: int) -> None:
    foreign = small.packed_w13.clone()
    foreign[2, offset] = value
    case = replace(small, packed_w13=foreign)
    one = torch.ones(1, 1)
    message = refusal(lambda: experts(case, case.x(1), torch.tensor([[2]]), one))
    assert "packed_w13" in message or "expert 2" in message
    # An expert that no token reaches is not looked at; Meta looks at no contents.
    experts(case, case.x(1), torch.tensor([[1]]), one)
    meta = [a.to("meta") if isinstance(a, Tensor) else a for a in ffn_arguments(case, case.x(1))]
    assert torch.ops.moepack.quantized_moe_ffn(*meta).device.type == "meta"


@pytest.mark.parametrize("name", ["quantized_moe_ffn", "quantized_experts"])
def test_one_tensor_on_meta_among_real_ones_is_refused(small: Layer, name: str) -> None:
    op, x = getattr(torch.ops.moepack, name), small.x(2)
    ids, weights = torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)
    case = with_biases(small)
    arguments = (
        ffn_arguments(case, x)
        if name == "quantized_moe_ffn"
        else experts_arguments(case, x, ids, weights)
    )
    names = [argument.name for argument in op.default._schema.arguments]
    for i, value in enumerate(arguments):
        if i == 0 or not isinstance(value, Tensor):
            continue
        mixed = [*arguments[:i], value.to("meta"), *arguments[i + 1 :]]
        expected = f"moepack::{name}: {names[i]}: is on meta, x is on cpu"
        assert refusal(partial(op, *mixed)).startswith(expected)
        into = partial(op.out, *mixed, out=torch.empty_like(x))
        assert expected.split(": ", 1)[1] in refusal(into)
    assert "out: is on meta" in refusal(lambda: op.out(*arguments, out=x.to("meta")))
    assert "is on cpu, x is on meta" in refusal(lambda: op(x.to("meta"), *arguments[1:]))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_blobs_change_numbers_or_are_refused(data: st.DataObject) -> None:
    case = layer(E=2, D=40, F=24)
    which = data.draw(st.sampled_from(["packed_w13", "packed_w2"]))
    blob = getattr(case, which).clone()
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.integers(0, blob.numel() - 1))
        blob.view(-1)[place] = data.draw(st.integers(0, 255))
    damaged = replace(case, **{which: blob})
    try:
        found = ffn(damaged, case.x(3))
    except RuntimeError:
        return
    assert found.shape == (3, 40)
    for isa in ISAS:
        ops.force_isa(isa)
        assert same(ffn(damaged, case.x(3)), found)
    ops.force_isa(None)


def test_an_unknown_isa_is_refused_with_the_list() -> None:
    with pytest.raises(UnsupportedError, match=r"sse9.*scalar"):
        ops.force_isa("sse9")
