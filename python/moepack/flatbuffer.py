"""Reading flatbuffers, every offset checked: damage is a ValueError."""

from __future__ import annotations

import struct
from typing import Any


class Table:
    """A flatbuffer table: fields by slot number, absent ones by default."""

    def __init__(self, buffer: memoryview, position: int) -> None:
        self.buffer = buffer
        self.position = position
        self.vtable = position - read(buffer, "<i", position)
        self.vtable_size = read(buffer, "<H", self.vtable)

    def _field(self, slot: int) -> int | None:
        entry = 4 + 2 * slot
        if entry + 2 > self.vtable_size:
            return None
        offset = read(self.buffer, "<H", self.vtable + entry)
        return self.position + offset if offset else None

    def number(self, slot: int, form: str, default: int = 0) -> int:
        at = self._field(slot)
        return default if at is None else read(self.buffer, form, at)

    def table(self, slot: int) -> Table | None:
        at = self._field(slot)
        return None if at is None else Table(self.buffer, at + read(self.buffer, "<I", at))

    def text(self, slot: int) -> str:
        at = self._field(slot)
        if at is None:
            return ""
        start, length = self._vector_at(at, 1)
        return bytes(self.buffer[start : start + length]).decode("utf-8")

    def numbers(self, slot: int, form: str) -> list[int]:
        at = self._field(slot)
        if at is None:
            return []
        size = struct.calcsize(form)
        start, length = self._vector_at(at, size)
        return [read(self.buffer, form, start + i * size) for i in range(length)]

    def tables(self, slot: int) -> list[Table]:
        at = self._field(slot)
        if at is None:
            return []
        start, length = self._vector_at(at, 4)
        places = range(start, start + 4 * length, 4)
        return [Table(self.buffer, p + read(self.buffer, "<I", p)) for p in places]

    def _vector_at(self, at: int, item: int) -> tuple[int, int]:
        start = at + read(self.buffer, "<I", at)
        length = read(self.buffer, "<I", start)
        if start + 4 + length * item > len(self.buffer):
            raise ValueError(f"vector of {length} items at {start} passes the end")
        return start + 4, length


def read(buffer: memoryview, form: str, at: int) -> int:
    """One number at an offset."""
    value: int = unpack(buffer, form, at)[0]
    return value


def unpack(buffer: memoryview, form: str, at: int) -> tuple[Any, ...]:
    """All that a format of `struct` names. Raises ValueError where the buffer does not hold it."""
    size = struct.calcsize(form)
    if not 0 <= at <= len(buffer) - size:
        raise ValueError(f"{size} bytes expected at {at}, of {len(buffer)} in all: cut short?")
    return struct.unpack_from(form, buffer, at)
