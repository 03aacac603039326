"""One MoE block that is being filled: collected, converted expert by expert, placed.

The base of every online format. Where a weight's elements are collected is a `Unit`; an expert is
converted when all its matrices are there and its float copy goes at once; the block is complete
when every tensor that it is made from has come. A method only says what a matrix becomes.
"""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from moepack import huge_pages, packing
from moepack.errors import BadWeights
from moepack.families import BlockSpec, ExpertsSpec, FoundBlock
from moepack.modules import PackedExperts
from moepack.online.methods import OnlineMethod, Packed, pack_into
from moepack.online.rooms import Slot, spec_of
from moepack.online.stacks import Stack
from moepack.online.unit import Unit
from moepack.placement import PackedTensors, build, placed, stacked_biases
from moepack.planner import BlockPlan
from moepack.threads import one_thread_each

# (block path, "packed_w13" or "packed_w2", [E, bytes]) -> where the result goes
Allocate = Callable[[str, str, tuple[int, int]], Stack]


def in_memory(path: str, name: str, shape: tuple[int, int]) -> Stack:
    return Stack(huge_pages.empty(*shape))


class OnlineBlock:
    """`needs`: the names, below the block, of the tensors that become part of the packed module."""

    def __init__(
        self,
        found: FoundBlock,
        decision: BlockPlan,
        method: OnlineMethod,
        allocate: Allocate = in_memory,
        floor_db: float | None = None,
        threads: int = 1,
    ) -> None:
        assert found.spec is not None
        self.found, self.decision, self.method = found, decision, method
        self.spec: BlockSpec = found.spec
        self.path = found.path
        self.needs = _needs(found.module, self.spec, decision)
        self.stacks = _stacks(found.module, self.spec, self.needs)
        self.worst_db = float("inf")  # of the matrices that were quantized
        self.kept = 0  # matrices
        self._allocate, self._floor_db, self._threads = allocate, floor_db, threads
        self._packed: tuple[Stack, Stack] | None = None
        self.done: set[int] = set()
        self._slots: queue.SimpleQueue[Slot] | None = None

    @property
    def where(self) -> str:
        return self.path or "(root)"

    @property
    def converts_early(self) -> bool:
        """Do an expert's matrices depend on its own stored tensors alone?"""
        router = self.spec.router
        is_scaled = router is not None and router.output_scale is not None
        return bool(self.stacks) and not (is_scaled and self.decision.router == "fused")

    @property
    def packed_path(self) -> str:
        """Where the packed module is, in a model in which the block is packed."""
        trial = placed(copy.deepcopy(self.found.module), self.spec, self.empty())
        inside = next(p for p, m in trial.named_modules() if isinstance(m, PackedExperts))
        return f"{self.path}.{inside}".strip(".")

    def takes_experts_from(self, units: Mapping[str, Unit]) -> bool:
        """Can every stack of experts be made one expert at a time?"""
        found = [units.get(name) for name in self.stacks]
        return bool(found) and all(unit is not None and unit.is_stack for unit in found)

    def advance(self, units: Mapping[str, Unit]) -> None:
        """Converts the experts that have become complete; `units` by names below the block."""
        if self.converts_early:
            self._convert_ready(self.found.module, units)

    @torch.no_grad()
    def finish(
        self, units: Mapping[str, Unit], values: Mapping[str, Tensor], *, partial: bool = False
    ) -> PackedExperts:
        """The packed module, when everything has come.

        `values`: the tensors by names below the block, without stacks that come expert by expert.
        Names that are in neither are held by no checkpoint: what is computed from them is NaN.
        `partial`: experts that did not come are left out; `done` are those that are packed.
        """
        for name, tensor in values.items():
            _check_finite(f"{self.where} {name}", tensor)
        self._set_values(values)
        self._convert_ready(self.found.module, units)
        has_all = self.stacks.keys() <= values.keys() and (
            self.stacks or self.needs <= values.keys()
        )
        if len(self.done) < self.spec.experts.num_experts and (has_all or not partial):
            self._convert_all(spec_of(self.found.module).packed_experts(self._is_fused))
        spec = spec_of(self.found.module)
        self.spec = spec
        biases = stacked_biases(spec.packed_experts(self._is_fused))
        w13, w2 = self._results()
        packed = PackedTensors(w13.tensor, w2.tensor, *biases)
        self._slots = self._packed = None  # the module alone holds the result from here on
        return build(spec, self.decision, self.found.module, packed)

    def empty(self) -> PackedExperts:
        """The packed module on the meta device, of a block that is there."""
        sizes = self._sizes().values()
        w13, w2 = (torch.empty(shape, dtype=torch.uint8, device="meta") for shape in sizes)
        bias13, bias2 = (
            None if bias is None else bias.to("meta")
            for bias in stacked_biases(self.spec.packed_experts(self._is_fused))
        )
        packed = PackedTensors(w13, w2, bias13, bias2)
        return build(self.spec, self.decision, self.found.module, packed)

    @property
    def _is_fused(self) -> bool:
        return self.decision.router == "fused"

    def _set_values(self, values: Mapping[str, Tensor]) -> None:
        block = self.found.module
        for name in self.needs - (self.stacks.keys() - values.keys()):
            owner = block.get_submodule(name.rpartition(".")[0])
            leaf = name.rpartition(".")[2]
            old = getattr(owner, leaf)
            new = values[name] if name in values else torch.full(old.shape, torch.nan).to(old.dtype)
            if leaf in owner._parameters:
                owner._parameters[leaf] = nn.Parameter(new, requires_grad=False)
            else:
                owner._buffers[leaf] = new

    def _convert_ready(self, block: nn.Module, units: Mapping[str, Unit]) -> None:
        if not self.takes_experts_from(units):
            return
        stacks = {name: units[name] for name in self.stacks}
        ready = [
            e
            for e in range(self.spec.experts.num_experts)
            if e not in self.done and all(unit.has(e) for unit in stacks.values())
        ]
        if not ready:
            return
        if self._slots is None:
            self._slots = queue.SimpleQueue()
            for _ in range(self._threads):
                self._slots.put(Slot(block, self.stacks, self._is_fused))

        ahead = dict(zip(ready, ready[self._threads :], strict=False))

        def convert(expert: int) -> list[Packed]:
            assert self._slots is not None
            if expert in ahead:
                for unit in stacks.values():
                    unit.read_ahead(ahead[expert])
            slot = self._slots.get()
            try:
                values = slot.values.hold(stacks, expert)
                has_scales = self.method.may_keep and all(
                    unit.has_scales(expert) for unit in stacks.values()
                )
                scales = slot.scales.hold(stacks, expert, scales=True) if has_scales else None
                return self._convert(values, expert, scales)
            finally:
                self._slots.put(slot)

        self._note(ready, convert)
        for expert in ready:
            for unit in stacks.values():
                unit.forget(expert)

    def _convert_all(self, experts: ExpertsSpec) -> None:
        todo = [e for e in range(experts.num_experts) if e not in self.done]
        self._note(todo, lambda expert: self._convert(experts, expert))

    def _note(self, experts: Iterable[int], convert: Callable[[int], list[Packed]]) -> None:
        """Runs the conversions; experts stay undone if one of them fails."""
        self._results()
        chosen = list(experts)
        with one_thread_each():
            if self._threads == 1 or len(chosen) == 1:
                found = [convert(expert) for expert in chosen]
            else:
                with ThreadPoolExecutor(self._threads) as pool:
                    found = list(pool.map(convert, chosen))
        matrices = [matrix for pair in found for matrix in pair]
        self.worst_db = min(self.worst_db, *(m.sqnr_db for m in matrices))
        self.kept += sum(m.is_kept for m in matrices)
        self.done.update(chosen)

    def _sizes(self) -> dict[str, tuple[int, int]]:
        experts, scheme = self.spec.experts, self.method.scheme
        attributes, dim, layout = experts.attributes, experts.model_dim, self.decision.layout
        bytes13 = packing.packed_bytes(
            scheme, attributes.rows13, dim, attributes.row_order13, layout
        )
        bytes2 = packing.packed_bytes(scheme, dim, experts.inner_dim, "plain", layout)
        return {
            "packed_w13": (experts.num_experts, bytes13),
            "packed_w2": (experts.num_experts, bytes2),
        }

    def _results(self) -> tuple[Stack, Stack]:
        if self._packed is None:
            w13, w2 = (self._allocate(self.path, n, shape) for n, shape in self._sizes().items())
            self._packed = (w13, w2)
        return self._packed

    @torch.no_grad()
    def _convert(
        self, experts: ExpertsSpec, expert: int, scales: ExpertsSpec | None = None
    ) -> list[Packed]:
        w13, w2 = self._results()
        order = experts.attributes.row_order13
        found = []
        for name, stack, read, row_order in (
            ("w13", w13, ExpertsSpec.w13, order),
            ("w2", w2, ExpertsSpec.w2, "plain"),
        ):
            blob = stack.room(expert)
            packed = pack_into(
                blob,
                self.method,
                read(experts, expert),
                row_order,
                f"{self.where} expert {expert} {name}",
                self._floor_db,
                self.decision.layout,
                None if scales is None else read(scales, expert),
            )
            stack.put(expert, blob)
            found.append(packed)
        return found


