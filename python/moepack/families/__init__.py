"""Finding every MoE block of a model and reading it into one neutral form.

A new model that uses standard experts costs nothing; another shape of code costs one file with
`NAME`, `is_candidate(module)` and `read(module)`, here or in a package of its own.
"""

from __future__ import annotations

import re

from torch import nn

from moepack.errors import UnsupportedError
from moepack.families import dequantized
from moepack.families.registry import Family, families, register_family
from moepack.families.spec import (
    BlockSpec,
    Combination,
    ExpertsSpec,
    FoundBlock,
    Oracle,
    RouterSpec,
    place_as,
)

# Classes named like an MoE block in which no family sees experts are reported, not passed over.
_NAMED_LIKE_A_BLOCK = re.compile(r"(MoE|Moe|MOE)(Block|Layer|FFN|FeedForward)?$")


def find_blocks(model: nn.Module) -> list[FoundBlock]:
    """Every MoE block of the model, outermost only, each once with all its paths."""
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"model is {type(model).__name__}; supported: a torch.nn.Module")
    found: dict[int, FoundBlock] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if any(
            path.startswith(f"{p}.") or p == "" for block in found.values() for p in block.paths
        ):
            continue
        if id(module) in found:
            found[id(module)].paths.append(path)
            continue
        block = _read(path, module)
        if block is not None:
            found[id(module)] = block
    return list(found.values())


def _read(path: str, module: nn.Module) -> FoundBlock | None:
    if is_replacement(module) and not dequantized.is_candidate(module):
        return None
    for family in families():
        if family.is_candidate(module):
            left_out = getattr(family, "left_out", None)
            if left_out is not None and (why := left_out(module)):
                return FoundBlock([path], module, family.NAME, None, left_out_because=why)
            spec, reason = family.read(module)
            named = spec.experts_child if spec is not None else ""
            experts = module.get_submodule(named)
            return FoundBlock([path], module, family.NAME, spec, reason, experts_of=id(experts))
    if _looks_like_a_block(module):
        reason = "it is named like an MoE block, but no family knows how its experts are stored"
        return FoundBlock([path], module, "unknown", None, reason, experts_of=id(module))
    return None


def _looks_like_a_block(module: nn.Module) -> bool:
    return _NAMED_LIKE_A_BLOCK.search(type(module).__name__) is not None and not any(
        family.is_candidate(inner) or is_replacement(inner)
        for inner in module.modules()
        for family in families()
    )


def is_replacement(module: nn.Module) -> bool:
    """Is the module, or one of its direct children, already moepack's?"""
    return any(getattr(type(m), "is_moepack_module", False) for m in (module, *module.children()))


__all__ = [
    "BlockSpec",
    "Combination",
    "ExpertsSpec",
    "Family",
    "FoundBlock",
    "Oracle",
    "RouterSpec",
    "find_blocks",
    "is_replacement",
    "place_as",
    "register_family",
]
