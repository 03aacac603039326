"""Files that are filled in place and put on the disk beside other work, and reading parts."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moepack.errors import MoePackError
from moepack.online.files import Finishing, MappedFile
from moepack.online.reading import Extent, ReadingRoom, read_extents
from moepack.online.stacks import FileStack, Stack


def test_what_is_written_is_seen_in_the_mapping_and_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    file = MappedFile(path, {"w": (torch.uint8, (3, 5)), "f": (torch.float32, (2, 2))})
    rows = torch.arange(15, dtype=torch.uint8).view(3, 5)
    for row in (2, 0, 1):
        file.write("w", row, rows[row])
    file.write("f", 1, torch.tensor([1.5, -2.0]))
    assert torch.equal(file.tensors["w"], rows)
    file.tensors["f"][0] = 7.0
    assert not path.exists()
    file.finish()
    found = load_file(path)
    assert torch.equal(found["w"], rows)
    assert torch.equal(found["f"], torch.tensor([[7.0, 7.0], [1.5, -2.0]]))


def test_threads_have_rooms_of_their_own(tmp_path: Path) -> None:
    file = MappedFile(tmp_path / "a.safetensors", {"w": (torch.uint8, (64, 1000))})
    for stack in (FileStack(file, "w"), Stack(torch.zeros(64, 1000, dtype=torch.uint8))):
        together = threading.Barrier(4)

        def make(expert: int, stack: Stack = stack, together: threading.Barrier = together) -> None:
            room = stack.room(expert).fill_(expert)
            together.wait()
            stack.put(expert, room)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(make, range(64)))
        expected = torch.arange(64, dtype=torch.uint8)[:, None].expand(64, 1000)
        assert torch.equal(stack.tensor, expected)


def test_files_are_finished_one_after_the_other_and_before_leaving(tmp_path: Path) -> None:
    files = [MappedFile(tmp_path / f"{n}.safetensors", {"w": (torch.uint8, (4,))}) for n in "ab"]
    with Finishing() as finishing:
        finishing.finish(files[0])
        finishing.finish(files[1])
        assert (tmp_path / "a.safetensors").is_file()
    assert (tmp_path / "b.safetensors").is_file()


def test_a_file_that_cannot_be_finished_is_an_error_at_the_end(tmp_path: Path) -> None:
    file = MappedFile(tmp_path / "a.safetensors", {"w": (torch.uint8, (4,))})
    (tmp_path / "a.unfinished").unlink()
    with pytest.raises(FileNotFoundError), Finishing() as finishing:
        finishing.finish(file)


def test_another_error_is_not_hidden_and_what_was_begun_is_finished(tmp_path: Path) -> None:
    file = MappedFile(tmp_path / "a.safetensors", {"w": (torch.uint8, (4,))})
    interrupted = MappedFile(tmp_path / "b.safetensors", {"w": (torch.uint8, (4,))})

    def work() -> None:
        with Finishing() as finishing:
            finishing.finish(file)
            interrupted.write("no such tensor", 0, torch.zeros(4, dtype=torch.uint8))

    with pytest.raises(KeyError, match="no such tensor"):
        work()
    assert (tmp_path / "a.safetensors").is_file()


def test_every_tensor_is_read_from_its_extent(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {
        "large": torch.randn(50, 70, generator=torch.Generator().manual_seed(0)),
        "small": torch.arange(7, dtype=torch.uint8),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, path)
    room, extents = ReadingRoom(), read_extents(path)
    for name in ("small", "large", "empty", "small"):
        extents[name].read_ahead()
        found = room.read(extents[name]).view(tensors[name].dtype).view(tensors[name].shape)
        assert torch.equal(found, tensors[name])


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    path = tmp_path / "short.bin"
    path.write_bytes(b"12345")
    with pytest.raises(MoePackError, match=r"short\.bin: ends before"):
        ReadingRoom().read(Extent(path, 2, 9))
