"""Headers of safetensors files, whole and damaged."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from moepack.errors import MoePackError
from moepack.safetensors_file import open_tensors, read_entries

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(5, dtype=torch.uint8)}
WHOLE: bytes = save(TENSORS, {"format": "pt"})
HEADER = 8 + struct.unpack_from("<Q", WHOLE)[0]


def with_header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + WHOLE[HEADER:]


def with_entry(**changed: Any) -> bytes:
    header = json.loads(WHOLE[8:HEADER])
    header["a"].update(changed)
    return with_header(json.dumps(header).encode())


def test_entries_say_where_the_bytes_lie(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(WHOLE)
    entries, start = read_entries(file)
    assert entries.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        first, last = entries[name]["data_offsets"]
        assert WHOLE[start + first : start + last] == tensor.numpy().tobytes()
        assert entries[name]["shape"] == list(tensor.shape)
    with open_tensors(file) as opened:
        assert torch.equal(opened.get_tensor("a"), TENSORS["a"])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        WHOLE[:5],
        WHOLE[:-1],
        WHOLE + b"\0",
        with_header(b"[]"),
        with_header(b'{"a": 3}'),
        with_header(b"\xff{}"),
        with_header(b"[" * 100_000),
        with_header(WHOLE[8:HEADER], 1 << 40),
        with_header(WHOLE[8:HEADER], (1 << 64) - 1),
        with_entry(dtype=None),
        with_entry(dtype="F17"),
        with_entry(shape="x"),
        with_entry(shape=[2, 1 << 62]),
        with_entry(data_offsets=[-4, 20]),
        with_entry(data_offsets=[24, 0]),
        with_entry(data_offsets=[0, 1 << 40]),
    ],
)
def test_damage_is_an_error_that_names_the_file(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(data)
    for read in (read_entries, open_tensors):
        with pytest.raises(MoePackError, match=r"a\.safetensors: missing or damaged"):
            read(file)


def test_what_is_not_there(tmp_path: Path) -> None:
    for place in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(MoePackError, match="missing or damaged"):
            read_entries(place)
