"""The modules that replace MoE blocks: buffers and attributes of the operators, nothing else.

All state is plain tensors, so state_dict, safetensors, deepcopy, pickle and weights_only loading
work. Casts such as `.to(torch.bfloat16)` and `.half()` never touch the values of these buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moepack import ops
from moepack.attributes import ExpertAttributes, RoutingAttributes
from moepack.errors import UnsupportedError
from moepack.packed_experts import PackedExperts, empty_experts, fp32

__all__ = ["PackedExperts", "QuantizedExperts", "QuantizedMoEFFN", "RoutedExperts", "combine"]


class QuantizedExperts(PackedExperts):
    """Takes the place of a block's `experts`: the router and the block's own code stay."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [..., D], top_k_index (integers) and top_k_weights [T, K] -> hidden_states'
        shape. Another width, or ids that are no integers, are an UnsupportedError.
        """
        flat = self._rows(hidden_states, "hidden_states")
        if top_k_index.is_floating_point() or top_k_index.dtype == torch.bool:
            raise UnsupportedError(
                f"top_k_index is {top_k_index.dtype}; expert ids are integers (int64 or int32). "
                "Are top_k_index and top_k_weights exchanged?"
            )
        y = self.experts(flat, top_k_index.to(torch.int64), top_k_weights.to(torch.float32))
        return y.view(hidden_states.shape)

    @classmethod
    def empty(
        cls,
        num_experts: int,
        dim: int,
        attributes: ExpertAttributes,
        *,
        has_bias13: bool = False,
        has_bias2: bool = False,
        device: torch.device | str = "meta",
    ) -> QuantizedExperts:
        """A module without values, to be filled by load_state_dict (`assign=True` from meta)."""
        return cls(
            *empty_experts(num_experts, dim, attributes, has_bias13, has_bias2, device),
            attributes,
            dim,
        )


class QuantizedMoEFFN(PackedExperts):
    """Takes the place of a whole MoE block: routing, experts and their sum in one operator.

    y = routed (+ sigmoid(shared_gate(x)) *) (+ shared(x)). The shared expert stays the module that
    it was, under the name that it had. x is [..., D] in fp32, bf16 or fp16; y has its dtype and
    shape, or is [T, D] where the original block returned that (`returns="flat"`). Buffers besides
    the experts': gate_weight [E, D], gate_bias [E], expert_bias [E], fp32.
    """

    gate_weight: Tensor
    gate_bias: Tensor | None
    expert_bias: Tensor | None

    def __init__(
        self,
        gate_weight: Tensor,
        gate_bias: Tensor | None,
        expert_bias: Tensor | None,
        packed_w13: Tensor,
        packed_w2: Tensor,
        bias13: Tensor | None,
        bias2: Tensor | None,
        routing: RoutingAttributes,
        attributes: ExpertAttributes,
    ) -> None:
        super().__init__(packed_w13, packed_w2, bias13, bias2, attributes, gate_weight.shape[1])
        if gate_weight.shape[0] != self.num_experts:
            raise UnsupportedError(
                f"gate_weight has {gate_weight.shape[0]} rows for {self.num_experts} packed experts"
            )
        self.routing = routing
        self.num_activated_experts = routing.num_activated_experts
        self.score_func = routing.score_func
        self.route_scale = routing.route_scale
        self._register("gate_weight", fp32(gate_weight))
        self._register("gate_bias", fp32(gate_bias))
        self._register("expert_bias", fp32(expert_bias))
        self.shared_name: str | None = None
        self.shared_gate_name: str | None = None
        self.returns = "shaped"

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = self._rows(hidden_states, "hidden_states")
        shared = self.get_submodule(self.shared_name) if self.shared_name else None
        gate = self.get_submodule(self.shared_gate_name) if self.shared_gate_name else None
        with self.reading():
            y = combine(x, self.routed(x), shared, gate)
        return y if self.returns == "flat" else y.view(hidden_states.shape)

    def routed(self, x: Tensor, router_x: Tensor | None = None) -> Tensor:
        """The routed experts' part: x [T, D] -> [T, D]; router_x [T, D] where it is not x."""
        with self.reading():
            return self._routed(x, router_x)

    def _routed(self, x: Tensor, router_x: Tensor | None) -> Tensor:
        r, a = self.routing, self.attributes
        return ops.quantized_moe_ffn(
            x,
            router_x,
            self.gate_weight,
            self.gate_bias,
            self.expert_bias,
            self.packed_w13,
            self.packed_w2,
            self.bias13,
            self.bias2,
            r.num_activated_experts,
            a.hidden_dim,
            a.scheme,
            a.layout,
            r.score_func,
            r.norm_topk,
            r.norm_eps,
            r.norm_clamp,
            r.route_scale,
            r.n_group,
            r.topk_group,
            r.group_score,
            r.router_dtype,
            a.activation,
            a.act_alpha,
            a.act_limit,
            a.gate_softcap,
            a.up_softcap,
            a.limit_after_act,
            a.weight_on_input,
        )

    def keep_shared(
        self, shared: tuple[str, nn.Module] | None, gate: tuple[str, nn.Module] | None
    ) -> None:
        """Takes over the original's shared expert and its gate, under the names that they had."""
        if shared is not None:
            self.shared_name = shared[0]
            self.add_module(*shared)
        if gate is not None:
            self.shared_gate_name = gate[0]
            self.add_module(*gate)

    @classmethod
    def empty(
        cls,
        num_experts: int,
        dim: int,
        routing: RoutingAttributes,
        attributes: ExpertAttributes,
        *,
        has_gate_bias: bool = False,
        has_expert_bias: bool = False,
        has_bias13: bool = False,
        has_bias2: bool = False,
        device: torch.device | str = "meta",
    ) -> QuantizedMoEFFN:
        """A module without values, to be filled by load_state_dict (`assign=True` from meta)."""
        bias = torch.empty(num_experts, dtype=torch.float32, device=device)
        return cls(
            torch.empty(num_experts, dim, dtype=torch.float32, device=device),
            bias if has_gate_bias else None,
            bias.clone() if has_expert_bias else None,
            *empty_experts(num_experts, dim, attributes, has_bias13, has_bias2, device),
            routing,
            attributes,
        )

    def extra_repr(self) -> str:
        r = self.routing
        return f"{super().extra_repr()}, K={r.num_activated_experts}, {r.score_func}"


class RoutedExperts(QuantizedMoEFFN):
    """Takes the place of the experts in a block that keeps its own code, and routes for it.

    The block calls its router, for which `RouterInput` stands, and hands on what it gets.
    """

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: None = None
    ) -> Tensor:
        """hidden_states [..., D], top_k_index: the router's input -> hidden_states' shape."""
        x = self._rows(hidden_states, "hidden_states")
        router_x = self._rows(top_k_index, "the router's input")
        return self.routed(x, router_x).view(hidden_states.shape)


def combine(
    x: Tensor, routed: Tensor, shared: nn.Module | None, shared_gate: nn.Module | None
) -> Tensor:
    """routed + sigmoid(shared_gate(x)) * shared(x), with what is there; all [T, D]."""
    if shared is None:
        return routed
    added: Tensor = shared(x)
    if shared_gate is not None:
        added = torch.sigmoid(shared_gate(x)) * added
    return routed + added
