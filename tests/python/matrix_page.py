"""docs/reference/supported-models.md from the result of matrix.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def runs(row: dict[str, Any]) -> bool:
    """Did ExecuTorch give what eager gives, at every position and for every new token?"""
    is_equal = _all(row["equal"]) and _all(row["greedy"] or "1/1")
    return row["program"] != "none" and is_equal


def _all(fraction: str) -> bool:
    found, _, total = fraction.partition("/")
    return found == total


def write(result: Path) -> None:
    """The page beside `result`; folders of the run that it names are taken out of it."""
    text = re.sub(r"/tmp/[^/ ]*/", "", result.read_text(encoding="utf-8"))
    result.write_text(text, encoding="utf-8")
    result.with_suffix(".md").write_text(page(json.loads(text)), encoding="utf-8")


def page(result: dict[str, Any]) -> str:
    rows = result["rows"]
    packed = sum(bool(row["router"]) for row in rows)
    fused = sum("fused" in row["router"] for row in rows)
    run = sum(runs(row) for row in rows)
    others = [f"- **{row['entry']}**: {row['in_the_way']}" for row in rows if not runs(row)]
    tail = ["", REPRODUCTIONS.rstrip(), "", *others] if others else []
    head = HEAD.format(packed=packed, fused=fused, run=run, total=len(rows), **result)
    return "\n".join([head.rstrip(), *map(_line, rows), *tail]) + "\n"


def _line(row: dict[str, Any]) -> str:
    difference = row["difference"]
    cells = [
        row["entry"],
        *(row[name] or "-" for name in ("router", "activation", "program", "backend", "equal")),
        row["greedy"] or "-",
        "-" if difference is None else format(difference, ".0e"),
    ]
    return f"| {' | '.join(cells)} |"


HEAD = """\
# Supported models

Generated from supported-models.json by `python tests/python/matrix.py`; do not edit.

Every MoE family of transformers {transformers}, as a tiny random model: packed to int8-g32,
exported, run in ExecuTorch {executorch} and compared with the packed model in eager PyTorch. Of
{total} entries {packed} are packed, {fused} of them route inside the operator, and {run} run in
ExecuTorch with the same argmax at every position.

- router: *fused* in the operator; *outside*: the model's own code routes and calls the packed
  experts.
- program: *generate* is what `moepack export` writes, a decoder with a cache. *forward* is one pass
  over a fixed input through transformers' own exporter, for what is no causal language model or
  keeps something else than plain keys and values.
- backend: *xnnpack* with portable kernels for the rest, or *portable* alone.
- argmax, greedy: positions, and new tokens, that equal eager's, of how many.
- difference: the largest of logits, relative to the largest logit.

| entry | router | activation | program | backend | argmax | greedy | difference |
|---|---|---|---|---|---|---|---|
"""

REPRODUCTIONS = """\
## What is in the way of the others

It is not the operators: all blocks but Doge's, whose experts are rows of two embeddings that
product keys select, are packed and verified, and what stops is the model's own code around them.

Complex numbers. ExecuTorch has no kernels for them, and rotary embeddings written with them do not
load (`error: 0x14`, an operator is missing):

    class Rotary(torch.nn.Module):
        def forward(self, angles):
            return torch.view_as_real(torch.polar(torch.ones_like(angles), angles))

Branches on values. torch.export refuses code that asks how many elements a mask selects
(`GuardOnDataDependentSymNode`), and ExecuTorch sizes that depend on values (`Could not extract
specialized integer`): sparse attention's index, experts inside attention, experts that are called
one by one:

    class Selected(torch.nn.Module):
        def forward(self, mask):
            return mask.nonzero() if mask.nonzero().shape[0] // 2 > 0 else mask

What each attempt said:
"""
