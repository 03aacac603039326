"""What tests/bench/instructions.py makes of its counts; `make test-instructions` counts."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

_PATH = Path(__file__).parents[1] / "bench/instructions.py"


@pytest.fixture(scope="module")
def instructions() -> ModuleType:
    spec = importlib.util.spec_from_file_location("instructions", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module


COMMITTED = {"int4-g32": {"decode": 0.25, "prefill": 0.16}}


def test_equal_within_the_tolerance(instructions: ModuleType) -> None:
    counted = {"int4-g32": {"decode": 0.2549, "prefill": 0.1569}}
    assert list(instructions.differences(counted, COMMITTED)) == []


@pytest.mark.parametrize(("decode", "change"), [(0.2551, "+2.0 %"), (0.3, "+20.0 %"), (0.2, "-20")])
def test_more_and_fewer_instructions_differ(
    instructions: ModuleType, decode: float, change: str
) -> None:
    counted = {"int4-g32": {"decode": decode, "prefill": 0.16}}
    (difference,) = instructions.differences(counted, COMMITTED)
    assert difference.startswith(f"int4-g32 decode: {decode}, committed 0.25: {change}")


def test_schemes_without_figures_and_figures_without_schemes(instructions: ModuleType) -> None:
    assert list(instructions.differences({"new": {"decode": 0.1}}, COMMITTED)) == [
        "new decode: 0.1, no figure is committed",
        "int4-g32: figures are committed, there is no such scheme",
    ]


def test_the_page_has_the_committed_figures(instructions: ModuleType) -> None:
    committed = json.loads(instructions.FIGURES.read_text())
    table = instructions.table(next(iter(committed.values())))
    page = instructions.PAGE.read_text()
    assert table in page
    assert instructions.with_table(page, table) == page
