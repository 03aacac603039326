"""inspect: programs, directories, blobs, safetensors; missing kernels; damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import moepack
from made_programs import checkpoint, copied, exported
from moepack import packing, quantizer
from moepack.checkpoint import load_model, save_packed
from moepack.errors import MoePackError
from moepack.inspection import inspect
from moepack.manifest import PROGRAM
from moepack.online import quantize_checkpoint
from moepack.program_file import open_program
from moepack.runtime import executorch_runtime


def made_blob() -> torch.Tensor:
    weight = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    return packing.pack(quantizer.quantize(weight, "int8-g64"))


def flip_packed_byte(path: Path) -> None:
    """One bit in the payload of the last expert of the first packed tensor."""
    file = open_program(path)
    call = next(c for c in file.methods[0].calls if c.operator.startswith("moepack::"))
    experts, size = call.constants[1].shape
    at = call.constants[1].offset + experts * size - 40
    content = bytearray(file.data)
    content[at] ^= 4
    path.write_bytes(content)


def test_directory_shows_what_was_exported() -> None:
    found = inspect(exported(), verify=True)
    assert found.kind == "exported directory"
    assert found.problems == []
    assert found.missing == []
    assert found.verified
    assert found.manifest is not None
    assert found.manifest["scheme"] == "int4-g32"
    assert "moepack::quantized_moe_ffn.out" in found.operators
    shapes = [(s.experts, s.rows, s.cols, s.row_order, s.scheme) for s in found.packed]
    assert shapes == [(8, 64, 64, "gate_up", "int4-g32"), (8, 64, 32, "plain", "int4-g32")] * 2
    assert found.to_json()["methods"][0]["name"] == "forward"


def test_kernels_that_are_missing_here_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = executorch_runtime()

    class Poor:
        class operator_registry:  # noqa: N801
            operator_names = {  # noqa: RUF012
                n for n in real.operator_registry.operator_names if not n.startswith("moepack")
            }

        backend_registry = real.backend_registry

    def runtime(*, moepack_kernels: bool = True) -> Any:
        if moepack_kernels:
            raise MoePackError("the library was not built here")
        return Poor

    monkeypatch.setattr("moepack.inspection.executorch_runtime", runtime)
    assert inspect(exported() / PROGRAM).missing == ["moepack::quantized_moe_ffn.out"]

    def absent(**_: bool) -> Any:
        raise ImportError("executorch")

    monkeypatch.setattr("moepack.inspection.executorch_runtime", absent)
    assert "moepack::quantized_moe_ffn.out" in inspect(exported() / PROGRAM).missing


def test_flipped_payload_bit_is_found_when_verified(tmp_path: Path) -> None:
    out = copied(exported(), tmp_path / "out")
    flip_packed_byte(out / PROGRAM)
    assert inspect(out / PROGRAM).problems == []
    (problem,) = inspect(out / PROGRAM, verify=True).problems
    assert "forward call 0 w13 expert 7" in problem
    names = [line.split(":")[0] for line in inspect(out, verify=True).problems]
    assert names == ["model.pte", "forward call 0 w13 expert 7"]


def test_directory_with_a_damaged_program_is_still_described(tmp_path: Path) -> None:
    out = copied(exported(), tmp_path / "out")
    (out / PROGRAM).write_bytes((out / PROGRAM).read_bytes()[:5000])
    found = inspect(out)
    assert any("cut short" in p or "damaged" in p for p in found.problems)
    assert found.manifest is not None


def test_blob_shows_its_header_and_damage(tmp_path: Path) -> None:
    path = tmp_path / "expert.bin"
    blob = made_blob()
    path.write_bytes(bytes(blob.tolist()))
    found = inspect(path, verify=True)
    assert found.problems == []
    (stack,) = found.packed
    assert (stack.scheme, stack.rows, stack.cols) == ("int8-g64", 24, 40)
    blob[-1] ^= 1
    path.write_bytes(bytes(blob.tolist()))
    assert inspect(path).problems == []
    assert len(inspect(path, verify=True).problems) == 1
    path.write_bytes(bytes(blob[:-1].tolist()))
    assert len(inspect(path).problems) == 1
    path.write_bytes(bytes(blob[:20].tolist()))
    assert len(inspect(path).problems) == 1


def test_packed_checkpoint_and_safetensors(tmp_path: Path) -> None:
    model = load_model(checkpoint("qwen3_moe"))
    moepack.quantize_(model)
    out = save_packed(model, checkpoint("qwen3_moe"), tmp_path / "packed")
    for found in (inspect(out, verify=True), inspect(out / "model.safetensors", verify=True)):
        assert found.problems == []
        assert len(found.packed) == 4
    path = out / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(MoePackError, match="damaged"):
        inspect(path)
    save_file({"a": torch.zeros(3)}, tmp_path / "plain.safetensors")
    assert inspect(tmp_path / "plain.safetensors").packed == []


def test_missing_shards_are_problems(tmp_path: Path) -> None:
    out = tmp_path / "packed"
    quantize_checkpoint(checkpoint("qwen3_moe"), out)
    assert inspect(out).problems == []
    for name in ("experts-00001.safetensors", "rest-00000.safetensors"):
        (out / name).unlink()
    found = inspect(out).problems
    assert [line.split(",")[0] for line in found] == [
        "experts-00001.safetensors: missing",
        "rest-00000.safetensors: missing",
    ]
    (out / "experts-00000.safetensors").unlink()
    assert len(inspect(out).problems) == 3
    index = out / "model.safetensors.index.json"
    for text in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(text, encoding="utf-8")
        assert ["damaged index" in line for line in inspect(out).problems] == [True]


def test_unknown_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    with pytest.raises(MoePackError, match="neither"):
        inspect(tmp_path / "notes.txt")
    with pytest.raises(MoePackError, match="no such file"):
        inspect(tmp_path / "absent")
    with pytest.raises(MoePackError, match="moepack export"):
        inspect(tmp_path)
