"""What is in the way of the models that do not run: each by a few lines, and in the original."""

from __future__ import annotations

import json
import re

import pytest

import lowering_limits
import matrix
import matrix_page
import tiny_families
from lowering_limits import LIMITS, Limit

ROWS = {row["entry"]: row for row in json.loads(matrix.RESULT.read_text(encoding="utf-8"))["rows"]}


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: type(limit.module).__name__)
def test_a_few_lines_of_torch_end_in_the_same(limit: Limit) -> None:
    assert re.search(limit.error, lowering_limits.plain(limit) + " ")


def test_every_entry_that_does_not_run_has_its_limit() -> None:
    stopped = {entry for entry, row in ROWS.items() if not matrix_page.runs(row)}
    explained = [entry for limit in LIMITS for entry in limit.entries]
    assert sorted(explained) == sorted(stopped - set(tiny_families.REFUSED))
    for limit in LIMITS:
        for entry in limit.entries:
            assert re.search(limit.error, ROWS[entry]["in_the_way"]), entry


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "limit"), [(entry, limit) for limit in LIMITS for entry in limit.entries]
)
def test_the_original_in_float_ends_in_the_same(entry: str, limit: Limit) -> None:
    assert re.search(limit.error, lowering_limits.original(entry))
