"""The neutral form of an MoE block: what a family reads, and all that later steps see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from moepack.attributes import RoutingAttributes
from moepack.reference.float_mode import ExpertReader

# x [T, D], ids [T, K], weights [T, K] -> [T, D]
ExpertsFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ExpertsSpec:
    """The experts, read one at a time: w13(e) [2F, D] rows [gate (activated); up], w2(e) [D, F]."""

    num_experts: int
    model_dim: int
    inner_dim: int
    reader: ExpertReader
    activation: str = "silu"
    gated: bool = True
    bytes_stored: int = 0
    # Weights that torchao has quantized: given(name, e) is its matrix, whose codes are kept.
    given: Callable[[str, int], Tensor] | None = None
    given_scheme: str = ""

    def w13(self, expert: int) -> Tensor:
        return self.reader.w13(expert)

    def w2(self, expert: int) -> Tensor:
        return self.reader.w2(expert)

    def bias13(self, expert: int) -> Tensor | None:
        return self.reader.bias13(expert)

    def bias2(self, expert: int) -> Tensor | None:
        return self.reader.bias2(expert)

    @property
    def has_bias(self) -> bool:
        return self.bias13(0) is not None or self.bias2(0) is not None


@dataclass(frozen=True)
class RouterSpec:
    """A router that the operator computes: gate_weight [E, D], biases [E], and its attributes."""

    gate_weight: Tensor
    gate_bias: Tensor | None
    expert_bias: Tensor | None
    attributes: RoutingAttributes


@dataclass(frozen=True)
class Combination:
    """What the block does around routing and experts.

    y = routed (+ sigmoid(shared_gate(x)) *) (+ shared(x)); `shared` and `shared_gate` name children
    of the block. The result has the shape of the input, or is `flat`: [T, D].
    """

    shared: str | None = None
    shared_gate: str | None = None
    returns: Literal["shaped", "flat"] = "shaped"


@dataclass(frozen=True)
class Oracle:
    """The original's own code, for verification only.

    `experts(first, last)`: the original experts `first .. last - 1`, in fp32, renumbered from 0.
    `block(stub)`: a copy of the original block in fp32 in which `stub` stands for the experts.
    """

    experts: Callable[[int, int], ExpertsFunction]
    block: Callable[[ExpertsFunction], nn.Module]


@dataclass(frozen=True)
class BlockSpec:
    """One MoE block. `router` is None where routing stays in PyTorch, `outside_because` of that."""

    experts: ExpertsSpec
    router: RouterSpec | None
    combination: Combination
    oracle: Oracle
    experts_child: str  # the block's child that is replaced when the router stays outside
    outside_because: str = ""


@dataclass
class FoundBlock:
    """A block at `paths` (more than one: the same module under several names), read or refused."""

    paths: list[str]
    module: nn.Module
    family: str
    spec: BlockSpec | None
    refused_because: str = ""
    experts_of: int = field(default=0)  # identifies experts that several blocks share

    @property
    def path(self) -> str:
        return self.paths[0]
