"""What a conversion of a checkpoint directory has done, as a value."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moepack.online.blocks import OnlineBlock
from moepack.verification import AdapterCheck


@dataclass(frozen=True)
class ConvertedBlock:
    path: str
    scheme: str
    router: str
    bytes: int
    worst_weight_db: float | None
    matrices: int
    kept: int | None


@dataclass
class Converted:
    """`worst_weight_db` compares each matrix with its own weights; None without noise.

    `kept` are the `matrices` that the source stored in their format already, taken bit for bit.
    Both are None for resumed blocks.
    `adapter_checks`: of the blocks that stand for their class and shape, by path.
    `peak_anonymous_bytes` is above what the process had when it began.
    """

    directory: Path
    blocks: list[ConvertedBlock] = field(default_factory=list)
    adapter_checks: dict[str, AdapterCheck] = field(default_factory=dict)
    resumed: int = 0
    bytes_copied: int = 0
    bytes_packed: int = 0
    peak_anonymous_bytes: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"directory": str(self.directory)}

    def __str__(self) -> str:
        resumed = f", {self.resumed} of them before an interruption" if self.resumed else ""
        checked = ", ".join(
            f"{path} ({check.experts} experts)" for path, check in self.adapter_checks.items()
        )
        return (
            f"{self.directory}: {len(self.blocks)} blocks packed{resumed}, {self.bytes_packed:,} "
            f"bytes; {self.bytes_copied:,} bytes copied as they were\n"
            f"block classes compared with their own code: {checked}\n"
            f"{self._weights()}; peak of "
            f"{self.peak_anonymous_bytes:,} bytes of anonymous memory; {self.seconds:.1f} s"
        )

    def _weights(self) -> str:
        """What is known of the blocks that this run packed."""
        packed = [block for block in self.blocks if block.kept is not None]
        worst = [b.worst_weight_db for b in packed if b.worst_weight_db is not None]
        kept, total = sum(b.kept or 0 for b in packed), sum(b.matrices for b in packed)
        said = [f"{kept:,} of {total:,} matrices kept as stored"] if kept else []
        if worst:
            said.append(f"worst matrix {min(worst):.1f} dB SQNR of its weights")
        elif kept < total:
            said.append("quantized without noise")
        return "; ".join(said) or "all blocks were packed before"


def described(block: OnlineBlock, size: int, *, is_new: bool) -> ConvertedBlock:
    """A block and the bytes of its file. `is_new`: this run packed it."""
    return ConvertedBlock(
        block.path,
        block.decision.scheme,
        block.decision.router,
        size,
        block.worst_db if is_new and math.isfinite(block.worst_db) else None,
        2 * block.spec.experts.num_experts,
        block.kept if is_new else None,
    )
