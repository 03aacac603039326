"""Models in memory and state dicts from one layout to the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moepack
import tiny_models
from moepack.errors import MoePackError, PackedFormatError, UnsupportedError
from packed_models import W2, logits, packed_modules, same_tensors, tiny, weights


def test_a_model_there_and_back() -> None:
    model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected, kept = logits(model), weights(model)
    done = moepack.convert(model, layout="torchao")
    assert done.result is model
    assert done.changes.changed == 0
    assert done.changes.scales > 0
    assert {module.attributes.layout for module in packed_modules(model)} == {"torchao"}
    assert all(torch.equal(a, b) for a, b in zip(weights(model), kept, strict=True))
    # Not one bit: fp16 scales times a power of two are the same numbers as fp32 ones.
    assert torch.equal(logits(model), expected)
    moepack.convert(model, layout="moepack")
    assert torch.equal(logits(model), expected)
    assert same_tensors(dict(model.state_dict()), before)


def test_quantizing_into_torchaos_layout_is_the_same_as_converting() -> None:
    converted, packed = tiny(), tiny("torchao")
    moepack.convert(converted, layout="torchao")
    assert same_tensors(dict(converted.state_dict()), dict(packed.state_dict()))
    moepack.dequantize_(converted)
    assert torch.isfinite(logits(converted)).all()


def test_what_is_in_the_layout_already_or_does_not_fit() -> None:
    with pytest.raises(UnsupportedError, match="nothing to convert"):
        moepack.convert(tiny(), layout="moepack")
    with pytest.raises(UnsupportedError, match="nothing to convert"):
        moepack.convert(nn.Linear(2, 2), layout="torchao")
    with pytest.raises(UnsupportedError, match="supported: moepack, torchao"):
        moepack.convert(tiny(), layout="gguf")
    odd = moepack.quantize_(tiny_models.build("qwen3_moe", odd=True), sqnr_floor=0.0).model
    before = odd.state_dict()
    with pytest.raises(UnsupportedError, match=r"mlp packed_w13: .*no incomplete\s+groups"):
        moepack.convert(odd, layout="torchao")
    assert odd.state_dict().keys() == before.keys()
    plan = moepack.plan(tiny_models.build("qwen3_moe", odd=True), layout="torchao")
    assert all("no incomplete" in block.why for block in plan.refused)
    assert plan.refused


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_state_dicts(family: str) -> None:
    """With a gate beside the experts, without one, and with experts that have no gate of theirs."""
    model = tiny(family=family)
    state = dict(model.state_dict())
    there = moepack.convert(state, layout="torchao").result
    expected = dict(moepack.convert(model, layout="torchao").result.state_dict())
    assert same_tensors(there, expected)
    back = moepack.convert(there, layout="moepack", scheme="int4-g32", dim=tiny_models.WIDTH)
    assert back.changes.changed == 0
    assert same_tensors(back.result, state)


def test_state_dicts_that_do_not_say_enough() -> None:
    state = dict(tiny("torchao").state_dict())
    with pytest.raises(UnsupportedError, match="pass scheme="):
        moepack.convert(state, layout="moepack")
    with pytest.raises(MoePackError, match="packed_w13"):
        moepack.convert(state, layout="moepack", scheme="int4-g64")
    without = {name: t for name, t in state.items() if not name.endswith("gate_weight")}
    with pytest.raises(UnsupportedError, match="dim="):
        moepack.convert(without, layout="moepack", scheme="int4-g32")
    alone = {name: t for name, t in state.items() if not name.endswith(W2)}
    with pytest.raises(PackedFormatError, match="packed_w2 is missing"):
        moepack.convert(alone, layout="moepack", scheme="int4-g32")
    with pytest.raises(UnsupportedError, match="nothing to convert"):
        moepack.convert({}, layout="moepack")
