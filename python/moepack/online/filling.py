"""A model on the meta device that is being filled, layer by layer, from tensors in any order.

Names are grouped by decoder layer. A group is complete when everything has come that the source
will bring for it: then its blocks are finished, its tensors handed on, and nothing of it is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from moepack.errors import BadWeights, MoePackError
from moepack.modules import PackedExperts
from moepack.online.blocks import OnlineBlock
from moepack.online.mapping import NameMapping, Target
from moepack.online.stored import Decoder, StoredTensor
from moepack.online.unit import Unit

_LAYER = re.compile(r"^(?:.*?\.)?(?:layers|blocks|h|layer)\.\d+(?=\.|$)")


@dataclass
class Group:
    """One transaction: the tensors of a decoder layer, or one tensor outside of the layers."""

    name: str
    required: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)
    blocks: list[OnlineBlock] = field(default_factory=list)
    units: dict[str, Unit] = field(default_factory=dict)
    error: MoePackError | None = None
    halves: list[str] = field(default_factory=list)
    is_done: bool = False

    def complete_names(self) -> set[str]:
        return {n for unit in self.units.values() if unit.is_complete for n in unit.outputs}

    def missing(self) -> list[str]:
        partly = [
            gap
            for unit in self.units.values()
            if set(unit.outputs) & self.required
            for gap in unit.missing()
        ]
        begun = {n for unit in self.units.values() for n in unit.outputs}
        return sorted(self.required - begun) + partly


@dataclass(frozen=True)
class Filled:
    """What a complete group has become: plain tensors by name, and packed modules by block."""

    group: Group
    tensors: Mapping[str, Tensor]
    packed: Sequence[tuple[OnlineBlock, PackedExperts]]


class Filling:
    """`apply` gets every group when it is complete, once.

    `names`: all stored names, if known. `keeps_going`: errors stay with their group, for the end.
    `only_blocks`: what is in no block is not required, and is not taken.
    `partial`: at the end, groups of which something is missing are applied with what came.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[OnlineBlock],
        apply: Callable[[Filled], None],
        names: frozenset[str] | None = None,
        *,
        keeps_going: bool = False,
        partial: bool = False,
        only_blocks: bool = False,
    ) -> None:
        self.mapping = NameMapping(model)
        self.unexpected: list[str] = []
        self.groups: dict[str, Group] = {}
        self._apply, self._keeps_going, self._names = apply, keeps_going, names
        self._partial, self._only_blocks = partial, only_blocks
        self._decoder = Decoder(names)
        self._home: dict[str, tuple[OnlineBlock, str]] = {}
        self._group_of: dict[str, Group] = {}
        self._make_groups(model, list(blocks))
        if names is not None:
            self._expect(self._decoder.logical_names(names))

    def _make_groups(self, model: nn.Module, blocks: list[OnlineBlock]) -> None:
        for block in blocks:
            group = self._group(_group_name(block.path) or block.path)
            group.blocks.append(block)
            for name in block.needs:
                for path in block.found.paths:
                    full = f"{path}.{name}" if path else name
                    self._home[full] = (block, name)
                    self._group_of[full] = group
        parameters = {name for name, _ in model.named_parameters()}
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        for name in self.mapping.shapes:
            group = self._group_of.setdefault(name, self._group(_group_name(name) or name))
            is_free = (
                name not in parameters
                or name in tied
                or self.mapping.may_be_missing(name)
                or (self._only_blocks and name not in self._home)
            )
            (group.optional if is_free else group.required).add(name)

    def _group(self, name: str) -> Group:
        return self.groups.setdefault(name, Group(name))

    def _expect(self, names: Iterable[str]) -> None:
        for name in names:
            target = self.mapping.target(name)
            if target is not None:
                self._unit(target).expect(target.pattern)
            else:
                self._note_unexpected(name)

    def _note_unexpected(self, name: str) -> None:
        if not self.mapping.is_ignored(name) and name not in self.unexpected:
            self.unexpected.append(name)

    def _unit(self, target: Target) -> Unit:
        units = self._group_of[target.name].units
        if target.name not in units:
            units[target.name] = self.mapping.unit(target)
        return units[target.name]

    def require_buffers_of(self, kind: type[nn.Module]) -> None:
        """Their buffers are weights: nothing else can make them."""
        for path, module in self.mapping.model.named_modules():
            if isinstance(module, kind):
                for name, _ in module.named_buffers(recurse=False):
                    full = f"{path}.{name}".removeprefix(".")
                    self._group_of[full].required.add(full)

    def check_names(self) -> None:
        """Raises BadWeights if names that are known in advance leave something out."""
        gone = [n for g in self.groups.values() for n in g.required - _outputs(g)]
        if gone:
            raise BadWeights(
                f"the checkpoint lacks {len(gone)} tensors of the model: {shortened(sorted(gone))}"
            )

    def check_places(self) -> None:
        """Raises BadWeights if names, known in advance or come, have no place in the model."""
        if self.unexpected:
            raise BadWeights(
                f"{len(self.unexpected)} stored tensors have no place in the model of config.json: "
                f"{shortened(self.unexpected, 4)}; correct config.json"
            )

    def add(self, stored: StoredTensor) -> None:
        """Takes one tensor; a group that it completes is finished and applied."""
        for tensor in self._decoder.feed(stored):
            target = self.mapping.target(tensor.name)
            if target is None:
                self._note_unexpected(tensor.name)
                continue
            group = self._group_of[target.name]
            if group.error is not None:
                continue
            with _Errors(group, self._keeps_going):
                if group.is_done:
                    raise BadWeights(f"{tensor.name} came after its layer was complete")
                self._unit(target).add(tensor, target.pattern)
                self._advance(group)

    def end(self) -> None:
        """Nothing more comes: finishes the groups of which only what may be missing is missing."""
        for group in self.groups.values():
            if not group.is_done and group.error is None and group.units:
                with _Errors(group, self._keeps_going):
                    if self._partial or not group.missing():
                        self._finish(group)

    def require_everything(self) -> None:
        """Raises BadWeights, naming it, if anything is missing or went wrong."""
        if found := self.unfinished():
            listed = "; ".join(f"{name}: {', '.join(why)}" for name, why in found.items())
            raise BadWeights(f"{len(found)} layers are incomplete: {listed}")

    def unfinished(self) -> dict[str, list[str]]:
        """What went wrong or is missing, by group."""
        found: dict[str, list[str]] = {}
        for group in self.groups.values():
            if group.error is not None:
                found[group.name] = [str(group.error)]
            elif not group.is_done and not self._partial and (missing := group.missing()):
                found[group.name] = [f"missing: {shortened(missing)}"]
            elif group.halves:
                found[group.name] = [f"came in part: {shortened(group.halves)}"]
        if loose := self._decoder.unfinished():
            found["scales"] = loose
        return found

    def _advance(self, group: Group) -> None:
        if self._names is None:
            for block in group.blocks:
                block.advance(self._units_of(group, block))
            is_complete = group.complete_names() >= group.required | group.optional
        else:
            is_complete = all(unit.is_complete for unit in group.units.values()) and (
                group.complete_names() >= group.required
            )
        if is_complete:
            self._finish(group)

    def _finish(self, group: Group) -> None:
        by_expert = {
            unit.name
            for block in group.blocks
            if block.takes_experts_from(units := self._units_of(group, block))
            for name, unit in units.items()
            if name in block.stacks
        }
        plain: dict[str, Tensor] = {}
        for unit in group.units.values():
            if unit.is_complete and unit.name not in by_expert:
                plain.update(unit.whole())
        packed = []
        for block in group.blocks:
            values = {
                self._home[name][1]: plain.pop(name)
                for name in list(plain)
                if name in self._home and self._home[name][0] is block
            }
            units = self._units_of(group, block)
            packed.append((block, block.finish(units, values, partial=self._partial)))
        group.is_done = True
        group.halves = [half for unit in group.units.values() for half in unit.halves()]
        self._apply(Filled(group, plain, packed))
        group.units.clear()

    def _units_of(self, group: Group, block: OnlineBlock) -> dict[str, Unit]:
        return {
            self._home[name][1]: unit
            for name, unit in group.units.items()
            if name in self._home and self._home[name][0] is block
        }


class _Errors:
    """Keeps an error with its group, or lets it out."""

    def __init__(self, group: Group, keeps: bool) -> None:
        self._group, self._keeps = group, keeps

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not self._keeps or not isinstance(error, MoePackError):
            return False
        self._group.error = self._group.error or error
        self._group.units.clear()  # what came for it is of no use any more
        return True


def _outputs(group: Group) -> set[str]:
    return {n for unit in group.units.values() for n in unit.outputs}


def _group_name(name: str) -> str:
    found = _LAYER.match(name)
    return found.group(0) if found else ""


def shortened(names: Sequence[str], most: int = 8) -> str:
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
