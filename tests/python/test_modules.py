"""The packed modules: their state survives casts, copies, files and processes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import moepack
import tiny_models
from moepack.attributes import ExpertAttributes
from moepack.errors import UnsupportedError
from moepack.modules import QuantizedExperts, QuantizedMoEFFN


def packed_block(family: str = "deepseek_v3") -> nn.Module:
    model = tiny_models.build(family)
    path = moepack.plan(model).blocks[0].path
    return moepack.quantize_(model).model.get_submodule(path)


def hidden(dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(3))
    return x.to(dtype)


def run(module: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    with torch.no_grad():
        y: Tensor = module(x)
    return y


def own_state(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)}


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.type(torch.float16),
        lambda m: m.to(torch.float64).to(torch.bfloat16).float(),
    ],
)
def test_casts_leave_the_values_alone(cast: object) -> None:
    block = packed_block()
    block.get_buffer("gate_weight")[0, 0] = 1e5  # infinite in fp16
    before = own_state(block)
    assert {"gate_weight", "expert_bias", "packed_w13", "packed_w2"} <= set(before)
    cast(block)  # type: ignore[operator]
    after = own_state(block)
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert all(before[k].dtype == after[k].dtype for k in before)


def test_casts_reach_the_shared_expert() -> None:
    block = packed_block().to(torch.bfloat16)
    assert {p.dtype for p in block.parameters()} == {torch.bfloat16}
    assert run(block, hidden(torch.bfloat16)).dtype == torch.bfloat16


def test_copies_and_files_give_the_same_bits(tmp_path: Path) -> None:
    block = packed_block()
    expected = run(block, hidden())
    assert torch.equal(run(copy.deepcopy(block), hidden()), expected)
    assert torch.equal(run(pickle.loads(pickle.dumps(block)), hidden()), expected)

    memory = io.BytesIO()
    torch.save(block.state_dict(), memory)
    memory.seek(0)
    plain = torch.load(memory, weights_only=True)
    save_file(block.state_dict(), tmp_path / "block.safetensors")
    for state in (plain, load_file(tmp_path / "block.safetensors")):
        other = copy.deepcopy(block)
        for buffer in other.buffers():
            buffer.zero_()
        other.load_state_dict(state, strict=True)
        assert torch.equal(run(other, hidden()), expected)


def test_the_state_is_plain_tensors_with_the_names_of_the_operator() -> None:
    state = packed_block("deepseek_v3").state_dict()
    names = {"gate_weight", "expert_bias", "packed_w13", "packed_w2"}
    assert {name for name in state if "." not in name} == names
    assert all(name.startswith("shared_experts.") for name in set(state) - names)
    assert all(type(value) is Tensor for value in state.values())


def test_a_module_without_values_takes_a_state() -> None:
    block = packed_block("qwen3_moe")
    assert isinstance(block, QuantizedMoEFFN)
    empty = QuantizedMoEFFN.empty(8, 64, block.routing, block.attributes)
    assert {b.device.type for b in empty.buffers()} == {"meta"}
    with pytest.raises(RuntimeError, match="gate_weight: is on meta, x is on cpu"):
        run(empty, hidden())
    empty.load_state_dict(block.state_dict(), strict=True, assign=True)
    assert torch.equal(run(empty, hidden()), run(block, hidden()))
    experts = QuantizedExperts.empty(8, 64, block.attributes, has_bias13=True, device="cpu")
    assert experts.bias13 is not None
    assert experts.bias13.shape == (8, 64)
    assert experts.bias2 is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_and_shape_are_kept(dtype: torch.dtype) -> None:
    block = packed_block("qwen3_moe")
    y = run(block, hidden(dtype))
    assert (y.shape, y.dtype) == ((2, 5, 64), dtype)
    flat = run(block, hidden(dtype).view(-1, 64))
    assert torch.equal(y.view(-1, 64), flat)
    strided = hidden(dtype).transpose(0, 1)
    assert torch.equal(run(block, strided).transpose(0, 1), y)


def test_experts_take_what_routers_give() -> None:
    model = moepack.quantize_(tiny_models.build("phimoe")).model
    experts = model.get_submodule("model.layers.0.mlp.experts")
    x = hidden(torch.bfloat16).view(-1, 64)
    ids = torch.randint(0, 8, (10, 2), dtype=torch.int32)
    weights = torch.rand(10, 2).bfloat16()
    y = experts(x, ids, weights)
    assert (y.dtype, y.shape) == (torch.bfloat16, (10, 64))
    assert torch.equal(y, experts(x, ids.long(), weights.float()))


@pytest.mark.parametrize("shape", [(2, 32), (4, 128), (64, 1), (64, 5), (0, 32), ()])
def test_another_width_is_refused_though_its_elements_divide(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    with pytest.raises(UnsupportedError, match=r"hidden_states is \[.*take \[\.\.\., 64\]"):
        packed_block("qwen3_moe")(x)
    block = packed_block("phimoe")
    ids = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(UnsupportedError, match=r"hidden_states is \[.*take \[\.\.\., 64\]"):
        block.get_submodule("experts")(x, ids, torch.ones(2, 1))
    routed = packed_block("gpt_oss").get_submodule("experts")
    with pytest.raises(UnsupportedError, match="the router's input is"):
        routed(torch.zeros(2, 64), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_ids_that_are_no_integers_are_refused(dtype: torch.dtype) -> None:
    experts = packed_block("phimoe").get_submodule("experts")
    ids = torch.rand(3, 2).to(dtype)
    with pytest.raises(UnsupportedError, match=f"top_k_index is {dtype}"):
        experts(torch.zeros(3, 64), ids, torch.ones(3, 2))


@pytest.mark.parametrize("family", ["qwen3_moe", "phimoe"])
def test_compiles_with_a_dynamic_number_of_tokens(family: str) -> None:
    block = packed_block(family).eval()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (2, 5):
        x = torch.randn(1, tokens, 64)
        assert torch.equal(run(compiled, x), run(block, x))


def test_blobs_of_other_sizes_are_refused() -> None:
    attributes = ExpertAttributes(32, "int4-g32")
    blob = torch.zeros(2, 100, dtype=torch.uint8)
    with pytest.raises(UnsupportedError, match=r"packed_w13 .*\[2, 100\].*int4-g32.*width 64"):
        QuantizedExperts(blob, blob, None, None, attributes, 64)


def test_repr_says_what_it_is() -> None:
    assert "E=8, D=64, F=32, int4-g32, silu, K=2, sigmoid" in repr(packed_block())


@pytest.mark.parametrize("family", ["deepseek_v3", "phimoe"])
def test_exports_with_a_dynamic_number_of_tokens(family: str) -> None:
    block = packed_block(family).eval()
    x = torch.randn(1, 4, 64)
    shapes = ({1: torch.export.Dim("tokens", min=2, max=64)},)
    with torch.no_grad():
        program = torch.export.export(block, (x,), dynamic_shapes=shapes)
    targets = [str(node.target) for node in program.graph.nodes if "moepack" in str(node.target)]
    assert len(targets) == 1
    for tokens in (2, 17):
        x = torch.randn(1, tokens, 64)
        assert torch.equal(run(program.module(), x), run(block, x))
