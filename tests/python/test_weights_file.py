"""Weights that a program keeps apart: read, run, damaged, exchanged."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tiny_models
from made_programs import scratch
from moepack.errors import MoePackError
from moepack.exporter.lowering import write_program
from moepack.inspection import inspect
from moepack.manifest import PROGRAM, WEIGHTS
from moepack.modules import QuantizedMoEFFN
from moepack.program_file import open_program
from moepack.runtime import Program
from moepack.transform import quantize_
from moepack.weights_file import open_weights, weights_of

VOCAB, CONTEXT = 320, 8
IDS = (5, 6, 7)


class Model(nn.Module):
    """A language model of one MoE block and an output layer that XNNPACK takes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        block = quantize_(tiny_models.build("qwen3_moe"), verify=False).model
        self.block = next(m for m in block.modules() if isinstance(m, QuantizedMoEFFN))
        self.register_buffer("table", torch.randn(VOCAB, self.block.dim))
        self.head = nn.Linear(self.block.dim, VOCAB)

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        x = nn.functional.embedding(input_ids, self.get_buffer("table"))
        y: Tensor = self.head(self.block(x + cache_position[None, :, None]))
        return y


@functools.cache
def written(seed: int = 0) -> Path:
    folder = scratch() / f"apart-{seed}"
    folder.mkdir()
    constants = {
        "get_max_seq_len": CONTEXT,
        "get_vocab_size": VOCAB,
        "get_eos_ids": [0],
        "enable_dynamic_shape": True,
    }
    count = torch.export.Dim("tokens", min=1, max=CONTEXT)
    shapes = {"input_ids": {1: count}, "cache_position": {0: count}}
    example = (torch.zeros(1, 2, dtype=torch.int64), torch.arange(2))
    model = Model(seed).eval().requires_grad_(False)
    write_program(model, example, shapes, constants, folder / PROGRAM, folder / WEIGHTS)
    with torch.no_grad():
        torch.save(model(torch.tensor([IDS]), torch.arange(3))[0], folder / "logits.pt")
    return folder


def copied(tmp_path: Path) -> Path:
    return shutil.copytree(written(), tmp_path / "copy")


def test_program_runs_from_both_files() -> None:
    folder = written()
    found = Program.load(folder / PROGRAM).logits(IDS)
    torch.testing.assert_close(found, torch.load(folder / "logits.pt"), rtol=1e-5, atol=1e-5)


def test_structure() -> None:
    program, weights = open_program(written() / PROGRAM), open_weights(written() / WEIGHTS)
    apart = program.kept_apart()
    assert {"block.packed_w13", "block.packed_w2", "block.gate_weight", "table"} == set(apart)
    assert {name: weights.stored[name].shape for name in apart} == apart
    others = [stored for name, stored in weights.stored.items() if name not in apart]
    assert others  # XNNPACK's, under names of its own
    assert all(stored.shape is None for stored in others)
    w13 = weights.stored["block.packed_w13"].segment
    assert w13.offset % 64 == 0
    assert bytes(weights.data[w13.offset : w13.offset + 4]) == b"MOEP"


def test_inspect_finds_the_experts_from_either_file(tmp_path: Path) -> None:
    program, weights = (inspect(written() / name, verify=True) for name in (PROGRAM, WEIGHTS))
    assert program.problems == weights.problems == program.missing == []
    assert weights.kind == "ExecuTorch weights"
    shapes = [[(s.experts, s.rows, s.cols) for s in found.packed] for found in (program, weights)]
    assert sorted(shapes[0]) == sorted(shapes[1])
    assert len(shapes[0]) == 2
    folder = copied(tmp_path)
    file = open_weights(folder / WEIGHTS)
    end = file.stored["block.packed_w2"].segment
    damaged = bytearray(file.data)
    damaged[end.offset + end.size - 1] ^= 1
    (folder / WEIGHTS).write_bytes(damaged)
    for name in (PROGRAM, WEIGHTS):
        assert inspect(folder / name).problems == []
        assert len(inspect(folder / name, verify=True).problems) == 1
    (folder / WEIGHTS).unlink()
    found = inspect(folder / PROGRAM)
    assert found.packed == []
    assert any("4 tensors in a .ptd file" in line for line in found.missing)


def test_weights_that_are_missing_or_of_another_program(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    (folder / WEIGHTS).unlink()
    with pytest.raises(MoePackError, match=r"4 tensors .*model\.ptd is not there"):
        Program.load(folder / PROGRAM)
    module = nn.Linear(64, 320).eval().requires_grad_(False)
    write_program(module, (torch.zeros(2, 64),), None, {}, tmp_path / "other.pte", folder / WEIGHTS)
    with pytest.raises(MoePackError, match=r"model\.ptd: lacks .*block\.packed_w13"):
        Program.load(folder / PROGRAM)
    (folder / WEIGHTS).write_text("no weights", encoding="utf-8")
    with pytest.raises(MoePackError, match="FT01"):
        Program.load(folder / PROGRAM)


def test_a_program_that_holds_its_weights_needs_no_file(tmp_path: Path) -> None:
    module = nn.Linear(64, 320).eval().requires_grad_(False)
    write_program(module, (torch.zeros(2, 64),), None, {}, tmp_path / "all.pte")
    assert weights_of(open_program(tmp_path / "all.pte")) is None


@pytest.mark.parametrize("kept", [0, 7, 40, 200, 0.5, -1])
def test_file_cut_short_is_an_error(tmp_path: Path, kept: float) -> None:
    folder = copied(tmp_path)
    content = (folder / WEIGHTS).read_bytes()
    length = int(kept * len(content)) if isinstance(kept, float) else kept
    (folder / WEIGHTS).write_bytes(content[:length])
    with pytest.raises(MoePackError, match=r"model\.ptd"):
        Program.load(folder / PROGRAM)


_FUZZ = """
import random, sys
from pathlib import Path
from moepack.errors import MoePackError
from moepack.runtime import Program
weights, size = Path(sys.argv[1]), int(sys.argv[2])
content, draw = weights.read_bytes(), random.Random(0)
refused = 0
for _ in range(100):
    damaged = bytearray(content)
    damaged[draw.randrange(size)] ^= 1 << draw.randrange(8)
    weights.unlink()  # the program before may have it mapped
    weights.write_bytes(damaged)
    try:
        Program.load(weights.with_suffix(".pte")).logits([5, 6, 7])
    except MoePackError:
        refused += 1
print("alive", refused > 20)
"""


def test_damaged_structure_ends_no_process(tmp_path: Path) -> None:
    weights = copied(tmp_path) / WEIGHTS
    size = open_weights(weights).structure_bytes
    command = [sys.executable, "-c", _FUZZ, str(weights), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.strip() == "alive True", done.stderr[-2000:]
