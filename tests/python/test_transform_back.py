"""Packed models go back to float, and are packed again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moepack
import tiny_models
from block_traffic import block_traffic, sqnr_db
from moepack.errors import NoMoEBlock
from moepack.modules import PackedExperts


@pytest.mark.parametrize("family", ["deepseek_v3", "phimoe", "qwen2_moe"])
def test_back_to_float(family: str) -> None:
    model = moepack.quantize_(tiny_models.build(family), "int8-g32").model
    path = next(n for n, m in model.named_modules() if isinstance(m, PackedExperts))
    path = path.removesuffix(".experts")
    (call,) = block_traffic(model, [path]).values()
    restored = moepack.dequantize_(model)
    assert not any(isinstance(m, PackedExperts) for m in restored.modules())
    assert (
        sqnr_db(call.repeat(restored.get_submodule(path)), call.output) > 28
    )  # what is left is the rounding of activations
    assert tiny_models.logits(restored).isfinite().all()
    with pytest.raises(NoMoEBlock, match="no module packed"):
        moepack.dequantize_(restored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3",
        "qwen2_moe",
        "gpt_oss",  # experts that route in a block that keeps its own code
        "gemma4_text",  # and its router's input goes through a norm
        "phimoe",  # router outside
        "nemotron_h",
        "longcat_flash",  # a wrapper around the packed experts
        "llama4_text",
        "muse_spark_text",
    ],
)
def test_packed_again_after_going_back_to_float(family: str, dtype: torch.dtype) -> None:
    model = moepack.quantize_(tiny_models.build(family), "int8-g32").model
    before, kinds = tiny_models.logits(model), [type(m) for m in model.modules()]
    report = moepack.quantize_(moepack.dequantize_(model, dtype), "int8-g32")
    assert [type(m) for m in report.model.modules()] == kinds
    assert all(block.adapter_error is not None for block in report.blocks)
    if dtype == torch.float32:
        assert torch.equal(tiny_models.logits(report.model), before)


def test_back_to_float_keeps_ties_and_roots() -> None:
    block = moepack.quantize_(tiny_models.executorch_block()).model
    tied = nn.ModuleDict({"a": block, "b": block})
    moepack.dequantize_(tied)
    assert tied["a"] is tied["b"]
    assert moepack.dequantize_(block) is not block
