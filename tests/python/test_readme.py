"""What the README tells people to type."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOEPACK = [sys.executable, "-m", "moepack.cli"]
COMMANDS = re.findall(r"^    moepack +([^#\n]+)", README, re.M)


def run(arguments: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_example_packs_the_demo_model() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    report = run([sys.executable, "-c", code])
    assert report.count("int4-g32") == 5


def test_every_command_has_its_options() -> None:
    named = [command.split()[0] for command in COMMANDS]
    assert {"plan", "quantize", "export", "run", "inspect", "doctor"} <= set(named)
    for command in COMMANDS:
        name, *rest = command.split()
        if "..." in rest:
            continue
        known = run([*MOEPACK, name, "--help"])
        for option in (word for word in rest if word.startswith("-")):
            assert re.search(rf"(?<!\S){re.escape(option)}\b", known), (name, option)


def test_plan_of_the_demo_model() -> None:
    assert "Qwen3MoeSparseMoeBlock" in run([*MOEPACK, "plan", "python/moepack/demo/model"])


@pytest.mark.parametrize("target", ["demo", "test", "test-all"])
def test_make_targets(target: str) -> None:
    assert f"make {target}" in README
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
