"""Files and directories with a program, and what goes with it, from one layout to the other."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import made_programs
import moepack
import one_layer
from expert_layer import Layer
from moepack.errors import MoePackError, PackedFormatError, UnsupportedError
from moepack.inspection import inspect
from moepack.runtime import Program
from moepack.weights_file import WeightsFile, open_weights
from one_layer import one_layer_program


def all_logits(path: Path) -> Tensor:
    return Program.load(path).logits(list(range(3, 20)))


def test_an_exported_directory_there_and_back(tmp_path: Path) -> None:
    source = made_programs.exported()
    expected = all_logits(source)
    there = moepack.convert(source, tmp_path / "there", layout="torchao").result
    assert torch.equal(all_logits(there), expected)
    Program.load(there, verify=True)  # the manifest is the new program's
    seen, before = inspect(there, verify=True), inspect(source)
    assert not seen.problems
    assert {(stack.layout, stack.scheme) for stack in seen.packed} == {("torchao", "int4")}
    assert [s.experts for s in seen.packed] == [s.experts for s in before.packed]
    assert (there / "model.pte").stat().st_size > (source / "model.pte").stat().st_size
    back = moepack.convert(there / "model.pte", tmp_path / "back.pte", layout="moepack").result
    assert torch.equal(all_logits(back), expected)
    with pytest.raises(MoePackError, match="exists"):
        moepack.convert(there / "model.pte", back, layout="moepack")
    with pytest.raises(UnsupportedError, match="no call with packed experts"):
        moepack.convert(back.read_bytes(), layout="moepack")


def test_the_card_says_which_operator_runs(tmp_path: Path) -> None:
    source = made_programs.exported()
    copy = made_programs.copied(source, tmp_path / "copy")
    with (copy / "README.md").open("ab") as card:
        card.write("in another encoding: \u00e9".encode("latin-1"))
    theirs = moepack.convert(copy, tmp_path / "theirs", layout="torchao", upstream=True).result
    text = (theirs / "README.md").read_text(encoding="utf-8")
    assert "accelerate_upstream" in text
    assert "moepack run . " not in text
    back = moepack.convert(theirs, tmp_path / "back", layout="moepack").result
    cards = [(path / "README.md").read_text(encoding="utf-8") for path in (source, back)]
    assert [text for text in cards if "moepack run . " not in text] == []
    assert cards[0].splitlines()[0] == cards[1].splitlines()[0] == text.splitlines()[0]


def test_exporting_in_torchaos_layout(tmp_path: Path) -> None:
    directory = made_programs.checkpoint("qwen3_moe")
    options: dict[str, Any] = {"linear": "float", "embedding": "float", "logits": "all"}
    moepack.export(directory, tmp_path / "out", layout="torchao", sqnr_floor=0.0, **options)
    assert torch.equal(all_logits(tmp_path / "out"), all_logits(made_programs.exported()))


def test_a_program_and_its_weights(tmp_path: Path) -> None:
    """What is no packed expert, XNNPACK's own data among it, keeps its bytes and its names."""
    source = tmp_path / "source"
    moepack.export(made_programs.checkpoint("qwen3_moe"), source, logits="all", weights_file=True)
    there = moepack.convert(source / "model.pte", tmp_path / "there.pte", layout="torchao").result
    assert torch.equal(all_logits(there), all_logits(source))
    before, after = (open_weights(p) for p in (source / "model.ptd", tmp_path / "there.ptd"))
    assert list(before.stored) == list(after.stored)
    changed = {name for name in before.stored if data_of(before, name) != data_of(after, name)}
    packed = {name for name in before.stored if "packed_w" in name}
    assert changed == packed
    assert len(packed) == 4
    back = moepack.convert(there, tmp_path / "back.pte", layout="moepack").result
    assert torch.equal(all_logits(back), all_logits(source))
    again = open_weights(tmp_path / "back.ptd")
    rest = before.stored.keys() - packed
    assert all(data_of(again, name) == data_of(before, name) for name in rest)


def data_of(file: WeightsFile, name: str) -> bytes:
    segment = file.stored[name].segment
    return bytes(file.data[segment.offset : segment.offset + segment.size])


def test_weights_that_are_missing_damaged_or_in_the_way(tmp_path: Path) -> None:
    program, weights = tmp_path / "a.pte", tmp_path / "a.ptd"
    Layer().write(program, weights)
    out = tmp_path / "out"
    (out / "b.pte").parent.mkdir()
    (out / "b.ptd").write_bytes(b"\x10\0\0\0FT01: older weights")
    with pytest.raises(MoePackError, match=r"b\.ptd exists"):
        moepack.convert(program, out / "b.pte", layout="torchao")
    with pytest.raises(MoePackError, match=r"a\.ptd: name a new file"):
        moepack.convert(program, tmp_path / "a.bin", layout="torchao", force=True)
    data = bytearray(weights.read_bytes())
    data[data.index(b"MOEP") + 100] ^= 1
    weights.write_bytes(data)
    with pytest.raises(PackedFormatError, match=r"call 0 packed_w13 expert 0: .*checksum"):
        moepack.convert(program, out / "b.pte", layout="torchao", force=True)
    weights.unlink()
    with pytest.raises(MoePackError, match=r"a\.ptd is not there"):
        moepack.convert(program, out / "b.pte", layout="torchao", force=True)
    assert [path.name for path in out.iterdir()] == ["b.ptd"]
    assert (out / "b.ptd").read_bytes() == b"\x10\0\0\0FT01: older weights"