def _needs(block: nn.Module, spec: BlockSpec, decision: BlockPlan) -> frozenset[str]:
    names = [*(n for n, _ in block.named_parameters()), *_persistent_buffers(block)]
    experts = f"{spec.experts_child}." if spec.experts_child else ""
    if decision.router == "outside":
        return frozenset(n for n in names if n.startswith(experts))
    if spec.combination.in_place:
        return frozenset(n for n in names if n.startswith((experts, f"{spec.router_child}.")))
    kept = tuple(
        f"{name}." for name in (spec.combination.shared, spec.combination.shared_gate) if name
    )
    return frozenset(n for n in names if not n.startswith(kept))


def _persistent_buffers(block: nn.Module) -> list[str]:
    buffers = {name for name, _ in block.named_buffers()}
    return [name for name in block.state_dict() if name in buffers]


def _stacks(block: nn.Module, spec: BlockSpec, needs: frozenset[str]) -> dict[str, Tensor]:
    """Three-dimensional weights of all experts, by name."""
    experts = f"{spec.experts_child}." if spec.experts_child else ""
    return {
        name: parameter
        for name, parameter in block.named_parameters()
        if name in needs
        and name.startswith(experts)
        and parameter.dim() == 3
        and parameter.shape[0] >= spec.experts.num_experts
    }


def _check_finite(where: str, values: Tensor) -> None:
    if not values.is_floating_point() or not values.numel():
        return
    if all(extreme.isfinite() for extreme in torch.aminmax(values)):
        return
    at = (~values.isfinite()).nonzero()[0].tolist()
    raise BadWeights(
        f"{where}: the value at {at} is {float(values[tuple(at)])}; weights have to be finite"
    )


__all__ = ["Allocate", "OnlineBlock", "in_memory"]
