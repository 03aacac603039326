"""How far int8 activations may move an output: docs/reference/activation-error.md, as code."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moepack.reference.arithmetic import ACTIVATION_GROUP

_UNIT = 2.0**-24  # half a step of fp32
_STEEPEST_SILU = 1.1  # the largest |derivative| is 1.0998
_SILU_ROUNDINGS = 16.0  # of exp, the sum, the quotient and the product with up, in units
_WEIGHT_ROUNDINGS = 64.0  # of a routing weight, its exp and its place in the sum included


def activation_error_bound(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Callable[[int], Tensor],
    w2: Callable[[int], Tensor],
    logit_error: Tensor | None = None,
) -> Tensor:
    """The largest |difference| of each output from one with float activations: [T, D] fp64.

    x [T, D] fp32, ids and weights [T, K]; w13 and w2 give an expert's weights [2F, D], rows
    [gate; up], and [D, F]. SiLU experts without biases. `logit_error` [T]: how far the logits of
    the two sides may differ by rounding, where each computes its own routing weights; both have to
    select the same experts.
    """
    bound = torch.zeros(x.shape, dtype=torch.float64)
    for expert in sorted(set(topk_ids.flatten().tolist())):
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        output, error = _expert(x[token].double(), w13(expert).double(), w2(expert).double())
        weight = topk_weights[token, slot, None].double().abs()
        slots = topk_ids.shape[1]
        relative = torch.full_like(weight, (slots + _WEIGHT_ROUNDINGS) * _UNIT)
        if logit_error is not None:  # d log w / d logit <= 1, its own and the sum's
            relative += torch.expm1(2 * logit_error[token, None].double())
        error = error + relative * (output.abs() + error)
        bound.index_put_((token,), weight * error, accumulate=True)
    return bound


def logit_rounding(x: Tensor, gate_weight: Tensor) -> Tensor:
    """How far two sums of a router's products in fp32, in any orders, may be apart: [T]."""
    products = x.double().abs() @ gate_weight.double().abs().T
    return 2 * _sum_roundings(x.shape[1]) * products.amax(-1)


def _expert(x: Tensor, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """Exact outputs [T, D] and the bound of their error."""
    gate_up_error = _gemm_error(x, torch.zeros_like(x), w13)
    gate, up = (x @ w13.T).chunk(2, dim=1)
    gate_error, up_error = gate_up_error.chunk(2, dim=1)
    silu = gate * torch.sigmoid(gate)
    hidden = silu * up
    hidden_error = _STEEPEST_SILU * gate_error * (up.abs() + up_error) + silu.abs() * up_error
    hidden_error += _SILU_ROUNDINGS * _UNIT * (hidden.abs() + hidden_error)
    return hidden @ w2.T, _gemm_error(hidden, hidden_error, w2)


def _gemm_error(value: Tensor, error: Tensor, weight: Tensor) -> Tensor:
    """Of a product with `value`, which is off by `error` and then quantized: [T, N]."""
    largest = value.abs() + error
    reached = (error + _half_step(largest)) @ weight.abs().T
    return reached + 2 * _sum_roundings(value.shape[1]) * (largest @ weight.abs().T)


def _half_step(largest: Tensor) -> Tensor:
    """Half of each activation group's scale, amax / 127, at every element."""
    width = largest.shape[1]
    padded = torch.nn.functional.pad(largest, (0, -width % ACTIVATION_GROUP))
    amax = padded.view(len(largest), -1, ACTIVATION_GROUP).amax(-1)
    return (amax / 254).repeat_interleave(ACTIVATION_GROUP, dim=1)[:, :width]


def _sum_roundings(terms: int) -> float:
    """The relative error of a sum of products in fp32, in any order, weights rounded once."""
    return (terms + 8) * _UNIT
