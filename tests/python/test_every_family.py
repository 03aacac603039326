"""Every MoE family of transformers under strong weights, from its own code to the packed kernel.

Strong: what activations see is six times larger, so that clamps and caps engage, and correction
biases (sigma 0.3) change selections. Weak weights hide wrong adapters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moepack
import tiny_models
from moepack import ops, reference
from moepack.dequantized import MoEExperts, MoEFFN
from moepack.expert_calls import ExpertView
from moepack.families import FoundBlock, find_blocks
from moepack.modules import PackedExperts, QuantizedMoEFFN
from moepack.reference import exact, float_mode

ENTRIES = [*tiny_models.FUSED, *tiny_models.OUTSIDE]
# Weights belong to slots, not experts, and jump when another expert's logit passes a threshold.
WEIGHTS_JUMP = ("phimoe",)

Rows = tuple[Tensor, ...]


@pytest.mark.parametrize("family", ENTRIES)
def test_float_and_kernel(family: str) -> None:
    check(family, tiny_models.build(family, gain=6.0))


@pytest.mark.parametrize("family", ENTRIES)
def test_sizes_that_divide_by_nothing(family: str) -> None:
    model = tiny_models.build(family, gain=6.0, odd=True)
    spec = next(block.spec for block in find_blocks(model) if block.spec is not None)
    assert spec.experts.num_experts == 10
    check(family, model)


def check(family: str, model: nn.Module) -> None:
    expected = tiny_models.logits(model, family)
    blocks = [block for block in find_blocks(model) if not block.left_out_because]
    in_float = float_model(model, blocks)
    with recorded_routing(in_float) as routing:
        found = tiny_models.logits(in_float, family)
    assert (found - expected).norm() < 1e-4 * expected.norm()

    packed = moepack.quantize_(copy.deepcopy(model), "int8-g32", verify=False).model
    with compared_with_reference() as calls:
        tiny_models.logits(packed, family)
    assert calls
    with replayed_routing(packed, routing, family in WEIGHTS_JUMP) as flips:
        found = tiny_models.logits(packed, family)
    print(f"{family}: {sqnr_db(expected, found):.1f} dB, {sum(flips)} selections flipped")
    assert sqnr_db(expected, found) > 30


def sqnr_db(expected: Tensor, found: Tensor) -> float:
    noise = (expected.double() - found.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


def float_model(model: nn.Module, blocks: list[FoundBlock]) -> nn.Module:
    """What the transform makes of the model, but with its own weights, in plain torch."""
    packed = moepack.quantize_(copy.deepcopy(model), "int8-g32", verify=False).model
    fused = {p for p, m in packed.named_modules() if isinstance(m, QuantizedMoEFFN)}
    restored = moepack.dequantize_(packed)
    for block in blocks:
        assert block.spec is not None, block.refused_because
        is_fused = any(p == block.path or p.startswith(f"{block.path}.") for p in fused)
        spec = block.spec.packed_experts(is_fused)
        (experts,) = (
            m for m in restored.get_submodule(block.path).modules() if isinstance(m, MoEExperts)
        )
        for name, read in (("w13", spec.w13), ("w2", spec.w2)):
            weights = torch.stack([read(e) for e in range(spec.num_experts)])
            experts.get_parameter(name).data.copy_(weights)
    return restored


@contextmanager
def recorded_routing(model: nn.Module) -> Iterator[list[Rows]]:
    """What every router selects in a run, in the order of calls."""
    rows: list[Rows] = []

    def routed(self: MoEFFN, x: Tensor, router_x: Tensor) -> Tensor:
        biases = (self.gate_bias, self.expert_bias)
        routing = float_mode.route(router_x.float(), self.gate_weight, *biases, self.routing)
        rows.append((routing.ids, routing.weights))
        return self.experts(x, routing.ids, routing.weights)

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        rows.append(tensors_of(output))

    hooks = [router.register_forward_hook(record) for router in routers_outside(model)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoEFFN, "routed", routed)
        yield rows
    for hook in hooks:
        hook.remove()


@contextmanager
def replayed_routing(
    model: nn.Module, recorded: list[Rows], weights_jump: bool
) -> Iterator[list[int]]:
    """Tokens for which a router selects other experts than in the recorded run get the recorded
    ones; gives how many those are, per call."""
    expected = iter(recorded)
    flips: list[int] = []

    def routed(self: QuantizedMoEFFN, x: Tensor, router_x: Tensor | None = None) -> Tensor:
        r = self.routing
        router_x = x if router_x is None else router_x
        logits = exact.router_logits(router_x, self.gate_weight, self.gate_bias, r.router_dtype)
        scores = exact.score(logits, r.score_func)
        choice = scores if self.expert_bias is None else scores + self.expert_bias
        ids = exact.select(choice, r.num_activated_experts, r.n_group, r.topk_group, r.group_score)
        weights = exact.weigh(
            scores.gather(1, ids),
            r.score_func,
            r.norm_topk,
            r.norm_eps,
            r.norm_clamp,
            r.route_scale,
        )
        ids, weights = replay((ids, weights))
        return self.experts(x, ids, weights)

    def replay(rows: Rows) -> Rows:
        before = next(expected)
        differs = selection(rows) != selection(before)
        is_flipped = differs.reshape(differs.shape[0], -1).any(-1)
        if weights_jump:
            _, weights, ids = rows
            is_flipped |= ((weights - before[1]).abs() > 0.1).any(-1) | (ids != before[2]).any(-1)
        flips.append(int(is_flipped.sum()))
        return tuple(
            torch.where(is_flipped.view(-1, *[1] * (a.dim() - 1)), b, a)
            if len(a) == len(is_flipped)
            else a
            for a, b in zip(rows, before, strict=True)
        )

    def substitute(module: nn.Module, inputs: Any, output: Any) -> Any:
        replaced = iter(replay(tensors_of(output)))
        return tuple(
            next(replaced).view(value.shape) if isinstance(value, Tensor) else value
            for value in output
        )

    hooks = [router.register_forward_hook(substitute) for router in routers_outside(model)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuantizedMoEFFN, "routed", routed)
        yield flips
    for hook in hooks:
        hook.remove()


def routers_outside(model: nn.Module) -> list[nn.Module]:
    """The routers of blocks whose experts are packed and which keep their own router."""
    routers = []
    for block in model.modules():
        experts = getattr(block, "experts", None)
        children = dict(block.named_children())
        router = children.get("gate", children.get("router"))
        if isinstance(experts, nn.Module) and isinstance(router, nn.Module):
            fused = any(isinstance(m, QuantizedMoEFFN | MoEFFN) for m in experts.modules())
            routers += [] if fused else [router]
    return routers


def tensors_of(output: Any) -> Rows:
    """A router's tensors with tokens in the first dimension."""
    tensors = [value for value in output if isinstance(value, Tensor)]
    return tuple(t.reshape(-1, t.shape[-1]) for t in tensors)


