"""The whole transform: what it replaces, keeps, shares and frees."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import moepack
import tiny_models
from block_traffic import block_traffic, sqnr_db
from moepack import packing, reference
from moepack.modules import QuantizedExperts, QuantizedMoEFFN


# One of each way in which a block is replaced; test_every_family.py has all families.
@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3",
        "qwen2_moe",
        "gpt_oss",
        "nemotron_h",
        "phimoe",
        "muse_spark_text",
        "llama4_text",
    ],
)
def test_a_block_gives_what_it_gave(family: str) -> None:
    model = tiny_models.build(family)
    paths = [block.path for block in moepack.plan(model).blocks]
    traffic = block_traffic(model, paths)
    expected = tiny_models.logits(model)

    report = moepack.quantize_(model, "int8-g32")
    assert [block.path for block in report.blocks] == paths
    floor = 20.0
    for path, call in traffic.items():
        module = report.model.get_submodule(path)
        output = call.repeat(module)
        assert output.shape == call.output.shape
        assert sqnr_db(call.output, output) > floor
        if type(module) is QuantizedMoEFFN:
            assert_equals_reference(module, call.x.reshape(-1, call.x.shape[-1]))
    # Rounding flips a few selections in later layers, each an error of its own size.
    assert sqnr_db(expected, tiny_models.logits(report.model)) > 10


def assert_equals_reference(module: QuantizedMoEFFN, x: Tensor) -> None:
    r, a = module.routing, module.attributes
    expected = reference.quantized_moe_ffn(
        x, None, module.gate_weight, module.gate_bias, module.expert_bias,
        module.packed_w13, module.packed_w2, module.bias13, module.bias2,
        r.num_activated_experts, a.hidden_dim, a.scheme, a.layout, r.score_func, r.norm_topk,
        r.norm_eps, r.norm_clamp, r.route_scale, r.n_group, r.topk_group, r.group_score,
        r.router_dtype, a.activation, a.act_alpha, a.act_limit, a.gate_softcap, a.up_softcap,
        a.limit_after_act, a.weight_on_input,
    )  # fmt: skip
    assert torch.equal(module.routed(x), expected)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "lfm2_moe"])
def test_models_in_bf16(family: str) -> None:
    model = tiny_models.build(family).to(torch.bfloat16)
    paths = [block.path for block in moepack.plan(model).blocks]
    traffic = block_traffic(model, paths)
    report = moepack.quantize_(model, "int8-g32")
    for path, call in traffic.items():
        module = report.model.get_submodule(path)
        assert isinstance(module, QuantizedMoEFFN)
        assert module.gate_weight.dtype == torch.float32
        output = call.repeat(module)
        assert output.dtype == torch.bfloat16
        assert sqnr_db(call.output, output) > 20.0


def test_int4_reports_its_sqnr() -> None:
    report = moepack.quantize_(tiny_models.build("qwen3_moe"), "int4-g32")
    for block in report.blocks:
        assert block.sqnr_db is not None
        assert 14 < block.sqnr_db < 26  # 4 bits: about 6 dB a bit, less the peak factor
        assert block.adapter_error is not None
        assert block.adapter_error < 1e-5
        assert block.sampled == "all 8 experts, 16 tokens; router: 254 tokens"
    text = str(report)
    assert "model.layers.0.mlp" in text
    assert "SQNR" in text
    json.dumps(report.to_json(), allow_nan=False)


@pytest.mark.parametrize("make", [tiny_models.executorch_block, None])
def test_the_root_is_the_block(make: Callable[[], nn.Module] | None) -> None:
    block = make() if make else tiny_models.build("phimoe").get_submodule("model.layers.0.mlp")
    report = moepack.quantize_(block)
    if make:
        assert isinstance(report.model, QuantizedMoEFFN)
        assert report.blocks[0].path == ""
    else:
        assert report.model is block
        assert isinstance(block.get_submodule("experts"), QuantizedExperts)


def test_tied_blocks_are_packed_once_and_stay_tied() -> None:
    block = tiny_models.executorch_block()
    model = nn.ModuleDict({"a": block, "b": block, "c": nn.Sequential(block)})
    report = moepack.quantize_(model)
    assert len(report.blocks) == 1
    assert report.blocks[0].also_at == ("b", "c.0")
    assert isinstance(model["a"], QuantizedMoEFFN)
    assert model["a"] is model["b"] is model.get_submodule("c.0")


def test_experts_that_two_blocks_share_are_packed_once() -> None:
    model = tiny_models.build("qwen3_moe")
    first, second = (model.get_submodule(f"model.layers.{i}.mlp") for i in (0, 1))
    second.experts = first.experts
    moepack.quantize_(model)
    a, b = (model.get_submodule(f"model.layers.{i}.mlp") for i in (0, 1))
    assert a.get_buffer("packed_w13").data_ptr() == b.get_buffer("packed_w13").data_ptr()
    assert not torch.equal(a.get_buffer("gate_weight"), b.get_buffer("gate_weight"))


def test_originals_are_freed_block_by_block() -> None:
    model = tiny_models.build("mixtral")
    originals = [
        weakref.ref(model.get_parameter(f"model.layers.{i}.mlp.experts.gate_up_proj"))
        for i in (0, 1)
    ]
    alive: dict[str, list[bool]] = {}

    def progress(what: str, done: int, total: int) -> None:
        alive[f"{what.split()[0]} {done}"] = [ref() is not None for ref in originals]

    moepack.quantize_(model, progress=progress)
    assert alive["checking 1"] == [True, True]
    assert alive["packing 0"] == [True, True]
    assert alive["packing 1"] == [False, True]
    assert [ref() for ref in originals] == [None, None]


@pytest.mark.parametrize("inner", [704, 1856])
@pytest.mark.parametrize("scheme", ["int4-g32", "int4-g128"])
def test_inner_sizes_that_groups_do_not_divide(inner: int, scheme: str) -> None:
    generator = torch.Generator().manual_seed(inner)
    block = tiny_models.executorch_block()
    experts = block.get_submodule("cond_ffn")
    for name in ("w1", "w2", "w3"):
        weights = torch.randn(2, inner, 48, generator=generator) * 0.1
        setattr(experts, name, nn.Parameter(weights))
    experts.num_experts, block.dim = 2, 48  # type: ignore[assignment]
    block.gate = nn.Linear(48, 2, bias=False)
    report = moepack.quantize_(block, scheme)
    assert report.model.hidden_dim == inner
    assert report.blocks[0].worst_expert_db is not None
    assert report.blocks[0].worst_expert_db > 14


def test_twice_is_a_no_op_that_says_so() -> None:
    model = moepack.quantize_(tiny_models.build("mixtral")).model
    before = dict(model.named_modules())
    report = moepack.quantize_(model)
    assert dict(report.model.named_modules()) == before
    assert "2 MoE blocks are packed already" in report.note
    assert report.note in str(report)


def test_the_rest_of_a_packed_model_is_packed() -> None:
    model = tiny_models.build("phimoe")
    moepack.quantize_(model, exclude=["model.layers.0.mlp"])
    report = moepack.quantize_(model)
    assert [block.path for block in report.blocks] == ["model.layers.0.mlp"]


@torch.no_grad()
def test_faint_zero_and_huge_experts() -> None:
    model = tiny_models.build("qwen3_moe")
    up = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    down = model.get_parameter("model.layers.0.mlp.experts.down_proj")
    down[0] *= 1e-23
    down[1] *= 1e6
    up[2] = 0
    down[3, 5] = 0
    up[4] *= 1e-23
    report = moepack.quantize_(model, "int8-g32")
    assert report.blocks[0].worst_expert_db is not None
    assert report.blocks[0].worst_expert_db > 20
    packed = model.get_submodule("model.layers.0.mlp")
    assert isinstance(packed, QuantizedMoEFFN)
    x = torch.randn(4, 64)
    one = torch.ones(4, 1)

    def alone(expert: int) -> Tensor:
        return packed.experts(x, torch.full((4, 1), expert), one)

    assert 1e-24 < float(alone(0).abs().max()) < 1e-21
    assert alone(1).isfinite().all()
    assert torch.equal(alone(2), torch.zeros(4, 64))
    assert torch.equal(alone(3)[:, 5], torch.zeros(4))


@torch.no_grad()
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_constant_rows(sign: float) -> None:
    model = tiny_models.build("qwen3_moe")
    model.get_parameter("model.layers.0.mlp.experts.down_proj")[2] = sign
    moepack.quantize_(model, "int4-g32")
    restored = moepack.dequantize_(model).get_parameter("model.layers.0.mlp.w2")[2]
    step = 1 / 7
    assert float((restored - sign).abs().max()) <= step / 2


def test_without_verification_the_report_says_so() -> None:
    report = moepack.quantize_(tiny_models.build("mixtral"), verify=False, threads=1)
    assert {block.sampled for block in report.blocks} == {"nothing: verify=False"}
    assert report.blocks[0].sqnr_db is None


def test_shared_experts_and_modes_stay() -> None:
    model = tiny_models.build("qwen2_moe")
    block = model.get_submodule("model.layers.0.mlp")
    shared, gate = (block.get_submodule(n) for n in ("shared_expert", "shared_expert_gate"))
    shared.train()
    moepack.quantize_(model)
    packed = model.get_submodule("model.layers.0.mlp")
    assert packed.shared_expert is shared
    assert packed.shared_expert_gate is gate
    assert not packed.training
    assert shared.training


def test_torchaos_rule_through_the_transform() -> None:
    report = moepack.quantize_(tiny_models.build("mixtral"), rule="torchao")
    assert {block.rule for block in report.blocks} == {"torchao"}


@pytest.mark.parametrize("kind", ["int4 in groups", "int8 per row"])
def test_codes_that_torchao_has_chosen_are_kept(kind: str) -> None:
    from torchao.quantization import Int8Tensor, IntxUnpackedToInt8Tensor, PerRow

    model = tiny_models.build("qwen3_moe", moe_intermediate_size=64)
    experts = model.get_submodule("model.layers.0.mlp.experts")
    codes: dict[str, Tensor] = {}
    for name in ("gate_up_proj", "down_proj"):
        weight = experts.get_parameter(name).detach()
        if kind == "int4 in groups":
            tensor = IntxUnpackedToInt8Tensor.from_hp(weight, (1, 1, 32), torch.int4)  # type: ignore[attr-defined]
        else:
            tensor = Int8Tensor.from_hp(weight, PerRow())
        codes[name] = tensor.qdata
        setattr(experts, name, nn.Parameter(tensor, requires_grad=False))
    report = moepack.quantize_(model, "int4-g64")
    first, second = report.blocks
    assert (first.rule, second.rule) == ("torchao's codes", "search")
    assert first.scheme == {"int4 in groups": "int4-g32", "int8 per row": "int8-g128"}[kind]
    assert 0 < first.scale_error < 2.0**-10
    assert first.sqnr_db is not None
    assert first.sqnr_db > 25  # against torchao's own values: only activations are rounded
    packed = report.model.get_submodule("model.layers.0.mlp")
    blobs = {
        "gate_up_proj": packed.get_buffer("packed_w13"),
        "down_proj": packed.get_buffer("packed_w2"),
    }
    for name, stack in blobs.items():
        assert torch.equal(torch.stack([packing.unpack(b).codes for b in stack]), codes[name])
    assert tiny_models.logits(report.model).isfinite().all()
