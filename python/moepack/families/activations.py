"""Recognising what experts compute between their matrices by what comes out, not by its name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from moepack.attributes import UNGATED, ExpertAttributes
from moepack.reference.float_mode import activate

# w13's columns [T, 2F] (gate, then up) or [T, F] -> [T, F]
ActivationFunction = Callable[[Tensor], Tensor]


def recognise(
    function: ActivationFunction, inner_dim: int, numbers: set[float], *, is_gated: bool
) -> ExpertAttributes | None:
    """The attributes under which the operator computes `function`, or None.

    `numbers`: the values that alphas, limits and softcaps may have.
    """
    columns = _probe(is_gated)
    try:
        expected = function(columns)
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return None
    for candidate in candidates(inner_dim, numbers, is_gated=is_gated):
        found = activate(columns, candidate)
        if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=1e-6):
            return candidate
    return None


def numbers_of(module: nn.Module) -> set[float]:
    """Every positive finite number that the module or a part of it has as an attribute."""
    values = (value for part in module.modules() for value in vars(part).values())
    return {
        float(v)
        for v in values
        if isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < math.inf
    }


def _probe(is_gated: bool) -> Tensor:
    """Rows of columns where clamps, caps and other functions show: [1, 2F] or [1, F]."""
    ramp = torch.linspace(-60.0, 60.0, 97)
    far = torch.tensor([1e2, 1e3, 1e4])
    gate = torch.cat([ramp, far, -far])
    if not is_gated:
        return gate[None]
    up = torch.cat([ramp.flip(0) * 0.9 + 1.0, -far.flip(0), far.flip(0)])
    return torch.cat([gate, up])[None]


def candidates(
    inner_dim: int, numbers: set[float], *, is_gated: bool
) -> Iterator[ExpertAttributes]:
    """What the operator can compute with these numbers, the plain forms first."""
    values = sorted(numbers)

    def form(activation: str, **settings: float | bool) -> ExpertAttributes:
        return ExpertAttributes(inner_dim, "", activation=activation, **settings)  # type: ignore[arg-type]

    if not is_gated:
        yield from map(form, UNGATED)
        return
    for activation, limit in itertools.product(("silu", "gelu_tanh"), (0.0, *values)):
        yield form(activation, act_limit=limit)
        yield form(activation, act_limit=limit, limit_after_act=limit > 0)
    for alpha, limit in itertools.product((1.0, *values), (0.0, *values)):
        yield form("swiglu_oai", act_alpha=alpha, act_limit=limit)
    for gate, up in itertools.product((0.0, *values), repeat=2):
        yield form("silu", gate_softcap=gate, up_softcap=up)
