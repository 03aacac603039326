"""Reading MoE blocks: what is recognised, how it is read, and what is refused with which reason."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moepack
import tiny_models
from moepack import packing, quantizer, verification
from moepack.errors import UnsupportedError
from moepack.families import BlockSpec, find_blocks
from moepack.families.routers import RULES


def only_spec(model: nn.Module) -> BlockSpec:
    spec = find_blocks(model)[0].spec
    assert spec is not None
    return spec


@pytest.mark.parametrize("family", tiny_models.FUSED)
def test_router_is_computed_as_the_original_does(family: str) -> None:
    model = tiny_models.build(family)
    blocks = find_blocks(model)
    assert blocks
    for block in blocks:
        if block.left_out_because:
            continue
        assert block.spec is not None, block.refused_because
        assert block.spec.router is not None, block.spec.outside_because
        check = verification.check_adapter(block.path, block.spec)
        assert check.error < 1e-5
        assert check.tokens > 200


@pytest.mark.parametrize("family", tiny_models.OUTSIDE)
def test_a_router_that_nobody_knows_stays_outside(family: str) -> None:
    for block in find_blocks(tiny_models.build(family)):
        assert block.spec is not None, block.refused_because
        assert block.spec.router is None
        assert block.spec.outside_because
        verification.check_adapter(block.path, block.spec)


@pytest.mark.parametrize("family", tiny_models.REFUSED)
def test_what_is_not_supported_is_named_with_its_reason(family: str) -> None:
    reason, _ = tiny_models.REFUSED[family]
    model = tiny_models.build(family)
    blocks = find_blocks(model)
    assert blocks
    assert all(block.spec is None and reason in block.refused_because for block in blocks)
    with pytest.raises(UnsupportedError, match=blocks[0].path.replace(".", r"\.")):
        moepack.quantize_(model)
    report = moepack.quantize_(model, exclude=[block.path for block in blocks])
    assert not report.blocks
    assert blocks[0].path in str(report)


def test_weights_that_are_not_normalized_stay_so() -> None:
    spec = only_spec(tiny_models.build("olmoe"))  # norm_topk_prob is False by default
    assert spec.router is not None
    assert not spec.router.attributes.norm_topk


@pytest.mark.parametrize("bias", [-5.0, 0.0])
def test_group_limited_selection_with_negative_scores(bias: float) -> None:
    model = tiny_models.build("deepseek_v3")
    router = model.get_submodule("model.layers.1.mlp.gate")
    with torch.no_grad():
        router.get_buffer("e_score_correction_bias").add_(bias)
    assert verification.check_adapter("", only_spec(model)).tokens > 200


def test_masked_experts_that_the_original_would_select_leave_the_router_outside() -> None:
    model = tiny_models.build("deepseek_v3")
    model.get_submodule("model.layers.1.mlp.gate").top_k = 5  # type: ignore[assignment]
    spec = only_spec(model)  # one group of four stays
    assert spec.router is None
    assert "too few for 5" in spec.outside_because


def test_settings_outside_the_table_leave_the_router_outside() -> None:
    model = tiny_models.build("cohere2_moe")
    router = model.get_submodule("model.layers.0.mlp.gate")
    router.expert_selection_fn = "sigmoid"  # type: ignore[assignment]
    spec = only_spec(model)
    assert spec.router is None
    assert "expert_selection_fn = 'sigmoid'" in spec.outside_because


class StandardExperts(nn.Module):
    """The standard interface, in any of its layouts."""

    def __init__(self, transposed: bool, concatenated: bool, bias: bool) -> None:
        super().__init__()
        self.is_transposed, self.is_concatenated = transposed, concatenated
        self.has_bias, self.has_gate = bias, True
        self.num_experts = 3
        generator = torch.Generator().manual_seed(0)
        gate, up = torch.randn(2, 3, 20, 36, generator=generator)
        down = torch.randn(3, 36, 20, generator=generator)
        bias13 = torch.randn(2, 3, 20, generator=generator)
        self.gate_up_proj = nn.Parameter(self._stored(self._joined(gate, up)))
        self.down_proj = nn.Parameter(self._stored(down))
        if bias:
            self.gate_up_proj_bias = nn.Parameter(self._joined(*bias13))
            self.down_proj_bias = nn.Parameter(torch.randn(3, 36, generator=generator))

    def _joined(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.is_concatenated:
            return torch.cat([gate, up], dim=1)
        return torch.stack([gate, up], dim=2).flatten(1, 2)

    def _stored(self, matrices: Tensor) -> Tensor:
        return matrices.transpose(1, 2).contiguous() if self.is_transposed else matrices

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        if self.is_concatenated:
            gate, up = gate_up.chunk(2, dim=-1)
        else:
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        return self.activate(gate, up)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return nn.functional.silu(gate) * up

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for token, slot in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
            e = int(ids[token, slot])
            up, down = self.gate_up_proj[e], self.down_proj[e]
            if self.is_transposed:
                up, down = up.T, down.T
            hidden = up @ x[token]
            hidden = self._apply_gate(
                hidden + self.gate_up_proj_bias[e] if self.has_bias else hidden
            )
            output = down @ hidden + (self.down_proj_bias[e] if self.has_bias else 0)
            y[token] += weights[token, slot] * output
        return y


class Block(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts
        self.gate = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 36)
        weights, ids = self.gate(flat).softmax(-1).topk(2)
        y: Tensor = self.experts(flat, ids, weights)
        return y.view(x.shape)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("concatenated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_every_layout_gives_the_same_bytes(
    transposed: bool, concatenated: bool, bias: bool
) -> None:
    def packed(model: nn.Module) -> list[Tensor]:
        experts = moepack.quantize_(model).model.get_submodule("experts")
        return [b for b in experts.buffers() if b is not None]

    plain = packed(Block(StandardExperts(False, True, bias)))
    other = packed(Block(StandardExperts(transposed, concatenated, bias)))
    assert len(plain) == (4 if bias else 2)
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


class HalfClamped(StandardExperts):
    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return nn.functional.silu(gate.clamp(max=10.0)) * up


class Mish(StandardExperts):
    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return nn.functional.mish(gate) * up


class HiddenLimit(StandardExperts):
    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)


class Shifted(StandardExperts):
    """swiglu_oai with alpha 1 and without a limit."""

    limit = 9.0  # lies: nothing uses it

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return nn.functional.silu(gate) * (up + 1)


class NamedStrangely(StandardExperts):
    def __init__(self, *layout: bool) -> None:
        super().__init__(*layout)
        self.temperature = 10

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)


@pytest.mark.parametrize("kind", [HalfClamped, Mish, HiddenLimit])
def test_an_activation_that_the_operator_has_not_is_refused(kind: type[StandardExperts]) -> None:
    (block,) = find_blocks(Block(kind(False, True, False)))
    assert block.spec is None
    assert "activation" in block.refused_because


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("kind", "activation", "limit"),
    [(Shifted, "swiglu_oai", 0.0), (NamedStrangely, "silu", 10.0)],
)
def test_an_activation_is_recognised_by_what_it_computes(
    kind: type[StandardExperts], activation: str, limit: float, interleaved: bool
) -> None:
    spec = only_spec(Block(kind(False, not interleaved, True)))
    found = spec.experts.attributes
    assert (found.activation, found.act_limit, found.act_alpha) == (activation, limit, 1.0)
    assert verification.check_adapter("", spec, fused=False).error < 1e-5


def test_flags_that_lie_are_not_believed() -> None:
    experts = StandardExperts(True, False, True)
    spec = only_spec(Block(experts))
    experts.has_bias = False
    del experts.is_transposed, experts.has_gate
    assert torch.equal(only_spec(Block(experts)).experts.w13(1), spec.experts.w13(1))
    assert spec.experts.bias13(2) is not None


def test_a_list_of_modules_that_are_no_experts_is_refused_by_name() -> None:
    (block,) = find_blocks(Block(nn.ModuleList(nn.Linear(36, 36) for _ in range(3))))
    assert block.spec is None
    assert "Linear" in block.refused_because
    with pytest.raises(UnsupportedError, match="an up and a down linear layer"):
        moepack.quantize_(Block(nn.ModuleList(nn.Linear(36, 36) for _ in range(3))))


EXECUTORCH: list[dict[str, Any]] = [
    {"score_func": "softmax"},
    {"score_func": "softmax", "expert_bias": True},
    {"score_func": "softmax_all", "shared": True},
    {"score_func": "softmax_all", "expert_bias": True},
    {"score_func": "sigmoid", "expert_bias": True, "route_scale": 2.5},
    {"score_func": "sigmoid", "shared": True},
]


@pytest.mark.parametrize("settings", EXECUTORCH)
def test_executorch_blocks(settings: dict[str, Any]) -> None:
    block = tiny_models.executorch_block(**settings)
    check = verification.check_adapter("", only_spec(block))
    assert check.error < 1e-5
    assert check.tokens > 200


def test_route_scale_with_softmax_is_what_the_original_makes_of_it() -> None:
    block = tiny_models.executorch_block("softmax")
    block.route_scale = 3.0  # type: ignore[assignment]
    assert verification.check_adapter("", only_spec(block)).error < 1e-5


def test_executorch_block_whose_routing_cannot_be_read() -> None:
    block = tiny_models.executorch_block()
    del block.score_func
    (found,) = find_blocks(block)
    assert found.spec is None
    assert "no score_func" in found.refused_because


@pytest.mark.parametrize("unwrap", [False, True])
def test_a_router_that_torchao_has_quantized(unwrap: bool) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    from torchao.utils import unwrap_tensor_subclass

    block = tiny_models.executorch_block("sigmoid", expert_bias=True)
    quantize_(block.get_submodule("gate"), Int8WeightOnlyConfig())
    weight = block.get_submodule("gate").weight
    assert isinstance(weight, Tensor)
    expected = weight.dequantize()
    if unwrap:
        unwrap_tensor_subclass(block)
    new = moepack.quantize_(block).model
    assert type(new.gate_weight) is Tensor
    assert torch.equal(new.gate_weight, expected.float())
    tokens = torch.export.Dim("tokens", min=2)
    program = torch.export.export(
        new, (torch.randn(5, tiny_models.WIDTH),), dynamic_shapes=({0: tokens},)
    )
    x = torch.randn(9, tiny_models.WIDTH)
    assert torch.equal(program.module()(x), new(x))


def test_a_router_of_bare_integers_is_refused() -> None:
    block = tiny_models.executorch_block()
    gate = block.get_submodule("gate")
    gate.weight = nn.Parameter(torch.ones(8, 64, dtype=torch.int8), requires_grad=False)
    (found,) = find_blocks(block)
    assert "integer codes" in found.refused_because


def test_a_block_is_found_once_with_all_its_names() -> None:
    block = tiny_models.executorch_block()
    model = nn.ModuleDict({"a": block, "b": block, "c": nn.Sequential(block)})
    (found,) = find_blocks(model)
    assert found.paths == ["a", "b", "c.0"]


def test_reading_is_lazy_and_one_expert_at_a_time() -> None:
    model = tiny_models.build("qwen3_moe")
    spec = only_spec(model)
    matrix = quantizer.quantize(spec.experts.w13(3), "int8-g32")
    experts = model.get_submodule("model.layers.0.mlp.experts")
    stacked: Tensor = experts.gate_up_proj  # type: ignore[assignment]
    assert spec.experts.w13(3).data_ptr() == stacked[3].data_ptr()
    assert packing.pack(matrix, "gate_up").numel() == packing.packed_bytes(
        "int8-g32", 64, 64, "gate_up"
    )


def test_every_row_of_the_table_is_compared_with_an_original() -> None:
    models = [tiny_models.build(family, device="meta") for family in tiny_models.FUSED]
    modules = {type(module).__name__ for model in models for module in model.modules()}
    named = {name for rule in RULES for name in rule.routers}
    assert named <= modules


def test_nothing_optional_is_imported() -> None:
    code = (
        "import moepack.transform, sys;"
        "print([m for m in ('transformers', 'executorch', 'torchao') if m in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "[]"
