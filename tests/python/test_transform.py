"""The whole transform: what it replaces, keeps and frees, what stops it, what errors leave."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import moepack
import tiny_models
from moepack import ops, packing, reference
from moepack.errors import BadWeights, NoMoEBlock, UnsupportedError, VerificationError
from moepack.modules import PackedExperts, QuantizedExperts, QuantizedMoEFFN


def sqnr_db(expected: Tensor, found: Tensor) -> float:
    noise = (expected.double() - found.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


class Call(NamedTuple):
    """One call of a block in a run of the model, and the tensor that came out."""

    inputs: tuple[Any, ...]
    options: dict[str, Any]
    output: Tensor

    @property
    def x(self) -> Tensor:
        x: Tensor = self.inputs[0]
        return x

    @torch.no_grad()
    def repeat(self, module: nn.Module) -> Tensor:
        return first_tensor(module(*self.inputs, **self.options))


def first_tensor(output: Any) -> Tensor:
    tensor: Tensor = output if isinstance(output, Tensor) else output[0]
    return tensor


def block_traffic(model: nn.Module, paths: list[str]) -> dict[str, Call]:
    """What goes into and comes out of the blocks in one run of the model."""
    seen: dict[str, Call] = {}

    def record(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: Any, options: dict[str, Any], output: Any) -> None:
            seen[path] = Call(inputs, options, first_tensor(output))

        return hook

    hooks = [
        model.get_submodule(p).register_forward_hook(record(p), with_kwargs=True) for p in paths
    ]
    tiny_models.logits(model)
    for hook in hooks:
        hook.remove()
    return seen


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


def test_without_a_block() -> None:
    with pytest.raises(NoMoEBlock, match="Sequential holds no MoE block"):
        moepack.quantize_(nn.Sequential(nn.Linear(4, 4)))


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


def test_a_model_on_the_meta_device() -> None:
    with pytest.raises(BadWeights, match=r"model\.layers\.0\.mlp: .*meta device"):
        moepack.quantize_(tiny_models.build("qwen3_moe", device="meta"))


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


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("verify", [True, False])
def test_a_weight_that_is_not_finite_is_named_and_nothing_is_touched(
    bad: float, verify: bool
) -> None:
    model = tiny_models.build("mixtral")
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.experts.down_proj")[5, 33, 7] = bad
    before = dict(model.named_modules())
    with pytest.raises(BadWeights, match=r"model\.layers\.1\.mlp expert 5 w2: row 33, column 7"):
        moepack.quantize_(model, verify=verify)
    assert dict(model.named_modules()) == before


def test_a_router_weight_that_is_not_finite() -> None:
    model = tiny_models.build("mixtral")
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.gate.weight")[3, 1] = math.nan
    with pytest.raises(BadWeights, match=r"model\.layers\.0\.mlp router gate_weight: row 3"):
        moepack.quantize_(model)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gate.weight", "experts.down_proj", "experts.gate_up_proj"])
def test_an_original_that_overflows_is_named_before_anything_is_touched(name: str) -> None:
    model = tiny_models.build("mixtral")
    weight = model.get_parameter(f"model.layers.1.mlp.{name}")
    weight.copy_(weight.sign() * 3e38)
    before = dict(model.named_modules())
    expected = r"model\.layers\.1\.mlp: the original block's own result .* is not finite in float32"
    with pytest.raises(VerificationError, match=expected):
        moepack.quantize_(model)
    assert dict(model.named_modules()) == before
    report = moepack.quantize_(model, exclude=["model.layers.1.mlp"])
    assert [block.path for block in report.blocks] == ["model.layers.0.mlp"]


@torch.no_grad()
def test_a_kernel_that_overflows_where_the_original_does_not() -> None:
    model = tiny_models.build("mixtral")
    model.get_parameter("model.layers.1.mlp.experts.gate_up_proj").mul_(1e17)
    with pytest.raises(VerificationError, match=r"model\.layers\.1\.mlp: packed experts overflow"):
        moepack.quantize_(model)


@torch.no_grad()
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_constant_rows(sign: float) -> None:
    model = tiny_models.build("qwen3_moe")
    model.get_parameter("model.layers.0.mlp.experts.down_proj")[2] = sign
    moepack.quantize_(model, "int4-g32")
    restored = moepack.dequantize_(model).get_parameter("model.layers.0.mlp.w2")[2]
    step = 1 / 7
    assert float((restored - sign).abs().max()) <= step / 2


def test_the_floor_stops_the_transform_at_the_block() -> None:
    model = tiny_models.build("mixtral")
    floors = {"model.layers.1.*": 90.0}
    with pytest.raises(VerificationError, match=r"model\.layers\.1\.mlp: int4-g32 .*floor is 90"):
        moepack.quantize_(model, sqnr_floor=floors)
    assert isinstance(model.get_submodule("model.layers.0.mlp"), QuantizedMoEFFN)
    assert not isinstance(model.get_submodule("model.layers.1.mlp"), PackedExperts)
    report = moepack.quantize_(model, sqnr_floor={"model.layers.1.mlp": 0.0})
    assert [block.path for block in report.blocks] == ["model.layers.1.mlp"]
    assert tiny_models.logits(report.model).isfinite().all()


def _observe(*_: Any) -> None:
    return None


Attach = Callable[[nn.Module], object]
ATTACHED: dict[str, tuple[Attach, str]] = {
    "hook": (lambda m: m.register_forward_hook(_observe), "forward hook _observe"),
    "pre-hook": (lambda m: m.register_forward_pre_hook(_observe), "forward pre-hook _observe"),
    "forward": (lambda m: setattr(m, "forward", m.forward), "patched forward forward"),
}


@pytest.mark.parametrize("kind", sorted(ATTACHED))
@pytest.mark.parametrize(
    ("family", "path", "part"),
    [
        ("qwen2_moe", "model.layers.1.mlp", ""),
        ("qwen2_moe", "model.layers.1.mlp", "experts"),
        ("qwen2_moe", "model.layers.1.mlp", "experts.act_fn"),
        ("qwen2_moe", "model.layers.1.mlp", "gate"),
        ("gpt_oss", "model.layers.1.mlp", "router"),  # keeps its own code
        ("gpt_oss", "model.layers.1.mlp", "experts"),
        ("phimoe", "model.layers.1.mlp", "experts"),  # router outside
        ("llama4_text", "model.layers.1.feed_forward", ""),  # a new module around both
        ("llama4_text", "model.layers.1.feed_forward", "experts"),
    ],
)
def test_what_hangs_on_parts_that_go_is_refused(
    family: str, path: str, part: str, kind: str
) -> None:
    model = tiny_models.build(family)
    attach, words = ATTACHED[kind]
    attach(model.get_submodule(f"{path}.{part}" if part else path))
    before = dict(model.named_modules())
    name = part.replace(".", r"\.") or "the block itself"
    with pytest.raises(UnsupportedError, match=rf"{path} .*{words} on {name}; remove.*exclude="):
        moepack.quantize_(model)
    assert dict(model.named_modules()) == before
    report = moepack.quantize_(model, exclude=[path])
    assert [block.path for block in report.blocks] == [path.replace("1", "0")]


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("qwen2_moe", "shared_expert"),
        ("qwen2_moe", "shared_expert_gate"),
        ("gpt_oss", ""),
        ("phimoe", ""),
        ("phimoe", "router"),
        ("llama4_text", "router"),
        ("llama4_text", "shared_expert"),
        ("muse_spark_text", "experts.post_expert_norm"),
    ],
)
def test_what_hangs_on_parts_that_stay_still_runs(family: str, part: str) -> None:
    model = tiny_models.build(family)
    path = moepack.plan(model).blocks[0].path
    staying = model.get_submodule(f"{path}.{part}" if part else path)
    seen: list[nn.Module] = []
    staying.register_forward_hook(lambda m, *_: seen.append(m))
    moepack.quantize_(model)
    seen.clear()  # verification runs copies of blocks, hooks and all
    tiny_models.logits(model)
    assert seen == [staying]


def test_what_transformers_hangs_on_every_router_is_no_obstacle() -> None:
    model = tiny_models.build("qwen3_moe")
    with torch.no_grad():
        model(torch.arange(4)[None], output_router_logits=True)
    assert model.get_submodule("model.layers.0.mlp.gate")._forward_hooks
    assert len(moepack.quantize_(model).blocks) == 2


@pytest.mark.parametrize("floor", [math.nan, "x", True, {"*": math.nan}, {"*": None}])
@pytest.mark.parametrize("verify", [True, False])
def test_a_floor_that_is_no_number_is_refused(floor: Any, verify: bool) -> None:
    model = tiny_models.executorch_block()
    with pytest.raises(UnsupportedError, match=r"sqnr_floor(\['\*'\])? is .*supported: a number"):
        moepack.quantize_(model, sqnr_floor=floor, verify=verify)


def test_a_root_that_is_no_module_is_refused() -> None:
    for call in (moepack.quantize_, moepack.plan):
        with pytest.raises(UnsupportedError, match=r"model is NoneType; .*nn\.Module"):
            call(None)  # type: ignore[arg-type]


def test_one_pattern_may_be_a_string() -> None:
    model = tiny_models.build("mixtral")
    report = moepack.quantize_(model, exclude="*.1.mlp")
    assert [block.path for block in report.blocks] == ["model.layers.0.mlp"]


@pytest.mark.parametrize("arguments", [{"exclude": [1]}, {"exclude": 3}, {"recipe": "float"}])
def test_patterns_that_are_no_strings_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=f"{next(iter(arguments))} is .*supported: "):
        moepack.quantize_(tiny_models.executorch_block(), **arguments)


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


@pytest.mark.parametrize("family", ["deepseek_v3", "phimoe", "qwen2_moe"])
def test_back_to_float(family: str) -> None:
    model = moepack.quantize_(tiny_models.build(family), "int8-g32").model
    path = next(n for n, m in model.named_modules() if isinstance(m, PackedExperts))
    path = path.removesuffix(".experts")
    (call,) = block_traffic(model, [path]).values()
    restored = moepack.dequantize_(model)
    assert not any(isinstance(m, PackedExperts) for m in restored.modules())
    assert (
        sqnr_db(call.repeat(restored.get_submodule(path)), call.output) > 28
    )  # what is left is the rounding of activations
    assert tiny_models.logits(restored).isfinite().all()
    with pytest.raises(NoMoEBlock, match="no module packed"):
        moepack.dequantize_(restored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3",
        "qwen2_moe",
        "gpt_oss",  # experts that route in a block that keeps its own code
        "gemma4_text",  # and its router's input goes through a norm
        "phimoe",  # router outside
        "nemotron_h",
        "longcat_flash",  # a wrapper around the packed experts
        "llama4_text",
        "muse_spark_text",
    ],
)
def test_packed_again_after_going_back_to_float(family: str, dtype: torch.dtype) -> None:
    model = moepack.quantize_(tiny_models.build(family), "int8-g32").model
    before, kinds = tiny_models.logits(model), [type(m) for m in model.modules()]
    report = moepack.quantize_(moepack.dequantize_(model, dtype), "int8-g32")
    assert [type(m) for m in report.model.modules()] == kinds
    assert all(block.adapter_error is not None for block in report.blocks)
    if dtype == torch.float32:
        assert torch.equal(tiny_models.logits(report.model), before)


def test_back_to_float_keeps_ties_and_roots() -> None:
    block = moepack.quantize_(tiny_models.executorch_block()).model
    tied = nn.ModuleDict({"a": block, "b": block})
    moepack.dequantize_(tied)
    assert tied["a"] is tied["b"]
    assert moepack.dequantize_(block) is not block


@pytest.mark.parametrize(
    ("score_func", "options"),
    [
        ("softmax", {"expert_bias": True}),
        ("sigmoid", {"expert_bias": True, "route_scale": 2.0}),
        ("softmax_all", {"shared": True}),
    ],
)
def test_the_call_of_executorchs_transform(score_func: str, options: dict[str, Any]) -> None:
    block = tiny_models.executorch_block(score_func, **options)
    x = torch.randn(6, tiny_models.WIDTH)
    with torch.no_grad():
        expected = block(x)
    model = nn.ModuleDict({"layer": block})
    found = moepack.replace_moe_with_quantized_op(model, group_size=32, weight_nbit=8)
    assert found is model
    with torch.no_grad():
        assert sqnr_db(expected, model["layer"](x)) > 25
        assert model["layer"](x.view(2, 3, -1)).shape == (2, 3, tiny_models.WIDTH)


def test_executorchs_arguments_are_checked() -> None:
    for arguments in ({"group_size": 48}, {"weight_nbit": 3}, {"group_size": -1}):
        with pytest.raises(UnsupportedError, match="supported"):
            moepack.replace_moe_with_quantized_op(tiny_models.executorch_block(), **arguments)


def test_executorchs_block_returns_what_it_returned() -> None:
    block = tiny_models.executorch_block()
    x = torch.randn(1, 6, tiny_models.WIDTH)
    with torch.no_grad():
        expected = block(x)
        found = moepack.quantize_(block, "int8-g32").model(x)
    assert found.shape == expected.shape == (6, tiny_models.WIDTH)


def test_the_operators_are_registered_once() -> None:
    ops.load()
    ops.load()
    assert ops.is_active()


def test_floor_for_no_block_is_an_error() -> None:
    model = tiny_models.build("qwen3_moe")
    with pytest.raises(UnsupportedError, match=r"'\*\.layer\.0\*' matches no MoE block; blocks: "):
        moepack.quantize_(model, sqnr_floor={"*": 5.0, "*.layer.0*": 7.0})
    assert not any(isinstance(module, PackedExperts) for module in model.modules())
