"""Blocks of transformers 5: a router, and a child `experts` called with x, ids and weights.

Recognised by structure, never by model: stacked weights by their shapes, the activation by what it
computes. The block may be a whole decoder layer.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from moepack.attributes import ExpertAttributes
from moepack.expert_calls import IdentityExperts, NormalizedExperts
from moepack.families.activations import numbers_of, recognise
from moepack.families.blocks import original_block, read_routing, router_child
from moepack.families.spec import (
    BlockSpec,
    ExpertsFunction,
    ExpertsSpec,
    Oracle,
    Placement,
)
from moepack.families.stacked import (
    Layout,
    given_scheme,
    in_float,
    is_plain,
    layout_of,
    one_expert,
    stacks_of,
)
from moepack.modules import QuantizedExperts
from moepack.reference.float_mode import ExpertReader

NAME = "huggingface"
_ACTIVATIONS = ("act_fn", "activation_fn", "activation", "act")
# Attributes that hold the number of experts, identity ones included, in one class or another.
_COUNTS = ("num_experts", "num_routed_experts", "total_experts")


def is_candidate(module: nn.Module) -> bool:
    """Does the module own routed experts?"""
    return "experts" in dict(module.named_children())


def read(block: nn.Module) -> tuple[BlockSpec | None, str]:
    """The block in neutral form, or None and the reason why it is not supported."""
    experts = block.get_submodule("experts")
    name = type(experts).__name__
    layout = layout_of(
        stacks_of(experts), transposed_hint=bool(getattr(experts, "is_transposed", False))
    )
    if layout is None:
        return None, f"{name} has no pair of stacked 3-D weights (gate and up; down)"
    stacks = {"w13": getattr(experts, layout.w13), "w2": getattr(experts, layout.w2)}
    if not all(w.is_floating_point() for w in stacks.values()):
        return None, f"{name} holds integer weights; supported: float, or torchao's symmetric ones"
    attributes, is_interleaved = read_activation(experts, layout)
    if attributes is None:
        return None, f"{name} computes an activation between its matrices that moepack has not"
    scheme, reason = _read_given(stacks, layout, is_interleaved)
    if reason:
        return None, reason
    norm, reason = _output_norm(experts, layout)
    if reason or (layout.more13 and not _are_identities(experts, layout)):
        return None, reason or f"{name} has {layout.more13} experts without w2 that change x"
    spec = _read_experts(experts, layout, attributes, is_interleaved, scheme, norm)
    router, combination, outside = read_routing(block, spec)
    oracle = Oracle(
        experts=lambda first, last: _original_experts(experts, layout, first, last),
        block=lambda stub: original_block(block, experts, stub, in_place=combination.in_place),
    )
    place = _placement(layout, norm)
    return BlockSpec(
        spec, router, combination, oracle, place, router_child(block), "experts", outside
    ), ""


def read_activation(experts: nn.Module, layout: Layout) -> tuple[ExpertAttributes | None, bool]:
    """What is computed between the matrices, and whether gate and up rows alternate."""
    apply_gate = getattr(experts, "_apply_gate", None)
    names = (name for name in _ACTIVATIONS if callable(getattr(experts, name, None)))
    act = getattr(experts, next(names, ""), None)
    numbers = numbers_of(experts)

    def found(function: Callable[[Tensor], Tensor]) -> ExpertAttributes | None:
        return recognise(function, layout.inner_dim, numbers, is_gated=layout.is_gated)

    if not layout.is_gated:
        return (found(act) if act else None), False
    if apply_gate is not None:
        concatenated = found(apply_gate)
        if concatenated is not None:
            return concatenated, False
        return found(lambda c: apply_gate(torch.stack(c.chunk(2, -1), -1).flatten(-2))), True
    if act is None:
        return None, False
    return found(lambda c: act(c.chunk(2, -1)[0]) * c.chunk(2, -1)[1]), False


def _read_given(stacks: dict[str, Tensor], layout: Layout, is_interleaved: bool) -> tuple[str, str]:
    """The scheme that torchao has quantized the experts to, "" for float; the reason to refuse."""
    if all(is_plain(stack) for stack in stacks.values()):
        return "", ""
    if layout.is_transposed or is_interleaved or layout.more13:
        return "", "torchao quantized it in a transposed or interleaved layout; supported: float"
    return given_scheme(stacks)


def _output_norm(experts: nn.Module, layout: Layout) -> tuple[nn.Module | None, str]:
    """The child with a weight as wide as the model, which a norm of outputs has."""
    width = (layout.model_dim,)
    norms = [
        child
        for child in experts.children()
        if any(p.shape == width for p in child.parameters(recurse=False))
    ]
    if len(norms) > 1:
        return None, f"{type(experts).__name__} has {len(norms)} norms; supported: one, of outputs"
    return (norms[0] if norms else None), ""


@torch.no_grad()
def _are_identities(experts: nn.Module, layout: Layout) -> bool:
    x = torch.linspace(-1.0, 2.0, layout.model_dim)[None]
    forward = inspect.unwrap(type(experts).forward)
    ids = torch.full((1, 2), layout.num_experts)
    result: Tensor = forward(experts, x, ids, torch.tensor([[0.5, 0.25]]))
    return torch.allclose(result, 0.75 * x)


def _read_experts(
    experts: nn.Module,
    layout: Layout,
    attributes: ExpertAttributes,
    is_interleaved: bool,
    scheme: str,
    norm: nn.Module | None,
) -> ExpertsSpec:
    stacks = {"w13": getattr(experts, layout.w13), "w2": getattr(experts, layout.w2)}

    def in_order(rows: Tensor) -> Tensor:
        return torch.cat([rows[::2], rows[1::2]]) if is_interleaved else rows

    def matrix(name: str, expert: int) -> Tensor:
        stored = in_float(one_expert(stacks[name], expert))
        return stored.T if layout.is_transposed else stored

    def bias(name: str, expert: int) -> Tensor | None:
        value = getattr(experts, f"{name}_bias", None)
        return value[expert].detach() if isinstance(value, Tensor) else None

    def bias13(expert: int) -> Tensor | None:
        value = bias(layout.w13, expert)
        return None if value is None else in_order(value)

    reader = ExpertReader(
        layout.num_experts,
        w13=lambda e: in_order(matrix("w13", e)),
        w2=lambda e: matrix("w2", e),
        bias13=bias13,
        bias2=lambda e: bias(layout.w2, e),
    )
    stored = sum(p.numel() * p.element_size() for p in experts.parameters())
    return ExpertsSpec(
        layout.num_experts,
        layout.model_dim,
        reader,
        attributes,
        stored,
        norm,
        given=(lambda name, e: one_expert(stacks[name], e)) if scheme else None,
        given_scheme=scheme,
    )


def _placement(layout: Layout, norm: nn.Module | None) -> Placement:
    def place(block: nn.Module, packed: QuantizedExperts) -> nn.Module:
        experts: nn.Module = packed if norm is None else NormalizedExperts(packed, norm)
        if layout.more13:
            experts = IdentityExperts(experts, layout.num_experts)
        block.experts = experts
        return block

    return place


def _original_experts(experts: nn.Module, layout: Layout, first: int, last: int) -> ExpertsFunction:
    """The class's own forward over a slice of the experts; no parameter of the model is touched."""
    window = copy.copy(experts)
    window._parameters = {
        name: None if p is None else nn.Parameter(in_float(p)[first:last].float(), False)
        for name, p in experts._parameters.items()
    }
    for name in _COUNTS:
        if hasattr(window, name):
            setattr(window, name, last - first)
    forward = inspect.unwrap(type(experts).forward)
    return lambda x, ids, weights: forward(window, x, ids, weights)
