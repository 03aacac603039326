"""Calls of ExecuTorch's own operator `llama::quantized_moe_ffn` as moepack's, and back.

Every call of upstream's can be moepack's. moepack's can be upstream's where its attributes ask for
what upstream computes: experts of gate and up under silu without biases, and one of two routings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from moepack.acceleration import ARGUMENTS, require_bias_fits, routing
from moepack.acceleration import OPERATOR as UPSTREAM
from moepack.attributes import ExpertAttributes
from moepack.converter.calls import Call, added
from moepack.errors import UnsupportedError
from moepack.packed_stacks import FFN, argument_names

_SHARED = ("x", "gate_weight", "expert_bias", "packed_w13", "packed_w2")
# Attributes of moepack's operator that upstream's does not have, at what it computes.
_FIXED: dict[str, Any] = {
    "n_group": 1,
    "router_dtype": "float32",
    "activation": "silu",
    "act_alpha": 1.0,
    "act_limit": 0.0,
    "gate_softcap": 0.0,
    "up_softcap": 0.0,
    "weight_on_input": False,
}
_ABSENT = ("router_x", "gate_bias", "bias13", "bias2")
# Added to a sum of scores above 2^-41, or bounding it from below, it changes no bit of the sum.
_LARGEST_EPS = 1e-20


def to_moepack(call: Call, group: int) -> list[int]:
    """Upstream's call -> the arguments of moepack's, for codes in groups of `group`."""
    has_bias = call.value("expert_bias").sizes != [0]
    score_func = call.text("score_func")
    require_bias_fits(has_bias, score_func)
    how = routing(call.integer("num_activated_experts"), score_func, call.number("route_scale"))
    experts = ExpertAttributes(
        call.integer("hidden_dim"), f"int{call.integer('weight_nbit')}-g{group}"
    )
    kept = {name: call.index[name] for name in _SHARED if name != "expert_bias" or has_bias}
    attributes = asdict(how) | asdict(experts)
    return [
        kept[name] if name in kept else added(call.plan, attributes.get(name))
        for name in argument_names(FFN)
    ]


def to_upstream(call: Call, no_bias: Callable[[], int]) -> list[int]:
    """moepack's call -> the arguments of upstream's, which computes the same.

    `no_bias` gives the value of an empty tensor. Raises UnsupportedError naming the call, what it
    asks for and what upstream computes.
    """
    form = call.forms()["packed_w13"]
    score_func, route_scale = _upstream_routing(call)
    attributes = {
        "num_experts": call.value("gate_weight").sizes[0],
        "dim": form.cols,
        "group_size": form.group,
        "weight_nbit": form.bits,
        "score_func": score_func,
        "route_scale": route_scale,
    }
    kept = {name: i for name, i in call.index.items() if name in ARGUMENTS}
    if call.tensor("expert_bias") is None:
        kept["expert_bias"] = no_bias()
    return [
        added(call.plan, attributes[name]) if name in attributes else kept[name]
        for name in ARGUMENTS
    ]


def require_expressible(call: Call) -> None:
    """Raises UnsupportedError unless upstream's operator computes what a call of moepack's does."""
    from executorch.exir.schema import ScalarType

    if call.operator != FFN:
        raise _inexpressible(call, "a router outside the operator", "one inside, as in " + FFN)
    for name in _ABSENT:
        if call.tensor(name) is not None:
            raise _inexpressible(call, name, "none")
    for name, supported in _FIXED.items():
        found = _plain(call.value(name))
        if found != supported:
            raise _inexpressible(call, f"{name} {found!r}", repr(supported))
    x = call.value("x")
    if x.scalar_type != ScalarType.FLOAT or len(x.sizes) != 2:
        found = f"x {x.scalar_type.name.lower()} {list(x.sizes)}"
        raise _inexpressible(call, found, "float [T, D]")
    _upstream_routing(call)


def _upstream_routing(call: Call) -> tuple[str, float]:
    """score_func and route_scale."""
    score_func, scale = call.text("score_func"), call.number("route_scale")
    normed, eps = call.flag("norm_topk"), call.number("norm_eps")
    has_bias = call.tensor("expert_bias") is not None
    if score_func == "sigmoid":
        if normed and eps <= _LARGEST_EPS:
            return "sigmoid", scale
        supported = f"sigmoid with norm_topk and a norm_eps of at most {_LARGEST_EPS}"
    else:
        # Over all and divided by the sum of the selected is over the selected.
        is_same = score_func == "softmax" or (score_func == "softmax_all" and normed)
        if is_same and (eps == 0 or not normed) and scale == 1 and not has_bias:
            return "softmax", scale
        supported = (
            "softmax, or softmax_all with norm_topk; norm_eps 0, route_scale 1, no expert_bias"
        )
    found = f"score_func {score_func!r}, norm_topk {normed}, norm_eps {eps}, route_scale {scale}"
    raise _inexpressible(call, found + (", expert_bias" if has_bias else ""), supported)


def _inexpressible(call: Call, found: str, supported: str) -> UnsupportedError:
    return UnsupportedError(
        f"{call.where}: {found}; supported by {UPSTREAM}: {supported}. "
        "Convert to the layout torchao alone, and keep moepack's operator"
    )


def _plain(value: Any) -> Any:
    """What one of the schema's scalars holds."""
    (content,) = vars(value).values()
    return content
