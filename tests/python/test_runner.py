"""The C++ runner, built as an integrator builds it: against an installed moepack and the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

import moepack
import pages
from moepack.exporter import export
from moepack.runtime import Generation, Program

ROOT = Path(__file__).parents[2]
DEMO = Path(moepack.__file__).parent / "demo/model"
PROMPT = [362, 988, 428]  # "The old man"

pytestmark = pytest.mark.slow


def cmake(*arguments: str | Path) -> None:
    command = [Path(sys.executable).with_name("cmake"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@cache
def wheel() -> Path:
    import executorch

    return Path(next(iter(executorch.__path__)))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runner")
    library, prefix, build = folder / "moepack", folder / "prefix", folder / "build"
    make = ("-G", "Unix Makefiles")
    python = f"-DPython_EXECUTABLE={sys.executable}"
    options = (python, "-DMOEPACK_BUILD_EXECUTORCH=ON", f"-DCMAKE_INSTALL_PREFIX={prefix}")
    cmake("-S", ROOT, "-B", library, *make, *options)
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count()))
    cmake("--build", library, "--parallel", jobs)
    cmake("--install", library)
    # Copied out of the repository, as the page says.
    source = folder / "copied"
    source.mkdir()
    for file in (ROOT / "cpp/runner").iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    cmake("-S", source, "-B", build, *make, f"-DCMAKE_PREFIX_PATH={prefix};{wheel()}")
    cmake("--build", build)
    return build / "moepack_runner"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "out"
    export(DEMO, out, max_seq_len=64)
    return out / "model.pte"


def call(
    runner: Path, *arguments: str | Path, ids: Sequence[object] = PROMPT
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(runner), *map(str, arguments)],
        input=" ".join(map(str, ids)),
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_same_tokens_as_in_python(runner: Path, program: Path) -> None:
    loaded = Program.load(program)
    for limit in (1, 20):
        done = call(runner, program, "--max-new-tokens", str(limit))
        assert done.returncode == 0, done.stderr
        expected = list(Generation(loaded, PROMPT, max_new_tokens=limit))
        assert [int(token) for token in done.stdout.split()] == expected
        assert f"prompt: {len(PROMPT)} tokens" in done.stderr
    done = call(runner, program)
    assert [int(token) for token in done.stdout.split()] == list(Generation(loaded, PROMPT))


def test_the_page_makes_text(runner: Path, program: Path, tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "build/runner").symlink_to(runner.parent)
    commands = pages.section(pages.DOCS / "how-to/integrate-cpp.md", "Run")
    assert len(pages.shell(commands, tmp_path, MODEL=program.parent).split()) > 10


def test_errors_are_one_line(runner: Path, program: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.pte"
    cut.write_bytes(program.read_bytes()[:100_000])
    text = tmp_path / "text.pte"
    text.write_text("no program " * 100, encoding="utf-8")
    cases: list[tuple[list[str | Path], Sequence[object], str]] = [
        ([], PROMPT, "usage"),
        (["--threads", "2"], PROMPT, "unknown argument '--threads'"),
        ([program, "--max-new-tokens", "0"], PROMPT, "at least 1"),
        ([program, "--max-new-tokens"], PROMPT, "needs a value"),
        ([program], ["x"], "expected token ids"),
        ([program], [], "no token ids"),
        ([program], [2048], "the vocabulary is 0 to 2047"),
        ([program], [-1], "the vocabulary is 0 to 2047"),
        ([program], [1] * 65, "the context ends at 64"),
        (["/no/such.pte"], PROMPT, "/no/such.pte: is no program"),
        ([cut], PROMPT, "cut.pte: is no program"),
        ([text], PROMPT, "text.pte: is no program"),
        ([program, "--weights", text], PROMPT, "(error 0x"),
    ]
    for arguments, ids, expected in cases:
        done = call(runner, *arguments, ids=ids)
        assert done.returncode == 1, (arguments, done)
        lines = done.stderr.splitlines()
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("moepack_runner: ")
        assert expected in lines[0]


def test_missing_operators_are_named(runner: Path, tmp_path: Path) -> None:
    import torch
    from executorch.exir import to_edge
    from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401

    class Attention(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.ops.llama.custom_sdpa(x, x, x, 0, None, 0.0, True)
            return result

    exported = torch.export.export(Attention(), (torch.randn(1, 4, 2, 8),))
    path = tmp_path / "sdpa.pte"
    path.write_bytes(to_edge(exported).to_executorch().buffer)
    done = call(runner, path)
    assert done.returncode == 1
    assert "this program lacks llama::custom_sdpa.out" in done.stderr
