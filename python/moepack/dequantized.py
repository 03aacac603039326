"""Packed models back in float: MoE blocks in plain torch, with the weights that were packed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moepack import packing
from moepack.attributes import ExpertAttributes, RoutingAttributes
from moepack.errors import NoMoEBlock
from moepack.modules import PackedExperts, QuantizedMoEFFN, combine
from moepack.reference import float_mode


class MoEExperts(nn.Module):
    """w13 [E, 2F, D] rows [gate; up], w2 [E, D, F]; silu(gate) * up. Not made for speed."""

    def __init__(
        self, w13: Tensor, w2: Tensor, bias13: Tensor | None, bias2: Tensor | None
    ) -> None:
        super().__init__()
        self.w13 = nn.Parameter(w13)
        self.w2 = nn.Parameter(w2)
        self.bias13 = None if bias13 is None else nn.Parameter(bias13.to(w13.dtype))
        self.bias2 = None if bias2 is None else nn.Parameter(bias2.to(w13.dtype))

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, D], ids and weights [T, K] -> [T, D]."""
        reader = float_mode.ExpertReader(
            self.w13.shape[0],
            w13=lambda e: self.w13[e],
            w2=lambda e: self.w2[e],
            bias13=lambda e: None if self.bias13 is None else self.bias13[e],
            bias2=lambda e: None if self.bias2 is None else self.bias2[e],
        )
        attributes = ExpertAttributes(self.w2.shape[2], scheme="")
        return float_mode.experts(x, ids, weights, reader, attributes)

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
        routing: RoutingAttributes,
    ) -> None:
        super().__init__(w13, w2, bias13, bias2)
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

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        routing = float_mode.route(
            x.to(torch.float32), self.gate_weight, self.gate_bias, self.expert_bias, self.routing
        )
        shared = self.get_submodule(self.shared_name) if self.shared_name else None
        gate = self.get_submodule(self.shared_gate_name) if self.shared_gate_name else None
        y = combine(x, self.experts(x, routing.ids, routing.weights), shared, gate)
        return y if self.returns == "flat" else y.view(hidden_states.shape)


def dequantize_(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Turns every packed module back into a plain float one, in place; returns the root.

    The weights are the dequantized ones; results differ from the packed model's only by the
    quantization of activations. Raises NoMoEBlock if nothing is packed.
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
    return model


def _in_float(module: PackedExperts, dtype: torch.dtype) -> nn.Module:
    def matrices(packed: Tensor) -> Tensor:
        return torch.stack([packing.unpack(blob).dequantize().to(dtype) for blob in packed])

    new: nn.Module
    tensors = (matrices(module.packed_w13), matrices(module.packed_w2), module.bias13, module.bias2)
    if isinstance(module, QuantizedMoEFFN):
        new = MoEFFN(
            module.gate_weight, module.gate_bias, module.expert_bias, *tensors, module.routing
        )
        new.take_shared(module)
    else:
        new = MoEExperts(*tensors)
    new.training = module.training
    return new
