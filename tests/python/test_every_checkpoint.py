"""Packed checkpoints of blocks that keep their own code: written, read, the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import moepack
import tiny_models
from moepack.checkpoint import load_model, save_packed
from moepack.exporter.experts import router_paths
from moepack.modules import PackedExperts

# One of each way in which packed experts stand in a model.
FAMILIES = {
    "gpt_oss": "in place, with biases",
    "gemma4_text": "in place, in a decoder layer",
    "nemotron_h": "in place, without a gate",
    "llama4_text": "a block of our own",
    "longcat_flash": "with identity experts",
    "deepseek_v4": "two kinds of routers outside",
    "dbrx": "a whole block",
    "jetmoe": "a whole block, beside attention experts",
    "nllb-moe": "one by one, in a block's own code",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_reads_what_it_wrote(family: str, tmp_path: Path) -> None:
    model: Any = tiny_models.build(family)
    model.config.save_pretrained(tmp_path / "source")
    moepack.quantize_(model, "int8-g32")
    out = save_packed(model, tmp_path / "source", tmp_path / "packed")
    loaded = load_model(out)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    expected = tiny_models.logits(model, family)
    # Products of float layers depend on how memory is aligned.
    assert torch.allclose(tiny_models.logits(loaded, family), expected, rtol=1e-4, atol=1e-5)
    found = [p for p, m in loaded.named_modules() if isinstance(m, PackedExperts)]
    assert found == [p for p, m in model.named_modules() if isinstance(m, PackedExperts)]


def test_routers_outside_are_known_to_the_exporter() -> None:
    model = moepack.quantize_(tiny_models.build("longcat_flash")).model
    assert any(path.endswith("mlp.router.classifier") for path in router_paths(model))
