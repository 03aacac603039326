"""Code that a user has hung onto the parts of a block which a packed module replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from moepack.families.spec import BlockSpec

# They only record outputs while a caller asks for them, and are put onto every module of a model.
_RECORDERS = "transformers.utils.output_capturing"


def lost_with(block: nn.Module, spec: BlockSpec, *, is_fused: bool) -> str:
    """The hooks and patched forwards that packing would drop, "" if there are none."""
    return ", ".join(
        f"{what} on {name or 'the block itself'}"
        for name, module in _replaced(block, spec, is_fused)
        for what in _attached(module)
    )


def _replaced(block: nn.Module, spec: BlockSpec, is_fused: bool) -> Iterator[tuple[str, nn.Module]]:
    gone, kept = _roots(spec, is_fused)
    staying = {id(m) for name in kept if name for m in block.get_submodule(name).modules()}
    for part in (spec.experts.output_norm, spec.router.before if spec.router else None):
        if part is not None:
            staying |= {id(m) for m in part.modules()}
    for root in gone:
        for name, module in block.get_submodule(root).named_modules(prefix=root):
            if id(module) not in staying:
                yield name, module


def _roots(spec: BlockSpec, is_fused: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the parts that go with all below them, and of those below them that stay."""
    if not is_fused:
        return spec.outside_replaces or (spec.experts_child,), spec.outside_keeps
    if spec.combination.in_place:
        return (spec.router_child, spec.experts_child), ()
    return ("",), tuple(n for n in (spec.combination.shared, spec.combination.shared_gate) if n)


def _attached(module: nn.Module) -> Iterator[str]:
    for kind, hooks in (
        ("forward hook", module._forward_hooks),
        ("forward pre-hook", module._forward_pre_hooks),
    ):
        for hook in hooks.values():
            if getattr(hook, "__module__", None) != _RECORDERS:
                yield f"{kind} {_name(hook)}"
    if "forward" in vars(module):
        yield f"patched forward {_name(module.forward)}"


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", type(function).__name__).rpartition(".")[2]
