"""Loading checkpoints, and packed ones written and read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import moepack
from made_programs import (
    FAMILIES,
    checkpoint,
    copied,
    made_model,
    write_checkpoint,
)
from moepack.checkpoint import PACKED_FILE, empty_model, load_model, save_packed
from moepack.errors import MoePackError

IDS = torch.arange(3, 20)[None]


@pytest.mark.parametrize("router", ["auto", "outside"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_checkpoint_gives_the_same_bits(family: str, router: str, tmp_path: Path) -> None:
    model = load_model(checkpoint(family))
    moepack.quantize_(model, router=router)  # type: ignore[arg-type]
    out = save_packed(model, checkpoint(family), tmp_path / "packed")
    loaded = load_model(out)
    with torch.inference_mode():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    names = {name for name, _ in loaded.named_buffers()} & {n for n, _ in model.named_buffers()}
    assert any(name.endswith("packed_w13") for name in names)
    assert (out / "tokenizer.json").is_file()


def test_tied_tensors_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    model = made_model("qwen3_moe", tie_word_embeddings=True)
    source = write_checkpoint(model, tmp_path / "model")
    loaded = load_model(source)
    moepack.quantize_(loaded)
    again = load_model(save_packed(loaded, source, tmp_path / "packed"))
    assert json.loads((tmp_path / "packed" / PACKED_FILE).read_text(encoding="utf-8"))["ties"]
    assert again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    with torch.inference_mode():
        assert torch.equal(again(IDS).logits, loaded(IDS).logits)


def test_empty_model_has_shapes_and_no_values() -> None:
    model = empty_model(checkpoint("mixtral"))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    decided = moepack.plan(model)
    assert [block.num_experts for block in decided.replaced] == [4]


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(MoePackError, match="no such directory"):
        load_model(tmp_path / "absent")
    with pytest.raises(MoePackError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(MoePackError, match=r"safetensors"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_damaged_checkpoint_is_one_line(tmp_path: Path, name: str) -> None:
    directory = copied(checkpoint("mixtral"), tmp_path / "model")
    content = (directory / name).read_bytes()
    (directory / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(MoePackError, match="cannot be loaded") as caught:
        load_model(directory)
    assert "\n" not in str(caught.value)


def test_newer_packed_format_is_refused(tmp_path: Path) -> None:
    model = load_model(checkpoint("mixtral"))
    moepack.quantize_(model)
    out = save_packed(model, checkpoint("mixtral"), tmp_path / "packed")
    content = json.loads((out / PACKED_FILE).read_text(encoding="utf-8"))
    (out / PACKED_FILE).write_text(json.dumps(content | {"format": 99}), encoding="utf-8")
    with pytest.raises(MoePackError, match="format 99"):
        load_model(out)
