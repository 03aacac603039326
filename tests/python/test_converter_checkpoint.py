"""Packed checkpoints from one layout to the other, however they were packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import made_programs
import moepack
from moepack.checkpoint import load_model, save_packed
from moepack.errors import MoePackError, PackedFormatError, UnsupportedError
from moepack.inspection import inspect
from moepack.online import Settings, quantize_checkpoint
from packed_models import logits, packed_modules, same_tensors


def quantized(out: Path) -> Path:
    quantize_checkpoint(
        made_programs.checkpoint("qwen3_moe"), out, Settings(sqnr_floor=0.0, threads=1)
    )
    return out


def saved(out: Path) -> Path:
    source = made_programs.checkpoint("qwen3_moe")
    model = moepack.quantize_(load_model(source), sqnr_floor=0.0).model
    return save_packed(model, source, out)


def by_the_library(out: Path) -> Path:
    from transformers import AutoModelForCausalLM

    config = moepack.MoePackConfig(sqnr_floor=0.0)
    source = made_programs.checkpoint("qwen3_moe")
    AutoModelForCausalLM.from_pretrained(source, quantization_config=config).save_pretrained(out)
    return out


@pytest.mark.parametrize("make", [quantized, saved, by_the_library])
def test_checkpoints_there_and_back(make: Callable[[Path], Path], tmp_path: Path) -> None:
    source = make(tmp_path / "packed")
    done = moepack.convert(source, tmp_path / "there", layout="torchao")
    assert done.result == tmp_path / "there"
    assert done.changes.changed == 0
    assert not inspect(done.result).problems
    original, converted = load_model(source), load_model(done.result)
    assert {module.attributes.layout for module in packed_modules(converted)} == {"torchao"}
    assert torch.equal(logits(original), logits(converted))
    moepack.convert(done.result, tmp_path / "back", layout="moepack")
    for file in source.glob("*.safetensors"):
        assert same_tensors(load_file(tmp_path / "back" / file.name), load_file(file))
    assert torch.equal(logits(load_model(tmp_path / "back")), logits(original))
    index = source / "model.safetensors.index.json"
    if index.is_file():
        assert json.loads((tmp_path / "back" / index.name).read_text()) == json.loads(
            index.read_text()
        )


def test_packing_while_loading_into_torchaos_layout(tmp_path: Path) -> None:
    """By moepack's own streaming and by the library: the tensors of a converted checkpoint."""
    from transformers import AutoModelForCausalLM

    there = moepack.convert(quantized(tmp_path / "packed"), tmp_path / "there", layout="torchao")
    source = made_programs.checkpoint("qwen3_moe")
    settings = Settings(layout="torchao", sqnr_floor=0.0, threads=1)
    quantize_checkpoint(source, tmp_path / "directly", settings)
    for file in there.result.glob("*.safetensors"):
        assert same_tensors(load_file(tmp_path / "directly" / file.name), load_file(file))
    config = moepack.MoePackConfig(layout="torchao", sqnr_floor=0.0)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
    assert {module.attributes.layout for module in packed_modules(model)} == {"torchao"}
    model.save_pretrained(tmp_path / "saved")
    expected = logits(load_model(there.result))
    assert torch.equal(logits(load_model(tmp_path / "saved")), expected)


def test_checkpoints_that_are_refused(tmp_path: Path) -> None:
    float_one = made_programs.checkpoint("qwen3_moe")
    with pytest.raises(MoePackError, match="not packed; `moepack quantize`"):
        moepack.convert(float_one, tmp_path / "out", layout="torchao")
    source = quantized(tmp_path / "packed")
    with pytest.raises(UnsupportedError, match="layout 'moepack' already"):
        moepack.convert(source, tmp_path / "out", layout="moepack")
    with pytest.raises(MoePackError, match="which is never changed"):
        moepack.convert(source, source, layout="torchao")
    with pytest.raises(MoePackError, match="say where"):
        moepack.convert(source, layout="torchao")
    with pytest.raises(MoePackError, match=r"neither a \.pte file"):
        moepack.convert(tmp_path, tmp_path / "out", layout="torchao")
    index = source / "model.safetensors.index.json"
    whole = index.read_bytes()
    index.write_text('{"metadata": 3}', encoding="utf-8")
    with pytest.raises(MoePackError, match="packed: cannot be loaded: AttributeError"):
        moepack.convert(source, tmp_path / "out", layout="torchao")
    index.write_bytes(whole)
    damaged = next(source.glob("experts-*.safetensors"))
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 0x11
    damaged.write_bytes(data)
    with pytest.raises(PackedFormatError, match=r"packed_w. expert .*checksum"):
        moepack.convert(source, tmp_path / "out", layout="torchao")
    assert not (tmp_path / "out").exists()
