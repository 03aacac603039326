"""The plan: what is replaced, how, and why not."""

from __future__ import annotations

import json
import re

import pytest
from torch import nn

import moepack
import tiny_models
from moepack.errors import UnsupportedError


def test_a_plan_says_sizes_router_and_bytes() -> None:
    model = tiny_models.build("deepseek_v3")
    (block,) = moepack.plan(model, "int4-g64").blocks
    assert (block.path, block.block_class) == ("model.layers.1.mlp", "DeepseekV3MoE")
    assert (block.action, block.router, block.why) == ("replace", "fused", "")
    assert (block.num_experts, block.num_activated_experts) == (8, 2)
    assert (block.model_dim, block.inner_dim) == (64, 32)
    assert block.bytes_before == 8 * 3 * 64 * 32 * 4
    report = moepack.quantize_(model, "int4-g64")
    packed = dict(report.model.get_submodule(block.path).named_buffers())
    assert block.bytes_after == packed["packed_w13"].numel() + packed["packed_w2"].numel()
    assert block.bytes_after == report.blocks[0].bytes_after


def test_a_plan_changes_nothing() -> None:
    model = tiny_models.build("qwen3_moe")
    before = dict(model.named_modules())
    moepack.plan(model)
    assert dict(model.named_modules()) == before


def test_printed_and_as_json() -> None:
    found = moepack.plan(tiny_models.build("phimoe"), "int8-g32")
    text = str(found)
    for word in ("model.layers.0.mlp", "PhimoeSparseMoeBlock", "int8-g32", "outside", "bytes"):
        assert word in text
    loaded = json.loads(json.dumps(found.to_json()))
    assert [b["path"] for b in loaded["blocks"]] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert loaded["bytes_after"] < loaded["bytes_before"]


def test_a_recipe_by_path() -> None:
    model = tiny_models.build("mixtral")
    found = moepack.plan(model, "int4-g32", recipe={"*.0.*": "int8-g32", "*": "float"})
    assert [block.scheme for block in found.blocks] == ["int8-g32", ""]
    assert [block.action for block in found.blocks] == ["replace", "exclude"]
    found = moepack.plan(model, exclude=["model.layers.1.mlp"])
    assert [block.action for block in found.blocks] == ["replace", "exclude"]


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    model = tiny_models.build("mixtral")
    with pytest.raises(UnsupportedError, match=r"'layers\.7\*' matches no .*model\.layers\.0\.mlp"):
        moepack.plan(model, exclude=["layers.7*"])


def test_unknown_schemes_and_router_modes_are_refused() -> None:
    model = tiny_models.build("mixtral")
    with pytest.raises(UnsupportedError, match="int4-g32"):
        moepack.plan(model, "int3-g32")
    with pytest.raises(UnsupportedError, match="int4-g32"):
        moepack.plan(model, recipe={"*": "int3"})
    with pytest.raises(UnsupportedError, match="auto, outside"):
        moepack.plan(model, router="inside")  # type: ignore[arg-type]


def test_routers_stay_outside_when_asked_or_when_their_logits_are() -> None:
    model = tiny_models.build("mixtral")
    assert {b.router for b in moepack.plan(model, router="outside").blocks} == {"outside"}
    model.config.output_router_logits = True  # type: ignore[union-attr]
    first = moepack.plan(model).blocks[0]
    assert first.router == "outside"
    assert "router logits" in first.why


def test_a_model_without_any_block() -> None:
    found = moepack.plan(nn.Sequential(nn.Linear(4, 4)))
    assert found.blocks == ()
    assert str(found) == "no MoE block found"


def test_a_packed_model() -> None:
    model = moepack.quantize_(tiny_models.build("mixtral")).model
    found = moepack.plan(model)
    assert (found.blocks, found.already_packed) == ((), 2)
    assert "packed already" in str(found)


def test_a_model_without_values_can_be_planned() -> None:
    found = moepack.plan(tiny_models.build("qwen3_moe", device="meta"))
    assert [block.action for block in found.blocks] == ["replace", "replace"]


@pytest.mark.parametrize("top_k", [0, 9])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "phimoe"])
def test_impossible_numbers_of_activated_experts_are_refused(family: str, top_k: int) -> None:
    model = tiny_models.build(family, num_experts_per_tok=top_k)
    found = moepack.plan(model).blocks
    experts = {int(n) for b in found for n in re.findall(r"per token of (\d+)", b.why)}
    assert {b.action for b in found} == {"refuse"}
    assert len(experts) == 1
    assert all(f"{top_k} activated experts per token of" in b.why for b in found)
    with pytest.raises(UnsupportedError, match=f"{top_k} activated experts"):
        moepack.quantize_(model)


def test_a_plan_knows_whether_it_is_possible() -> None:
    model = tiny_models.build("qwen3_moe")
    assert moepack.plan(model).is_possible
    assert moepack.plan(model, exclude="*").is_possible
    moepack.quantize_(model)
    assert moepack.plan(model).is_possible
    assert not moepack.plan(nn.Linear(4, 4)).is_possible
    refused = tiny_models.build("qwen3_moe")
    refused.get_submodule("model.layers.0.mlp.gate").top_k = 99  # type: ignore[assignment]
    assert not moepack.plan(refused).is_possible
