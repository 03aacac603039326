"""Reading a .pte: what is in it, and damage."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from made_programs import exported
from moepack.errors import MoePackError
from moepack.manifest import PROGRAM
from moepack.program_file import open_program


def test_structure_is_what_the_runtime_sees() -> None:
    from moepack.runtime import executorch_runtime

    path = exported() / PROGRAM
    file = open_program(path)
    program = executorch_runtime().load_program(path)
    assert {method.name for method in file.methods} == program.method_names
    assert file.delegates() == {"XnnpackBackend"}
    assert "moepack::quantized_moe_ffn.out" in file.operators()
    forward = next(method for method in file.methods if method.name == "forward")
    calls = [call for call in forward.calls if call.operator.startswith("moepack::")]
    assert len(calls) == 2
    for call in calls:
        assert call.strings[:2] == ("int4-g32", "moepack")
        gate, w13, w2 = call.constants
        assert gate.shape == (8, 64)
        assert bytes(file.data[w13.offset : w13.offset + 4]) == b"MOEP"
        assert bytes(file.data[w2.offset : w2.offset + 4]) == b"MOEP"


@pytest.mark.parametrize("length", [0, 3, 8, 40, 500, 20_000])
def test_file_cut_short_is_an_error(tmp_path: Path, length: int) -> None:
    path = tmp_path / "cut.pte"
    path.write_bytes((exported() / PROGRAM).read_bytes()[:length])
    with pytest.raises(MoePackError, match=r"cut\.pte"):
        open_program(path)


def test_last_byte_missing_is_an_error(tmp_path: Path) -> None:
    file = open_program(exported() / PROGRAM)
    end = max(segment.offset + segment.size for segment in file.segments)
    path = tmp_path / "cut.pte"
    path.write_bytes(bytes(file.data[: end - 1]))
    with pytest.raises(MoePackError, match="cut short"):
        open_program(path)


def test_any_damage_is_an_error_or_another_digest(tmp_path: Path) -> None:
    file = open_program(exported() / PROGRAM)
    digest, draw = file.structure_digest(), random.Random(0)
    path = tmp_path / "damaged.pte"
    refused = 0
    for _ in range(200):
        damaged = bytearray(file.data)
        for _ in range(draw.choice((1, 4))):
            damaged[draw.randrange(file.program_bytes)] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            assert open_program(path).structure_digest() != digest
        except MoePackError:
            refused += 1
    assert refused > 0


def test_foreign_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "text.pte"
    path.write_text("this is no program", encoding="utf-8")
    with pytest.raises(MoePackError, match="ET12"):
        open_program(path)
    with pytest.raises(MoePackError, match="cannot be opened"):
        open_program(tmp_path / "absent.pte")
    with pytest.raises(MoePackError, match="cannot be opened"):
        open_program(tmp_path)
