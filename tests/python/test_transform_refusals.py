"""What stops the transform, and that it leaves everything as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import moepack
import tiny_models
from moepack.errors import BadWeights, NoMoEBlock, UnsupportedError, VerificationError
from moepack.modules import PackedExperts, QuantizedMoEFFN


def test_without_a_block() -> None:
    with pytest.raises(NoMoEBlock, match="Sequential holds no MoE block"):
        moepack.quantize_(nn.Sequential(nn.Linear(4, 4)))


def test_a_model_on_the_meta_device() -> None:
    with pytest.raises(BadWeights, match=r"model\.layers\.0\.mlp: .*meta device"):
        moepack.quantize_(tiny_models.build("qwen3_moe", device="meta"))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("verify", [True, False])
def test_a_weight_that_is_not_finite_is_named_and_nothing_is_touched(
    bad: float, verify: bool
) -> None:
    model = tiny_models.build("mixtral")
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.experts.down_proj")[5, 33, 7] = bad
    before = dict(model.named_modules())
    with pytest.raises(BadWeights, match=r"model\.layers\.1\.mlp expert 5 w2: row 33, column 7"):
        moepack.quantize_(model, verify=verify)
    assert dict(model.named_modules()) == before


def test_a_router_weight_that_is_not_finite() -> None:
    model = tiny_models.build("mixtral")
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.gate.weight")[3, 1] = math.nan
    with pytest.raises(BadWeights, match=r"model\.layers\.0\.mlp router gate_weight: row 3"):
        moepack.quantize_(model)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gate.weight", "experts.down_proj", "experts.gate_up_proj"])
def test_an_original_that_overflows_is_named_before_anything_is_touched(name: str) -> None:
    model = tiny_models.build("mixtral")
    weight = model.get_parameter(f"model.layers.1.mlp.{name}")
    weight.copy_(weight.sign() * 3e38)
    before = dict(model.named_modules())
    expected = r"model\.layers\.1\.mlp: the original block's own result .* is not finite in float32"
    with pytest.raises(VerificationError, match=expected):
        moepack.quantize_(model)
    assert dict(model.named_modules()) == before
    report = moepack.quantize_(model, exclude=["model.layers.1.mlp"])
    assert [block.path for block in report.blocks] == ["model.layers.0.mlp"]


@torch.no_grad()
def test_a_kernel_that_overflows_where_the_original_does_not() -> None:
    model = tiny_models.build("mixtral")
    model.get_parameter("model.layers.1.mlp.experts.gate_up_proj").mul_(1e17)
    with pytest.raises(VerificationError, match=r"model\.layers\.1\.mlp: packed experts overflow"):
        moepack.quantize_(model)


def test_the_floor_stops_the_transform_at_the_block() -> None:
    model = tiny_models.build("mixtral")
    floors = {"model.layers.1.*": 90.0}
    with pytest.raises(VerificationError, match=r"model\.layers\.1\.mlp: int4-g32 .*floor is 90"):
        moepack.quantize_(model, sqnr_floor=floors)
    assert isinstance(model.get_submodule("model.layers.0.mlp"), QuantizedMoEFFN)
    assert not isinstance(model.get_submodule("model.layers.1.mlp"), PackedExperts)
    report = moepack.quantize_(model, sqnr_floor={"model.layers.1.mlp": 0.0})
    assert [block.path for block in report.blocks] == ["model.layers.1.mlp"]
    assert tiny_models.logits(report.model).isfinite().all()


@pytest.mark.parametrize("floor", [math.nan, "x", True, {"*": math.nan}, {"*": None}])
@pytest.mark.parametrize("verify", [True, False])
def test_a_floor_that_is_no_number_is_refused(floor: Any, verify: bool) -> None:
    model = tiny_models.executorch_block()
    with pytest.raises(UnsupportedError, match=r"sqnr_floor(\['\*'\])? is .*supported: a number"):
        moepack.quantize_(model, sqnr_floor=floor, verify=verify)


def test_a_root_that_is_no_module_is_refused() -> None:
    for call in (moepack.quantize_, moepack.plan):
        with pytest.raises(UnsupportedError, match=r"model is NoneType; .*nn\.Module"):
            call(None)  # type: ignore[arg-type]


def test_one_pattern_may_be_a_string() -> None:
    model = tiny_models.build("mixtral")
    report = moepack.quantize_(model, exclude="*.1.mlp")
    assert [block.path for block in report.blocks] == ["model.layers.0.mlp"]


@pytest.mark.parametrize("arguments", [{"exclude": [1]}, {"exclude": 3}, {"recipe": "float"}])
def test_patterns_that_are_no_strings_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=f"{next(iter(arguments))} is .*supported: "):
        moepack.quantize_(tiny_models.executorch_block(), **arguments)


def test_floor_for_no_block_is_an_error() -> None:
    model = tiny_models.build("qwen3_moe")
    with pytest.raises(UnsupportedError, match=r"'\*\.layer\.0\*' matches no MoE block; blocks: "):
        moepack.quantize_(model, sqnr_floor={"*": 5.0, "*.layer.0*": 7.0})
    assert not any(isinstance(module, PackedExperts) for module in model.modules())
