"""Packed tensors become modules, and modules take the place of the blocks that they replace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from moepack.expert_calls import RouterInput
from moepack.families import BlockSpec, ExpertsSpec, FoundBlock
from moepack.modules import PackedExperts, QuantizedExperts, QuantizedMoEFFN, RoutedExperts
from moepack.planner import BlockPlan


@dataclass(frozen=True)
class PackedTensors:
    """w13 and w2 uint8 [E, bytes], bias13 [E, 2F] and bias2 [E, D] fp32 or None."""

    w13: Tensor
    w2: Tensor
    bias13: Tensor | None
    bias2: Tensor | None


def stacked_biases(experts: ExpertsSpec) -> tuple[Tensor | None, Tensor | None]:
    """bias13 [E, 2F] and bias2 [E, D] in fp32, or None."""

    def stack(read: Callable[[int], Tensor | None]) -> Tensor | None:
        biases = [b for e in range(experts.num_experts) if (b := read(e)) is not None]
        return torch.stack(biases).float() if biases else None

    return stack(experts.bias13), stack(experts.bias2)


def build(
    spec: BlockSpec, decision: BlockPlan, original: nn.Module, packed: PackedTensors
) -> PackedExperts:
    """The module of a block: its experts, and its router where the operator routes."""
    attributes = replace(spec.experts.attributes, scheme=decision.scheme, layout=decision.layout)
    tensors = (packed.w13, packed.w2, packed.bias13, packed.bias2)
    if decision.router == "outside" or spec.router is None:
        experts = QuantizedExperts(*tensors, attributes, spec.experts.model_dim)
        return experts.train(original.training)
    router = spec.router
    kind = RoutedExperts if spec.combination.in_place else QuantizedMoEFFN
    new = kind(
        router.gate_weight,
        router.gate_bias,
        router.expert_bias,
        *tensors,
        router.attributes,
        attributes,
    )
    new.training = original.training  # not train(): the shared expert keeps its own mode
    new.returns = spec.combination.returns
    shared, gate = (
        (name, original.get_submodule(name)) if name else None
        for name in (spec.combination.shared, spec.combination.shared_gate)
    )
    new.keep_shared(shared, gate)
    return new


def put(model: nn.Module, found: FoundBlock, spec: BlockSpec, new: PackedExperts) -> nn.Module:
    """Puts the new module at every path of the old one; returns the root."""
    in_place = placed(found.module, spec, new)
    for path in found.paths:
        if path == "":
            return in_place
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, in_place)
    return model


def placed(block: nn.Module, spec: BlockSpec, new: PackedExperts) -> nn.Module:
    """What stands at the block's path: the new module, or the block with new children."""
    if isinstance(new, QuantizedExperts):
        assert spec.place is not None  # else the plan refuses the block
        return spec.place(block, new)
    if isinstance(new, RoutedExperts):
        assert spec.router is not None
        setattr(block, spec.router_child, RouterInput(spec.router.before))
        setattr(block, spec.experts_child, new)
        return block
    return new
