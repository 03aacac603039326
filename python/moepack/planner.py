"""What will happen to every MoE block of a model: decided once, as a value that can be printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from moepack import packing
from moepack.errors import UnsupportedError
from moepack.families import BlockSpec, FoundBlock, find_blocks
from moepack.families.hooks import lost_with
from moepack.modules import PackedExperts
from moepack.schemes import Scheme
from moepack.schemes import scheme as scheme_of

Action = Literal["replace", "exclude", "refuse"]
RouterMode = Literal["fused", "outside"]
FLOAT = "float"  # in a recipe: leave the block as it is


@dataclass(frozen=True)
class BlockPlan:
    """One block. `router` fused: the operator routes; outside: the block's own code does.

    `why` explains an outside router, an exclusion or a refusal. Bytes are those of the experts.
    """

    path: str
    also_at: tuple[str, ...]
    block_class: str
    family: str
    action: Action
    why: str
    scheme: str = ""
    layout: str = "moepack"
    router: RouterMode = "outside"
    num_experts: int = 0
    num_activated_experts: int | None = None
    model_dim: int = 0
    inner_dim: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


@dataclass(frozen=True)
class Plan:
    """All blocks of a model. `already_packed` counts moepack's own modules that were found."""

    blocks: tuple[BlockPlan, ...]
    already_packed: int = 0

    @property
    def replaced(self) -> tuple[BlockPlan, ...]:
        return tuple(block for block in self.blocks if block.action == "replace")

    @property
    def refused(self) -> tuple[BlockPlan, ...]:
        return tuple(block for block in self.blocks if block.action == "refuse")

    @property
    def is_possible(self) -> bool:
        """Whether `quantize_` would do it: there are MoE blocks, and none of them is refused."""
        return not self.refused and bool(self.blocks or self.already_packed)

    @property
    def bytes_before(self) -> int:
        return sum(block.bytes_before for block in self.replaced)

    @property
    def bytes_after(self) -> int:
        return sum(block.bytes_after for block in self.replaced)

    def to_json(self) -> dict[str, Any]:
        return {
            "blocks": [asdict(block) for block in self.blocks],
            "already_packed": self.already_packed,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }

    def __str__(self) -> str:
        if not self.blocks:
            return (
                f"{self.already_packed} MoE blocks, all packed already"
                if self.already_packed
                else "no MoE block found"
            )
        rows = [_TITLES, *(_row(block) for block in self.blocks)]
        return f"{table(rows)}\nexperts: {self.bytes_before:,} -> {self.bytes_after:,} bytes"


_TITLES = ("block", "class", "E", "K", "D", "F", "scheme", "router", "bytes", "packed", "remark")


def _row(block: BlockPlan) -> tuple[str, ...]:
    top_k = "?" if block.num_activated_experts is None else str(block.num_activated_experts)
    sizes = (str(block.num_experts), top_k, str(block.model_dim), str(block.inner_dim))
    if block.action != "replace":
        remark = f"{block.action}d: {block.why}"
        return (_name(block), block.block_class, *sizes, "-", "-", "-", "-", remark)
    saved = (f"{block.bytes_before:,}", f"{block.bytes_after:,}")
    return (_name(block), block.block_class, *sizes, block.scheme, block.router, *saved, block.why)


def _name(block: BlockPlan) -> str:
    return " = ".join(path or "(root)" for path in (block.path, *block.also_at))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned by spaces, the first row a title."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def plan(
    model: nn.Module,
    scheme: str | Scheme = "int4-g32",
    *,
    exclude: str | Sequence[str] = (),
    recipe: Mapping[str, str] | None = None,
    router: Literal["auto", "outside"] = "auto",
    layout: str = "moepack",
) -> Plan:
    """Finds every MoE block and says what `quantize_` would do with it. Changes nothing.

    Patterns are module paths with shell wildcards; `exclude` is one or several. `recipe`
    maps patterns to schemes, or to "float" to leave a block as it is; the first match wins, then
    `exclude`, then `scheme`. A pattern that matches no block is an UnsupportedError.
    `router="outside"` leaves every router in PyTorch. `layout` is how packed experts lie in memory:
    "moepack", or "torchao" for blobs that ExecuTorch's own operator reads too (more bytes, and
    dimensions have to be multiples of the scheme's group).
    """
    return plan_blocks(
        model,
        find_blocks(model),
        scheme,
        exclude=exclude,
        recipe=recipe,
        router=router,
        layout=layout,
    )


