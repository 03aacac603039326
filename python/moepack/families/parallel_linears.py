"""Blocks without a child `experts`: two children, each one linear layer of every expert.

`input_linear` and `output_linear` hold weights [E, rows, columns] and are called with tokens sorted
by expert; the block adds a bias of its own to the sum. The weights of a token sum to one, so that
the bias moves into the experts. The same children are also used for attention (query and output
projections as experts), which is no feed-forward block.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from moepack.families.activations import numbers_of, recognise
from moepack.families.routers import read_router
from moepack.families.spec import BlockSpec, Combination, ExpertsFunction, ExpertsSpec, Oracle
from moepack.families.stacked import layout_of
from moepack.reference.float_mode import ExpertReader

NAME = "parallel_linears"
_LINEARS = ("input_linear", "output_linear")


def is_candidate(module: nn.Module) -> bool:
    """Does the module own routed experts?"""
    return _has_linears(module) or _has_linears(getattr(module, "experts", None))


def _has_linears(module: nn.Module | None) -> bool:
    weights = [getattr(getattr(module, n, None), "weight", None) for n in _LINEARS]
    is_stacked = all(isinstance(w, Tensor) and w.dim() == 3 for w in weights)
    return is_stacked and hasattr(module, "router")


def left_out(block: nn.Module) -> str:
    """Why the block is none of ours, if so."""
    if hasattr(block, "activation") and _has_linears(block):
        return ""
    return "its experts are projections of attention, not a feed-forward block"


def read(block: nn.Module) -> tuple[BlockSpec | None, str]:
    """The block in neutral form, or None and the reason why it is not supported."""
    w13, w2 = (block.get_submodule(name).get_parameter("weight") for name in _LINEARS)
    layout = layout_of({"w13": w13, "w2": w2})
    if layout is None or not layout.is_gated or layout.is_transposed or layout.w13 != "w13":
        return None, f"weights {list(w13.shape)} and {list(w2.shape)} are not gate and up, and down"
    act, bias = block.activation, block.get_parameter("bias")

    def gated(columns: Tensor) -> Tensor:
        gate, up = columns.chunk(2, -1)
        product: Tensor = act(gate) * up  # type: ignore[operator]
        return product

    attributes = recognise(gated, layout.inner_dim, numbers_of(block), is_gated=True)
    if attributes is None:
        return None, "it computes an activation that moepack has not"
    reader = ExpertReader(
        layout.num_experts,
        w13=lambda e: w13[e].detach(),
        w2=lambda e: w2[e].detach(),
        bias13=lambda e: None,
        bias2=lambda e: bias.detach(),
    )
    stored = sum(w.numel() * w.element_size() for w in (w13, w2))
    spec = ExpertsSpec(layout.num_experts, layout.model_dim, reader, attributes, stored)
    router, _, outside = read_router(block, block.get_submodule("router"), layout.num_experts)
    if router is None or router.attributes.score_func != "softmax":
        return None, f"{outside}; weights that sum to one are needed to move its bias"
    oracle = Oracle(
        experts=lambda first, last: _original_experts(block, first, last),
        block=lambda stub: _original_block(block, layout.inner_dim, stub),
    )
    return BlockSpec(spec, router, Combination(), oracle, None, "router", ""), ""


def _original_experts(block: nn.Module, first: int, last: int) -> ExpertsFunction:
    inward, outward = (_window(block.get_submodule(name), first, last) for name in _LINEARS)

    def function(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for slot in range(ids.shape[1]):
            expert, order = ids[:, slot].sort(stable=True)
            sizes = torch.bincount(expert, minlength=last - first).tolist()
            gate, up = inward(x[order], sizes).chunk(2, -1)
            outputs = outward(block.activation(gate) * up, sizes)  # type: ignore[operator]
            y[order] += (outputs + block.bias.float()) * weights[order, slot, None]
        return y

    return function


def _window(linear: nn.Module, first: int, last: int) -> nn.Module:
    window = copy.copy(linear)
    weight = linear.get_parameter("weight").detach()[first:last].float()
    window._parameters = {"weight": nn.Parameter(weight, False)}
    window.num_experts = last - first  # type: ignore[assignment]
    return window


class _Inward(nn.Module):
    """Stands for the first layer: its numbers are not used."""

    def __init__(self, inner_dim: int) -> None:
        super().__init__()
        self.inner_dim = inner_dim
        self.seen: Tensor | None = None

    def forward(self, x: Tensor, expert_size: object) -> Tensor:
        self.seen = x
        return x.new_zeros(x.shape[0], 2 * self.inner_dim)


class _Outward(nn.Module):
    """Stands for the second layer: what `function` makes of the first layer's input.

    Less the bias: what comes out of the block is the weighted sum only if it adds the bias once and
    the weights sum to one.
    """

    def __init__(self, function: ExpertsFunction, inward: _Inward, bias: Tensor) -> None:
        super().__init__()
        self.function = function
        self.inward = inward
        self.bias = nn.Parameter(bias.detach().clone(), False)

    def forward(self, hidden: Tensor, expert_size: list[int]) -> Tensor:
        x = self.inward.seen
        assert x is not None
        ids = torch.arange(len(expert_size)).repeat_interleave(torch.tensor(expert_size))[:, None]
        return self.function(x, ids, torch.ones_like(ids, dtype=x.dtype)) - self.bias


def _original_block(block: nn.Module, inner_dim: int, stub: ExpertsFunction) -> nn.Module:
    inward = _Inward(inner_dim)
    outward = _Outward(stub, inward, block.get_parameter("bias"))
    linears = (block.get_submodule(name) for name in _LINEARS)
    stands_for = {id(old): new for old, new in zip(linears, (inward, outward), strict=True)}
    return copy.deepcopy(block, stands_for).float().eval()
