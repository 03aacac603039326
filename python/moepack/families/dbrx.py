"""Experts as two-dimensional weights [E * F, D]: w1 (gate), v1 (up) and w2, which is transposed.

They belong to a child of `experts` that is called with one expert's part of each.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from moepack.families.activations import numbers_of, recognise
from moepack.families.blocks import original_block, read_routing, router_child
from moepack.families.spec import BlockSpec, ExpertsFunction, ExpertsSpec, Oracle, place_as
from moepack.reference.float_mode import ExpertReader

NAME = "dbrx"
_MATRICES = ("w1", "v1", "w2")


def is_candidate(module: nn.Module) -> bool:
    """Does the module own routed experts?"""
    mlp = getattr(getattr(module, "experts", None), "mlp", None)
    weights = [getattr(mlp, name, None) for name in _MATRICES]
    return all(isinstance(w, Tensor) and w.dim() == 2 for w in weights)


def read(block: nn.Module) -> tuple[BlockSpec | None, str]:
    """The block in neutral form, or None and the reason why it is not supported."""
    experts = block.get_submodule("experts")
    mlp = experts.get_submodule("mlp")
    w1, v1, w2 = (mlp.get_parameter(name) for name in _MATRICES)
    count, inner = int(experts.num_experts), int(experts.ffn_hidden_size)  # type: ignore[arg-type]
    if not w1.shape == v1.shape == w2.shape or w1.shape[0] != count * inner:
        return None, f"weights of {count} experts and inner size {inner} have other shapes"
    act = mlp.activation_fn

    def gated(columns: Tensor) -> Tensor:
        gate, up = columns.chunk(2, -1)
        product: Tensor = act(gate) * up  # type: ignore[operator]
        return product

    attributes = recognise(gated, inner, numbers_of(mlp), is_gated=True)
    if attributes is None:
        return None, f"{type(mlp).__name__} computes an activation that moepack has not"

    def part(weight: Tensor, expert: int) -> Tensor:
        return weight.detach()[expert * inner : (expert + 1) * inner]

    reader = ExpertReader(
        count,
        w13=lambda e: torch.cat([part(w1, e), part(v1, e)]),
        w2=lambda e: part(w2, e).T,
        bias13=lambda e: None,
        bias2=lambda e: None,
    )
    stored = sum(p.numel() * p.element_size() for p in experts.parameters())
    spec = ExpertsSpec(count, w1.shape[1], reader, attributes, stored)
    router, combination, outside = read_routing(block, spec)
    oracle = Oracle(
        experts=lambda first, last: _original_experts(experts, inner, first, last),
        block=lambda stub: original_block(block, experts, stub, in_place=combination.in_place),
    )
    place, name = place_as("experts"), router_child(block)
    return BlockSpec(spec, router, combination, oracle, place, name, "experts", outside), ""


def _original_experts(experts: nn.Module, inner: int, first: int, last: int) -> ExpertsFunction:
    window = copy.copy(experts)
    mlp = copy.copy(experts.get_submodule("mlp"))
    rows = slice(first * inner, last * inner)
    mlp._parameters = {
        name: nn.Parameter(mlp.get_parameter(name).detach()[rows].float(), False)
        for name in _MATRICES
    }
    window._modules = {**experts._modules, "mlp": mlp}
    window.num_experts = last - first  # type: ignore[assignment]
    return lambda x, ids, weights: window(x[None], ids, weights)[0]
