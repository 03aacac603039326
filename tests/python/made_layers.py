"""Packed layers with made weights, and calls of the operators on them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moepack import _core, packing
from moepack.quantizer import quantize

ISAS = [name for name, supported, _ in _core.isa_table() if supported]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Layer:
    """Packed experts of one layer and the tensors around them."""

    scheme: str
    D: int
    F: int
    gate_weight: Tensor
    packed_w13: Tensor
    packed_w2: Tensor
    gate_bias: Tensor | None = None
    expert_bias: Tensor | None = None
    bias13: Tensor | None = None
    bias2: Tensor | None = None

    @property
    def experts(self) -> int:
        return len(self.gate_weight)

    def x(self, tokens: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        return torch.randn(tokens, self.D, generator=random).to(dtype)


def layer(scheme: str = "int4-g32", E: int = 6, D: int = 96, F: int = 40, seed: int = 0) -> Layer:
    random = torch.Generator().manual_seed(seed)

    def packed(rows: int, cols: int, order: Any) -> Tensor:
        weights = (torch.randn(rows, cols, generator=random) * cols**-0.5 for _ in range(E))
        return packing.pack_experts((quantize(w, scheme) for w in weights), order)

    gate = torch.randn(E, D, generator=random)
    return Layer(scheme, D, F, gate, packed(2 * F, D, "gate_up"), packed(D, F, "plain"))


def with_biases(base: Layer, seed: int = 9) -> Layer:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    E = base.experts
    return replace(
        base,
        gate_bias=normal(E),
        expert_bias=normal(E),
        bias13=normal(E, 2 * base.F),
        bias2=normal(E, base.D),
    )


def ffn_arguments(
    case: Layer, x: Tensor, K: int = 2, router_x: Tensor | None = None, **attributes: Any
) -> list[Any]:
    values: dict[str, Any] = {
        "layout": "moepack",
        "score_func": "softmax",
        "norm_topk": False,
        "norm_eps": 0.0,
        "norm_clamp": False,
        "route_scale": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "group_score": "top2sum",
        "router_dtype": "float32",
        "activation": "silu",
        "act_alpha": 1.0,
        "act_limit": 0.0,
        "gate_softcap": 0.0,
        "up_softcap": 0.0,
        "limit_after_act": False,
        "weight_on_input": False,
    }
    scheme = attributes.pop("scheme", case.scheme)
    hidden_dim = attributes.pop("hidden_dim", case.F)
    assert attributes.keys() <= values.keys()
    values.update(attributes)
    tensors = [x, router_x, case.gate_weight, case.gate_bias, case.expert_bias]
    tensors += [case.packed_w13, case.packed_w2, case.bias13, case.bias2]
    return [*tensors, K, hidden_dim, scheme, *values.values()]


def experts_arguments(
    case: Layer, x: Tensor, ids: Tensor, weights: Tensor, **attributes: Any
) -> list[Any]:
    ffn = ffn_arguments(case, x, **attributes)
    return [x, ids, weights, *ffn[5:9], *ffn[10:13], *ffn[22:]]


def ffn(case: Layer, x: Tensor, **keywords: Any) -> Tensor:
    result: Tensor = torch.ops.moepack.quantized_moe_ffn(*ffn_arguments(case, x, **keywords))
    return result


def experts(case: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    result: Tensor = torch.ops.moepack.quantized_experts(*experts_arguments(case, x, ids, weights))
    return result


def same(a: Tensor, b: Tensor) -> bool:
    """Bit-equal, any NaN equal to any NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value)
