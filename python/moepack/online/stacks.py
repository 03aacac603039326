"""Where a block's packed experts go: into memory, or into a file that is larger than memory."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from moepack.online.files import MappedFile


class Stack:
    """Packed experts in memory, uint8 [E, bytes]. Threads may make different experts at once."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def room(self, expert: int) -> Tensor:
        """uint8 [bytes], where the thread that asks makes the expert's blob."""
        return self.tensor[expert]

    def put(self, expert: int, blob: Tensor) -> None:
        """Takes the blob that was made in the expert's room."""


class FileStack(Stack):
    """Made in a room of each thread, then written: pages of a mapping cost more than the bytes."""

    def __init__(self, file: MappedFile, name: str) -> None:
        super().__init__(file.tensors[name])
        self._file, self._name = file, name
        self._own = threading.local()

    def room(self, expert: int) -> Tensor:
        if not hasattr(self._own, "room"):
            self._own.room = torch.empty_like(self.tensor[expert])
        room: Tensor = self._own.room
        return room

    def put(self, expert: int, blob: Tensor) -> None:
        self._file.write(self._name, expert, blob)