@pytest.mark.parametrize("suffix", [".pte", ".ptd"])
def test_only_files_of_executorch_are_replaced(suffix: str, tmp_path: Path) -> None:
    Layer().write(tmp_path / "a.pte", tmp_path / "a.ptd")
    precious = tmp_path / f"b{suffix}"
    precious.write_bytes(b"somebody's")
    with pytest.raises(MoePackError, match="is not replaced: it is no file of ExecuTorch's"):
        moepack.convert(tmp_path / "a.pte", tmp_path / "b.pte", layout="torchao", force=True)
    assert precious.read_bytes() == b"somebody's"
    assert sorted(path.name for path in tmp_path.glob("b*")) == [precious.name]


@functools.cache
def layer(apart: bool) -> Path:
    """A folder with a.pte and, if its weights lie `apart`, a.ptd."""
    folder = made_programs.scratch() / f"layer-{apart}"
    folder.mkdir()
    Layer().write(folder / "a.pte", folder / "a.ptd" if apart else None)
    return folder


def listing(folder: Path) -> dict[str, bytes | str]:
    """What lies there, links by where they lead."""
    return {
        path.name: str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in folder.iterdir()
    }


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("suffix", [".ptd", ".PTD"])
def test_a_program_is_never_written_where_its_weights_go(
    suffix: str, apart: bool, tmp_path: Path
) -> None:
    folder = made_programs.copied(layer(apart), tmp_path / "folder")
    before = listing(folder)
    with pytest.raises(MoePackError, match=rf"b\{suffix}: .* name the program, as a \.pte"):
        moepack.convert(folder / "a.pte", folder / f"b{suffix}", layout="torchao")
    assert listing(folder) == before


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("suffix", [".pte", ".ptd"])
@pytest.mark.parametrize("leads_to", ["absent", "itself", "a file of ExecuTorch's"])
def test_links_are_never_replaced(leads_to: str, suffix: str, force: bool, tmp_path: Path) -> None:
    folder = made_programs.copied(layer(True), tmp_path / "folder")
    shutil.copyfile(folder / f"a{suffix}", folder / "old")
    link = folder / f"b{suffix}"
    link.symlink_to({"absent": "absent", "itself": link.name}.get(leads_to, "old"))
    before = listing(folder)
    with pytest.raises(MoePackError, match=rf"b\{suffix} is a symbolic link"):
        moepack.convert(folder / "a.pte", folder / "b.pte", layout="torchao", force=force)
    assert listing(folder) == before


def test_a_pipe_in_the_way_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "b.pte")
    with pytest.raises(MoePackError, match="is no file of ExecuTorch's"):
        moepack.convert(layer(False) / "a.pte", tmp_path / "b.pte", layout="torchao", force=True)


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("b" * 300 + ".pte", "File name too long"),
        ("b" * 250 + ".pte", "File name too long"),  # with what its draft adds
        ("file/b.pte", "File exists"),
        ("b\0.pte", "null"),
    ],
)
def test_an_output_that_cannot_be_written_is_named(out: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    target = tmp_path / out
    with pytest.raises(MoePackError) as caught:
        moepack.convert(layer(False) / "a.pte", target, layout="torchao")
    assert str(caught.value).startswith(f"{target}: cannot be written: ")
    assert reason in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# Memory of its own that a process may have more of once it has converted a small program.
ALLOWED = 40_000_000
WITHIN = """
import resource, sys
import moepack
small, large, out, allowed = sys.argv[1:]
moepack.convert(small, out, layout="torchao")
(used,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData"))
limit = 1024 * int(used) + int(allowed)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
moepack.convert(large, out, layout="torchao", force=True)
"""


@pytest.mark.parametrize("apart", [False, True])
def test_weights_are_never_in_memory_as_a_whole(apart: bool, tmp_path: Path) -> None:
    small = Layer().write(tmp_path / "small.pte", tmp_path / "small.ptd" if apart else None)
    given = one_layer_program(one_layer.CONTEXT, apart)
    large = tmp_path / "large.pte"
    large.symlink_to(given[0])
    if apart:
        large.with_suffix(".ptd").symlink_to(given[-1])
    arguments = [str(small), str(large), str(tmp_path / "out.pte"), str(ALLOWED)]
    done = subprocess.run(
        [sys.executable, "-c", WITHIN, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    written = sum(path.stat().st_size for path in tmp_path.glob("out.*"))
    assert written > one_layer.BYTES > ALLOWED
