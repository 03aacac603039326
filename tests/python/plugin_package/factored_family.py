"""A package of someone else: a block in a shape of code that moepack has not, and its family.

All weights are parameters of the block: gate and up as one matrix [E * F, D] each, down as
[D, E * F]. The block scales its routing weights by a learned temperature of the logits.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from moepack.attributes import ExpertAttributes, RoutingAttributes
from moepack.families import BlockSpec, Combination, ExpertsSpec, Oracle, RouterSpec
from moepack.families.spec import ExpertsFunction
from moepack.reference.float_mode import ExpertReader


class FactoredMixture(nn.Module):
    def __init__(self, num_experts: int, width: int, inner: int, top_k: int) -> None:
        super().__init__()
        self.num_experts, self.inner, self.top_k = num_experts, inner, top_k
        self.gates = nn.Parameter(torch.randn(num_experts * inner, width) * width**-0.5)
        self.ups = nn.Parameter(torch.randn(num_experts * inner, width) * width**-0.5)
        self.downs = nn.Parameter(torch.randn(width, num_experts * inner) * inner**-0.5)
        self.route = nn.Linear(width, num_experts)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        chosen, ids = (self.route(flat) / self.temperature).topk(self.top_k, dim=-1)
        return self.mix(flat, ids, chosen.softmax(-1)).view(x.shape)

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        dense = torch.zeros(x.shape[0], self.num_experts).scatter_add_(1, ids, weights)
        hidden = nn.functional.silu(x @ self.gates.T) * (x @ self.ups.T)
        mixed = hidden.unflatten(1, (self.num_experts, self.inner)) * dense[..., None]
        y: Tensor = mixed.flatten(1) @ self.downs.T
        return y


class _WithStandIn(FactoredMixture):
    """The original's forward, with a stand-in for its experts."""

    function: ExpertsFunction

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.function(x, ids, weights)


def is_candidate(module: nn.Module) -> bool:
    return isinstance(module, FactoredMixture)


def read(module: nn.Module) -> tuple[BlockSpec | None, str]:
    assert isinstance(module, FactoredMixture)
    inner, count = module.inner, module.num_experts

    def rows(weight: Tensor, expert: int) -> Tensor:
        return weight.detach()[expert * inner : (expert + 1) * inner]

    reader = ExpertReader(
        count,
        w13=lambda e: torch.cat([rows(module.gates, e), rows(module.ups, e)]),
        w2=lambda e: rows(module.downs.T, e).T,
        bias13=lambda e: None,
        bias2=lambda e: None,
    )
    experts = ExpertsSpec(count, module.gates.shape[1], reader, ExpertAttributes(inner, scheme=""))
    router = RouterSpec(
        module.route.weight.detach() / module.temperature.detach(),
        module.route.bias.detach() / module.temperature.detach(),
        None,
        RoutingAttributes(module.top_k, "softmax"),
    )
    oracle = Oracle(experts=lambda a, b: _window(module, a, b), block=lambda f: _block(module, f))
    return BlockSpec(experts, router, Combination(), oracle, place=None), ""


def _window(block: FactoredMixture, first: int, last: int) -> ExpertsFunction:
    window = copy.deepcopy(block).float()
    rows = slice(first * block.inner, last * block.inner)
    window.num_experts = last - first
    for name in ("gates", "ups"):
        setattr(window, name, nn.Parameter(getattr(window, name)[rows]))
    window.downs = nn.Parameter(window.downs[:, rows])
    return window.mix


def _block(block: FactoredMixture, function: ExpertsFunction) -> nn.Module:
    twin = copy.deepcopy(block).float()
    twin.__class__ = _WithStandIn
    twin.function = function  # type: ignore[assignment]
    return twin


NAME = "factored"
