"""Quantizing while loading: the same bytes as afterwards, from any order, in little memory."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moepack
import tiny_models
from made_checkpoints import rewrite, saved, stored_tensors
from moepack import packing, verification
from moepack.errors import BadWeights, NoMoEBlock, UnsupportedError, VerificationError
from moepack.modules import PackedExperts
from moepack.online import Loaded, OnlineMethod, Settings, adapter, load
from moepack.online.loading import fill, meta_model
from moepack.online.sources import Pieces
from moepack.quantizer import QuantizedMatrix

FAMILIES = [
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss"),
    *("minimax_m2", "lfm2_moe", "granitemoe", "phimoe", "llama4_text", "dbrx", "jetmoe"),
    *("gemma4_text", "nemotron_h", "longcat_flash", "deepseek_v4"),
    *("switch_transformers", "nllb-moe"),
]


def quantized_after_loading(directory: Path, scheme: str = "int4-g32", **options: Any) -> nn.Module:
    import transformers

    (name,) = transformers.AutoConfig.from_pretrained(directory).architectures
    model = getattr(transformers, name).from_pretrained(directory, dtype=torch.float32).eval()
    return moepack.quantize_(model, scheme, verify=False, **options).model


def assert_same_state(found: nn.Module, expected: nn.Module) -> None:
    a, b = found.state_dict(), expected.state_dict()
    assert a.keys() == b.keys()
    assert [name for name in b if not torch.equal(a[name], b[name])] == []


def pieces_into(directory: Path, pieces: Any, settings: Settings | None = None) -> Loaded:
    from transformers import AutoConfig

    model = meta_model(AutoConfig.from_pretrained(directory), torch.float32)
    return fill(model, Pieces(pieces), settings or Settings(threads=1))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bytes_as_after_loading(family: str, tmp_path: Path) -> None:
    directory = saved(tiny_models.build(family), tmp_path)
    loaded = load(directory, Settings(threads=1))
    expected = quantized_after_loading(directory)
    assert_same_state(loaded.model, expected)
    found = tiny_models.logits(loaded.model, family)
    assert torch.equal(found, tiny_models.logits(expected, family))
    assert loaded.unexpected == []
    assert set(loaded.worst_db) == {block.path for block in loaded.plan.replaced}


@pytest.mark.parametrize("router", ["auto", "outside"])
def test_schemes_exclusions_and_routers(router: Any, tmp_path: Path) -> None:
    directory = saved(tiny_models.build("deepseek_v3", num_hidden_layers=4), tmp_path)
    options: dict[str, Any] = {
        "recipe": {"*.1.mlp": "int8-g64", "*.2.mlp": "float"},
        "router": router,
    }
    loaded = load(directory, Settings("int4-g64", threads=2, **options))
    assert_same_state(loaded.model, quantized_after_loading(directory, "int4-g64", **options))
    schemes = [m.scheme for m in loaded.model.modules() if isinstance(m, PackedExperts)]
    assert schemes == ["int8-g64", "int4-g64"]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma4_text", "dbrx", "deepseek_v3"])
@pytest.mark.parametrize("seed", range(3))
def test_pieces_in_any_order(family: str, seed: int, tmp_path: Path) -> None:
    directory = saved(tiny_models.build(family), tmp_path)
    tensors = list(stored_tensors(directory).items())
    random.Random(seed).shuffle(tensors)

    def pieces() -> Iterator[tuple[str, Tensor]]:
        room = torch.empty(max(t.numel() for _, t in tensors))
        for name, tensor in tensors:
            piece = room[: tensor.numel()].view(tensor.shape)
            piece.copy_(tensor)
            yield name, piece
            piece.fill_(torch.nan)  # the caller's memory is used for the next one

    found = pieces_into(directory, pieces())
    assert_same_state(found.model, quantized_after_loading(directory))


def test_tensors_of_a_trainer_leave_no_gradients(tmp_path: Path) -> None:
    directory = saved(tiny_models.build("qwen3_moe"), tmp_path)
    tensors = {n: nn.Parameter(t) for n, t in stored_tensors(directory).items()}
    model = pieces_into(directory, iter(tensors.items())).model
    found = [*model.parameters(), *model.buffers()]
    assert not any(t.requires_grad or t.grad_fn is not None for t in found)
    assert_same_state(model, load(directory, Settings(threads=1)).model)


class Ternary(OnlineMethod):
    """A toy: -1, 0 and 1 times one scale per group, in the cells of int4-g32."""

    def quantize(self, weight: Tensor, where: str) -> QuantizedMatrix:
        groups = weight.float().unflatten(1, (-1, 32))
        scales = (2 * groups.abs().mean(-1)).half()
        codes = (groups / scales.float().clamp(min=1e-7)[..., None]).round().clamp(-1, 1)
        return QuantizedMatrix(self.scheme, codes.to(torch.int8).flatten(1), scales, 0)

    def floor_db(self) -> float:
        return 1.0


def test_a_new_format_adds_its_arithmetic_only(tmp_path: Path) -> None:
    directory = saved(tiny_models.build("qwen3_moe"), tmp_path)
    method = Ternary("int4-g32")
    model = load(directory, Settings(threads=1, methods={"int4-g32": method})).model
    original = tiny_models.build("qwen3_moe").get_submodule("model.layers.0.mlp.experts")
    packed: Any = model.get_submodule("model.layers.0.mlp")
    for expert, weight in enumerate(original.get_parameter("gate_up_proj").detach()):
        matrix = packing.unpack(packed.packed_w13[expert])
        assert set(matrix.codes.unique().tolist()) == {-1, 0, 1}
        assert torch.equal(matrix.codes, method.quantize(weight, "").codes)
    assert tiny_models.logits(model).isfinite().all()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_dummy_weights(family: str, tmp_path: Path) -> None:
    model: Any = tiny_models.build(family)
    model.config.save_pretrained(tmp_path)
    loaded = load(tmp_path, Settings("int8-g32", threads=1), load_format="dummy")
    assert tiny_models.logits(loaded.model).isfinite().all()
    expected = moepack.quantize_(model, "int8-g32", verify=False).model.state_dict()
    found = loaded.model.state_dict()
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in expected.items()}


def test_extreme_experts_are_proportionate(tmp_path: Path) -> None:
    directory = saved(tiny_models.build("qwen3_moe"), tmp_path)
    tensors = stored_tensors(directory)
    base = "model.layers.0.mlp.experts"
    for expert, factor in ((1, 0.0), (2, 1e-23), (3, 1e6)):
        for name in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"{base}.{expert}.{name}.weight"] *= factor
    rewrite(directory, tensors)
    packed: Any = load(directory, Settings(threads=1)).model.get_submodule("model.layers.0.mlp")
    for expert in range(4):
        weight = tensors[f"{base}.{expert}.down_proj.weight"]
        found = packing.unpack(packed.packed_w2[expert]).dequantize()
        assert (found - weight).norm() <= 0.2 * weight.norm()


def test_what_is_missing_is_named_before_any_work(tmp_path: Path) -> None:
    directory = saved(tiny_models.build("qwen3_moe"), tmp_path)
    tensors = stored_tensors(directory)
    del tensors["model.layers.1.mlp.gate.weight"]
    rewrite(directory, tensors)
    with pytest.raises(BadWeights, match=r"lacks 1 tensors.*model\.layers\.1\.mlp\.gate\.weight"):
        load(directory)


@pytest.mark.parametrize("as_pieces", [False, True])
def test_what_has_no_place_is_an_error_unless_allowed(as_pieces: bool, tmp_path: Path) -> None:
    directory = saved(tiny_models.build("qwen3_moe"), tmp_path)
    tensors = stored_tensors(directory)
    name = "model.layers.2.mlp.gate.weight"
    rewrite(directory, tensors | {name: torch.zeros(8, 64)})
    pieces = iter(stored_tensors(directory).items())
    read = partial(pieces_into, directory, pieces) if as_pieces else partial(load, directory)
    with pytest.raises(BadWeights, match=rf"1 stored tensors have no place.*{name}"):
        read(settings=Settings(threads=1))
    assert load(directory, Settings(threads=1), allow_unexpected=True).unexpected == [name]


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    directory = saved(tiny_models.build("qwen3_moe"), tmp_path)
    tensors = stored_tensors(directory)
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    rewrite(directory, tensors)
    with pytest.raises(BadWeights, match=r"layers\.1: missing: .*gate_up_proj expert 5"):
        load(directory, Settings(threads=1))


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    directory = saved(tiny_models.build("qwen3_moe"), tmp_path)
    tensors = stored_tensors(directory)
    tensors["model.layers.1.mlp.experts.5.down_proj.weight"][3, 4] = torch.nan
    rewrite(directory, tensors)
    with pytest.raises(BadWeights, match=r"layers\.1\.mlp expert 5 w2: .*row 3, column 4 is nan"):
        load(directory, Settings(threads=1))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("experts", [2, 4, 16])
def test_another_number_of_experts_than_the_config_says(
    family: str, experts: int, tmp_path: Path
) -> None:
    directory = saved(tiny_models.build(family), tmp_path)
    config = json.loads((directory / "config.json").read_text())
    key = next(k for k in ("num_local_experts", "num_experts") if k in config)
    config[key] = experts
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadWeights, match=rf"(\b8\b|expert {experts}\b).*\b{experts}\b"):
        load(directory, Settings(threads=1))


def test_a_rough_matrix_stops_the_load(tmp_path: Path) -> None:
    directory = saved(tiny_models.build("qwen3_moe"), tmp_path)
    with pytest.raises(VerificationError, match=r"layers\.0\.mlp expert 0 w13: .* the floor is 90"):
        load(directory, Settings(threads=1, sqnr_floor=90.0))


def test_a_class_that_computes_something_else_stops_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = saved(tiny_models.build("qwen3_moe"), tmp_path)
    assert list(load(directory, Settings(threads=1)).adapter_checks) == ["model.layers.0.mlp"]
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block

    original = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: 1.01 * original(self, x))
    with pytest.raises(VerificationError, match=r"layers\.0\.mlp: moepack's reading"):
        load(directory, Settings(threads=1))


def test_of_a_large_block_a_part_is_compared_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its size: its router, and experts of so many weights, first and last among them."""
    monkeypatch.setattr(verification, "_WINDOW_BYTES", 1)
    monkeypatch.setattr(adapter, "MOST_WEIGHTS", 4 * 3 * tiny_models.WIDTH * tiny_models.INNER)
    directory = saved(tiny_models.build("qwen3_moe", num_local_experts=16), tmp_path)
    (check,) = load(directory, Settings(threads=1)).adapter_checks.values()
    assert check.experts == 4
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts as Experts

    original = Experts.forward
    monkeypatch.setattr(Experts, "forward", lambda self, *args: 1.01 * original(self, *args))
    with pytest.raises(VerificationError, match=r"layers\.0\.mlp: moepack's reading"):
        load(directory, Settings(threads=1))


