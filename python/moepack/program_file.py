"""Reading the structure of a .pte file without ExecuTorch: operators, constants, segments.

A .pte is a flatbuffer (schema `program.fbs` of ExecuTorch, identifier ET12) with an extended
header, followed by segments of raw data. Only what moepack shows and checks is read. Every offset
is checked against the file, so that a damaged file is an error and never a wild read.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moepack.errors import MoePackError

_IDENTIFIER = b"ET12"
_HEADER_MAGIC = b"eh00"
_HEADER = struct.Struct("<4sIQQ")
_KERNEL_CALL = 1
_TENSOR, _STRING = 5, 6


class _Table:
    """A flatbuffer table: fields by slot number, absent ones by default."""

    def __init__(self, buffer: memoryview, position: int) -> None:
        self.buffer = buffer
        self.position = position
        self.vtable = position - _read(buffer, "<i", position)
        self.vtable_size = _read(buffer, "<H", self.vtable)

    def _field(self, slot: int) -> int | None:
        entry = 4 + 2 * slot
        if entry + 2 > self.vtable_size:
            return None
        offset = _read(self.buffer, "<H", self.vtable + entry)
        return self.position + offset if offset else None

    def number(self, slot: int, form: str, default: int = 0) -> int:
        at = self._field(slot)
        return default if at is None else _read(self.buffer, form, at)

    def table(self, slot: int) -> _Table | None:
        at = self._field(slot)
        return None if at is None else _Table(self.buffer, at + _read(self.buffer, "<I", at))

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
        return [_read(self.buffer, form, start + i * size) for i in range(length)]

    def tables(self, slot: int) -> list[_Table]:
        at = self._field(slot)
        if at is None:
            return []
        start, length = self._vector_at(at, 4)
        places = range(start, start + 4 * length, 4)
        return [_Table(self.buffer, p + _read(self.buffer, "<I", p)) for p in places]

    def _vector_at(self, at: int, item: int) -> tuple[int, int]:
        start = at + _read(self.buffer, "<I", at)
        length = _read(self.buffer, "<I", start)
        if start + 4 + length * item > len(self.buffer):
            raise ValueError(f"vector of {length} items at {start} passes the end")
        return start + 4, length


def _read(buffer: memoryview, form: str, at: int) -> int:
    if at < 0:
        raise ValueError(f"offset {at} is before the beginning")
    value: int = struct.unpack_from(form, buffer, at)[0]
    return value


@dataclass(frozen=True)
class Segment:
    """Bytes of the file, by absolute offset."""

    offset: int
    size: int


@dataclass(frozen=True)
class Constant:
    """A constant tensor of the program: its shape and where its bytes begin in the file."""

    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Call:
    """One call of an operator: constants and strings among its arguments, in order."""

    operator: str
    constants: tuple[Constant, ...]
    strings: tuple[str, ...]


@dataclass(frozen=True)
class Method:
    name: str
    operators: tuple[str, ...]
    delegates: tuple[str, ...]
    calls: tuple[Call, ...]
    planned_bytes: int


@dataclass(frozen=True)
class ProgramFile:
    """What a .pte holds, and the mapped file for those who want its bytes."""

    path: Path
    methods: tuple[Method, ...]
    segments: tuple[Segment, ...]
    constant_segment: Segment | None
    named_segments: frozenset[int]
    program_bytes: int
    data: memoryview

    def operators(self) -> set[str]:
        return {name for method in self.methods for name in method.operators}

    def delegates(self) -> set[str]:
        return {name for method in self.methods for name in method.delegates}

    def structure_digest(self) -> str:
        """sha256 of everything but weights: the program and the delegates' own programs.

        A runtime follows these bytes; damage in weights changes numbers only.
        """
        digest = hashlib.sha256(self.data[: self.program_bytes])
        for index, segment in enumerate(self.segments):
            if segment != self.constant_segment and index not in self.named_segments:
                digest.update(self.data[segment.offset : segment.offset + segment.size])
        return digest.hexdigest()


def open_program(path: Path) -> ProgramFile:
    """Maps the file and reads its structure.

    Raises MoePackError when the file is missing, no .pte, cut short or inconsistent.
    """
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise MoePackError(f"{path}: cannot be opened: {error}") from error
    if len(data) < 8 or data[4:8] != _IDENTIFIER:
        raise MoePackError(f"{path}: not an ExecuTorch program (no ET12 identifier)")
    try:
        return _read_program(path, data)
    except (ValueError, IndexError, struct.error, UnicodeDecodeError, RecursionError) as error:
        raise MoePackError(f"{path}: damaged ExecuTorch program: {error}") from error


def _read_program(path: Path, data: memoryview) -> ProgramFile:
    program_bytes, base = len(data), 0
    magic, _, size, offset = _HEADER.unpack_from(data, 8)
    if magic == _HEADER_MAGIC:
        program_bytes, base = size, offset
    if program_bytes > len(data):
        raise ValueError(f"file has {len(data)} bytes, its program alone {program_bytes}")
    buffer = data[:program_bytes]
    program = _Table(buffer, _read(buffer, "<I", 0))
    segments = tuple(
        Segment(base + table.number(0, "<Q"), table.number(1, "<Q")) for table in program.tables(4)
    )
    for segment in segments:
        if segment.offset + segment.size > len(data):
            end = segment.offset + segment.size
            raise ValueError(f"file has {len(data)} bytes, a segment ends at {end}: cut short")
    constants, offsets = None, []
    table = program.table(5)
    if table is not None and table.numbers(1, "<Q"):
        constants = segments[table.number(0, "<I")]
        offsets = [constants.offset + o for o in table.numbers(1, "<Q")]
    return ProgramFile(
        path=path,
        methods=tuple(_method(plan, offsets) for plan in program.tables(1)),
        segments=segments,
        constant_segment=constants,
        named_segments=frozenset(t.number(1, "<I") for t in program.tables(7)),
        program_bytes=program_bytes,
        data=data,
    )


def _method(plan: _Table, offsets: list[int]) -> Method:
    operators = []
    for table in plan.tables(6):
        name, overload = table.text(0), table.text(1)
        operators.append(f"{name}.{overload}" if overload else name)
    values = plan.tables(2)
    calls = []
    for chain in plan.tables(5):
        for instruction in chain.tables(2):
            call = instruction.table(1)
            if instruction.number(0, "<B") == _KERNEL_CALL and call is not None:
                arguments = [values[i] for i in call.numbers(1, "<i")]
                calls.append(_call(operators[call.number(0, "<i")], arguments, offsets))
    return Method(
        name=plan.text(0),
        operators=tuple(operators),
        delegates=tuple(table.text(0) for table in plan.tables(7)),
        calls=tuple(calls),
        planned_bytes=sum(plan.numbers(8, "<q")),
    )


def _call(operator: str, arguments: list[_Table], offsets: list[int]) -> Call:
    constants = []
    for argument in arguments:
        value = argument.table(1)
        if argument.number(0, "<B") != _TENSOR or value is None:
            continue
        index = value.number(5, "<I")
        if index and value.table(6) is None:
            constants.append(Constant(tuple(value.numbers(2, "<i")), offsets[index]))
    return Call(operator, tuple(constants), tuple(_strings(arguments)))


def _strings(arguments: list[_Table]) -> Iterator[str]:
    for argument in arguments:
        value = argument.table(1)
        if argument.number(0, "<B") == _STRING and value is not None:
            yield value.text(0)
