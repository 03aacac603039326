"""One expert's matrix out of stacked weights [E, N, K]: float, or quantized by torchao already."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moepack import quantizer
from moepack.errors import UnsupportedError


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
