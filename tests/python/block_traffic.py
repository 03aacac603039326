"""What goes into and comes out of a model's blocks, and how far two outputs are apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tiny_models


def sqnr_db(expected: Tensor, found: Tensor) -> float:
    noise = (expected.double() - found.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


class Call(NamedTuple):
    """One call of a block in a run of the model, and the tensor that came out."""

    inputs: tuple[Any, ...]
    options: dict[str, Any]
    output: Tensor

    @property
    def x(self) -> Tensor:
        x: Tensor = self.inputs[0]
        return x

    @torch.no_grad()
    def repeat(self, module: nn.Module) -> Tensor:
        return first_tensor(module(*self.inputs, **self.options))


def first_tensor(output: Any) -> Tensor:
    tensor: Tensor = output if isinstance(output, Tensor) else output[0]
    return tensor


def block_traffic(model: nn.Module, paths: list[str]) -> dict[str, Call]:
    """What goes into and comes out of the blocks in one run of the model."""
    seen: dict[str, Call] = {}

    def record(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: Any, options: dict[str, Any], output: Any) -> None:
            seen[path] = Call(inputs, options, first_tensor(output))

        return hook

    hooks = [
        model.get_submodule(p).register_forward_hook(record(p), with_kwargs=True) for p in paths
    ]
    tiny_models.logits(model)
    for hook in hooks:
        hook.remove()
    return seen
