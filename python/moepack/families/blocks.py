"""What surrounds the experts of a block: its router, shared expert, and its own code to compare."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from moepack.families.routers import read_router
from moepack.families.spec import Combination, ExpertsFunction, ExpertsSpec, RouterSpec

ROUTERS = ("gate", "router")
_SHARED = ("shared_experts", "shared_expert", "shared_mlp")
_SHARED_GATE = "shared_expert_gate"


def router_child(block: nn.Module) -> str:
    """The name of the block's router, "" if it has none."""
    children = dict(block.named_children())
    return next((name for name in ROUTERS if name in children), "")


def read_routing(
    block: nn.Module, experts: ExpertsSpec, parts: tuple[str, ...] = ("experts",)
) -> tuple[RouterSpec | None, Combination, str]:
    """Router, what is around it, and why the router stays outside if it does.

    `parts` are the block's children that hold experts. A child that nobody knows makes the block
    keep its own code.
    """
    children = dict(block.named_children())
    name = router_child(block)
    shared = next((name for name in _SHARED if name in children), None)
    shared_gate = _SHARED_GATE if _SHARED_GATE in children else None
    combination = Combination(shared, shared_gate)
    if not name:
        return None, combination, "no child named gate or router"
    if experts.output_norm is not None:
        return None, combination, "each expert's output is normalized before it is weighted"
    spec, in_place, outside = read_router(block, children[name], experts.num_experts)
    if spec is None:
        return None, combination, outside
    unknown = set(children) - {*parts, *ROUTERS, *_SHARED, _SHARED_GATE}
    if unknown or in_place:
        combination = Combination(in_place=True)
    if spec.output_scale is not None and experts.given_scheme:
        return None, combination, "its scales cannot move into codes that torchao has chosen"
    if spec.gate_weight.shape != (experts.num_experts, experts.model_dim):
        found = list(spec.gate_weight.shape)
        return None, combination, f"router weight {found} does not fit the experts"
    return spec, combination, ""


class StubExperts(nn.Module):
    """Computes `function` where a block calls its experts with x, ids and weights."""

    def __init__(self, function: ExpertsFunction) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self.function(flat, top_k_index, top_k_weights).view(hidden_states.shape)


class _RouterThenExperts(nn.Module):
    """All that matters of a block that keeps its own code."""

    def __init__(self, router: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.router = router
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        _, weights, ids = self.router(x)
        y: Tensor = self.experts(x, ids, weights)
        return y


def original_block(
    block: nn.Module, experts: nn.Module, stub: ExpertsFunction, *, in_place: bool = False
) -> nn.Module:
    """A copy of the block in fp32 with a stand-in for its experts."""
    stand_in = StubExperts(stub)
    if in_place:
        router = copy.deepcopy(block.get_submodule(router_child(block)))
        return _RouterThenExperts(router, stand_in).float().eval()
    return copy.deepcopy(block, {id(experts): stand_in}).float().eval()
