"""Packed models back in float: MoE blocks in plain torch, with the weights that were packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from moepack.attributes import ExpertAttributes, RoutingAttributes
from moepack.errors import NoMoEBlock
from moepack.expert_calls import ExpertView
from moepack.modules import PackedExperts, QuantizedMoEFFN, RoutedExperts, combine
from moepack.reference import float_mode


class MoEExperts(nn.Module):
    """w13 [E, 2F, D] rows [gate; up] (without a gate [E, F, D]), w2 [E, D, F]. Not made for speed.

    `attributes` say what is computed between the two.
    """

    def __init__(
        self,
        w13: Tensor,
        w2: Tensor,
        bias13: Tensor | None,
        bias2: Tensor | None,
        attributes: ExpertAttributes,
    ) -> None:
        super().__init__()
        self.attributes = attributes
        self.w13 = nn.Parameter(w13)
        self.w2 = nn.Parameter(w2)
        self.bias13 = None if bias13 is None else nn.Parameter(bias13.to(w13.dtype))
        self.bias2 = None if bias2 is None else nn.Parameter(bias2.to(w13.dtype))

    def reader(self) -> float_mode.ExpertReader:
        """The weights, one expert at a time."""
        return float_mode.ExpertReader(
            self.w13.shape[0],
            w13=lambda e: self.w13[e],
            w2=lambda e: self.w2[e],
            bias13=lambda e: None if self.bias13 is None else self.bias13[e],
            bias2=lambda e: None if self.bias2 is None else self.bias2[e],
        )

    def window(self, first: int, last: int) -> MoEExperts:
        """Experts first .. last - 1 in fp32, renumbered from 0."""

        def part(tensor: Tensor) -> Tensor:
            return tensor.detach()[first:last].float()

        bias13, bias2 = (b if b is None else part(b) for b in (self.bias13, self.bias2))
        return MoEExperts(part(self.w13), part(self.w2), bias13, bias2, self.attributes)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, D], ids and weights [T, K] -> [T, D]."""
        return float_mode.experts(x, ids, weights, self.reader(), self.attributes)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self.experts(flat, top_k_index, top_k_weights).view(hidden_states.shape)


class MoEFFN(MoEExperts):
    """The experts with their router, and the shared expert that the block had."""

    gate_weight: Tensor
    gate_bias: Tensor | None
    expert_bias: Tensor | None

    def __init__(
        self,
        gate_weight: Tensor,
        gate_bias: Tensor | None,
        expert_bias: Tensor | None,
        w13: Tensor,
        w2: Tensor,
        bias13: Tensor | None,
        bias2: Tensor | None,
        attributes: ExpertAttributes,
        routing: RoutingAttributes,
    ) -> None:
        super().__init__(w13, w2, bias13, bias2, attributes)
        self.routing = routing
        self.register_buffer("gate_weight", gate_weight)
        self.register_buffer("gate_bias", gate_bias)
        self.register_buffer("expert_bias", expert_bias)
        self.shared_name: str | None = None
        self.shared_gate_name: str | None = None
        self.returns = "shaped"

    def take_shared(self, packed: QuantizedMoEFFN) -> None:
        """The shared expert of a packed block, its names and the form of the result."""
        self.shared_name, self.shared_gate_name = packed.shared_name, packed.shared_gate_name
        self.returns = packed.returns
        for name in (self.shared_name, self.shared_gate_name):
            if name is not None:
                self.add_module(name, packed.get_submodule(name))

    def routed(self, x: Tensor, router_x: Tensor) -> Tensor:
        """Both [T, D] -> [T, D]: routing and experts."""
        routing = float_mode.route(
            router_x.float(), self.gate_weight, self.gate_bias, self.expert_bias, self.routing
        )
        return self.experts(x, routing.ids, routing.weights)

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        shared = self.get_submodule(self.shared_name) if self.shared_name else None
        gate = self.get_submodule(self.shared_gate_name) if self.shared_gate_name else None
        y = combine(x, self.routed(x, x), shared, gate)
        return y if self.returns == "flat" else y.view(hidden_states.shape)


class MoERoutedExperts(MoEFFN):
    """In a block that keeps its own code: called with the router's input in the place of ids."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: None = None
    ) -> Tensor:
        dim = hidden_states.shape[-1]
        y = self.routed(hidden_states.reshape(-1, dim), top_k_index.reshape(-1, dim))
        return y.view(hidden_states.shape)


def dequantize_(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Turns every packed module back into a plain float one, in place; returns the root.

    The weights are the dequantized ones; results differ from the packed model's only by the
    quantization of activations. `quantize_` packs them again. Raises NoMoEBlock if there is none.
    """
    built: dict[int, nn.Module] = {}
    paths = [
        (path, module)
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, PackedExperts)
    ]
    if not paths:
        raise NoMoEBlock(f"{type(model).__name__} holds no module packed by moepack")
    for path, module in paths:
        if id(module) not in built:
            built[id(module)] = _in_float(module, dtype)
        if path == "":
            return built[id(module)]
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, built[id(module)])
    for view in model.modules():
        if isinstance(view, ExpertView):
            view.look_at(built[id(view.packed)])
    return model


def _in_float(module: PackedExperts, dtype: torch.dtype) -> nn.Module:
    def matrices(read: Callable[[int], Tensor]) -> Tensor:
        return torch.stack([read(expert).to(dtype) for expert in range(module.num_experts)])

    new: nn.Module
    tensors = (
        matrices(module.w13),
        matrices(module.w2),
        module.bias13,
        module.bias2,
        replace(module.attributes, scheme="", layout="moepack"),
    )
    if isinstance(module, QuantizedMoEFFN):
        kind = MoERoutedExperts if isinstance(module, RoutedExperts) else MoEFFN
        new = kind(
            module.gate_weight, module.gate_bias, module.expert_bias, *tensors, module.routing
        )
        new.take_shared(module)
    else:
        new = MoEExperts(*tensors)
    new.training = module.training
    return new
