"""The attributes of the operators' schema, as values; docs/reference/op.md says what each means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UNGATED = ("relu", "relu2")


@dataclass(frozen=True)
class ExpertAttributes:
    """What both operators need to know about the experts, in the order of the schema."""

    hidden_dim: int
    scheme: str
    layout: str = "moepack"
    activation: str = "silu"
    act_alpha: float = 1.0
    act_limit: float = 0.0
    gate_softcap: float = 0.0
    up_softcap: float = 0.0
    limit_after_act: bool = False
    weight_on_input: bool = False

    @property
    def is_gated(self) -> bool:
        return self.activation not in UNGATED

    @property
    def rows13(self) -> int:
        """Rows of w13: gate and up, or up alone."""
        return 2 * self.hidden_dim if self.is_gated else self.hidden_dim

    @property
    def row_order13(self) -> Literal["plain", "gate_up"]:
        return "gate_up" if self.is_gated else "plain"


@dataclass(frozen=True)
class RoutingAttributes:
    """How a router's logits become ids and weights, in the order of the schema."""

    num_activated_experts: int
    score_func: str
    norm_topk: bool = False
    norm_eps: float = 0.0
    norm_clamp: bool = False
    route_scale: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_score: str = "top2sum"
    router_dtype: str = "float32"
