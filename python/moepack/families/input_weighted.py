"""Blocks that weight the experts' input: every expert sees every token times its routing weight.

The original computes all experts for all tokens, most of them on zeros; the packed block selects.
`router(x)` returns scores [T, E], zero where an expert is not selected, and logits.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace

import torch
from torch import Tensor, nn

from moepack.families.huggingface import read_activation
from moepack.families.spec import BlockSpec, Combination, ExpertsFunction, ExpertsSpec, Oracle
from moepack.families.stacked import is_plain, layout_of, stacks_of
from moepack.modules import QuantizedExperts
from moepack.reference.float_mode import ExpertReader

NAME = "input_weighted"
_CHILDREN = {"experts", "router", "shared_expert"}


class InputWeightedBlock(nn.Module):
    """The block with packed experts: returns (y [T, D], router logits), as the original does."""

    is_moepack_module = True

    def __init__(
        self, experts: QuantizedExperts, router: nn.Module, shared: nn.Module, top_k: int
    ) -> None:
        super().__init__()
        self.experts = experts
        self.router = router
        self.shared_expert = shared
        self.top_k = top_k

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(x)
        weights, ids = scores.topk(self.top_k, dim=-1)
        return self.shared_expert(x) + self.experts(x, ids, weights), logits


def is_candidate(module: nn.Module) -> bool:
    """Does the module own routed experts?"""
    experts = getattr(module, "experts", None)
    if not isinstance(experts, nn.Module) or set(dict(module.named_children())) != _CHILDREN:
        return False
    return len(inspect.signature(experts.forward).parameters) == 1 and len(stacks_of(experts)) == 2


def read(block: nn.Module) -> tuple[BlockSpec | None, str]:
    """The block in neutral form, or None and the reason why it is not supported."""
    experts = block.get_submodule("experts")
    layout = layout_of(stacks_of(experts))
    if layout is None or layout.more13 or not layout.is_gated:
        return None, f"{type(experts).__name__}: its two stacked weights fit no layout"
    w13, w2 = experts.get_parameter(layout.w13), experts.get_parameter(layout.w2)
    if not (is_plain(w13) and is_plain(w2) and w13.is_floating_point()):
        return None, f"{type(experts).__name__} is quantized already; supported: float weights"
    attributes, _ = read_activation(experts, layout)
    if attributes is None:
        return None, f"{type(experts).__name__} computes an activation that moepack has not"

    def turned(matrix: Tensor) -> Tensor:
        return matrix.detach().T if layout.is_transposed else matrix.detach()

    reader = ExpertReader(
        layout.num_experts,
        w13=lambda e: turned(w13[e]),
        w2=lambda e: turned(w2[e]),
        bias13=lambda e: None,
        bias2=lambda e: None,
    )
    stored = sum(p.numel() * p.element_size() for p in experts.parameters())
    attributes = replace(attributes, weight_on_input=True)
    spec = ExpertsSpec(layout.num_experts, layout.model_dim, reader, attributes, stored)
    oracle = Oracle(
        experts=lambda first, last: _original_experts(experts, first, last),
        block=lambda stub: block,
    )
    why = "it selects by logits and weights by their sigmoid, where distinct logits can be equal"
    return BlockSpec(
        spec,
        None,
        Combination(),
        oracle,
        _place,
        "router",
        "experts",
        why,
        outside_replaces=("",),
        outside_keeps=("router", "shared_expert"),
    ), ""


def _place(block: nn.Module, packed: QuantizedExperts) -> nn.Module:
    router, shared = block.get_submodule("router"), block.get_submodule("shared_expert")
    new = InputWeightedBlock(packed, router, shared, int(block.top_k))  # type: ignore[arg-type]
    new.training = block.training
    return new


def _original_experts(experts: nn.Module, first: int, last: int) -> ExpertsFunction:
    window, count = copy.copy(experts), last - first
    window._parameters = {
        name: nn.Parameter(p.detach()[first:last].float(), False)
        for name, p in experts.named_parameters(recurse=False)
    }
    window.num_experts = count  # type: ignore[assignment]

    def function(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for slot in range(ids.shape[1]):
            scores = torch.zeros(x.shape[0], count).scatter_(1, ids[:, [slot]], weights[:, [slot]])
            inputs = (x * scores.T[..., None]).reshape(-1, x.shape[1])
            y += window(inputs).view(count, *x.shape).sum(0)
        return y

    return function
