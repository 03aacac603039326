"""Blocks of transformers 5: a child `experts` with the standard experts interface, and a router.

Recognised by structure, never by model: stacked 3-D weights, the flags that the interface stores on
the experts module, and an activation that is recognised by what it computes.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moepack.families.routers import read_router
from moepack.families.spec import (
    BlockSpec,
    Combination,
    ExpertsFunction,
    ExpertsSpec,
    Oracle,
    RouterSpec,
)
from moepack.families.stacked import given_scheme, in_float, is_plain, one_expert
from moepack.reference.float_mode import ExpertReader

NAME = "huggingface"
_ROUTERS = ("gate", "router")
_SHARED = ("shared_experts", "shared_expert", "shared_mlp")
_SHARED_GATE = "shared_expert_gate"
_INTERFACE_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def is_candidate(module: nn.Module) -> bool:
    """Does the module own routed experts?"""
    return "experts" in dict(module.named_children())


def read(block: nn.Module) -> tuple[BlockSpec | None, str]:
    """The block in neutral form, or None and the reason why it is not supported."""
    experts = block.get_submodule("experts")
    reason = _refuse_experts(experts)
    if reason:
        return None, reason
    scheme, reason = _read_given(experts)
    if reason:
        return None, reason
    spec = _read_experts(experts, scheme)
    router, combination, outside = _read_routing(block, spec.num_experts)
    oracle = Oracle(
        experts=lambda first, last: _original_experts(experts, first, last),
        block=lambda stub: _original_block(block, experts, stub),
    )
    return BlockSpec(spec, router, combination, oracle, "experts", outside), ""


def _refuse_experts(experts: nn.Module) -> str:
    name = type(experts).__name__
    missing = [flag for flag in _INTERFACE_FLAGS if not hasattr(experts, flag)]
    if missing:
        return f"{name} does not use the standard experts interface (no {', '.join(missing)})"
    if not experts.has_gate:
        return f"{name} has no gate projection; supported: gated experts (gate, up, down)"
    if getattr(experts, "has_post_expert_norm", False):
        return f"{name} normalizes the output of each expert; supported: plain gated experts"
    weights = [getattr(experts, n, None) for n in ("gate_up_proj", "down_proj")]
    if not all(isinstance(w, Tensor) and w.dim() == 3 for w in weights):
        return f"{name} has no stacked 3-D weights gate_up_proj and down_proj"
    if not all(isinstance(w, Tensor) and w.is_floating_point() for w in weights):
        return f"{name} holds integer weights; supported: float, or torchao's symmetric tensors"
    if not _is_silu(experts):
        return f"{name} computes another activation than silu(gate) * up; supported: silu"
    return ""


def _is_silu(experts: nn.Module) -> bool:
    """Applies the experts' own gating to numbers that tell clamps and other functions apart."""
    ramp = torch.linspace(-60.0, 60.0, 97)
    gate, up = ramp, ramp.flip(0) * 0.9 + 1.0
    joined = torch.cat([gate, up])
    if not experts.is_concatenated:
        joined = torch.stack([gate, up], dim=1).flatten()
    apply_gate: Callable[[Tensor], Tensor] = experts._apply_gate  # type: ignore[assignment]
    try:
        result = apply_gate(joined[None])[0]
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return False
    expected = F.silu(gate) * up
    return result.shape == expected.shape and bool(torch.allclose(result, expected, rtol=1e-5))


def _read_given(experts: nn.Module) -> tuple[str, str]:
    """The scheme that torchao has quantized the experts to, "" for float; the reason to refuse."""
    stacks = _stacks(experts)
    if all(is_plain(stack) for stack in stacks.values()):
        return "", ""
    if experts.is_transposed or not experts.is_concatenated:
        return "", "torchao quantized it in a transposed or interleaved layout; supported: float"
    return given_scheme(stacks)


def _stacks(experts: nn.Module) -> dict[str, Tensor]:
    gate_up, down = experts.gate_up_proj, experts.down_proj
    assert isinstance(gate_up, Tensor)
    assert isinstance(down, Tensor)
    return {"w13": gate_up, "w2": down}


def _read_experts(experts: nn.Module, scheme: str) -> ExpertsSpec:
    gate_up, down = _stacks(experts).values()
    transposed, concatenated = bool(experts.is_transposed), bool(experts.is_concatenated)

    def rows(tensor: Tensor) -> Tensor:
        return tensor if concatenated else torch.cat([tensor[::2], tensor[1::2]])

    def bias(name: str, expert: int) -> Tensor | None:
        value = getattr(experts, name)[expert].detach() if experts.has_bias else None
        return rows(value) if value is not None and name.startswith("gate_up") else value

    def matrix(tensor: Tensor, expert: int) -> Tensor:
        stored = in_float(one_expert(tensor, expert))
        return stored.T if transposed else stored

    num_experts, model_dim, inner_dim = down.shape
    if transposed:
        model_dim, inner_dim = inner_dim, model_dim
    reader = ExpertReader(
        num_experts,
        w13=lambda e: rows(matrix(gate_up, e)),
        w2=lambda e: matrix(down, e),
        bias13=lambda e: bias("gate_up_proj_bias", e),
        bias2=lambda e: bias("down_proj_bias", e),
    )
    return ExpertsSpec(
        num_experts,
        model_dim,
        inner_dim,
        reader,
        bytes_stored=sum(p.numel() * p.element_size() for p in experts.parameters()),
        given=(lambda name, e: one_expert(_stacks(experts)[name], e)) if scheme else None,
        given_scheme=scheme,
    )


def _read_routing(block: nn.Module, num_experts: int) -> tuple[RouterSpec | None, Combination, str]:
    children = dict(block.named_children())
    router = next((children[name] for name in _ROUTERS if name in children), None)
    shared = next((name for name in _SHARED if name in children), None)
    shared_gate = _SHARED_GATE if _SHARED_GATE in children else None
    combination = Combination(shared, shared_gate)
    if router is None:
        return None, combination, "no child named gate or router"
    unknown = set(children) - {"experts", *_ROUTERS, *_SHARED, _SHARED_GATE}
    if unknown:
        return None, combination, f"the block does more, with {', '.join(sorted(unknown))}"
    spec, outside = read_router(block, router, num_experts)
    return spec, combination, outside


def _original_experts(experts: nn.Module, first: int, last: int) -> ExpertsFunction:
    """The class's own forward over a slice of the experts; no parameter of the model is touched."""
    window = copy.copy(experts)
    window._parameters = {
        name: None if p is None else nn.Parameter(in_float(p)[first:last].float(), False)
        for name, p in experts._parameters.items()
    }
    window.num_experts = last - first  # type: ignore[assignment]
    forward = inspect.unwrap(type(experts).forward)
    return lambda x, ids, weights: forward(window, x, ids, weights)


class _Stub(nn.Module):
    def __init__(self, function: ExpertsFunction) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.function(hidden_states, top_k_index, top_k_weights)


def _original_block(block: nn.Module, experts: nn.Module, stub: ExpertsFunction) -> nn.Module:
    return copy.deepcopy(block, {id(experts): _Stub(stub)}).float().eval()
