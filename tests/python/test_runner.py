"""The C++ runner, built as an integrator builds it: against an installed moepack and the wheel."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import moepack
import one_layer as made
import pages
import tiny_models
from cmake_builds import ROOT, build_runner, install_moepack, jobs, wheel
from moepack.exporter import export
from moepack.exporter.lowering import write_program
from moepack.runtime import Generation, Program
from moepack.tokenizer import Tokenizer
from one_layer import CONTEXT, OneLayer, damaged, one_layer, one_layer_program

DEMO = Path(moepack.__file__).parent / "demo/model"
PAGE = pages.DOCS / "how-to/integrate-cpp.md"
PROMPT = [362, 988, 428]  # "The old man"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's commands were followed."""
    folder = tmp_path_factory.mktemp("page")
    pages.shell(
        pages.section(PAGE, "Build"), folder, MOEPACK=ROOT, CMAKE_BUILD_PARALLEL_LEVEL=jobs()
    )
    return folder


@pytest.fixture(scope="module")
def runner(folder: Path) -> Path:
    return folder / "build/runner/moepack_runner"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "out"
    export(DEMO, out, max_seq_len=64)
    return out / "model.pte"


def written(done: subprocess.CompletedProcess[str]) -> list[int]:
    assert done.returncode == 0, done.stderr
    return [int(token) for token in done.stdout.split()]


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
        assert written(done) == list(Generation(loaded, PROMPT, max_new_tokens=limit))
        assert f"prompt: {len(PROMPT)} tokens" in done.stderr
    everything = list(Generation(loaded, PROMPT))
    assert written(call(runner, program)) == everything
    assert written(call(runner, program, ids=["", *PROMPT, "\n"])) == everything
    options = ("--threads", "3", "--huge-pages", "--verify")
    assert written(call(runner, program, *options)) == everything


@pytest.mark.parametrize(("tokens", "apart"), [(1, False), (2, False), (CONTEXT, True)])
def test_prompts_are_fed_as_the_program_takes_them(runner: Path, tokens: int, apart: bool) -> None:
    files = one_layer_program(tokens, apart)
    done = call(runner, *files, "--max-new-tokens", "12", ids=made.PROMPT)
    assert written(done) == one_layer().greedy(made.PROMPT, 12)


def test_models_that_take_one_token_a_call(runner: Path, tmp_path: Path) -> None:
    """Linear attention keeps a state, which every token changes: the prompt goes in one by one."""
    model = moepack.quantize_(tiny_models.build("qwen3_next"), "int8-g32").model
    export(model, tmp_path / "out", max_seq_len=40, linear="float", embedding="float")
    loaded = Program.load(tmp_path / "out")
    assert loaded.tokens_per_call == 1
    prompt = tiny_models.tokens(17)[0].tolist()
    expected = list(Generation(loaded, prompt, max_new_tokens=20))
    assert len(expected) == 20
    done = call(runner, tmp_path / "out/model.pte", "--max-new-tokens", "20", ids=prompt)
    assert written(done) == expected


@pytest.mark.parametrize("apart", [False, True])
def test_verify_reads_every_checksum(runner: Path, tmp_path: Path, apart: bool) -> None:
    files = one_layer_program(CONTEXT, apart)
    few = ("--max-new-tokens", "2")
    done = call(runner, *files, *few, "--verify", ids=made.PROMPT)
    assert "verified: 64 packed matrices" in done.stderr
    broken = damaged(Path(files[-1]), tmp_path / "damaged")
    files = (*files[:-1], broken)
    assert call(runner, *files, *few, ids=made.PROMPT).returncode == 0
    done = call(runner, *files, *few, "--verify", ids=made.PROMPT)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "of expert 1: the payload's checksum is" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_verify_needs_something_to_verify(runner: Path, tmp_path: Path) -> None:
    class Dense(OneLayer):
        def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
            return ((self.embedding[ids[0]] + self.places[positions]) @ self.embedding.T)[None, -1:]

    path = tmp_path / "dense.pte"
    example = (torch.zeros(1, 1, dtype=torch.long), torch.arange(1))
    write_program(Dense(one_layer().block), example, None, made.CONSTANTS, path)
    assert call(runner, path, "--max-new-tokens", "2", ids=made.PROMPT).returncode == 0
    done = call(runner, path, "--verify", ids=made.PROMPT)
    assert done.returncode == 1
    assert "nothing to verify" in done.stderr


