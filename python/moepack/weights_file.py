"""Reading the structure of a .ptd file without ExecuTorch: the weights that a program keeps apart.

A .ptd is a flatbuffer (schema `flat_tensor.fbs` of ExecuTorch, identifier FT01) with a header of
its own, followed by segments of raw data. Every offset is checked against the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from moepack.errors import MoePackError
from moepack.flatbuffer import Table, read, unpack
from moepack.program_file import ProgramFile, Segment, map_file

IDENTIFIER = b"FT01"
_HEADER = "<4sIQQQQ"
_HEADER_MAGIC = b"FH01"
_LARGEST_ALIGNMENT = 1 << 16
_LISTED = 4


@dataclass(frozen=True)
class StoredData:
    """Bytes under a name. `shape` is a tensor's; None for what a backend has stored for itself."""

    segment: Segment
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class WeightsFile:
    """What a .ptd holds, by name, and the mapped file for those who want its bytes."""

    path: Path
    stored: dict[str, StoredData]
    structure_bytes: int
    data: memoryview

    def bytes_of(self, name: str) -> memoryview:
        segment = self.stored[name].segment
        return self.data[segment.offset : segment.offset + segment.size]

    def structure_digest(self) -> str:
        """sha256 of everything but weights; a runtime follows these bytes."""
        return hashlib.sha256(self.data[: self.structure_bytes]).hexdigest()


def open_weights(path: Path) -> WeightsFile:
    """Maps the file and reads its structure.

    Raises MoePackError when the file is missing, no .ptd, cut short or inconsistent.
    """
    data = map_file(path)
    if len(data) < 8 or data[4:8] != IDENTIFIER:
        raise MoePackError(f"{path}: not ExecuTorch's weights (no FT01 identifier)")
    try:
        return _read_weights(path, data)
    except (ValueError, IndexError) as error:
        raise MoePackError(f"{path}: damaged ExecuTorch weights: {error}") from error


def weights_of(program: ProgramFile) -> WeightsFile | None:
    """The file beside a program, of the same name, with what it keeps apart; None if it does not.

    Raises MoePackError when the file is missing, damaged, or not that of the program.
    """
    wanted = program.kept_apart()
    if not wanted:
        return None
    path = program.path.with_suffix(".ptd")
    if not path.is_file():
        raise MoePackError(
            f"{program.path}: keeps {len(wanted)} tensors ({_some(wanted)}) in a file of weights; "
            f"{path.name} is not there. Put the file that was exported with the program beside it"
        )
    weights = open_weights(path)
    held = {name: stored.shape for name, stored in weights.stored.items()}
    wrong = [name for name, shape in wanted.items() if held.get(name) != shape]
    if wrong:
        raise MoePackError(
            f"{path}: lacks {_some(wrong)} in the shapes that {program.path.name} expects; "
            "export both again"
        )
    return weights


def _read_weights(path: Path, data: memoryview) -> WeightsFile:
    magic, _, offset, size, base, segment_bytes = unpack(data, _HEADER, 8)
    if magic != _HEADER_MAGIC:
        raise ValueError("no FH01 header")
    if not offset + size <= base <= base + segment_bytes <= len(data):
        raise ValueError(f"file has {len(data)} bytes, its data end at {base + segment_bytes}")
    root = Table(data[: offset + size], read(data, "<I", 0))
    segments = [
        Segment(base + table.number(0, "<Q"), table.number(1, "<Q")) for table in root.tables(1)
    ]
    _check_segments(segments, base, base + segment_bytes)
    stored: dict[str, StoredData] = {}
    for table in root.tables(2):
        name, data_of = table.text(0), _stored(table, segments)
        if not name or name in stored:
            raise ValueError(f"an entry has no name of its own: {name!r}")
        stored[name] = data_of
    if {entry.segment for entry in stored.values()} != set(segments):
        raise ValueError("a segment belongs to no name")
    return WeightsFile(path, stored, base, data)


def _stored(table: Table, segments: list[Segment]) -> StoredData:
    segment, layout = segments[table.number(1, "<I")], table.table(2)
    if layout is None:
        return StoredData(segment, None)
    shape, order = tuple(layout.numbers(1, "<i")), layout.numbers(2, "<B")
    if sorted(order) != list(range(len(shape))) or min(shape, default=1) < 0:
        raise ValueError(f"a tensor has the shape {list(shape)} and the order {order}")
    if prod(shape) > segment.size:
        raise ValueError(f"a tensor {list(shape)} in {segment.size} bytes")
    return StoredData(segment, shape)


def _check_segments(segments: list[Segment], start: int, end: int) -> None:
    """One after the other: a backend takes its data by name and does not look at their size."""
    for segment in segments:
        if not start <= segment.offset < start + _LARGEST_ALIGNMENT:
            raise ValueError(
                f"a segment begins at {segment.offset}, the one before ends at {start}"
            )
        start = segment.offset + segment.size
        if start > end:
            raise ValueError(f"a segment ends at {start}, past the data's end at {end}")


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    shown = ", ".join(listed[:_LISTED])
    return shown if len(listed) <= _LISTED else f"{shown} and {len(listed) - _LISTED} more"