def test_a_pattern_that_matches_nothing_and_a_dense_model(tmp_path: Path) -> None:
    directory = saved(tiny_models.build("qwen3_moe"), tmp_path)
    with pytest.raises(UnsupportedError, match="matches no MoE block"):
        load(directory, Settings(recipe={"*.7.mlp": "float"}))
    dense = tiny_models.build("qwen3_moe", mlp_only_layers=[0, 1])
    with pytest.raises(NoMoEBlock):
        load(saved(dense, tmp_path / "dense"))


PEAK = """
import ctypes, gc, json, sys
from pathlib import Path
import torch
from moepack import quantizer
from moepack.online import Settings, load

torch.set_num_threads(1)
directory, peak = sys.argv[1], 0

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def look(*_):
    global peak
    peak = max(peak, anonymous())

original = quantizer.quantize

def quantize(*arguments):
    matrix = original(*arguments)
    look()
    return matrix

load(directory, Settings(threads=1, recipe={"*.[1-7].mlp": "float"}))  # what is allocated once
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
quantizer.quantize = quantize
before = anonymous()
model = load(directory, Settings(threads=1), progress=look).model
result = sum(t.nbytes for t in model.state_dict().values())
print(json.dumps({"peak": peak - before, "result": result}))
"""


def test_peak_memory_is_the_result_and_about_one_layer(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_local_experts": 16, "num_hidden_layers": 8}
    model = tiny_models.build("qwen3_moe", **sizes, hidden_size=256, moe_intermediate_size=256)
    source = saved(model, tmp_path, "20MB")
    layer = sum(t.nbytes for n, t in stored_tensors(source).items() if ".layers.0." in n)
    command = [sys.executable, "-c", PEAK, str(source)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(run.stdout.splitlines()[-1])
    print(f"{found}, a float layer {layer:,}, the float model {8 * layer:,}")
    assert 8 * layer > 2 * (found["result"] + layer)  # else the test could not fail
    assert found["peak"] <= found["result"] + layer
