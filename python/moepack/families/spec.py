"""The neutral form of an MoE block: what a family reads, and all that later steps see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor, nn

from moepack.attributes import ExpertAttributes, RoutingAttributes
from moepack.modules import QuantizedExperts
from moepack.reference.float_mode import ExpertReader

# x [T, D], ids [T, K], weights [T, K] -> [T, D]
ExpertsFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ExpertsSpec:
    """The experts, read one at a time: w13(e) [2F, D] rows [gate (activated); up] or, without a
    gate, [F, D]; w2(e) [D, F].

    `attributes` say what lies between the two; their scheme is chosen later. `output_norm` is
    applied to every expert's output before it is weighted.
    """

    num_experts: int
    model_dim: int
    reader: ExpertReader
    attributes: ExpertAttributes
    bytes_stored: int = 0
    output_norm: nn.Module | None = None
    # Weights that torchao has quantized: given(name, e) is its matrix, whose codes are kept.
    given: Callable[[str, int], Tensor] | None = None
    given_scheme: str = ""

    @property
    def inner_dim(self) -> int:
        return self.attributes.hidden_dim

    def w13(self, expert: int) -> Tensor:
        return self.reader.w13(expert)

    def w2(self, expert: int) -> Tensor:
        return self.reader.w2(expert)

    def bias13(self, expert: int) -> Tensor | None:
        return self.reader.bias13(expert)

    def bias2(self, expert: int) -> Tensor | None:
        return self.reader.bias2(expert)

    @property
    def bias_bytes(self) -> int:
        biases = (self.bias13(0), self.bias2(0))
        return 4 * self.num_experts * sum(b.numel() for b in biases if b is not None)

    def scaled(self, scale: Tensor | None) -> ExpertsSpec:
        """The same with every expert's output times scale[e]."""
        if scale is None:
            return self
        factors, read = scale.detach().float(), self.reader

        def bias2(expert: int) -> Tensor | None:
            bias = read.bias2(expert)
            return None if bias is None else bias.float() * factors[expert]

        scaled = read._replace(w2=lambda e: read.w2(e).float() * factors[e], bias2=bias2)
        return replace(self, reader=scaled)


@dataclass(frozen=True)
class RouterSpec:
    """A router that the operator computes: gate_weight [E, D], biases [E], and its attributes.

    `before` (without parameters that a cast could change) maps the router's input to what
    gate_weight multiplies; `output_scale` [E] multiplies the weight of expert e.
    """

    gate_weight: Tensor
    gate_bias: Tensor | None
    expert_bias: Tensor | None
    attributes: RoutingAttributes
    before: nn.Module | None = None
    output_scale: Tensor | None = None


@dataclass(frozen=True)
class Combination:
    """What the block does around routing and experts.

    y = routed (+ sigmoid(shared_gate(x)) *) (+ shared(x)); `shared` and `shared_gate` name children
    of the block. The result has the shape of the input, or is `flat`: [T, D].

    `in_place`: the block does more. It keeps its own code, and only its children `router` and
    `experts` change: the router's stand-in hands its input on to the experts, which route.
    """

    shared: str | None = None
    shared_gate: str | None = None
    returns: Literal["shaped", "flat"] = "shaped"
    in_place: bool = False


@dataclass(frozen=True)
class Oracle:
    """The original's own code, for verification only.

    `experts(first, last)`: the original experts `first .. last - 1`, in fp32, renumbered from 0.
    `block(stub)`: a copy of the original block in fp32 in which `stub` stands for the experts.
    """

    experts: Callable[[int, int], ExpertsFunction]
    block: Callable[[ExpertsFunction], nn.Module]


# Puts packed experts into a block whose router stays outside; returns what stands in its place.
Placement = Callable[[nn.Module, QuantizedExperts], nn.Module]


def place_as(name: str) -> Placement:
    """The packed experts as the block's child `name`, called as the original experts were."""

    def place(block: nn.Module, packed: QuantizedExperts) -> nn.Module:
        setattr(block, name, packed)
        return block

    return place


@dataclass(frozen=True)
class BlockSpec:
    """One MoE block. `router` is None where routing stays in PyTorch, `outside_because` of that.

    `place` is None where the block's own code cannot route for packed experts. `outside_replaces`
    names the parts that it replaces (default: `experts_child`), `outside_keeps` those in them that
    stay.
    """

    experts: ExpertsSpec
    router: RouterSpec | None
    combination: Combination
    oracle: Oracle
    place: Placement | None
    router_child: str = ""
    experts_child: str = ""
    outside_because: str = ""
    outside_replaces: tuple[str, ...] = ()
    outside_keeps: tuple[str, ...] = ()

    def packed_experts(self, is_fused: bool) -> ExpertsSpec:
        """What is packed: a scale that the router applies moves into the experts with routing."""
        return self.experts.scaled(self.router.output_scale if self.router and is_fused else None)


@dataclass
class FoundBlock:
    """A block at `paths` (more than one: the same module under several names), read or refused.

    `left_out_because`: it has experts, but not those of a feed-forward block.
    """

    paths: list[str]
    module: nn.Module
    family: str
    spec: BlockSpec | None
    refused_because: str = ""
    left_out_because: str = ""
    experts_of: int = field(default=0)  # identifies experts that several blocks share

    @property
    def path(self) -> str:
        return self.paths[0]
