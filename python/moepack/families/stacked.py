"""Experts as stacked weights [E, rows, columns]: their layout by shapes, one expert's matrix."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from moepack import quantizer
from moepack.errors import UnsupportedError


class Layout(NamedTuple):
    """Which of a module's parameters is which, and the sizes that follow from their shapes.

    `more13`: rows of w13's stack beyond the experts of w2's.
    """

    w13: str
    w2: str
    is_gated: bool
    is_transposed: bool
    num_experts: int
    model_dim: int
    inner_dim: int
    more13: int


def stacks_of(experts: nn.Module) -> dict[str, Tensor]:
    """The module's own three-dimensional parameters."""
    return {n: p for n, p in experts.named_parameters(recurse=False) if p.dim() == 3}


def layout_of(stacks: dict[str, Tensor], *, transposed_hint: bool = False) -> Layout | None:
    """The layout of two stacked weights, gate and up as one, or None if their shapes fit none.

    Without a gate the shapes fit both orientations: `transposed_hint` decides.
    """
    if len(stacks) != 2:
        return None
    first, second = stacks
    for w13, w2 in ((first, second), (second, first)):
        (e13, a, b), (e2, c, d) = stacks[w13].shape, stacks[w2].shape
        if e13 < e2 or "down" in w13:
            continue
        sizes = (e2, c, d, e13 - e2)
        turned = (e2, d, c, e13 - e2)
        if (a, b) == (2 * d, c):
            return Layout(w13, w2, True, False, *sizes)
        if (a, b) == (d, 2 * c):
            return Layout(w13, w2, True, True, *turned)
        if (a, b) == (d, c):
            return Layout(w13, w2, False, transposed_hint, *(turned if transposed_hint else sizes))
    return None


def is_plain(tensor: Tensor) -> bool:
    """Is it an ordinary tensor, not one of torchao's?"""
    return type(tensor) in (Tensor, nn.Parameter)


def in_float(tensor: Tensor) -> Tensor:
    """The values of a tensor, detached; a torchao tensor is dequantized."""
    return tensor.detach() if is_plain(tensor) else tensor.dequantize().detach()


def one_expert(stacked: Tensor, expert: int) -> Tensor:
    """[N, K]: the expert's part, still torchao's if the stack is."""
    if is_plain(stacked):
        return stacked.detach()[expert]
    source: Any = stacked
    # Not every torchao tensor can be indexed: build the two-dimensional one from its parts.
    data = {
        name: None if (part := getattr(source, name, None)) is None else part[expert]
        for name in (*source.tensor_data_names, *getattr(source, "optional_tensor_data_names", []))
    }
    attributes = {
        name: getattr(source, name)
        for name in (
            *source.tensor_attribute_names,
            *getattr(source, "optional_tensor_attribute_names", []),
        )
    }
    attributes["block_size"] = list(attributes["block_size"])[1:]
    matrix: Tensor = type(source)(**data, **attributes)
    return matrix


def given_scheme(stacks: dict[str, Tensor]) -> tuple[str, str]:
    """The scheme of stacks that torchao has quantized, or "" and why they are refused."""
    schemes = {}
    for name, stack in stacks.items():
        if is_plain(stack):
            return "", f"{name} is float while others are quantized by torchao"
        try:
            schemes[name] = quantizer.from_torchao(one_expert(stack, 0), name).scheme.name
        except (UnsupportedError, AttributeError, KeyError, TypeError) as error:
            return "", f"{name} is quantized in a form that cannot be kept: {error}"
    if len(set(schemes.values())) > 1:
        return "", f"torchao quantized them to different schemes: {schemes}"
    return next(iter(schemes.values())), ""
