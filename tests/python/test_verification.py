"""Verification has to catch every way of misreading a block."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import moepack
import tiny_models
from moepack import verification
from moepack.errors import VerificationError
from moepack.families import BlockSpec, find_blocks
from moepack.modules import QuantizedMoEFFN


def read(family: str) -> BlockSpec:
    spec = find_blocks(tiny_models.build(family))[0].spec
    assert spec is not None
    return spec


def with_experts(spec: BlockSpec, **readers: object) -> BlockSpec:
    reader = spec.experts.reader._replace(**readers)  # type: ignore[arg-type]
    return dataclasses.replace(spec, experts=dataclasses.replace(spec.experts, reader=reader))


def with_routing(spec: BlockSpec, **changes: object) -> BlockSpec:
    assert spec.router is not None
    attributes = dataclasses.replace(spec.router.attributes, **changes)  # type: ignore[arg-type]
    router = dataclasses.replace(spec.router, attributes=attributes)
    return dataclasses.replace(spec, router=router)


def assert_caught(spec: BlockSpec, where: str) -> None:
    with pytest.raises(VerificationError, match=f"layer: .*{where}"):
        verification.check_adapter("layer", spec)


def test_gate_and_up_swapped() -> None:
    spec = read("qwen3_moe")
    swapped = with_experts(spec, w13=lambda e: spec.experts.w13(e).roll(32, dims=0))
    assert_caught(swapped, "the experts")


def test_one_expert_of_many_misread() -> None:
    spec = read("qwen3_moe")
    shifted = with_experts(spec, w2=lambda e: spec.experts.w2(0 if e == 5 else e))
    assert_caught(shifted, "the experts")


@pytest.mark.parametrize("name", ["bias13", "bias2"])
def test_a_bias_dropped(name: str) -> None:
    assert_caught(with_experts(read("gpt_oss"), **{name: lambda e: None}), "the experts")


def test_interleaving_ignored() -> None:
    spec = read("gpt_oss")
    stored = spec.experts.w13

    def as_stored(expert: int) -> Tensor:
        gate, up = stored(expert).chunk(2)
        return torch.stack([gate, up], dim=1).flatten(0, 1)

    assert_caught(with_experts(spec, w13=as_stored), "the experts")


def test_w2_transposed() -> None:
    spec = find_blocks(tiny_models.build("qwen3_moe", moe_intermediate_size=64))[0].spec
    assert spec is not None
    assert_caught(with_experts(spec, w2=lambda e: spec.experts.w2(e).T), "the experts")


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gpt_oss", {"act_limit": 7.5}),
        ("gpt_oss", {"act_limit": 0.0}),
        ("gpt_oss", {"act_alpha": 1.7}),
        ("gpt_oss", {"activation": "silu"}),
        ("hy_v4", {"act_limit": 0.0}),
        ("step3p5", {"limit_after_act": False}),
        ("step3p5", {"act_limit": 8.0}),
        ("inkling2_text", {"up_softcap": 0.0}),
        ("gemma4_text", {"activation": "silu"}),
        ("nemotron_h", {"activation": "relu"}),
        ("llama4_text", {"weight_on_input": False}),
    ],
)
def test_an_activation_misread(family: str, change: dict[str, Any]) -> None:
    spec = read(family)
    attributes = dataclasses.replace(spec.experts.attributes, **change)
    experts = dataclasses.replace(spec.experts, attributes=attributes)
    assert_caught(dataclasses.replace(spec, experts=experts), "the experts")


def test_a_norm_of_outputs_dropped() -> None:
    spec = read("muse_spark_text")
    experts = dataclasses.replace(spec.experts, output_norm=None)
    assert_caught(dataclasses.replace(spec, experts=experts), "the experts")


@pytest.mark.parametrize("dropped", ["output_scale", "before", "gate_bias"])
def test_what_a_router_does_besides_dropped(dropped: str) -> None:
    spec = read("gpt_oss" if dropped == "gate_bias" else "gemma4_text")
    assert spec.router is not None
    router = dataclasses.replace(spec.router, **{dropped: None})  # type: ignore[arg-type]
    assert_caught(dataclasses.replace(spec, router=router), "the router")


def test_the_bias_that_a_block_adds_to_its_sum() -> None:
    spec = read("jetmoe")
    assert_caught(with_experts(spec, bias2=lambda e: None), "the experts")
    model = tiny_models.build("jetmoe")
    block = find_blocks(model)[0].module

    class Doubling(type(block)):  # type: ignore[misc]
        def forward(self, layer_input: Tensor) -> Tensor:
            y: Tensor = super().forward(layer_input) + self.get_parameter("bias")
            return y

    block.__class__ = Doubling
    with pytest.raises(VerificationError, match="the router"):
        moepack.quantize_(block)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3_moe", {"norm_topk": False}),
        ("olmoe", {"norm_topk": True}),
        ("deepseek_v3", {"route_scale": 1.0}),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
        ("deepseek_v3", {"group_score": "max"}),
        ("deepseek_v3", {"score_func": "softmax_all"}),
        ("lfm2_moe", {"norm_eps": 0.01}),
        ("granitemoe", {"score_func": "softmax_all"}),
        ("minimax_m3_vl_text", {"route_scale": 1.5}),
        ("openai_privacy_filter", {"route_scale": 1.0}),
        ("dbrx", {"norm_topk": False}),
    ],
)
def test_routing_misread(family: str, change: dict[str, object]) -> None:
    assert_caught(with_routing(read(family), **change), "the router")


@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2", "ernie4_5_moe"])
def test_the_selection_bias_dropped(family: str) -> None:
    spec = read(family)
    assert spec.router is not None
    router = dataclasses.replace(spec.router, expert_bias=None)
    assert_caught(dataclasses.replace(spec, router=router), "the router")


@pytest.mark.parametrize("dropped", ["shared", "shared_gate"])
def test_the_shared_expert_misread(dropped: str) -> None:
    spec = read("qwen2_moe")
    combination = {
        "shared": dataclasses.replace(spec.combination, shared=None),
        "shared_gate": dataclasses.replace(spec.combination, shared_gate=None),
    }[dropped]
    assert_caught(dataclasses.replace(spec, combination=combination), "the shared expert")


def test_a_block_that_does_more_than_its_parts() -> None:
    block = tiny_models.build("qwen3_moe").get_submodule("model.layers.0.mlp")

    class Doubling(type(block)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            y: Tensor = super().forward(hidden_states)
            return 2 * y

    class Pairing(type(block)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
            return super().forward(hidden_states), None

    block.__class__ = Doubling
    with pytest.raises(VerificationError, match="router='outside'"):
        moepack.quantize_(block)
    block.__class__ = Pairing
    with pytest.raises(VerificationError, match="returns tuple"):
        moepack.quantize_(block)
    x = torch.randn(1, 7, 64)
    with torch.no_grad():
        expected = block(x)[0]
        found = moepack.quantize_(block, "int8-g32", router="outside").model(x)[0]
    assert torch.nn.functional.mse_loss(found, expected) < 0.01 * expected.square().mean()


def packed(family: str) -> tuple[BlockSpec, QuantizedMoEFFN]:
    model = tiny_models.build(family)
    block = find_blocks(model)[0]
    assert block.spec is not None
    report = moepack.quantize_(tiny_models.build(family))
    module = report.model.get_submodule(block.path)
    assert isinstance(module, QuantizedMoEFFN)
    return block.spec, module


def test_an_expert_packed_wrongly_is_found_among_the_others() -> None:
    spec, module = packed("qwen3_moe")
    sound = verification.check_quantized("layer", spec, module)
    verification.check_floor("layer", sound, "int4-g32", None)
    module.packed_w2[6] = module.packed_w2[1]
    broken = verification.check_quantized("layer", spec, module)
    assert broken.worst_expert == 6
    with pytest.raises(VerificationError, match=r"layer: .*worst expert 6.*sqnr_floor"):
        verification.check_floor("layer", broken, "int4-g32", None)


def test_an_attribute_that_does_not_reach_the_operator() -> None:
    spec, module = packed("deepseek_v3")
    module.routing = dataclasses.replace(module.routing, route_scale=1.0)
    with pytest.raises(VerificationError, match="routing inside the operator"):
        verification.check_quantized("layer", spec, module)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "gemma4_text"])
def test_a_block_that_went_back_to_float_misread(family: str) -> None:
    model = moepack.dequantize_(moepack.quantize_(tiny_models.build(family)).model)
    spec = find_blocks(model)[0].spec
    assert spec is not None
    assert verification.check_adapter("layer", spec).error < 1e-5
    shifted = with_experts(spec, w2=lambda e: spec.experts.w2(0 if e == 5 else e))
    assert_caught(shifted, "the experts")
    assert_caught(with_routing(spec, route_scale=0.5), "the router")
    assert_caught(with_routing(spec, num_activated_experts=1), "the router")


def test_numbers_that_are_not_finite_fail() -> None:
    nan = torch.full((1, 4), math.nan)
    assert math.isnan(verification.relative_error(nan, torch.ones(1, 4)))
    spec = read("qwen3_moe")
    assert_caught(with_experts(spec, w2=lambda e: torch.full((64, 32), math.nan)), "the experts")
