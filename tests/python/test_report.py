"""What is printed holds the numbers; progress is silent where there is no terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import moepack
from made_programs import checkpoint, exported
from moepack import report
from moepack.checkpoint import empty_model, load_model
from moepack.demo import Sample, Sizes
from moepack.doctor import diagnose
from moepack.evaluate import Perplexity
from moepack.exporter import ExportResult
from moepack.inspection import inspect
from moepack.manifest import Manifest
from moepack.runtime import GenerationStats


def printed(value: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(report.renderable(value))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plan_names_blocks_and_bytes() -> None:
    plan = moepack.plan(empty_model(checkpoint("qwen3_moe")), exclude=["*.1.mlp"])
    text = printed(plan)
    assert "model.layers.0.mlp" in text
    assert f"{plan.bytes_after:,}" in text
    assert "excluded: by name" in text
    assert "no MoE block" in printed(moepack.plan(empty_model(checkpoint("qwen3_moe")).lm_head))


def test_replacements_show_their_sqnr() -> None:
    model = load_model(checkpoint("qwen3_moe"))
    done = moepack.quantize_(model)
    text = printed(done)
    for block in done.blocks:
        assert f"{block.sqnr_db:.2f} dB" in text
    assert "packed already" in printed(moepack.quantize_(model))


def test_export_and_inspection_show_files_and_operators() -> None:
    manifest = Manifest.read(exported())
    assert f"{manifest.files['model.pte'].bytes:,}" in printed(ExportResult(exported(), manifest))
    text = printed(inspect(exported(), verify=True))
    assert "moepack::quantized_moe_ffn.out" in text
    assert "nothing" in text
    assert "all right" in text


def test_diagnosis_shows_fixes() -> None:
    found = diagnose()
    text = printed(found)
    assert str(found.isa_in_use) in text
    for check in found.checks:
        assert check.name in text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Perplexity(12.5, 2.5257, 1000, 10, 128, 64), "12.5000"),
        (GenerationStats(7, 9, 0.5, 1.0, 8, "context"), "--max-seq-len"),
        (GenerationStats(7, 9, 0.5, 1.0, 8, "eos"), "8/s"),
        (Sizes(1000, 2000, 500, 600), "25%"),
        (Sample("In the beginning", " was"), "In the beginning was"),
        ("anything else", "anything else"),
    ],
)
def test_small_results(value: object, expected: str) -> None:
    assert expected in printed(value)


def test_steps_without_a_terminal_are_lines() -> None:
    console = Console(file=io.StringIO(), width=80)
    with report.Steps(console) as steps:
        steps.begin("Packing")
        steps.advance(0.5)
        steps.show("a result")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().split("\n")[:2] == ["Packing...", "a result"]
