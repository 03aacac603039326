"""What `dequantize_` leaves: blocks of moepack's own float modules, to be packed again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from moepack.dequantized import MoEExperts, MoEFFN, MoERoutedExperts
from moepack.expert_calls import ExpertView, RouterInput
from moepack.families.spec import (
    BlockSpec,
    Combination,
    ExpertsFunction,
    ExpertsSpec,
    Oracle,
    RouterSpec,
)
from moepack.modules import QuantizedExperts

NAME = "dequantized"
_WHY = "it stayed outside when the block was packed first"


def is_candidate(module: nn.Module) -> bool:
    """Does the module own routed experts?"""
    return type(module) is MoEFFN or _child(module, MoEExperts, MoERoutedExperts) != ""


def read(block: nn.Module) -> tuple[BlockSpec | None, str]:
    """The block in neutral form."""
    name = "" if isinstance(block, MoEFFN) else _child(block, MoEExperts, MoERoutedExperts)
    experts = block.get_submodule(name)
    assert isinstance(experts, MoEExperts)
    stored = sum(p.numel() * p.element_size() for p in experts.parameters(recurse=False))
    num_experts, dim = experts.w13.shape[0], experts.w13.shape[-1]
    spec = ExpertsSpec(num_experts, dim, experts.reader(), experts.attributes, stored)
    if isinstance(experts, MoEFFN):
        return _with_router(block, name, experts, spec), ""
    oracle = Oracle(lambda first, last: experts.window(first, last).experts, lambda _: block)
    return BlockSpec(spec, None, Combination(), oracle, _placement(name), "", name, _WHY), ""


def _with_router(block: nn.Module, name: str, experts: MoEFFN, spec: ExpertsSpec) -> BlockSpec:
    """The whole block, or experts that route in a block that keeps its own code."""
    is_whole = experts is block
    router_name = "" if is_whole else _child(block, RouterInput)
    stand_in = block.get_submodule(router_name)
    before = stand_in.before if isinstance(stand_in, RouterInput) else None
    gate = (experts.gate_weight, experts.gate_bias, experts.expert_bias)
    oracle = Oracle(
        experts=lambda first, last: experts.window(first, last).experts,
        block=lambda stub: _original_block(experts, stub, before, is_whole=is_whole),
    )
    combination = Combination(in_place=True)
    if is_whole:
        returns: Literal["flat", "shaped"] = "flat" if experts.returns == "flat" else "shaped"
        combination = Combination(experts.shared_name, experts.shared_gate_name, returns)
    router = RouterSpec(*gate, experts.routing, before)
    return BlockSpec(spec, router, combination, oracle, None, router_name, name)


def _child(module: nn.Module, *kinds: type[nn.Module]) -> str:
    return next((name for name, child in module.named_children() if type(child) in kinds), "")


def _placement(name: str) -> Callable[[nn.Module, QuantizedExperts], nn.Module]:
    def place(block: nn.Module, packed: QuantizedExperts) -> nn.Module:
        setattr(block, name, packed)
        for view in block.modules():
            if isinstance(view, ExpertView):
                view.look_at(packed)
        return block

    return place


class _Routed(nn.Module):
    """All that matters of a block that keeps its own code."""

    def __init__(self, experts: MoEFFN, before: nn.Module | None) -> None:
        super().__init__()
        self.experts = experts
        self.before = copy.deepcopy(before)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts.routed(x, x if self.before is None else self.before(x))


def _original_block(
    experts: MoEFFN, stub: ExpertsFunction, before: nn.Module | None, *, is_whole: bool
) -> nn.Module:
    window = copy.copy(experts)
    window._parameters, window._buffers = {}, dict(experts._buffers)
    window._modules = copy.deepcopy(experts._modules)
    window.experts = stub  # type: ignore[assignment, method-assign]
    return (window if is_whole else _Routed(window, before)).float().eval()
