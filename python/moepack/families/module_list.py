"""Experts as a list or dictionary of modules, one each, that the block calls one by one.

The code of models before transformers 5, of checkpoints that carry their own code, and of encoder
and decoder models. An expert is recognised by its two or three linear layers: their shapes say
which leads back to the model's width; of two that do not, running the expert says which is gated.
The block keeps its own code; in the place of each expert stands a view of the packed ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moepack.attributes import ExpertAttributes
from moepack.expert_calls import ExpertView
from moepack.families.activations import candidates, numbers_of
from moepack.families.spec import BlockSpec, Combination, ExpertsFunction, ExpertsSpec, Oracle
from moepack.families.stacked import is_plain
from moepack.modules import QuantizedExperts
from moepack.reference import float_mode
from moepack.reference.float_mode import ExpertReader

NAME = "module_list"
_WHY = "the block calls its experts one by one and keeps its own code"


class Linears(NamedTuple):
    """Names of an expert's linear layers; `gate` is "" without one."""

    gate: str
    up: str
    down: str


def is_candidate(module: nn.Module) -> bool:
    """Does the module own routed experts?"""
    experts = getattr(module, "experts", None)
    return isinstance(experts, nn.ModuleList | nn.ModuleDict) and len(_experts(module)) > 0


def _experts(block: nn.Module) -> dict[str, nn.Module]:
    """The children of `experts` that have weights, by name."""
    children = block.get_submodule("experts").named_children()
    return {name: child for name, child in children if any(True for _ in child.parameters())}


def read(block: nn.Module) -> tuple[BlockSpec | None, str]:
    """The block in neutral form, or None and the reason why it is not supported."""
    modules = list(_experts(block).values())
    kind = type(modules[0]).__name__
    if any(_signature(m) != _signature(modules[0]) for m in modules):
        return None, f"its experts differ in class or shapes ({kind}, ...)"
    if not all(is_plain(p) and p.is_floating_point() for m in modules for p in m.parameters()):
        return None, f"its experts ({kind}) are quantized already; supported: float weights"
    found = next(_readings(modules[0]), None)
    if found is None:
        return None, (
            f"its experts ({kind}) are not recognised; supported: modules with an up and a down "
            "linear layer and possibly a gate, and one of the operator's activations between"
        )
    linears, attributes = found

    def layer(expert: int, name: str) -> nn.Linear:
        linear = modules[expert].get_submodule(name)
        assert isinstance(linear, nn.Linear)
        return linear

    first = [name for name in (linears.gate, linears.up) if name]

    def bias(expert: int, names: list[str]) -> Tensor | None:
        biases = [layer(expert, name).bias for name in names]
        return None if biases[0] is None else torch.cat([b.detach() for b in biases])

    reader = ExpertReader(
        len(modules),
        w13=lambda e: torch.cat([layer(e, name).weight.detach() for name in first]),
        w2=lambda e: layer(e, linears.down).weight.detach(),
        bias13=lambda e: bias(e, first),
        bias2=lambda e: bias(e, [linears.down]),
    )
    stored = sum(p.numel() * p.element_size() for m in modules for p in m.parameters())
    width = layer(0, linears.down).out_features
    spec = ExpertsSpec(len(modules), width, reader, attributes, stored)
    oracle = Oracle(
        experts=lambda first, last: _original_experts(modules[first:last]),
        block=lambda stub: block,
    )
    replaces = tuple(f"experts.{name}" for name in _experts(block))
    return BlockSpec(
        spec, None, Combination(), oracle, _place, "", "experts", _WHY, outside_replaces=replaces
    ), ""


def _signature(expert: nn.Module) -> tuple[object, ...]:
    return (type(expert), *((name, p.shape) for name, p in expert.named_parameters()))


@torch.no_grad()
def _readings(expert: nn.Module) -> Iterator[tuple[Linears, ExpertAttributes]]:
    """What the expert may be: each computes what the expert computes, on probes."""
    is_meta = any(p.device.type == "meta" for p in expert.parameters())
    plain = copy.deepcopy(expert).float().eval()
    for linears in _by_shape(plain):
        down = plain.get_submodule(linears.down)
        width, inner_dim = (down.get_parameter("weight").shape[i] for i in (0, 1))
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
        x *= torch.tensor([0.1, 1.0, 30.0, 1000.0])[:, None]  # clamps and caps show
        if is_meta:  # nothing can be compared without values; quantizing it is refused
            yield (
                linears,
                ExpertAttributes(inner_dim, "", activation="silu" if linears.gate else "relu"),
            )
            continue
        columns = [plain.get_submodule(n)(x) for n in (linears.gate, linears.up) if n]
        try:
            expected = plain(x)
        except RuntimeError:
            continue  # another layer is the one that leads back
        size = expected.norm(dim=-1, keepdim=True)
        for attributes in candidates(inner_dim, numbers_of(expert), is_gated=bool(linears.gate)):
            found = down(float_mode.activate(torch.cat(columns, -1), attributes))
            if ((found - expected).norm(dim=-1, keepdim=True) <= 1e-5 * size).all():
                yield linears, attributes


def _by_shape(expert: nn.Module) -> Iterator[Linears]:
    layers = {n: m for n, m in expert.named_modules() if isinstance(m, nn.Linear)}
    if sum(p.numel() for p in expert.parameters()) != sum(
        p.numel() for m in layers.values() for p in m.parameters()
    ):
        return
    if any((m.bias is None) != (next(iter(layers.values())).bias is None) for m in layers.values()):
        return
    for down, layer in layers.items():
        back = (layer.in_features, layer.out_features)
        others = [n for n, m in layers.items() if n != down]
        if any((layers[n].out_features, layers[n].in_features) != back for n in others):
            continue
        if len(others) == 1:
            yield Linears("", others[0], down)
        elif len(others) == 2:
            yield Linears(others[0], others[1], down)
            yield Linears(others[1], others[0], down)


def _original_experts(modules: list[nn.Module]) -> ExpertsFunction:
    window = [copy.deepcopy(module).float().eval() for module in modules]

    def function(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert, module in enumerate(window):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            y.index_add_(0, token, module(x[token]) * weights[token, slot, None])
        return y

    return function


def _place(block: nn.Module, packed: QuantizedExperts) -> nn.Module:
    container = block.get_submodule("experts")
    for index, name in enumerate(_experts(block)):
        view = ExpertView(packed, index)
        view.training = block.training
        container._modules[name] = view
    block.packed_experts = packed
    return block
