"""The experts of the model to export: packed here, or found packed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from moepack.errors import NoMoEBlock, UnsupportedError
from moepack.expert_calls import IdentityExperts, NormalizedExperts
from moepack.families import find_blocks
from moepack.modules import PackedExperts, QuantizedExperts
from moepack.planner import plan_blocks
from moepack.transform import quantize_


def pack_experts(
    model: nn.Module, scheme: str, options: Mapping[str, Any]
) -> dict[str, float | None]:
    """Quantizes the experts in place and returns the SQNR in dB by block path.

    A model whose experts are packed already is left alone; its SQNR is not known any more. Experts
    that would stay in float are refused, before any work.
    """
    _refuse_float_experts(model, scheme, options)
    found = packed_modules(model)
    if found:
        return dict.fromkeys(found)
    report = quantize_(model, scheme=scheme, **options)
    if not report.blocks:
        raise NoMoEBlock(f"{type(model).__name__}: nothing to pack: every MoE block is excluded")
    return {block.path: block.sqnr_db for block in report.blocks}


def _refuse_float_experts(model: nn.Module, scheme: str, options: Mapping[str, Any]) -> None:
    """ExecuTorch has no operators for what picks their weights: the export would end with that."""
    found = find_blocks(model)
    decided = plan_blocks(
        model,
        found,
        scheme,
        exclude=options.get("exclude", ()),
        recipe=options.get("recipe"),
        router=options.get("router", "auto"),
    )
    if not decided.replaced and not decided.already_packed:
        return
    blocks = {block.path for block in found if block.spec is not None}
    left = [
        block.path
        for block in decided.blocks
        if block.path in blocks and (block.action == "exclude" or decided.already_packed)
    ]
    if left:
        raise UnsupportedError(
            f"{', '.join(left)}: their experts would stay in float, which no exported program can "
            "run; pack every MoE block. To keep more precision in some, give them a finer scheme: "
            f"recipe={{{left[0]!r}: 'int8-g32'}}"
        )


def packed_modules(model: nn.Module) -> dict[str, PackedExperts]:
    return {p: m for p, m in model.named_modules() if isinstance(m, PackedExperts)}


def packed_scheme(model: nn.Module) -> str:
    """The scheme of the packed experts; several are joined by a plus sign."""
    return "+".join(sorted({module.scheme for module in packed_modules(model).values()}))


def router_paths(model: nn.Module) -> frozenset[str]:
    """Routers that stayed outside the operator, with their parts: they keep their precision."""
    paths: set[str] = set()
    for path, module in packed_modules(model).items():
        if not isinstance(module, QuantizedExperts):
            continue
        block_path = path.rpartition(".")[0]
        if isinstance(model.get_submodule(block_path), NormalizedExperts | IdentityExperts):
            block_path = block_path.rpartition(".")[0]  # these stand between experts and block
        block = model.get_submodule(block_path)
        for name in ("gate", "router"):
            router = getattr(block, name, None)
            if isinstance(router, nn.Module):
                root = f"{block_path}.{name}" if block_path else name
                paths |= {f"{root}.{p}" if p else root for p, _ in router.named_modules()}
    return frozenset(paths)