def most_anonymous_bytes(runner: Path, *arguments: str | Path) -> int:
    """While the runner decodes until the context ends."""
    process = subprocess.Popen(
        [str(runner), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write("1 2 3")
    process.stdin.close()
    most = 0
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        anonymous = [line for line in status.read_text().splitlines() if "RssAnon" in line]
        most = max([most, *(1024 * int(line.split()[1]) for line in anonymous)])
    assert process.stderr is not None
    assert process.returncode == 0, process.stderr.read()
    return most


@pytest.mark.parametrize("apart", [False, True])
def test_mapped_weights_take_no_memory(runner: Path, apart: bool) -> None:
    files = one_layer_program(CONTEXT, apart)
    assert Path(files[-1]).stat().st_size > made.BYTES
    assert most_anonymous_bytes(runner, *files) < made.BYTES / 2
    # The measurement sees a copy where there is one.
    assert most_anonymous_bytes(runner, *files, "--huge-pages") > made.BYTES


def test_huge_pages_are_used(runner: Path) -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.is_file() or "[never]" in setting.read_text():
        pytest.skip("this system has no transparent huge pages")
    done = call(runner, *one_layer_program(CONTEXT, False), "--huge-pages", ids=[1])
    assert done.returncode == 0, done.stderr
    (found,) = (line.split()[-2] for line in done.stderr.splitlines() if "on huge pages" in line)
    assert int(found) >= 40


def test_without_a_tokenizer_library_text_is_refused(runner: Path, program: Path) -> None:
    tokenizer = program.with_name("tokenizer.json")
    done = call(runner, program, "--tokenizer", tokenizer, "--prompt", "The old man")
    assert done.returncode == 1
    assert "this build has none, for CMake found no package 'tokenizers'" in done.stderr


@pytest.fixture(scope="module")
def text_runner(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "MOEPACK_TOKENIZERS" not in os.environ:
        pytest.skip(
            "MOEPACK_TOKENIZERS names no prefix with the tokenizer library, as test-all has"
        )
    build = tmp_path_factory.mktemp("text") / "build/runner"
    return build_runner(build, folder / "prefix", wheel(), os.environ["MOEPACK_TOKENIZERS"])


def test_the_tutorials_program_gives_the_text_of_python(text_runner: Path, tmp_path: Path) -> None:
    page = pages.DOCS / "tutorial/export-llm.md"
    made, outputs = pages.followed(page)
    for name in ("model.pte", "tokenizer.json"):
        (tmp_path / name).symlink_to(made / name)
    (tmp_path / "build").mkdir()
    (tmp_path / "build/runner").symlink_to(text_runner.parent)
    (command,) = (line for line in page.read_text("utf-8").splitlines() if "moepack_runner" in line)
    text = pages.shell(command.strip(), tmp_path).removesuffix("\n")
    assert len(text.split()) > 20
    _, _, expected = outputs[-1].partition("The old man")
    assert expected.partition("PyTorchObserver")[0].removesuffix("\n") == text


def test_text_with_the_tokenizer_library(text_runner: Path, program: Path, tmp_path: Path) -> None:
    loaded = Program.load(program)
    tokenizer = Tokenizer.load(program.parent)
    files = (program, "--tokenizer", program.with_name("tokenizer.json"))
    for prompt in (
        "The old man",
        "In the beginning",
        "na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve",
    ):
        done = call(text_runner, *files, "--max-new-tokens", "20", "--prompt", prompt)
        ids = list(Generation(loaded, tokenizer.encode(prompt), max_new_tokens=20))
        assert done.stdout.removesuffix("\n") == tokenizer.decode(ids, skip_special=False)
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{", encoding="utf-8")
    done = call(text_runner, program, "--tokenizer", broken, "--prompt", "x")
    assert done.returncode == 1
    assert "is no tokenizer that can be read" in done.stderr.splitlines()[-1]


def test_the_page_makes_text(folder: Path, program: Path) -> None:
    text = pages.shell(pages.section(PAGE, "Run"), folder, MODEL=program.parent)
    assert len(text.split()) > 10


def test_errors_are_one_line(runner: Path, program: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.pte"
    cut.write_bytes(program.read_bytes()[:100_000])
    text = tmp_path / "text.pte"
    text.write_text("no program " * 100, encoding="utf-8")
    cases: list[tuple[list[str | Path], Sequence[object], str]] = [
        ([], PROMPT, "usage"),
        ([one_layer_program(CONTEXT, True)[0]], made.PROMPT, ".ptd file, give it with --weights"),
        (["--thread", "2"], PROMPT, "unknown argument '--thread'"),
        ([program, "--threads", "0"], PROMPT, "from 1 to 1024"),
        ([program, "--threads", "1025"], PROMPT, "from 1 to 1024"),
        ([program, "--prompt", "x"], PROMPT, "--prompt needs --tokenizer"),
        ([program, "--bos"], PROMPT, "--bos needs --tokenizer"),
        ([program, "--tokenizer", "x"], PROMPT, "--tokenizer needs --prompt"),
        ([program, "--max-new-tokens", "0"], PROMPT, "at least 1"),
        ([program, "--max-new-tokens"], PROMPT, "needs a value"),
        ([program], ["x"], "expected token ids, numbers between spaces; word 1 is none"),
        ([program], [1, 2, "-"], "; word 3 is none"),
        ([program], [1, 2, "+"], "; word 3 is none"),
        ([program], [1, 2, "3x"], "; word 3 is none"),
        ([program], [1, 2, "3-4"], "; word 3 is none"),
        ([program], [1, 2, 2**63], "; word 3 is none"),
        ([program], [2**63], "; word 1 is none"),
        ([program], [], "no token ids"),
        ([program], [2048], "the vocabulary is 0 to 2047"),
        ([program], [-1], "the vocabulary is 0 to 2047"),
        ([program], [1] * 65, "the context ends at 64"),
        (["/no/such.pte"], PROMPT, "/no/such.pte: cannot be opened"),
        (["/no/\nsuch\r.pte"], PROMPT, "/no/?such?.pte: cannot be opened"),
        (["--thread\ns"], PROMPT, "unknown argument '--thread?s'"),
        ([program, "--weights", "/no/such.ptd"], PROMPT, "/no/such.ptd: cannot be opened"),
        ([cut], PROMPT, "cut.pte: is no program"),
        ([text], PROMPT, "text.pte: is no program"),
        ([program, "--weights", text], PROMPT, "text.pte no weights, that can be read"),
    ]
    for arguments, ids, expected in cases:
        done = call(runner, *arguments, ids=ids)
        assert done.returncode == 1, (arguments, done)
        lines = done.stderr.splitlines()
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("moepack_runner: ")
        assert expected in lines[0]


def test_help_names_every_option(runner: Path) -> None:
    option = re.compile("--[a-z][a-z-]+")
    table = [
        row for row in PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("| `--")
    ]
    done = call(runner, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert set(option.findall(done.stdout)) == set(option.findall("".join(table)))


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


SOURCE_BUILD = """
foreach(pair executorch:executorch extension_threadpool:executorch_threadpool
    optimized_native_cpu_ops_lib:executorch_kernels_optimized
    quantized_ops_lib:executorch_kernels_quantized xnnpack_backend:executorch_backend_xnnpack)
  string(REPLACE ":" ";" pair ${pair})
  list(GET pair 0 name)
  list(GET pair 1 library)
  add_library(${name} SHARED IMPORTED)
  set_target_properties(${name} PROPERTIES
    IMPORTED_LOCATION "WHEEL/lib/lib${library}.so"
    INTERFACE_INCLUDE_DIRECTORIES
      "WHEEL/include;WHEEL/include/executorch/runtime/core/portable_type/c10"
    INTERFACE_COMPILE_DEFINITIONS C10_USING_CUSTOM_GENERATED_MACROS)
endforeach()
"""


def test_a_source_build_of_executorch_serves_too(tmp_path: Path) -> None:
    """Its target names, here over the wheel's libraries; moepack's kernels become an archive."""
    source_build = tmp_path / "executorch"
    package = source_build / "lib/cmake/ExecuTorch/executorch-config.cmake"
    package.parent.mkdir(parents=True)
    package.write_text(SOURCE_BUILD.replace("WHEEL", str(wheel())), encoding="utf-8")
    options = ("-DMOEPACK_BUILD_EXECUTORCH=ON", f"-Dexecutorch_ROOT={source_build}")
    prefix = install_moepack(tmp_path / "moepack", *options)
    assert (prefix / "lib/libmoepack_executorch.a").is_file()
    runner = build_runner(tmp_path / "runner", prefix, source_build)
    files = one_layer_program(CONTEXT, False)
    done = call(runner, *files, "--max-new-tokens", "6", "--verify", ids=made.PROMPT)
    assert written(done) == one_layer().greedy(made.PROMPT, 6)
