"""moepack's reading of a block class against the class's own code, before any weight is read.

While loading there is no original block. One of each class and shape gets random weights instead;
its matrices overlap in memory, each a row further, so that all differ and take the room of one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from moepack.families import FoundBlock, find_blocks
from moepack.online.blocks import OnlineBlock
from moepack.online.rooms import with_tensors
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
        trial = _with_made_values(module, block.stacks)
        spec = find_blocks(trial)[0].spec
        assert spec is not None
        fused = block.decision.router == "fused"
        found[block.path] = check_adapter(block.path, spec, fused=fused, most_weights=MOST_WEIGHTS)
    return found


def read_with_values(found: FoundBlock) -> FoundBlock:
    """A block on the meta device, read from random values where shapes do not tell what it is.

    Which of an expert's layers leads back, and what is between, is known by running it: experts
    that are modules of their own have no form on the meta device.
    """
    parameters = list(found.module.parameters())
    if found.spec is None or any(not p.is_meta or p.dim() == 3 for p in parameters):
        return found
    trial = find_blocks(_with_made_values(found.module, ()))[0]
    return replace(found, spec=trial.spec, refused_because=trial.refused_because)


def _with_made_values(module: nn.Module, stacks: Collection[str]) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.is_floating_point():
            alike[(tensor.shape, tensor.dtype)].append(name)
    made: dict[str, Tensor] = {}
    for names in alike.values():
        rows, cols = tensors[names[0]].shape
        stack = _stack(len(names), rows, cols, tensors[names[0]].dtype, generator)
        made.update(zip(names, stack, strict=True))
    for name, tensor in tensors.items():
        if name in stacks:
            experts, rows, cols = tensor.shape
            made[name] = _stack(experts, rows, cols, tensor.dtype, generator)
        elif name not in made:
            made[name] = _values(name, tensor, generator)
    return with_tensors(module, made)


def _stack(
    count: int, rows: int, cols: int, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """[count, rows, cols], all in the room of one."""
    scale: float = cols**-0.5
    room = scale * torch.randn((count - 1 + rows) * cols, generator=generator)
    return room.to(dtype).as_strided((count, rows, cols), (cols, cols, 1))


def _values(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    spread = torch.randn(like.shape, generator=generator)
    if like.dim() > 1:
        scale: float = like.shape[-1] ** -0.5
        return (scale * spread).to(like.dtype)
    return (0.3 * spread if "bias" in name else 1 + 0.3 * spread).to(like.dtype)
