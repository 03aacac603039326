"""Loading checkpoints, and packed ones written and read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import moepack
from made_programs import (
    FAMILIES,
    checkpoint,
    copied,
    made_model,
    write_checkpoint,
)
from moepack.checkpoint import empty_model, load_model, save_packed
from moepack.errors import BadWeights, MoePackError
from moepack.manifest import PACKED_FILE
from moepack.online import quantize_checkpoint

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
    with pytest.raises(MoePackError, match=f"{name}: .*(damaged|JSON)") as caught:
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


@pytest.mark.parametrize(
    ("family", "settings", "expected"),
    [
        ("qwen3_moe", {"num_hidden_layers": 3}, r"lacks 11 tensors .*model\.layers\.2\."),
        ("qwen3_moe", {"num_hidden_layers": 1}, r"11 stored tensors .*model\.layers\.1\."),
        (
            "mixtral",
            {"num_local_experts": 2},
            r"down_proj is stored as \[4, 64, 32\].* \[2, 64, 32\]",
        ),
        (
            "mixtral",
            {"num_local_experts": 8},
            r"down_proj is stored as \[4, 64, 32\].* \[8, 64, 32\]",
        ),
        ("qwen3_moe", {"moe_intermediate_size": 64}, r"\[8, 64, 32\].* \[8, 64, 64\]"),
    ],
)
def test_config_of_another_model_is_refused(
    family: str, settings: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    directory = copied(checkpoint(family), tmp_path / "model")
    _change_config(directory, settings)
    with pytest.raises(BadWeights, match=expected):
        load_model(directory)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.mlp.gate.weight"])
def test_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    directory = _without(checkpoint("qwen3_moe"), tmp_path / "model", name)
    with pytest.raises(BadWeights, match=f"lacks 1 tensors .*{name}"):
        load_model(directory)


def test_missing_matrix_of_one_expert_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    directory = _without(checkpoint("qwen3_moe"), tmp_path / "model", name)
    with pytest.raises(MoePackError, match=name):
        load_model(directory)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.experts.3.up_proj.weight", "model.embed_tokens.weight"]
)
def test_integers_are_no_weights(name: str, tmp_path: Path) -> None:
    directory = copied(checkpoint("qwen3_moe"), tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    tensors[name] = (100 * tensors[name]).to(torch.int32)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadWeights, match=f"{name} is stored as I32"):
        load_model(directory)


@pytest.mark.parametrize("text", ["{", "[]", "", '{"eos_token_id": 2'])
def test_broken_generation_config_is_refused(text: str, tmp_path: Path) -> None:
    directory = copied(checkpoint("mixtral"), tmp_path / "model")
    (directory / "generation_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(MoePackError, match=r"generation_config\.json: .*JSON"):
        load_model(directory)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("layers", "expected"), [(1, "no place"), (3, "lacks")])
def test_packed_checkpoints_are_held_to_the_same(
    layers: int, expected: str, streamed: bool, tmp_path: Path
) -> None:
    out = tmp_path / "packed"
    model = made_model("olmoe", num_hidden_layers=2)
    source = write_checkpoint(model, tmp_path / "model")
    if streamed:
        quantize_checkpoint(source, out)
    else:
        loaded = load_model(source)
        moepack.quantize_(loaded)
        save_packed(loaded, source, out)
        description = json.loads((out / PACKED_FILE).read_text(encoding="utf-8"))
        if layers == 1:
            del description["blocks"]["model.layers.1.mlp"]
            (out / PACKED_FILE).write_text(json.dumps(description), encoding="utf-8")
    content = json.loads((out / "config.json").read_text(encoding="utf-8"))
    if streamed:
        settings = content["quantization_config"]
        settings["modules"] = [m for m in settings["modules"] if layers > 1 or ".1." not in m[0]]
    (out / "config.json").write_text(json.dumps(content), encoding="utf-8")
    _change_config(out, {"num_hidden_layers": layers})
    with pytest.raises(BadWeights, match=expected):
        load_model(out)


# The library's model would take more memory than there is, before anything is compared.
@pytest.mark.parametrize("is_packed", [False, True])
def test_config_of_any_size_is_refused_without_memory_for_it(
    is_packed: bool, tmp_path: Path
) -> None:
    directory = _made(tmp_path, is_packed)
    _change_config(directory, {"vocab_size": 1 << 40})
    expected = "1099511627776" if is_packed else r"asks for [\d,]{18,} weights"
    with pytest.raises(BadWeights, match=expected):
        load_model(directory)


# Each layer takes time to make, before anything is compared.
@pytest.mark.parametrize("is_packed", [False, True])
def test_more_layers_than_tensors_are_refused_unmade(is_packed: bool, tmp_path: Path) -> None:
    directory = _made(tmp_path, is_packed)
    _change_config(directory, {"num_hidden_layers": 1 << 40})
    expected = r"asks for 1,099,511,627,776 layers, and the files hold \d+ tensors"
    with pytest.raises(BadWeights, match=expected):
        load_model(directory)
    if not is_packed:
        with pytest.raises(BadWeights, match=expected):
            quantize_checkpoint(directory, tmp_path / "out")


def _made(folder: Path, is_packed: bool) -> Path:
    source = write_checkpoint(made_model("olmoe"), folder / "model")
    if not is_packed:
        return source
    loaded = load_model(source)
    moepack.quantize_(loaded)
    return save_packed(loaded, source, folder / "packed")


def _change_config(directory: Path, settings: dict[str, Any]) -> None:
    file = directory / "config.json"
    content = json.loads(file.read_text(encoding="utf-8")) | settings
    file.write_text(json.dumps(content), encoding="utf-8")


def _without(source: Path, target: Path, name: str) -> Path:
    directory = copied(source, target)
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
