"""Parts of files, read into memory that is used again, or by the system in advance."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moepack.errors import MoePackError
from moepack.safetensors_file import read_entries


class Extent(NamedTuple):
    """Bytes `first` to `last` of a file."""

    file: Path
    first: int
    last: int

    def read_ahead(self) -> None:
        """The system reads it from the disk, without waiting, where it can be told to."""
        if hasattr(os, "posix_fadvise"):
            with self.file.open("rb", buffering=0) as opened:
                size = self.last - self.first
                os.posix_fadvise(opened.fileno(), self.first, size, os.POSIX_FADV_WILLNEED)


class ReadingRoom:
    """Memory for what each thread reads last: mapped pages cost more than copying their bytes."""

    def __init__(self) -> None:
        self._own = threading.local()

    def read(self, extent: Extent) -> Tensor:
        """uint8 [bytes], until this thread reads again.

        Raises MoePackError if the file is shorter.
        """
        size = extent.last - extent.first
        if getattr(self._own, "size", -1) < size:
            self._own.size, self._own.room = size, torch.empty(size, dtype=torch.uint8)
        room: Tensor = self._own.room[:size]
        left = room.numpy().data
        with extent.file.open("rb", buffering=0) as opened:
            opened.seek(extent.first)
            while left:
                count = opened.readinto(left)
                if not count:
                    raise MoePackError(f"{extent.file}: ends before its tensors do")
                left = left[count:]
        return room


def read_extents(file: Path) -> dict[str, Extent]:
    """Where each tensor of a safetensors file lies, by name."""
    entries, start = read_entries(file)
    return {
        name: Extent(file, *(start + offset for offset in entry["data_offsets"]))
        for name, entry in entries.items()
    }
