"""docs/reference/supported-models.md from the result of matrix.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import lowering_limits


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
    tail = ["", LIMITS.rstrip(), "", *_limits(), "What each attempt said:", "", *others]
    head = HEAD.format(packed=packed, fused=fused, run=run, total=len(rows), **result)
    return "\n".join([head.rstrip(), *map(_line, rows), *tail]) + "\n"


def _limits() -> list[str]:
    lines = []
    for limit in lowering_limits.LIMITS:
        lines += [f"**{', '.join(limit.entries)}**: {limit.why}", ""]
        lines += ["```python", lowering_limits.lines_of(limit).rstrip(), "```", ""]
    return lines


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
ExecuTorch with the same argmax at every position and, of causal language models, the same greedy
tokens.

- router: *fused* in the operator; *outside*: the model's own code routes and calls the packed
  experts.
- program: *generate* is what `moepack export` writes, a decoder with a cache: of keys and values
  (also with attention windows, sinks and indexers, which the tiny models' texts go beyond), of
  linear attention's and convolutions' states. *forward* is one pass over a fixed input through
  transformers' own exporter, for what is no causal language model or keeps something else; texts
  are continued by it with the rest of the input padded.
- backend: *xnnpack* with portable kernels for the rest, or *portable* alone.
- argmax, greedy: positions, and new tokens, that equal eager's (of the packed model, without a
  cache), of how many; no greedy tokens where it is no causal language model.
- difference: the largest of logits, relative to the largest logit. A last bit that attention rounds
  otherwise can flip an int8 code of an activation: hence 1e-3 at some.

| entry | router | activation | program | backend | argmax | greedy | difference |
|---|---|---|---|---|---|---|---|
"""

LIMITS = """\
## What is in the way of the others

It is not the operators: all blocks but Doge's, whose experts are rows of two embeddings that
product keys select, are packed and verified. What stops is the models' own code around them, in
float as well: tests/python/lowering_limits.py has each reason in a few lines of torch, and
test_lowering_limits.py runs these and the models as transformers builds them.
"""
