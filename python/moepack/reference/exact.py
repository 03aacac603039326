"""The two operators, operation by operation as docs/reference/op.md states them."""

from __future__ import annotations

import torch
from torch import Tensor

from moepack.attributes import UNGATED
from moepack.errors import UnsupportedError
from moepack.reference.activation import Activation
from moepack.reference.arithmetic import (
    ACTIVATION_GROUP,
    exp,
    fma,
    fp32,
    quantize_activations,
    scale_by_power_of_two,
    sequential_sum,
    sigmoid,
)
from moepack.reference.blobs import Matrix, decode, decode_universal
from moepack.schemes import SCHEMES

FLOAT_PART = 32  # k of one sum of fp8 products

_ROUTER_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def quantized_moe_ffn(
    x: Tensor,
    router_x: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    expert_bias: Tensor | None,
    packed_w13: Tensor,
    packed_w2: Tensor,
    bias13: Tensor | None,
    bias2: Tensor | None,
    num_activated_experts: int,
    hidden_dim: int,
    scheme: str,
    layout: str,
    score_func: str,
    norm_topk: bool,
    norm_eps: float,
    norm_clamp: bool,
    route_scale: float,
    n_group: int,
    topk_group: int,
    group_score: str,
    router_dtype: str,
    activation: str,
    act_alpha: float,
    act_limit: float,
    gate_softcap: float,
    up_softcap: float,
    limit_after_act: bool,
    weight_on_input: bool,
) -> Tensor:
    """The operator `moepack::quantized_moe_ffn`: x [T, D] -> [T, D] in the dtype of x."""
    logits = router_logits(
        x if router_x is None else router_x, gate_weight, gate_bias, router_dtype
    )
    scores = score(logits, score_func)
    choice = scores if expert_bias is None else scores + expert_bias
    ids = select(choice, num_activated_experts, n_group, topk_group, group_score)
    weights = weigh(scores.gather(1, ids), score_func, norm_topk, norm_eps, norm_clamp, route_scale)
    return quantized_experts(
        x, ids, weights, packed_w13, packed_w2, bias13, bias2, hidden_dim, scheme, layout,
        activation, act_alpha, act_limit, gate_softcap, up_softcap, limit_after_act,
        weight_on_input,
    )  # fmt: skip


def quantized_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    packed_w13: Tensor,
    packed_w2: Tensor,
    bias13: Tensor | None,
    bias2: Tensor | None,
    hidden_dim: int,
    scheme: str,
    layout: str,
    activation: str,
    act_alpha: float,
    act_limit: float,
    gate_softcap: float,
    up_softcap: float,
    limit_after_act: bool,
    weight_on_input: bool,
) -> Tensor:
    """The operator `moepack::quantized_experts`: x [T, D] -> [T, D] in the dtype of x."""
    act = Activation(activation, act_alpha, act_limit, gate_softcap, up_softcap, limit_after_act)
    tokens, slots = topk_ids.shape
    outputs = torch.zeros(tokens, slots, x.shape[1])
    rows13 = (1 if activation in UNGATED else 2) * hidden_dim
    values = x.float()
    for expert in sorted(set(topk_ids.flatten().tolist())):
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        w13 = _matrix(packed_w13[expert], layout, scheme, rows13, x.shape[1])
        w2 = _matrix(packed_w2[expert], layout, scheme, x.shape[1], hidden_dim)
        gate_up = project(values[token], w13)
        if bias13 is not None:
            gate_up = gate_up + bias13[expert]
        if weight_on_input:
            gate_up = topk_weights[token, slot, None] * gate_up
        hidden = act(gate_up[:, :hidden_dim], gate_up[:, hidden_dim:])
        output = project(hidden, w2)
        outputs[token, slot] = output if bias2 is None else output + bias2[expert]
    y = torch.zeros(tokens, x.shape[1])
    for k in range(slots):
        weight = fp32(1.0) if weight_on_input else topk_weights[:, k, None]
        y = fma(weight, outputs[:, k], y)
    return y.to(x.dtype)


def _matrix(blob: Tensor, layout: str, scheme_name: str, rows: int, columns: int) -> Matrix:
    if layout == "moepack":
        return decode(blob)
    if layout != "torchao":
        raise UnsupportedError(f"layout {layout!r}; supported: moepack, torchao")
    form = SCHEMES[scheme_name]
    return decode_universal(blob, rows, columns, form.bits, form.group)


def project(values: Tensor, matrix: Matrix) -> Tensor:
    """[T, K] fp32 times the matrix's rows: [T, N] fp32. fp8 weights take the values as they are."""
    if matrix.codes.is_floating_point():
        return float_gemm(values, matrix)
    return gemm(*quantize_activations(values), matrix)


