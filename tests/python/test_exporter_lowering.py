"""Programs as files: weights stored once, aligned, never copied on the way, from .pte or .ptd."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moepack.exporter.linears import quantize_linears
from moepack.exporter.lowering import Method, write_methods
from moepack.runtime import executorch_runtime

BENCH = Path(__file__).parents[1] / "bench/export_memory.py"
WIDTH, ROWS = 256, 1024


class Mixed(nn.Module):
    """Constants of every kind: read by a kernel, taken by XNNPACK, the same under two names."""

    def __init__(self, is_quantized: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, ROWS), nn.Linear(ROWS, WIDTH)
        self.register_buffer("table", torch.randn(ROWS, WIDTH))
        self.register_buffer("again", self.get_buffer("table").clone())
        if is_quantized:
            quantize_linears(self, frozenset())
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        first = torch.zeros(x.shape[0], dtype=torch.int64)
        rows = nn.functional.embedding(first, self.get_buffer("table"))
        last = nn.functional.embedding(first + ROWS - 1, self.get_buffer("again"))
        y: Tensor = self.down(self.up(x).relu()) + rows + last
        return y


def written(
    folder: Path, module: nn.Module, weights: bool, counts: tuple[int, ...] = (1, 16)
) -> tuple[Path, Path | None]:
    program, data = folder / "both.pte", folder / "both.ptd" if weights else None
    entries = {f"of_{tokens}": Method(module, (torch.zeros(tokens, WIDTH),)) for tokens in counts}
    write_methods(entries, {"answer": 42}, program, data)
    return program, data


@pytest.mark.parametrize(("is_quantized", "weights"), [(False, False), (True, True)])
def test_methods_share_weights_and_compute_the_same(
    tmp_path: Path, is_quantized: bool, weights: bool
) -> None:
    module = Mixed(is_quantized)
    path, data = written(tmp_path, module, weights)
    linear = 2 * WIDTH * ROWS // 2 if is_quantized else 2 * WIDTH * ROWS * 4
    once = linear + 4 * WIDTH * ROWS
    total = path.stat().st_size + (data.stat().st_size if data else 0)
    assert once < total < 1.2 * once
    if data is not None:
        assert path.stat().st_size < 20_000  # XNNPACK's weights have gone with the others
    program = executorch_runtime().load_program(path, data_path=data)
    assert program.load_method("answer").execute(()) == [42]
    for tokens in (1, 16):
        x = torch.randn(tokens, WIDTH)
        found = program.load_method(f"of_{tokens}").execute((x,))[0]
        with torch.no_grad():
            # int8 activations round differently in XNNPACK: a last bit of a code here and there.
            torch.testing.assert_close(found, module(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("weights", [False, True])
def test_files_do_not_depend_on_where_constants_lie(
    tmp_path: Path, weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written from the tensors' own memory is what upstream writes from its copies."""
    from moepack.exporter import constants

    names = []
    for name in ("in place", "copied"):
        (tmp_path / name).mkdir()
        names.append([p for p in written(tmp_path / name, Mixed(False), weights, (1,)) if p])
        monkeypatch.setattr(constants, "_SMALLEST", 1 << 62)
    for ours, theirs in zip(*names, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()


def measured(folder: Path, *arguments: str) -> dict[str, Any]:
    found_file = folder / "found.json"
    options = ["--folder", str(folder), "--json", str(found_file), *arguments]
    command = [sys.executable, str(BENCH), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(found_file.read_text(encoding="utf-8"))
    assert found["export_ratio"] < 0.25
    assert found["run_ratio"] < 0.25
    return found


def test_exporting_takes_no_copy_of_the_weights(tmp_path: Path) -> None:
    measured(tmp_path, "--gib", "0.125")


@pytest.mark.slow
@pytest.mark.parametrize("option", [(), ("--weights-file",)], ids=["pte", "ptd"])
def test_tensor_beyond_two_gib(tmp_path: Path, option: tuple[str, ...]) -> None:
    found = measured(tmp_path, "--gib", "2.1", *option)
    assert found["largest_tensor_bytes"] > 2**31
