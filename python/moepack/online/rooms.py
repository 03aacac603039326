"""Where the float matrices of one expert are while it is converted."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moepack.families import BlockSpec, ExpertsSpec, find_blocks
from moepack.online.unit import Unit


class Room:
    """Room for one expert's float matrices: stacks of which every entry is the same memory.

    The family reads any expert from them as from a full stack, whatever its layout.
    """

    def __init__(self, block: nn.Module, stacks: Mapping[str, Tensor], is_fused: bool) -> None:
        self._block, self._stacks, self._is_fused = block, stacks, is_fused
        self._room: dict[str, Tensor] = {}
        self._experts: ExpertsSpec

    def hold(self, units: Mapping[str, Unit], expert: int, *, scales: bool = False) -> ExpertsSpec:
        """An expert's values, or the scale of each, in the same places."""
        dtypes = {name: unit.part_dtype(expert) for name, unit in units.items()}
        if dtypes != {name: room.dtype for name, room in self._room.items()}:
            self._room = {
                n: torch.empty(1, *unit.shape[1:], dtype=dtypes[n]) for n, unit in units.items()
            }
            expanded = {n: r.expand(self._stacks[n].shape) for n, r in self._room.items()}
            view = with_tensors(self._block, expanded)
            self._experts = spec_of(view).packed_experts(self._is_fused)
        for name, unit in units.items():
            unit.fill(expert, self._room[name], scales=scales)
        return self._experts


class Slot:
    """What one thread works in."""

    def __init__(self, block: nn.Module, stacks: Mapping[str, Tensor], is_fused: bool) -> None:
        self.values = Room(block, stacks, is_fused)
        self.scales = Room(block, stacks, is_fused)


def with_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the module that has these parameters (names may be nested) and shares the rest."""
    view = copy.copy(module)
    view._parameters, view._buffers = dict(module._parameters), dict(module._buffers)
    view._modules = dict(module._modules)
    below: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        head, _, rest = name.partition(".")
        if rest:
            below.setdefault(head, {})[rest] = tensor
        elif head in view._buffers:
            view._buffers[head] = tensor
        else:
            view._parameters[head] = nn.Parameter(tensor, requires_grad=False)
    for head, inner in below.items():
        view._modules[head] = with_tensors(module.get_submodule(head), inner)
    return view


def spec_of(block: nn.Module) -> BlockSpec:
    """The neutral form of a block as it is now."""
    spec = find_blocks(block)[0].spec
    assert spec is not None  # it was read before, from the same structure
    return spec