def float_gemm(values: Tensor, matrix: Matrix) -> Tensor:
    rows, padded = matrix.codes.shape
    values = torch.nn.functional.pad(values, (0, padded - values.shape[1]))
    acc = torch.zeros(values.shape[0], rows)
    for first in range(0, padded, matrix.group):
        parts = []
        for begin in range(first, first + matrix.group, FLOAT_PART):
            part = torch.zeros_like(acc)
            for k in range(begin, begin + FLOAT_PART):
                part = fma(values[:, k, None], matrix.codes[:, k], part)
            parts.append(part)
        acc = fma(sum(parts[1:], parts[0]), matrix.scales[:, first // matrix.group], acc)
    return scale_by_power_of_two(acc, matrix.exponent)


def gemm(codes: Tensor, scales: Tensor, matrix: Matrix) -> Tensor:
    """Quantized rows [T, A*128] times the matrix's rows: [T, N] fp32."""
    acc = torch.zeros(codes.shape[0], matrix.codes.shape[0])
    for first in range(0, matrix.codes.shape[1], ACTIVATION_GROUP):
        inner = torch.zeros_like(acc)
        for k in range(first, min(first + ACTIVATION_GROUP, matrix.codes.shape[1]), matrix.group):
            # Sums of integers below 2^24: exact in fp32 in any order.
            idot = codes[:, k : k + matrix.group] @ matrix.codes[:, k : k + matrix.group].float().T
            inner = fma(idot, matrix.scales[:, k // matrix.group], inner)
        acc = fma(inner, scales[:, first // ACTIVATION_GROUP, None], acc)
    return scale_by_power_of_two(acc, matrix.exponent)


def router_logits(
    router_x: Tensor, gate_weight: Tensor, gate_bias: Tensor | None, router_dtype: str
) -> Tensor:
    """[T, D] and [E, D] -> logits [T, E] fp32, rounded to router_dtype."""
    padding = (0, -gate_weight.shape[1] % 16)
    x = torch.nn.functional.pad(router_x.float(), padding)[:, None, :]
    w = torch.nn.functional.pad(gate_weight, padding)[None, :, :]
    p = torch.zeros(x.shape[0], w.shape[1], 16)
    for i in range(0, w.shape[2], 16):
        p = fma(x[..., i : i + 16], w[..., i : i + 16], p)
    for half in (8, 4, 2, 1):
        p = p[..., :half] + p[..., half:]
    logits = p[..., 0]
    if gate_bias is not None:
        logits = logits + gate_bias
    return logits.to(_ROUTER_DTYPES[router_dtype]).float()


def score(logits: Tensor, score_func: str) -> Tensor:
    if score_func == "softmax":
        return logits
    if score_func == "sigmoid":
        return sigmoid(logits)
    if score_func == "softmax_all":
        return _softmax(logits)
    raise UnsupportedError(f"score_func {score_func!r}; supported: softmax, softmax_all, sigmoid")


def select(choice: Tensor, top_k: int, n_group: int, topk_group: int, group_score: str) -> Tensor:
    """Ids [T, K] of the best choices, best first; NaN below -inf, ties to the lowest id."""
    order = _order_keys(choice)
    if n_group > 1:
        tokens, experts = choice.shape
        grouped = choice.view(tokens, n_group, -1)
        best = _best_first(_order_keys(grouped))
        group_scores = grouped.gather(2, best)[..., 0]
        if group_score == "top2sum" and grouped.shape[2] > 1:
            group_scores = group_scores + grouped.gather(2, best)[..., 1]
        kept = _best_first(_order_keys(group_scores))[:, :topk_group]
        is_kept = torch.zeros(tokens, n_group, dtype=torch.bool).scatter_(1, kept, True)
        is_kept = is_kept.repeat_interleave(experts // n_group, dim=1)
        order = torch.where(is_kept, order, torch.iinfo(torch.int64).min)
    return _best_first(order)[:, :top_k]


def weigh(
    selected: Tensor,
    score_func: str,
    norm_topk: bool,
    norm_eps: float,
    norm_clamp: bool,
    route_scale: float,
) -> Tensor:
    """Scores of the selected [T, K] -> weights [T, K] fp32."""
    weights = _softmax(selected) if score_func == "softmax" else selected
    if norm_topk:
        total = sequential_sum(weights)
        total = torch.maximum(total, fp32(norm_eps)) if norm_clamp else total + fp32(norm_eps)
        weights = weights / total[:, None]
    return weights * fp32(route_scale)


def _softmax(logits: Tensor) -> Tensor:
    is_nan = logits.isnan()
    largest = logits.masked_fill(is_nan, float("-inf")).amax(-1, keepdim=True)
    largest = torch.where(is_nan.all(-1, keepdim=True), fp32(0.0), largest)
    t = exp(logits - largest)
    return t / sequential_sum(t)[:, None]


def _order_keys(values: Tensor) -> Tensor:
    """int64 keys that sort as the values do, -0 equal to +0, NaN below everything."""
    bits = (values + 0.0).contiguous().view(torch.int32).long()
    keys = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return torch.where(values.isnan(), -(1 << 40), keys)


def _best_first(keys: Tensor) -> Tensor:
    return torch.sort(keys, dim=-1, descending=True, stable=True).indices
