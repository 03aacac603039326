"""from_pretrained and save_pretrained of transformers with MoePackConfig."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.quantizers.auto import AutoHfQuantizer

import moepack
import tiny_models
from made_checkpoints import copied, rewrite, saved, stored_tensors
from moepack import MoePackConfig
from moepack.errors import BadWeights, NoMoEBlock, UnsupportedError, VerificationError
from moepack.modules import PackedExperts
from moepack.online.loading import load_packed

FAMILIES = [
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss"),
    *("minimax_m2", "lfm2_moe", "granitemoe", "phimoe", "llama4_text", "hy_v3", "sarvam_moe"),
    *("gemma4_text", "jetmoe", "dbrx", "nemotron_h", "longcat_flash", "kolibri1"),
    *("switch_transformers", "nllb-moe"),
]


def load(model_class: Any, directory: Path, **options: Any) -> Any:
    return model_class.from_pretrained(directory, **({"dtype": torch.float32} | options)).eval()


def assert_same_state(found: nn.Module, expected: nn.Module) -> None:
    a, b = found.state_dict(), expected.state_dict()
    assert a.keys() == b.keys()
    assert [n for n in b if a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bytes_as_after_loading_and_through_disk(family: str, tmp_path: Path) -> None:
    model = tiny_models.build(family)
    kind, directory = type(model), saved(model, tmp_path / "float")
    expected = moepack.quantize_(load(kind, directory), verify=False).model
    found = load(kind, directory, quantization_config=MoePackConfig(scheme="int4-g32"))
    assert_same_state(found, expected)
    logits = tiny_models.logits(expected, family)
    assert torch.equal(tiny_models.logits(found, family), logits)

    found.save_pretrained(tmp_path / "packed", max_shard_size="60KB")
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) > 1
    again = load(kind, tmp_path / "packed")
    assert_same_state(again, expected)
    assert torch.equal(tiny_models.logits(again, family), logits)
    assert_same_state(load_packed(tmp_path / "packed"), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "gpt_oss"])
def test_other_dtypes(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_models.build(family)
    kind, directory = type(model), saved(model, tmp_path / "float")
    expected = moepack.quantize_(load(kind, directory, dtype=dtype), verify=False).model
    found = load(kind, directory, dtype=dtype, quantization_config=MoePackConfig())
    assert_same_state(found, expected)
    found.save_pretrained(tmp_path / "packed")
    assert_same_state(load(kind, tmp_path / "packed", dtype=dtype), expected)
    assert_same_state(load_packed(tmp_path / "packed", dtype=dtype), expected)


def test_patterns_choose_schemes(tmp_path: Path) -> None:
    model = tiny_models.build("mixtral", num_hidden_layers=4)
    directory = saved(model, tmp_path / "float")
    config = MoePackConfig(
        scheme="int4-g64",
        modules={"model.layers.0.*": "int8-g32", "*.[01].mlp": "float"},
        exclude=["model.layers.2.mlp"],
        router="outside",
    )
    found = load(AutoModelForCausalLM, directory, quantization_config=config)
    schemes = {p: m.scheme for p, m in found.named_modules() if isinstance(m, PackedExperts)}
    expected = {"0": "int8-g32", "3": "int4-g64"}
    assert schemes == {f"model.layers.{n}.mlp.experts": s for n, s in expected.items()}
    found.save_pretrained(tmp_path / "packed")
    stored = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == "moepack"
    assert [pattern for pattern, _ in stored["modules"]] == ["model.layers.0.*", "*.[01].mlp"]
    assert_same_state(load(AutoModelForCausalLM, tmp_path / "packed"), found)


def test_what_matches_nothing_and_what_has_no_experts(tmp_path: Path) -> None:
    directory = saved(tiny_models.build("qwen3_moe"), tmp_path / "moe")
    config = MoePackConfig(modules={"model.layers.7.*": "float"})
    with pytest.raises(UnsupportedError, match=r"'model\.layers\.7\.\*' matches no MoE block"):
        load(AutoModelForCausalLM, directory, quantization_config=config)
    with pytest.raises(UnsupportedError, match="int3"):
        load(AutoModelForCausalLM, directory, quantization_config=MoePackConfig("int3-g32"))
    dense = saved(tiny_models.build("qwen3_moe", mlp_only_layers=[0, 1]), tmp_path / "dense")
    with pytest.raises(NoMoEBlock):
        load(AutoModelForCausalLM, dense, quantization_config=MoePackConfig())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("experts.5.up_proj", "nan", r"layers\.1\.mlp expert 5 w13: .*row 8\d*"),
        ("experts.5.up_proj", "missing", r"conversion of the weights"),
        ("gate", "missing", r"lacks.*layers\.1\.mlp\.gate\.weight"),
    ],
)
def test_bad_checkpoints_are_errors(name: str, change: str, message: str, tmp_path: Path) -> None:
    directory = saved(tiny_models.build("qwen3_moe"), tmp_path / "float")
    tensors = stored_tensors(directory)
    full = f"model.layers.1.mlp.{name}.weight"
    if change == "missing":
        del tensors[full]
    else:
        tensors[full][8, 3] = torch.nan
    rewrite(directory, tensors)
    message = message.replace("row 8\\d*", "row 40")  # the rows of up follow those of gate
    with pytest.raises((BadWeights, RuntimeError), match=message):
        load(AutoModelForCausalLM, directory, quantization_config=MoePackConfig())


def test_a_class_that_computes_something_else_stops_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = saved(tiny_models.build("qwen3_moe"), tmp_path)
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block

    original = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: 1.01 * original(self, x))
    with pytest.raises(VerificationError, match=r"layers\.0\.mlp: moepack's reading"):
        load(AutoModelForCausalLM, directory, quantization_config=MoePackConfig())


def test_a_packed_checkpoint_that_lacks_a_buffer(tmp_path: Path) -> None:
    directory = saved(tiny_models.build("qwen3_moe"), tmp_path / "float")
    found = load(AutoModelForCausalLM, directory, quantization_config=MoePackConfig())
    found.save_pretrained(tmp_path / "packed")
    tensors: dict[str, Tensor] = stored_tensors(tmp_path / "packed")
    del tensors["model.layers.1.mlp.gate_weight"]
    damaged = copied(tmp_path / "packed", tmp_path / "damaged", tensors)
    with pytest.raises(BadWeights, match=r"lacks.*layers\.1\.mlp\.gate_weight"):
        load(AutoModelForCausalLM, damaged)
    with pytest.raises(BadWeights, match=r"layers\.1\.mlp\.gate_weight"):
        load_packed(damaged)


def test_reload_into_a_model_from_pretrained(tmp_path: Path) -> None:
    a = saved(tiny_models.build("deepseek_v3"), tmp_path / "a")
    b = saved(tiny_models.build("deepseek_v3", seed=3), tmp_path / "b")
    for dtype in (torch.float32, torch.bfloat16):
        options: dict[str, Any] = {"dtype": dtype, "quantization_config": MoePackConfig()}
        found = load(AutoModelForCausalLM, a, **options)
        found.load_state_dict({n: t.clone() for n, t in found.state_dict().items()}, assign=True)
        moepack.reload_weights(found, b)
        assert_same_state(found, load(AutoModelForCausalLM, b, **options))


def test_base_models_too(tmp_path: Path) -> None:
    directory = saved(tiny_models.build("qwen3_moe"), tmp_path)
    found = load(AutoModel, directory, quantization_config=MoePackConfig())
    expected = moepack.quantize_(load(AutoModel, directory), verify=False).model
    assert_same_state(found, expected)


def test_another_device_is_refused() -> None:
    # Asked directly: from_pretrained takes a device_map only where accelerate is installed.
    quantizer = AutoHfQuantizer.from_config(MoePackConfig())
    for device_map in ({"": "meta"}, {"model": "cpu", "lm_head": "cuda:0"}, "cuda"):
        with pytest.raises(UnsupportedError, match="run on the CPU"):
            quantizer.validate_environment(device_map=device_map)
    for accepted in (None, "cpu", "auto", {"": "cpu"}):
        quantizer.validate_environment(device_map=accepted)


def test_importing_moepack_loads_no_transformers() -> None:
    code = "import sys, moepack, moepack.modules; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_pattern_to_exclude_may_be_a_string() -> None:
    assert MoePackConfig(exclude="*.1.mlp").exclude == ["*.1.mlp"]
