"""What broke other systems, for the packed module of every family and of every kind of router."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moepack
import tiny_models
from moepack import packing
from moepack.families import find_blocks
from moepack.modules import PackedExperts, QuantizedMoEFFN
from test_every_family import ENTRIES, check, sqnr_db


@functools.cache
def packed_module(family: str) -> PackedExperts:
    model = moepack.quantize_(tiny_models.build(family), "int8-g32", verify=False).model
    return next(m for m in model.modules() if isinstance(m, PackedExperts))


def hidden(module: PackedExperts, tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, module.dim, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def run(module: PackedExperts, x: Tensor) -> Tensor:
    """Routing and experts, or the experts for ids and weights that are drawn."""
    if isinstance(module, QuantizedMoEFFN):
        return module.routed(x)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, module.num_experts, (len(x), 3), generator=generator)
    return module.experts(x, ids, torch.rand(ids.shape, generator=generator))


@pytest.mark.parametrize("family", ENTRIES)
def test_any_number_of_tokens_gives_the_same_rows(family: str) -> None:
    module = packed_module(family)
    x = hidden(module, 9)
    together = run(module, x)
    assert run(module, x[:0]).shape == (0, module.dim)
    if isinstance(module, QuantizedMoEFFN):
        for row in range(9):
            assert torch.equal(run(module, x[row : row + 1]), together[row : row + 1])


@pytest.mark.parametrize("family", ENTRIES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_leaves_the_others_alone(family: str, bad: float) -> None:
    module = packed_module(family)
    x = hidden(module, 6)
    expected = run(module, x)
    x[2, 5] = bad
    x[4] = bad
    found = run(module, x)
    for row in (0, 1, 3, 5):
        assert torch.equal(found[row], expected[row])
    assert not found[4].isfinite().any()


@pytest.mark.parametrize("family", ENTRIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_and_views(family: str, dtype: torch.dtype) -> None:
    module = packed_module(family)
    x = hidden(module, 8).to(dtype)
    found = run(module, x)
    assert found.dtype == dtype
    assert torch.equal(run(module, x.float()).to(dtype), found)
    strided = torch.stack([x, x], dim=2)[..., 0]
    assert not strided.is_contiguous()
    assert torch.equal(run(module, strided), found)


@pytest.mark.parametrize("family", [*tiny_models.OUTSIDE, "gpt_oss", "nemotron_h"])
def test_ids_from_outside(family: str) -> None:
    module = packed_module(family)
    x = hidden(module, 4)
    weights = torch.rand(4, 2, generator=torch.Generator().manual_seed(2))
    twice = module.experts(x, torch.full((4, 2), 1), weights)
    first, second = (module.experts(x, torch.full((4, 1), 1), w) for w in weights.T[..., None])
    assert torch.allclose(twice, first + second, rtol=1e-5, atol=1e-6) or (
        module.attributes.weight_on_input
    )
    for bad in (-1, module.num_experts, 2**40):
        ids = torch.tensor([[0, 1]] * 3 + [[0, bad]])
        with pytest.raises(RuntimeError):
            module.experts(x, ids, weights)


@pytest.mark.parametrize("family", ENTRIES)
def test_casts_leave_router_and_biases_alone(family: str) -> None:
    module = copy.deepcopy(packed_module(family))
    before = {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)}
    for cast in (module.half(), module.to(torch.bfloat16), module.double()):
        for name, buffer in cast.named_buffers(recurse=False):
            assert buffer.dtype == before[name].dtype
            assert torch.equal(buffer, before[name])


def test_experts_without_a_gate_are_not_doubled() -> None:
    module = packed_module("nemotron_h")
    header = packing.read_header(module.packed_w13[0])
    assert (header.rows, header.row_order) == (tiny_models.INNER, "plain")
    assert header.rows == packing.read_header(module.packed_w2[0]).cols


@pytest.mark.parametrize("scheme", ["int4-g32", "int4-g128", "int8-g64"])
@pytest.mark.parametrize(
    ("family", "inner"),
    [("qwen3_moe", 704), ("nemotron_h", 1856), ("gpt_oss", 1456), ("gemma4_text", 4304)],
)
def test_inner_sizes_that_no_group_divides(family: str, inner: int, scheme: str) -> None:
    name = "intermediate_size" if family == "gpt_oss" else "moe_intermediate_size"
    experts = {"num_experts": 2, "n_routed_experts": 2, "num_local_experts": 2, "n_group": 1}
    changes: dict[str, Any] = {name: inner, **experts}
    model = tiny_models.build(family, **changes)
    report = moepack.quantize_(model, scheme)
    for block in report.blocks:
        assert block.sqnr_db is not None
        assert block.sqnr_db > (14 if scheme.startswith("int4") else 30)


@pytest.mark.parametrize("family", ENTRIES)
def test_models_in_bf16(family: str) -> None:
    model = tiny_models.build(family).to(torch.bfloat16)
    kept: set[str] = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, parameter in model.named_parameters():
        if any(re.search(rf"(^|\.){k.replace('*', '.*')}($|\.)", name) for k in kept):
            parameter.data = parameter.data.float()  # as transformers loads it
    expected = logits_in_bf16(model, family)
    report = moepack.quantize_(model, "int8-g32")
    found = logits_in_bf16(report.model, family)
    assert found.dtype == expected.dtype
    assert found.isfinite().all()
    # bf16 rounds everything between the blocks anew; a few near-tied selections flip.
    assert sqnr_db(expected.float(), found.float()) > 8


@torch.no_grad()
def logits_in_bf16(model: nn.Module, family: str) -> Tensor:
    inputs = {
        name: value.to(torch.bfloat16) if value.is_floating_point() else value
        for name, value in tiny_models.inputs(family).items()
    }
    output: Tensor = model(**inputs, use_cache=False)[0]
    return output


def test_layers_that_differ() -> None:
    model = tiny_models.build("qwen3_moe", gain=6.0)
    sizes: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 48}
    sizes |= dict.fromkeys(("num_experts", "num_local_experts"), 5)
    other = tiny_models.build("qwen3_moe", gain=6.0, **sizes)
    model.get_submodule("model.layers.1").mlp = other.get_submodule("model.layers.0.mlp")
    blocks = moepack.plan(model).replaced
    assert [(b.num_experts, b.num_activated_experts, b.inner_dim) for b in blocks] == [
        (8, 2, 32),
        (5, 3, 48),
    ]
    check("qwen3_moe", model)


def test_limits_that_differ_by_layer() -> None:
    sparse, limits = ["sparse", "sparse"], [5.0, 7.0]
    model = tiny_models.build("step3p5", gain=6.0, mlp_layer_types=sparse, swiglu_limits=limits)
    specs = [block.spec for block in find_blocks(model)]
    assert [spec.experts.attributes.act_limit for spec in specs if spec] == limits
    check("step3p5", model)


def test_router_logits_are_recorded_where_they_were() -> None:
    model = tiny_models.build("qwen3_moe", output_router_logits=True)
    with torch.no_grad():
        expected = model(input_ids=tiny_models.tokens()).router_logits
        report = moepack.quantize_(model, "int8-g32")
        found = report.model(input_ids=tiny_models.tokens()).router_logits
    assert all(block.router == "outside" for block in report.plan.blocks)
    assert len(found) == len(expected) == 2
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "minimax_m2", "qwen3_moe"])
def test_blocks_of_heads_that_predict_more_tokens(family: str) -> None:
    from transformers.modeling_layers import MtpModel

    model: Any = tiny_models.build(family)
    model.config.num_mtp_layers = 1
    head = MtpModel(model, 1)
    tiny_models._strengthen(head, 0, 1.0)
    (block,) = moepack.quantize_(head, "int8-g32").blocks
    assert (block.path, block.router) == ("layers.0.mtp_block.mlp", "fused")
