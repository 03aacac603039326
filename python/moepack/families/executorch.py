"""`MOEFeedForward` of ExecuTorch's llama_transformer, and classes of the same structure.

Children `gate` (a Linear) and `cond_ffn` with w1, w3 [E, F, D] and w2 [E, F, D], which is
transposed with respect to Hugging Face; attributes num_activated_experts, score_func, route_scale,
expert_bias.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from moepack.attributes import ExpertAttributes, RoutingAttributes
from moepack.families.spec import (
    BlockSpec,
    Combination,
    ExpertsFunction,
    ExpertsSpec,
    Oracle,
    RouterSpec,
    place_as,
)
from moepack.families.stacked import in_float, is_plain
from moepack.reference.float_mode import ExpertReader

NAME = "executorch"
_MATRICES = ("w1", "w2", "w3")
_ROUTING = ("num_activated_experts", "score_func", "route_scale", "expert_bias")
_SCORE_FUNCS = ("softmax", "softmax_all", "sigmoid")


def is_candidate(module: nn.Module) -> bool:
    """Does the module own routed experts?"""
    return "cond_ffn" in dict(module.named_children())


def read(block: nn.Module) -> tuple[BlockSpec | None, str]:
    """The block in neutral form, or None and the reason why it is not supported."""
    reason = _refuse(block)
    if reason:
        return None, reason
    cond_ffn = block.get_submodule("cond_ffn")
    router = _read_router(block)
    shared = "shared_expert" if getattr(block, "shared_expert", None) is not None else None
    oracle = Oracle(
        experts=lambda first, last: _original_experts(cond_ffn, first, last),
        block=lambda stub: _original_block(block, router, stub),
    )
    combination = Combination(shared, returns="flat")
    experts = _read_experts(cond_ffn)
    place = place_as("cond_ffn")
    return BlockSpec(experts, router, combination, oracle, place, "gate", "cond_ffn"), ""


def _refuse(block: nn.Module) -> str:
    cond_ffn = block.get_submodule("cond_ffn")
    shapes = [getattr(getattr(cond_ffn, name, None), "shape", ()) for name in _MATRICES]
    if not all(len(shape) == 3 for shape in shapes) or len(set(shapes)) != 1:
        found = ", ".join(f"{n} {list(s)}" for n, s in zip(_MATRICES, shapes, strict=True))
        return f"cond_ffn has {found}; supported: w1, w2, w3 of one shape [E, F, D]"
    weights = [getattr(cond_ffn, name) for name in _MATRICES]
    if not all(is_plain(w) and w.is_floating_point() for w in weights):
        return "cond_ffn holds weights that are already quantized; supported: float weights"
    missing = [name for name in _ROUTING if not hasattr(block, name)]
    if missing:
        return f"it has no {', '.join(missing)}, so its routing cannot be read"
    if block.score_func not in _SCORE_FUNCS:
        return f"score_func {block.score_func!r}; supported: {', '.join(_SCORE_FUNCS)}"
    if not _gate_weight(block).is_floating_point():
        return "the weight of gate holds integer codes; supported: float or torchao tensors"
    return ""


def _gate_weight(block: nn.Module) -> Tensor:
    """The router's weights; a torchao-quantized tensor (also an unwrapped one) is dequantized."""
    weight: Tensor = block.get_submodule("gate").weight  # type: ignore[assignment]
    return in_float(weight)


def _read_router(block: nn.Module) -> RouterSpec:
    is_sigmoid = block.score_func == "sigmoid"
    gate_weight = _gate_weight(block)
    bias = block.get_submodule("gate").bias
    attributes = RoutingAttributes(
        num_activated_experts=int(block.num_activated_experts),  # type: ignore[arg-type]
        score_func=str(block.score_func),
        norm_topk=is_sigmoid,
        norm_eps=torch.finfo(torch.float32).tiny if is_sigmoid else 0.0,
        norm_clamp=is_sigmoid,
        # The original scales in sigmoid mode only.
        route_scale=float(block.route_scale) if is_sigmoid else 1.0,  # type: ignore[arg-type]
        router_dtype=str(gate_weight.dtype).removeprefix("torch."),
    )
    expert_bias = block.expert_bias
    return RouterSpec(
        gate_weight,
        bias.detach() if isinstance(bias, Tensor) else None,
        expert_bias.detach() if isinstance(expert_bias, Tensor) else None,
        attributes,
    )


def _read_experts(cond_ffn: nn.Module) -> ExpertsSpec:
    w1, w2, w3 = (getattr(cond_ffn, name) for name in _MATRICES)
    num_experts, inner_dim, model_dim = w1.shape
    reader = ExpertReader(
        num_experts,
        w13=lambda e: torch.cat([w1[e].detach(), w3[e].detach()]),
        w2=lambda e: w2[e].detach().T,
        bias13=lambda e: None,
        bias2=lambda e: None,
    )
    stored = 3 * w1.numel() * w1.element_size()
    attributes = ExpertAttributes(inner_dim, scheme="")
    return ExpertsSpec(num_experts, model_dim, reader, attributes, bytes_stored=stored)


def _original_experts(cond_ffn: nn.Module, first: int, last: int) -> ExpertsFunction:
    window = copy.copy(cond_ffn)
    window._parameters = {
        name: nn.Parameter(getattr(cond_ffn, name).detach()[first:last].float(), False)
        for name in _MATRICES
    }

    def experts(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        outputs: Tensor = window(x, ids)
        return torch.einsum("tkd,tk->td", outputs, weights)

    return experts


class _Stub(nn.Module):
    """Returns [T, K, D] of which the weighted sum is what `function` computes for these weights."""

    def __init__(self, function: ExpertsFunction) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        one = torch.ones_like(ids[:, :1], dtype=x.dtype)
        slots = [self.function(x, ids[:, k : k + 1], one) for k in range(ids.shape[1])]
        return torch.stack(slots, dim=1)


def _original_block(block: nn.Module, router: RouterSpec, stub: ExpertsFunction) -> nn.Module:
    gate = nn.Linear(1, 1, bias=router.gate_bias is not None)
    gate.weight = nn.Parameter(router.gate_weight.float(), False)
    if router.gate_bias is not None:
        gate.bias = nn.Parameter(router.gate_bias.float(), False)
    stands_for = {id(block.get_submodule("cond_ffn")): _Stub(stub), id(block.gate): gate}
    return copy.deepcopy(block, stands_for).float().eval()
