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
    """One expert's tensors at a time: w13 [2F, D] rows [gate; up] (without a gate [F, D]),
    w2 [D, F], biases or None."""

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
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    reader: ExpertReader,
    attributes: ExpertAttributes,
    output_norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """x [T, D], ids and weights [T, K] -> [T, D]; reads each used expert once, as x's dtype.

    `output_norm` is applied to every expert's output before it is weighted.
    """
    outputs = x.new_zeros(*ids.shape, x.shape[1])
    weights = weights.to(x.dtype)
    for expert in range(reader.num_experts):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        rows = x[token] * weights[token, slot, None] if attributes.weight_on_input else x[token]
        columns = _linear(rows, reader.w13(expert), reader.bias13(expert))
        hidden = activate(columns, attributes)
        outputs[token, slot] = _linear(hidden, reader.w2(expert), reader.bias2(expert))
    if output_norm is not None:
        outputs = output_norm(outputs)
    return (outputs if attributes.weight_on_input else outputs * weights[..., None]).sum(1)


def activate(columns: Tensor, attributes: ExpertAttributes) -> Tensor:
    """w13's columns [T, 2F] (gate, then up) or, without a gate, [T, F] -> [T, F]."""
    if not attributes.is_gated:
        positive = F.relu(columns)
        return positive if attributes.activation == "relu" else positive.square()
    gate, up = columns.chunk(2, dim=-1)
    limit = attributes.act_limit or float("inf")
    if not attributes.limit_after_act:
        gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    activated = _activated_gate(gate, attributes)
    if attributes.limit_after_act:
        activated = activated.clamp(max=limit)
    if attributes.activation == "swiglu_oai":
        up = up + 1
    return activated * _softcap(up, attributes.up_softcap)


def _activated_gate(gate: Tensor, attributes: ExpertAttributes) -> Tensor:
    if attributes.activation == "silu":
        return _softcap(gate, attributes.gate_softcap) * gate.sigmoid()
    if attributes.activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh")
    if attributes.activation == "swiglu_oai":
        return gate * (attributes.act_alpha * gate).sigmoid()
    raise UnsupportedError(
        f"activation {attributes.activation!r}; supported: silu, gelu_tanh, swiglu_oai, relu, relu2"
    )


def _softcap(x: Tensor, cap: float) -> Tensor:
    return x if cap == 0.0 else cap * (x / cap).tanh()


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
