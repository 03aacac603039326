"""What `quantize_` did to a model, as a value: printable and ready for JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from moepack.planner import Plan, table


@dataclass(frozen=True)
class BlockReport:
    """One replaced block. `sqnr_db` compares the kernel with float on `sampled`.

    `scale_error`: the largest relative rounding of scales that torchao had chosen.
    """

    path: str
    also_at: tuple[str, ...]
    scheme: str
    rule: str
    router: str
    bytes_before: int
    bytes_after: int
    adapter_error: float | None = None
    sqnr_db: float | None = None
    worst_expert_db: float | None = None
    sampled: str = "nothing: verify=False"
    scale_error: float = 0.0


@dataclass
class Report:
    """What `quantize_` did. `model` is the root: a new one if the root itself was the block."""

    model: nn.Module
    plan: Plan
    blocks: list[BlockReport] = field(default_factory=list)
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values for json.dump; an infinite SQNR (no error at all) becomes null."""
        blocks = [
            {k: None if _is_infinite(v) else v for k, v in asdict(block).items()}
            for block in self.blocks
        ]
        return {"plan": self.plan.to_json(), "blocks": blocks, "note": self.note}

    def __str__(self) -> str:
        titles = ("block", "scheme", "router", "bytes", "packed", "SQNR dB", "worst", "adapter")
        rows = [titles, *(_report_row(block) for block in self.blocks)]
        kept = [
            f"{b.path}: left as it is ({b.why})" for b in self.plan.blocks if b.action != "replace"
        ]
        return "\n".join([table(rows), *kept, *([self.note] if self.note else [])])


def _is_infinite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _report_row(block: BlockReport) -> tuple[str, ...]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        " = ".join(path or "(root)" for path in (block.path, *block.also_at)),
        block.scheme,
        block.router,
        f"{block.bytes_before:,}",
        f"{block.bytes_after:,}",
        number(block.sqnr_db, ".2f"),
        number(block.worst_expert_db, ".2f"),
        number(block.adapter_error, ".1e"),
    )
