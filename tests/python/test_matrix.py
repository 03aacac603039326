"""The table of supported models: of the present sources, and what its result says."""

from __future__ import annotations

import json
from typing import Any

import pytest

import matrix
import matrix_page
import tiny_models

RESULT: dict[str, Any] = json.loads(matrix.RESULT.read_text(encoding="utf-8"))
# One of each way to run: fused and outside, both programs, every kind of experts and of cache.
SHOWN = (
    "minimax",
    "deepseek_v3",
    "gpt_oss",
    "gemma4_text",
    "nemotron_h",
    "phimoe",
    "dbrx",
    "muse_spark_text",
)


def test_the_result_is_of_the_present_sources() -> None:
    assert RESULT["sources"] == matrix.digest(), "run python tests/python/matrix.py"
    assert [row["entry"] for row in RESULT["rows"]] == matrix.ENTRIES


def test_the_page_is_generated_from_the_result() -> None:
    page = matrix.RESULT.with_suffix(".md").read_text(encoding="utf-8")
    assert page == matrix_page.page(RESULT)


def test_most_entries_run_and_every_other_one_says_why_not() -> None:
    rows = RESULT["rows"]
    assert sum(matrix_page.runs(row) for row in rows) >= 70
    assert all(row["in_the_way"] for row in rows if not matrix_page.runs(row))


def test_language_models_that_run_are_compared_token_by_token() -> None:
    for row in RESULT["rows"]:
        if matrix_page.runs(row):
            model = tiny_models.build(row["entry"], device="meta")
            is_compared = bool(row["greedy"])
            assert is_compared == matrix._is_language_model(row["entry"], model), row["entry"]


def test_a_row_that_differs_from_eager_is_not_counted() -> None:
    row = next(row for row in RESULT["rows"] if matrix_page.runs(row))
    for change in ({"equal": "11/12"}, {"greedy": "7/8"}, {"program": "none"}):
        assert not matrix_page.runs(row | change)


@pytest.mark.parametrize("entry", SHOWN)
def test_an_entry_still_runs(entry: str) -> None:
    assert matrix.apart(entry).runs