def plan_blocks(
    model: nn.Module,
    found: Sequence[FoundBlock],
    scheme: str | Scheme,
    *,
    exclude: str | Sequence[str],
    recipe: Mapping[str, str] | None,
    router: Literal["auto", "outside"],
    layout: str = "moepack",
) -> Plan:
    """`plan` for blocks that were found already."""
    packing.require_layout(layout)
    rules = _rules(exclude, recipe)
    _check_patterns(rules, found)
    outside_because = _why_all_outside(model, router)
    blocks = (_plan_block(block, scheme, rules, outside_because, layout) for block in found)
    packed = sum(isinstance(module, PackedExperts) for module in model.modules())
    return Plan(tuple(blocks), packed)


def _rules(exclude: str | Sequence[str], recipe: Mapping[str, str] | None) -> dict[str, str]:
    if recipe is not None and not isinstance(recipe, Mapping):
        raise UnsupportedError(
            f"recipe is {recipe!r}; supported: a mapping from path patterns to schemes"
        )
    patterns = [exclude] if isinstance(exclude, str) else exclude
    if not isinstance(patterns, Iterable) or not all(isinstance(p, str) for p in patterns):
        raise UnsupportedError(f"exclude is {exclude!r}; supported: path patterns, as strings")
    return dict(recipe or {}) | dict.fromkeys(patterns, FLOAT)


def _check_patterns(rules: Mapping[str, str], found: Sequence[FoundBlock]) -> None:
    for value in rules.values():
        if value != FLOAT:
            scheme_of(value)
    require_matches(rules, found)


def require_matches(patterns: Iterable[str], found: Sequence[FoundBlock]) -> None:
    """Raises UnsupportedError where a path pattern matches no block."""
    for pattern in patterns:
        if not any(_matches(pattern, block) for block in found):
            paths = ", ".join(block.path or "(root)" for block in found) or "none"
            raise UnsupportedError(f"pattern {pattern!r} matches no MoE block; blocks: {paths}")


def _matches(pattern: str, block: FoundBlock) -> bool:
    return any(fnmatchcase(path, pattern) for path in block.paths)


def _why_all_outside(model: nn.Module, router: str) -> str:
    if router == "outside":
        return "asked for"
    if router != "auto":
        raise UnsupportedError(f"router {router!r}; supported: auto, outside")
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        return "the config asks for router logits, which are taken from the router modules"
    return ""


def _plan_block(
    block: FoundBlock,
    default: str | Scheme,
    rules: Mapping[str, str],
    outside_because: str,
    layout: str,
) -> BlockPlan:
    names = (block.path, tuple(block.paths[1:]), type(block.module).__name__, block.family)
    chosen = next((value for p, value in rules.items() if _matches(p, block)), default)
    if chosen == FLOAT:
        return BlockPlan(*names, "exclude", "by name")
    if block.left_out_because:
        return BlockPlan(*names, "exclude", block.left_out_because)
    if block.spec is None:
        return BlockPlan(*names, "refuse", block.refused_because)
    spec = block.spec
    form = scheme_of(spec.experts.given_scheme or chosen)
    outside_because = outside_because or spec.outside_because
    is_fused = spec.router is not None and not outside_because
    if spec.place is None and not is_fused:
        why = f"its router is one piece of code with its experts and cannot stay: {outside_because}"
        return BlockPlan(*names, "refuse", why)
    if lost := lost_with(block.module, spec, is_fused=is_fused):
        why = f"packed experts would not run what it carries: {lost}; remove that before packing"
        return BlockPlan(*names, "refuse", why)
    e = spec.experts
    top_k = spec.router.attributes.num_activated_experts if spec.router else _top_k(block.module)
    if top_k is not None and not 1 <= top_k <= e.num_experts:
        why = f"{top_k} activated experts per token of {e.num_experts}; correct the config"
        return BlockPlan(*names, "refuse", why)
    try:
        packed = e.num_experts * (
            packing.packed_bytes(
                form, e.attributes.rows13, e.model_dim, e.attributes.row_order13, layout
            )
            + packing.packed_bytes(form, e.model_dim, e.inner_dim, "plain", layout)
        )
    except UnsupportedError as error:
        return BlockPlan(*names, "refuse", str(error))
    return BlockPlan(
        *names,
        "replace",
        "; ".join(_remarks(spec, "" if is_fused else outside_because)),
        form.name,
        layout,
        "fused" if is_fused else "outside",
        e.num_experts,
        top_k,
        e.model_dim,
        e.inner_dim,
        e.bytes_stored,
        packed + e.bias_bytes,
    )


def _remarks(spec: BlockSpec, outside_because: str) -> Iterator[str]:
    if outside_because:
        yield f"router outside: {outside_because}"
    if spec.experts.given_scheme:
        yield f"codes of torchao's {spec.experts.given_scheme} are kept"


def _top_k(block: nn.Module) -> int | None:
    for module in (*block.children(), block):
        value = getattr(module, "top_k", None)
        if isinstance(value, int):
            return value
    return None
