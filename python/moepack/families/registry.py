"""The families that are asked, in order: registered ones, those of installed packages, our own."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Protocol, cast

from torch import nn

from moepack.errors import MoePackError
from moepack.families import (
    dbrx,
    dequantized,
    executorch,
    huggingface,
    input_weighted,
    module_list,
    parallel_linears,
)
from moepack.families.spec import BlockSpec

ENTRY_POINTS = "moepack.families"


class Family(Protocol):
    """One shape of code. A module with these three names is one.

    May also have `left_out(module) -> str`: why experts that it sees are none of a feed-forward
    block, "" if they are.
    """

    @property
    def NAME(self) -> str: ...  # noqa: N802

    def is_candidate(self, module: nn.Module, /) -> bool:
        """Does the module own routed experts that this family reads? Called for every module."""
        ...

    def read(self, module: nn.Module, /) -> tuple[BlockSpec | None, str]:
        """The block in neutral form, or None and the reason why it cannot be packed."""
        ...


# The first one that sees experts reads them: special shapes of code come before general ones.
_OWN = (dequantized, executorch, module_list, input_weighted, dbrx, parallel_linears, huggingface)
_registered: list[Family] = []


def register_family(family: Family) -> None:
    """Makes a family known in this process; it is asked before all others that are known.

    `family`: a module or object with NAME, is_candidate and read. An installed package needs no
    call: it names its families in the entry-point group "moepack.families". Raises MoePackError if
    something is missing or another family has its name.
    """
    _check(family, repr(family))
    if any(known.NAME == family.NAME and known is not family for known in families()):
        raise MoePackError(f"family {family.NAME!r} is known already; choose another NAME")
    if family not in _registered:
        _registered.insert(0, family)


def families() -> tuple[Family, ...]:
    return (*_registered, *_installed(), *cast(tuple[Family, ...], _OWN))


@cache
def _installed() -> tuple[Family, ...]:
    found: dict[str, Family] = {family.NAME: family for family in cast(tuple[Family, ...], _OWN)}
    installed = []
    for point in entry_points(group=ENTRY_POINTS):
        where = f"entry point {point.name} = {point.value} of {ENTRY_POINTS}"
        try:
            family = cast(Family, point.load())
        except Exception as error:
            raise MoePackError(f"{where} cannot be loaded: {error}") from error
        _check(family, where)
        if found.setdefault(family.NAME, family) is not family:
            raise MoePackError(f"{where}: family {family.NAME!r} is known already")
        installed.append(family)
    return tuple(installed)


def _check(family: Family, where: str) -> None:
    missing = [n for n in ("NAME", "is_candidate", "read") if not hasattr(family, n)]
    if missing:
        raise MoePackError(f"{where} is no family: it has no {', '.join(missing)}")
