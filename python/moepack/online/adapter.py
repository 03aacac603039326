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
from moepack.verification import AdapterCheck, check_adapter

# Checking reads an expert in fp32, twice: of larger blocks a part, or it would take as long as
# packing. All experts are one code, and differ in their weights alone.
MOST_WEIGHTS = 1 << 29


def check_classes(blocks: Iterable[OnlineBlock]) -> dict[str, AdapterCheck]:
    """What was found, by path of the block that stands for its class and shape.

    Raises VerificationError where the neutral form is not what the original block computes.
    """
    seen: set[tuple[object, ...]] = set()
    found: dict[str, AdapterCheck] = {}
    for block in blocks:
        module = block.found.module
        shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters())
        kind = (type(module), block.decision.router, shapes)
        if kind in seen:
            continue
        seen.add(kind)
        generator = torch.Generator().manual_seed(0)
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        trial = with_tensors(
            module, {n: _made(n, t, n in block.stacks, generator) for n, t in tensors.items()}
        )
        spec = find_blocks(trial)[0].spec
        assert spec is not None
        fused = block.decision.router == "fused"
        found[block.path] = check_adapter(block.path, spec, fused=fused, most_weights=MOST_WEIGHTS)
    return found


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