def selection(rows: Rows) -> Tensor:
    """[T, ...]: equal where the same experts are selected."""
    for tensor in rows:
        if not tensor.is_floating_point():
            return tensor.sort(-1).values if tensor.shape[-1] <= 4 else tensor
    return rows[0] != 0  # scores [T, E], zero where an expert is not selected


@contextmanager
def compared_with_reference() -> Iterator[list[str]]:
    """Every call of an operator is also computed by the reference: the same bits."""
    calls: list[str] = []

    def both(name: str) -> Callable[..., Tensor]:
        kernel: Callable[..., Tensor] = getattr(ops, name)
        plain: Callable[..., Tensor] = getattr(reference, name)

        def call(*arguments: Any) -> Tensor:
            result = kernel(*arguments)
            assert torch.equal(result, plain(*arguments))
            calls.append(name)
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("quantized_moe_ffn", "quantized_experts"):
            patch.setattr(ops, name, both(name))
        yield calls


def test_how_many_families_route_in_the_operator() -> None:
    """FUSED lists what is fused, by test_families; extra configurations of a family count once."""
    from tiny_families import MODEL_TYPES

    families = {MODEL_TYPES.get(name, name) for name in tiny_models.FUSED}
    assert len(families) >= 62
    assert len({*ENTRIES}) >= 79


def test_nothing_of_the_originals_experts_stays() -> None:
    model = moepack.quantize_(tiny_models.build("switch_transformers")).model
    names = [n for n, _ in model.named_parameters() if "expert_" in n]
    assert not names
    packed = [m for m in model.modules() if isinstance(m, PackedExperts)]
    assert len(packed) == 2
    assert len([n for n in model.state_dict() if n.endswith("packed_w13")]) == 2
    twin = copy.deepcopy(model)
    assert torch.equal(*(tiny_models.logits(m, "switch_transformers") for m in (model, twin)))
    owned = {id(m) for m in twin.modules() if isinstance(m, PackedExperts)}
    assert {id(m.packed) for m in twin.modules() if isinstance(m, ExpertView)} == owned
