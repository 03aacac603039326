"""Pipes and devices are refused before they are opened, by everything that reads files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from made_programs import checkpoint, copied, exported
from moepack.regular_file import require_regular


def test_files_and_links_to_files_are_regular(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(file)
    require_regular(file)
    require_regular(link)


def test_what_is_none_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        require_regular(tmp_path / "absent")
    with pytest.raises(IsADirectoryError, match="is a directory"):
        require_regular(tmp_path)
    for path in (made_pipe(tmp_path / "pipe"), Path("/dev/zero")):
        with pytest.raises(OSError, match="is no regular file"):
            require_regular(path)


def made_pipe(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


READERS = """
import sys
from pathlib import Path
from moepack.json_text import read_object
from moepack.program_file import open_program
from moepack.safetensors_file import open_tensors
from moepack.weights_file import open_weights
for read in (read_object, open_program, open_tensors, open_weights):
    try:
        read(Path(sys.argv[1]))
    except Exception as error:
        print(type(error).__name__, error)
"""


def run(*line: str | Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as one that opens a pipe never returns."""
    return subprocess.run(
        [sys.executable, *line], capture_output=True, text=True, timeout=120, check=False
    )


def test_readers_refuse_pipes(tmp_path: Path) -> None:
    lines = run("-c", READERS, made_pipe(tmp_path / "pipe")).stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert line.startswith(f"MoePackError {tmp_path / 'pipe'}: ")
        assert "is no regular file" in line


# Which file of an exported directory or a checkpoint is a pipe, and what is said of it.
PIPES = [
    ("run", "model.pte", "is no regular file"),
    ("run", "manifest.json", "no manifest.json"),
    ("eval", "model.pte", "is no regular file"),
    ("eval", "config.json", "no config.json"),
    ("quantize", "model.safetensors", "is no regular file"),
    ("inspect", "model.safetensors", "is no regular file"),
]


@pytest.mark.parametrize(("command", "name", "expected"), PIPES)
def test_commands_refuse_pipes(command: str, name: str, expected: str, tmp_path: Path) -> None:
    is_exported = name in ("model.pte", "manifest.json")
    source = exported("mixtral") if is_exported else checkpoint("mixtral")
    directory = copied(source, tmp_path / "directory")
    made_pipe(directory / name)
    text = tmp_path / "text"
    text.write_text("some words", encoding="utf-8")
    options: dict[str, list[str | Path]] = {
        "run": ["--prompt", "x"],
        "eval": ["--text", text],
        "quantize": ["-o", tmp_path / "out"],
        "inspect": [],
    }
    done = run("-m", "moepack.cli", command, directory, *options[command])
    assert done.returncode == 1
    assert expected in done.stderr.splitlines()[-1]
    assert "unexpected" not in done.stderr
