"""Packed experts called in the ways in which blocks that keep their own code call theirs."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RouterInput(nn.Module):
    """Stands for the router of a block whose experts route: its input in the place of the ids.

    `before` is applied to it; logits and weights are None.
    """

    def __init__(self, before: nn.Module | None = None) -> None:
        super().__init__()
        self.before = before

    def forward(self, hidden_states: Tensor) -> tuple[None, None, Tensor]:
        return None, None, hidden_states if self.before is None else self.before(hidden_states)


class NormalizedExperts(nn.Module):
    """Packed experts whose outputs pass a norm one by one before they are weighted and summed."""

    is_moepack_module = True

    def __init__(self, packed: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.packed = packed
        self.norm = norm

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As QuantizedExperts; each slot of a token is a token of its own for the operator."""
        slots = top_k_index.shape[1]
        x = hidden_states.reshape(-1, hidden_states.shape[-1]).repeat_interleave(slots, 0)
        ids = top_k_index.reshape(-1, 1)
        outputs = self.norm(self.packed(x, ids, torch.ones_like(ids, dtype=torch.float32)))
        y: Tensor = (outputs.unflatten(0, (-1, slots)) * top_k_weights[..., None]).sum(1)
        return y.to(hidden_states.dtype).view(hidden_states.shape)


class IdentityExperts(nn.Module):
    """Packed experts 0 .. E-1; every id from E on stands for an expert that changes nothing."""

    is_moepack_module = True

    def __init__(self, packed: nn.Module, num_experts: int) -> None:
        super().__init__()
        self.packed = packed
        self.num_experts = num_experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As QuantizedExperts."""
        is_identity = top_k_index >= self.num_experts
        ids = top_k_index.masked_fill(is_identity, 0)
        routed: Tensor = self.packed(
            hidden_states, ids, top_k_weights.masked_fill(is_identity, 0.0)
        )
        kept = top_k_weights.masked_fill(~is_identity, 0.0).sum(-1, keepdim=True)
        kept = kept.view(*hidden_states.shape[:-1], 1)
        return routed + (hidden_states * kept).to(hidden_states.dtype)


class ExpertView(nn.Module):
    """Expert `index` of packed experts, as a module of its own: x [..., D] -> the same shape.

    For blocks that call their experts one by one. The packed experts are someone else's child.
    """

    is_moepack_module = True

    def __init__(self, packed: nn.Module, index: int) -> None:
        super().__init__()
        self.index = index
        self.look_at(packed)

    def look_at(self, packed: nn.Module) -> None:
        # In a tuple it is no child of this module, and its weights have one name in the model.
        self._packed = (packed,)

    @property
    def packed(self) -> nn.Module:
        return self._packed[0]

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        ids = torch.full((flat.shape[0], 1), self.index, dtype=torch.int64, device=flat.device)
        y: Tensor = self.packed(flat, ids, torch.ones_like(ids, dtype=torch.float32))
        return y.view(hidden_states.shape)

    def extra_repr(self) -> str:
        return f"expert {self.index}"
