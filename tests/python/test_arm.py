"""Programs exported here, run by the cross-compiled runner on emulated aarch64 CPUs.

`make test-arm` compiles it and names the build folder in MOEPACK_ARM_BUILD.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import moepack
import pages
from cmake_builds import ROOT, jobs
from made_programs import made_model
from moepack.exporter import export
from moepack.exporter.lowering import write_program
from moepack.modules import QuantizedMoEFFN
from moepack.runtime import Generation, Program

DEMO = Path(moepack.__file__).parent / "demo/model"
PROMPT = [362, 988, 428]  # "The old man"
BUILD = os.environ.get("MOEPACK_ARM_BUILD")
# With every extension, with dot products only, with neither.
BEST_ISA = {"max": "neoni8mm", "cortex-a76": "neondot", "cortex-a57": "scalar"}
TOKENS = (1, 17, 64)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BUILD is None, reason="needs the cross-compiled build of `make test-arm`"),
]


def emulate(
    cpu: str, program: str, *arguments: str | Path, ids: Sequence[int] = (), isa: str = ""
) -> str:
    settings = {"QEMU_LD_PREFIX": "/usr/aarch64-linux-gnu"} | ({"MOEPACK_ISA": isa} if isa else {})
    done = subprocess.run(
        ["qemu-aarch64-static", "-cpu", cpu, f"{BUILD}/cpp/{program}", *map(str, arguments)],
        input=" ".join(map(str, ids)),
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "out"
    export(DEMO, out, max_seq_len=64)
    return out / "model.pte"


@pytest.fixture(scope="module")
def expected(program: Path) -> list[int]:
    return list(Generation(Program.load(program), PROMPT, max_new_tokens=24))


@pytest.mark.parametrize("cpu", BEST_ISA)
def test_the_runner_writes_the_same_tokens_as_here(
    cpu: str, program: Path, expected: list[int]
) -> None:
    written = emulate(cpu, "runner/moepack_runner", program, "--max-new-tokens", "24", ids=PROMPT)
    assert [int(token) for token in written.split()] == expected
    assert len(set(expected)) > 5


@pytest.mark.parametrize(
    ("family", "scheme"), [("qwen3_moe", "int4-g32"), ("deepseek_v3", "int8-g64")]
)
def test_a_moe_layer_gives_the_same_bits_as_here(family: str, scheme: str, tmp_path: Path) -> None:
    model = made_model(family)
    moepack.quantize_(model, scheme)
    block = next(module for module in model.modules() if isinstance(module, QuantizedMoEFFN))
    block.shared_name = None  # dense layers round as XNNPACK does on each CPU
    width = model.config.hidden_size
    count = torch.export.Dim("tokens", min=1, max=max(TOKENS))
    layer, weights = tmp_path / "layer.pte", tmp_path / "weights.ptd"
    write_program(block, (torch.zeros(2, width),), ({0: count},), {}, layer, weights)
    generator = torch.Generator().manual_seed(0)
    for tokens in TOKENS:
        x = torch.randn(tokens, width, generator=generator)
        x.numpy().tofile(tmp_path / "x")
        with torch.inference_mode():
            here = block(x).numpy()
        for cpu, isa in BEST_ISA.items():
            files = (tmp_path / name for name in ("layer.pte", "x", "y", "weights.ptd"))
            emulate(cpu, "forward/moepack_forward", *files, isa=isa)
            there = np.fromfile(tmp_path / "y", dtype=np.float32).reshape(here.shape)
            assert np.array_equal(here.view(np.uint32), there.view(np.uint32)), (cpu, tokens)


def test_the_page_builds_and_runs(program: Path, tmp_path: Path, expected: list[int]) -> None:
    variables = {"MOEPACK": ROOT, "MODEL": program.parent, "CMAKE_BUILD_PARALLEL_LEVEL": jobs()}
    page = pages.DOCS / "how-to/deploy-aarch64.md"
    for title in ("Build", "Copy", "Run"):
        printed = pages.shell(pages.section(page, title), tmp_path, **variables)
    *selftest, tokens = printed.splitlines()
    assert any(line.endswith(" passed, 0 failed") for line in selftest)
    assert [int(token) for token in tokens.split()] == expected[:20]
