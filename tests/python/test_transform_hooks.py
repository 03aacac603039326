"""What hangs on the modules that the transform takes away or leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import moepack
import tiny_models
from moepack.errors import UnsupportedError


def _observe(*_: Any) -> None:
    return None


Attach = Callable[[nn.Module], object]
ATTACHED: dict[str, tuple[Attach, str]] = {
    "hook": (lambda m: m.register_forward_hook(_observe), "forward hook _observe"),
    "pre-hook": (lambda m: m.register_forward_pre_hook(_observe), "forward pre-hook _observe"),
    "forward": (lambda m: setattr(m, "forward", m.forward), "patched forward forward"),
}


@pytest.mark.parametrize("kind", sorted(ATTACHED))
@pytest.mark.parametrize(
    ("family", "path", "part"),
    [
        ("qwen2_moe", "model.layers.1.mlp", ""),
        ("qwen2_moe", "model.layers.1.mlp", "experts"),
        ("qwen2_moe", "model.layers.1.mlp", "experts.act_fn"),
        ("qwen2_moe", "model.layers.1.mlp", "gate"),
        ("gpt_oss", "model.layers.1.mlp", "router"),  # keeps its own code
        ("gpt_oss", "model.layers.1.mlp", "experts"),
        ("phimoe", "model.layers.1.mlp", "experts"),  # router outside
        ("llama4_text", "model.layers.1.feed_forward", ""),  # a new module around both
        ("llama4_text", "model.layers.1.feed_forward", "experts"),
    ],
)
def test_what_hangs_on_parts_that_go_is_refused(
    family: str, path: str, part: str, kind: str
) -> None:
    model = tiny_models.build(family)
    attach, words = ATTACHED[kind]
    attach(model.get_submodule(f"{path}.{part}" if part else path))
    before = dict(model.named_modules())
    name = part.replace(".", r"\.") or "the block itself"
    with pytest.raises(UnsupportedError, match=rf"{path} .*{words} on {name}; remove.*exclude="):
        moepack.quantize_(model)
    assert dict(model.named_modules()) == before
    report = moepack.quantize_(model, exclude=[path])
    assert [block.path for block in report.blocks] == [path.replace("1", "0")]


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("qwen2_moe", "shared_expert"),
        ("qwen2_moe", "shared_expert_gate"),
        ("gpt_oss", ""),
        ("phimoe", ""),
        ("phimoe", "router"),
        ("llama4_text", "router"),
        ("llama4_text", "shared_expert"),
        ("muse_spark_text", "experts.post_expert_norm"),
    ],
)
def test_what_hangs_on_parts_that_stay_still_runs(family: str, part: str) -> None:
    model = tiny_models.build(family)
    path = moepack.plan(model).blocks[0].path
    staying = model.get_submodule(f"{path}.{part}" if part else path)
    seen: list[nn.Module] = []
    staying.register_forward_hook(lambda m, *_: seen.append(m))
    moepack.quantize_(model)
    seen.clear()  # verification runs copies of blocks, hooks and all
    tiny_models.logits(model)
    assert seen == [staying]


def test_what_transformers_hangs_on_every_router_is_no_obstacle() -> None:
    model = tiny_models.build("qwen3_moe")
    with torch.no_grad():
        model(torch.arange(4)[None], output_router_logits=True)
    assert model.get_submodule("model.layers.0.mlp.gate")._forward_hooks
    assert len(moepack.quantize_(model).blocks) == 2
