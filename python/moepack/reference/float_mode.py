"""The same blocks in float, without quantization: what verification compares with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moepack.attributes import ExpertAttributes, RoutingAttributes
from moepack.errors import UnsupportedError


class Routing(NamedTuple):
    """Ids and weights [T, K]; per token [T] how close the selection was, and the largest choice."""

    ids: Tensor
    weights: Tensor
    margin: Tensor
    largest: Tensor


class ExpertReader(NamedTuple):
    """One expert's tensors at a time: w13 [2F, D] rows [gate; up], w2 [D, F], biases or None."""

    num_experts: int
    w13: Callable[[int], Tensor]
    w2: Callable[[int], Tensor]
    bias13: Callable[[int], Tensor | None]
    bias2: Callable[[int], Tensor | None]


def route(
    router_x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    expert_bias: Tensor | None,
    attributes: RoutingAttributes,
) -> Routing:
    """router_x [T, D] -> ids, weights [T, K] in its dtype; router_dtype is not applied."""
    dtype = router_x.dtype
    logits = F.linear(
        router_x, gate_weight.to(dtype), None if gate_bias is None else gate_bias.to(dtype)
    )
    scores = _scores(logits, attributes.score_func)
    choice = scores if expert_bias is None else scores + expert_bias.to(dtype)
    largest = choice.abs().amax(-1)
    choice, group_margin = _keep_best_groups(choice, attributes)
    ids, margin = _best(choice, attributes.num_activated_experts)
    weights = scores.gather(1, ids)
    if attributes.score_func == "softmax":
        weights = weights.softmax(-1)
    if attributes.norm_topk:
        total = weights.sum(-1, keepdim=True)
        eps = attributes.norm_eps
        weights = weights / (total.clamp(min=eps) if attributes.norm_clamp else total + eps)
    weights = weights * attributes.route_scale
    return Routing(ids, weights, torch.minimum(margin, group_margin), largest)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, reader: ExpertReader, attributes: ExpertAttributes
) -> Tensor:
    """x [T, D], ids and weights [T, K] -> [T, D]; reads each used expert once, as x's dtype."""
    if attributes.activation != "silu":
        raise UnsupportedError(f"activation {attributes.activation!r}; supported: silu")
    outputs = x.new_zeros(*ids.shape, x.shape[1])
    for expert in range(reader.num_experts):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        gate_up = _linear(x[token], reader.w13(expert), reader.bias13(expert))
        gate, up = gate_up.chunk(2, dim=-1)
        output = _linear(F.silu(gate) * up, reader.w2(expert), reader.bias2(expert))
        outputs[token, slot] = output
    return (outputs * weights.to(x.dtype)[..., None]).sum(1)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _scores(logits: Tensor, score_func: str) -> Tensor:
    if score_func == "softmax":
        return logits
    if score_func == "softmax_all":
        return logits.softmax(-1)
    if score_func == "sigmoid":
        return logits.sigmoid()
    raise UnsupportedError(f"score_func {score_func!r}; supported: softmax, softmax_all, sigmoid")


def _keep_best_groups(choice: Tensor, attributes: RoutingAttributes) -> tuple[Tensor, Tensor]:
    if attributes.n_group <= 1:
        return choice, choice.new_full(choice.shape[:1], float("inf"))
    grouped = choice.view(choice.shape[0], attributes.n_group, -1)
    if attributes.group_score == "max":
        group_scores = grouped.amax(-1)
    else:
        group_scores = grouped.topk(min(2, grouped.shape[2]), dim=-1).values.sum(-1)
    kept, margin = _best(group_scores, attributes.topk_group)
    is_dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(is_dropped[..., None], float("-inf")).flatten(1), margin


def _best(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ids of the `count` largest, ties to the lowest id, and the gap to the next one."""
    ordered = torch.sort(values, dim=-1, descending=True, stable=True)
    if count >= values.shape[1]:
        margin = values.new_full(values.shape[:1], float("inf"))
    else:
        margin = ordered.values[:, count - 1] - ordered.values[:, count]
    return ordered.indices[:, :count], margin
