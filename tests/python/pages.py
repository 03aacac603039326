"""Pages of the documentation, followed as they are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from made_programs import scratch

DOCS = Path(__file__).parents[2] / "docs"
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


@cache
def followed(page: Path) -> tuple[Path, list[str]]:
    """Does it once for all tests, in a folder that is returned too and not to be changed."""
    folder = scratch() / page.stem
    folder.mkdir()
    return folder, follow(page, folder)


def section(page: Path, title: str) -> str:
    """The one shell block under a heading."""
    _, _, after = page.read_text(encoding="utf-8").partition(f"## {title}\n")
    block = _BLOCK.search(after)
    assert block is not None
    assert block[1] == "sh"
    return block[2]


def shell(code: str, folder: Path, **variables: object) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
        | {name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout
