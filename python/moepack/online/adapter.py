"""moepack's reading of a block class against the class's own code, before any weight is read.

While loading there is no original block. One of each class and shape gets random weights instead;
its experts overlap in memory, each some rows further, so that all differ and take the room of one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from moepack.families import find_blocks
from moepack.online.blocks import OnlineBlock, with_tensors
from moepack.verification import check_adapter

# Checking reads every expert in fp32, twice: beyond this it would take as long as packing.
LARGEST = 1 << 29


def check_classes(blocks: Iterable[OnlineBlock]) -> dict[str, float]:
    """The error by path of the block that stands for its class and shape; larger ones are left out.

    Raises VerificationError where the neutral form is not what the original block computes.
    """
    checked: dict[tuple[object, ...], str] = {}
    errors: dict[str, float] = {}
    for block in blocks:
        module = block.found.module
        shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters())
        kind = (type(module), block.decision.router, shapes)
        weights = sum(p.numel() for p in module.parameters())
        if kind in checked or weights > LARGEST:
            continue
        checked[kind] = block.path
        generator = torch.Generator().manual_seed(0)
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        trial = with_tensors(
            module, {n: _made(n, t, n in block.stacks, generator) for n, t in tensors.items()}
        )
        spec = find_blocks(trial)[0].spec
        assert spec is not None
        fused = block.decision.router == "fused"
        errors[block.path] = check_adapter(block.path, spec, fused=fused).error
    return errors


def _made(name: str, like: Tensor, is_stack: bool, generator: torch.Generator) -> Tensor:
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    if like.dim() < 2:
        spread = 0.3 * torch.randn(like.shape, generator=generator)
        return (spread if "bias" in name else 1 + spread).to(like.dtype)
    scale: float = like.shape[-1] ** -0.5
    if not is_stack:
        return (scale * torch.randn(like.shape, generator=generator)).to(like.dtype)
    experts, rows, cols = like.shape
    room = scale * torch.randn((experts - 1 + rows) * cols, generator=generator)
    return room.to(like.dtype).as_strided((experts, rows, cols), (cols, cols, 1))
