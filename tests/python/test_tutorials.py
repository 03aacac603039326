"""The tutorials, executed as they are written: Python blocks are saved, shell blocks run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[2] / "docs/tutorial"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SAVED_AS = re.compile(r"Save this as `([\w.]+)`")


def follow(page: Path, folder: Path) -> list[str]:
    """Does what the page says in `folder`; what its commands print."""
    text = page.read_text(encoding="utf-8")
    outputs, end = [], 0
    for block in _BLOCK.finditer(text):
        before, (language, code) = text[end : block.start()], block.groups()
        end = block.end()
        if language == "python":
            (name,) = _SAVED_AS.findall(before)
            (folder / name).write_text(code, encoding="utf-8")
        elif language == "sh":
            outputs.append(shell(code, folder))
    return outputs


def shell(code: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
def test_export_llm(tmp_path: Path) -> None:
    outputs = follow(TUTORIALS / "export-llm.md", tmp_path)
    assert len(outputs) == 3
    words = re.findall(r"[a-z]+", outputs[-1].partition("The old man")[2])
    assert len(words) >= 15
    assert {"the", "and", "a", "of", "to", "his"} & set(words)
