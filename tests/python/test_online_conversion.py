"""A checkpoint packed on the disk: the bytes of `load`, what is left as it was, interruptions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import tiny_models
from made_checkpoints import copied, encoded, fp8_block, saved, stored_tensors
from moepack import MoePackConfig, checkpoint
from moepack.errors import BadWeights, MoePackError, NoMoEBlock, UnsupportedError
from moepack.modules import PackedExperts
from moepack.online import Settings, conversion, load, quantize_checkpoint
from moepack.online.loading import load_packed

ONE = Settings(threads=1)
FAMILIES = [
    *("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "granitemoe", "dbrx"),
    *("gemma4_text", "jetmoe", "hy_v3", "sarvam_moe", "minimax_m2", "nemotron_h", "phimoe"),
    *("switch_transformers", "nllb-moe"),
]


def assert_same_state(found: nn.Module, expected: nn.Module) -> None:
    a, b = found.state_dict(), expected.state_dict()
    assert a.keys() == b.keys()
    assert [n for n in b if a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_of_load(family: str, tmp_path: Path) -> None:
    source = saved(tiny_models.build(family), tmp_path / "float")
    done = quantize_checkpoint(source, tmp_path / "packed", ONE)
    expected = load(source, ONE).model
    found = load_packed(tmp_path / "packed")
    assert_same_state(found, expected)
    assert torch.equal(tiny_models.logits(found, family), tiny_models.logits(expected, family))
    assert len(done.blocks) == sum(isinstance(m, PackedExperts) for m in expected.modules())
    assert all(block.worst_weight_db and block.worst_weight_db > 10 for block in done.blocks)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["float", "packed"]


def test_transformers_and_the_commands_read_it(tmp_path: Path) -> None:
    source = saved(tiny_models.build("qwen3_moe"), tmp_path / "float")
    quantize_checkpoint(source, tmp_path / "packed", Settings("int8-g64", threads=2))
    assert MoePackConfig is not None
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32).eval()
    expected = load(source, Settings("int8-g64", threads=1)).model
    assert_same_state(found, expected)
    assert torch.equal(tiny_models.logits(found), tiny_models.logits(expected))
    assert_same_state(checkpoint.load_model(tmp_path / "packed"), expected)


def test_schemes_by_pattern_and_layers_left_as_they_were(tmp_path: Path) -> None:
    model = tiny_models.build("mixtral", num_hidden_layers=4)
    source = saved(model, tmp_path / "float")
    stored, exact = encoded(
        stored_tensors(source),
        lambda n, t: fp8_block(n, t) if "proj" in n or "experts" in n else None,
    )
    fp8 = copied(source, tmp_path / "fp8", stored)
    settings = Settings("int4-g64", recipe={"*.1.mlp": "int8-g32"}, exclude=["*.2.mlp"], threads=1)
    quantize_checkpoint(fp8, tmp_path / "packed", settings)
    found = stored_tensors(tmp_path / "packed")
    left = {n for n in stored if "block_sparse_moe" not in n or "layers.2." in n}
    assert left < found.keys()
    for name in left:
        assert found[name].dtype == stored[name].dtype
        assert torch.equal(found[name].view(torch.uint8), stored[name].view(torch.uint8))
    assert not any("experts" in n and "layers.2." not in n for n in found)
    expected = load(copied(source, tmp_path / "exact", exact), settings).model
    assert_same_state(load_packed(tmp_path / "packed"), expected)
    with pytest.raises(UnsupportedError, match=r"is stored as F8_E4M3, which.*load_packed"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


@pytest.mark.parametrize("size", [0, 20])
def test_progress_that_was_cut_short_is_none(tmp_path: Path, size: int) -> None:
    source = saved(tiny_models.build("qwen3_moe"), tmp_path / "float")

    def interrupt(*what: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "out", ONE, progress=interrupt)
    state = tmp_path / ".out.unfinished/moepack-progress.json"
    state.write_bytes(state.read_bytes()[:size])
    assert quantize_checkpoint(source, tmp_path / "out", ONE).resumed == 0


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(tiny_models.build("qwen3_moe", num_hidden_layers=4), tmp_path / "float")
    out = tmp_path / "packed"
    seen: list[str] = []

    def interrupt(what: str, done: int, total: int) -> None:
        seen.append(what)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, out, ONE, progress=interrupt)
    assert not out.exists()
    done = quantize_checkpoint(source, out, ONE, progress=lambda *what: seen.append(what[0]))
    assert done.resumed == 2
    assert [what for what in seen if what.startswith("packing")] == [
        f"packing model.layers.{n}.mlp" for n in range(4)
    ]
    assert_same_state(load_packed(out), load(source, ONE).model)


def test_other_settings_begin_anew(tmp_path: Path) -> None:
    source = saved(tiny_models.build("qwen3_moe"), tmp_path / "float")

    def interrupt(*what: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "out", ONE, progress=interrupt)
    other = Settings("int8-g32", threads=1)
    assert quantize_checkpoint(source, tmp_path / "out", other).resumed == 0
    assert_same_state(load_packed(tmp_path / "out"), load(source, other).model)


def test_refusals_name_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(tiny_models.build("qwen3_moe"), tmp_path / "float")
    with pytest.raises(MoePackError, match="is the source"):
        quantize_checkpoint(source, source, ONE)
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: usage(9, 9, 1000))
        with pytest.raises(MoePackError, match=r"[\d,]+ more bytes of disk.*1,000 are free"):
            quantize_checkpoint(source, tmp_path / "out", ONE)
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "available_bytes", lambda: 1000)
        with pytest.raises(MoePackError, match=r"memory are needed.*1,000 are available"):
            quantize_checkpoint(source, tmp_path / "out", ONE)
    quantize_checkpoint(source, tmp_path / "out", ONE)
    with pytest.raises(MoePackError, match="--force"):
        quantize_checkpoint(source, tmp_path / "out", ONE)
    quantize_checkpoint(source, tmp_path / "out", ONE, force=True)


@pytest.mark.parametrize("out", ["float", "float/packed", "."])
def test_source_and_foreign_files_are_kept(tmp_path: Path, out: str) -> None:
    source = saved(tiny_models.build("qwen3_moe"), tmp_path / "all" / "float")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(MoePackError, match="the source"):
        quantize_checkpoint(source, tmp_path / "all" / out, ONE, force=True)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").touch()
    with pytest.raises(MoePackError, match=r"notes\.txt"):
        quantize_checkpoint(source, foreign, ONE, force=True)
    assert sorted(tmp_path.rglob("*")) == sorted([*before, foreign, foreign / "notes.txt"])


@pytest.mark.parametrize("exclude", [["*"], ["*.0.mlp", "*.1.mlp"]])
def test_nothing_to_quantize_is_said_first(tmp_path: Path, exclude: list[str]) -> None:
    source = saved(tiny_models.build("qwen3_moe"), tmp_path / "float")
    with pytest.raises(NoMoEBlock, match="nothing to quantize"):
        quantize_checkpoint(source, tmp_path / "out", Settings(exclude=exclude, threads=1))
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("layer", [0, 2])
def test_a_failure_leaves_nothing_or_says_where_it_lies(tmp_path: Path, layer: int) -> None:
    float_ = saved(tiny_models.build("qwen3_moe", num_hidden_layers=3), tmp_path / "float")
    tensors = stored_tensors(float_)
    tensors[f"model.layers.{layer}.mlp.experts.1.up_proj.weight"].fill_(torch.nan)
    source = copied(float_, tmp_path / "bad", tensors)
    stage = tmp_path / ".out.unfinished"
    with pytest.raises(BadWeights, match="expert 1") as caught:
        quantize_checkpoint(source, tmp_path / "out", ONE)
    assert stage.exists() == (layer == 2) == (str(stage) in str(caught.value))
    assert not (tmp_path / "out").exists()


def test_integers_and_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    source = saved(tiny_models.build("qwen3_moe", num_hidden_layers=2), tmp_path / "float")
    tensors = stored_tensors(source)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    codes = tensors | {name: (100 * tensors[name]).to(torch.int32)}
    other = tensors | {"model.layers.2.mlp.gate.weight": torch.zeros(2, 2)}
    for number, (changed, expected) in enumerate(
        [(codes, f"{name} is stored as I32"), (other, "no place .*layers.2.mlp.gate.weight")]
    ):
        directory = copied(source, tmp_path / str(number), changed)
        with pytest.raises(BadWeights, match=expected):
            quantize_checkpoint(directory, tmp_path / "out", ONE)
        assert not list(tmp_path.glob("*out*"))
    with pytest.raises(BadWeights, match=f"{name} is stored as I32"):
        load(tmp_path / "0", ONE)


@pytest.mark.parametrize("read", [load, lambda d: quantize_checkpoint(d, d.parent / "out", ONE)])
def test_what_is_no_checkpoint_is_named(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    with pytest.raises(MoePackError, match=r"absent: no config\.json"):
        read(tmp_path / "absent")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(MoePackError, match="model: cannot be loaded"):
        read(tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "changed", [{"scheme": 3}, {"exclude": [1]}, {"modules": [["*"]]}, {"modules": [["*", 3]]}]
)
def test_settings_of_another_kind_are_named(tmp_path: Path, changed: dict[str, Any]) -> None:
    source = saved(tiny_models.build("qwen3_moe"), tmp_path / "float")
    quantize_checkpoint(source, tmp_path / "out", ONE)
    path = tmp_path / "out/config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"] |= changed
    path.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(MoePackError, match="quantization_config: "):
        load_packed(tmp_path / "out")


@pytest.mark.parametrize("read", [load, lambda d: quantize_checkpoint(d, d.parent / "out", ONE)])
@pytest.mark.parametrize(
    "changed",
    [{"architectures": 0.5}, {"hidden_act": "none"}, {"hidden_size": 1 << 70}],
)
def test_configs_of_no_model_are_named(
    tmp_path: Path, read: Callable[[Path], Any], changed: dict[str, Any]
) -> None:
    source = saved(tiny_models.build("qwen3_moe"), tmp_path / "model")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (source / "config.json").write_text(json.dumps(config | changed), encoding="utf-8")
    with pytest.raises(MoePackError, match="model: cannot be loaded"):
        read(source)
    assert list(tmp_path.iterdir()) == [source]


def test_anonymous_memory_is_a_few_experts(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_local_experts": 32, "num_hidden_layers": 4, "hidden_size": 256}
    model = tiny_models.build("qwen3_moe", **sizes, moe_intermediate_size=256)
    source = saved(model, tmp_path / "float", "20MB")
    layer = sum(t.nbytes for n, t in stored_tensors(source).items() if ".layers.0." in n)
    code = (
        "import sys, json; from moepack import verification; verification._WINDOW_BYTES = 1 << 20\n"
        "from moepack.online import Settings, quantize_checkpoint as q\n"
        "s = Settings(threads=1); q(sys.argv[1], sys.argv[2] + '0', s)\n"
        "print(json.dumps(q(sys.argv[1], sys.argv[2], s).to_json()))"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "packed")]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(run.stdout.splitlines()[-1])
    print({k: v for k, v in found.items() if k != "blocks"}, f"a float layer {layer:,}")
    expert = layer // 32
    assert found["peak_anonymous_bytes"] < 10 * expert < layer / 3 < found["bytes_packed"]


def test_the_index_lists_every_tensor(tmp_path: Path) -> None:
    source = saved(tiny_models.build("qwen3_moe"), tmp_path / "float")
    quantize_checkpoint(source, tmp_path / "out", ONE)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors: dict[str, Tensor] = stored_tensors(tmp_path / "out")
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
