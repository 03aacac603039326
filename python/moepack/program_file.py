"""Reading the structure of a .pte file without ExecuTorch: operators, constants, segments.

A .pte is a flatbuffer (schema `program.fbs` of ExecuTorch, identifier ET12) with an extended
header, followed by segments of raw data. Only what moepack shows and checks is read. Every offset
is checked against the file, so that a damaged file is an error and never a wild read.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moepack.errors import MoePackError
from moepack.flatbuffer import Table, read, unpack
from moepack.regular_file import require_regular

IDENTIFIER = b"ET12"
_HEADER_MAGIC = b"eh00"
_HEADER = "<4sIQQ"
_KERNEL_CALL = 1
_TENSOR, _STRING = 5, 6
_EXTERNAL = 1


@dataclass(frozen=True)
class Segment:
    """Bytes of the file, by absolute offset."""

    offset: int
    size: int


@dataclass(frozen=True)
class Constant:
    """A constant tensor of the program: its shape, ExecuTorch's number of its dtype, and where its
    bytes begin in the file.

    One with a `name` is kept under that name in a file of weights; `offset` says nothing then.
    """

    shape: tuple[int, ...]
    scalar_type: int
    offset: int
    name: str = ""


@dataclass(frozen=True)
class Call:
    """One call of an operator: its arguments, None for what is no constant tensor, and the strings
    among them, in order."""

    operator: str
    arguments: tuple[Constant | None, ...]
    strings: tuple[str, ...]

    @property
    def constants(self) -> tuple[Constant, ...]:
        return tuple(constant for constant in self.arguments if constant is not None)


@dataclass(frozen=True)
class Method:
    name: str
    operators: tuple[str, ...]
    delegates: tuple[str, ...]
    calls: tuple[Call, ...]
    constants: tuple[Constant, ...]
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

    def constant_bytes(self, constant: Constant) -> memoryview:
        """The constants of the program from where one of them begins; their sizes lie nowhere."""
        segment = self.constant_segment
        end = 0 if segment is None else segment.offset + segment.size
        return self.data[constant.offset : end]

    def kept_apart(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that lie in a file of weights (.ptd)."""
        return {c.name: c.shape for method in self.methods for c in method.constants if c.name}

    def structure_digest(self) -> str:
        """sha256 of everything but weights: the program and the delegates' own programs.

        A runtime follows these bytes; damage in weights changes numbers only.
        """
        digest = hashlib.sha256(self.data[: self.program_bytes])
        for index, segment in enumerate(self.segments):
            if segment != self.constant_segment and index not in self.named_segments:
                digest.update(self.data[segment.offset : segment.offset + segment.size])
        return digest.hexdigest()


def map_file(path: Path) -> memoryview:
    """The bytes of a file. Raises MoePackError when it is missing, empty or no regular file."""
    try:
        require_regular(path)
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise MoePackError(f"{path}: cannot be opened: {error}") from error


def open_program(path: Path) -> ProgramFile:
    """Maps the file and reads its structure.

    Raises MoePackError when the file is missing, no .pte, cut short or inconsistent.
    """
    data = map_file(path)
    if len(data) < 8 or data[4:8] != IDENTIFIER:
        raise MoePackError(f"{path}: not an ExecuTorch program (no ET12 identifier)")
    try:
        return _read_program(path, data)
    except (ValueError, IndexError, RecursionError) as error:
        raise MoePackError(f"{path}: damaged ExecuTorch program: {error}") from error


def _read_program(path: Path, data: memoryview) -> ProgramFile:
    program_bytes, base = len(data), 0
    magic, _, size, offset = unpack(data, _HEADER, 8)
    if magic == _HEADER_MAGIC:
        program_bytes, base = size, offset
    if program_bytes > len(data):
        raise ValueError(f"file has {len(data)} bytes, its program alone {program_bytes}")
    buffer = data[:program_bytes]
    program = Table(buffer, read(buffer, "<I", 0))
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


def _method(plan: Table, offsets: list[int]) -> Method:
    operators = []
    for table in plan.tables(6):
        name, overload = table.text(0), table.text(1)
        operators.append(f"{name}.{overload}" if overload else name)
    values = plan.tables(2)
    constants = {i: c for i, v in enumerate(values) if (c := _constant(v, offsets)) is not None}
    calls = []
    for chain in plan.tables(5):
        for instruction in chain.tables(2):
            call = instruction.table(1)
            if instruction.number(0, "<B") == _KERNEL_CALL and call is not None:
                arguments = call.numbers(1, "<i")
                calls.append(
                    Call(
                        operators[call.number(0, "<i")],
                        tuple(constants.get(i) for i in arguments),
                        tuple(_strings([values[i] for i in arguments])),
                    )
                )
    return Method(
        name=plan.text(0),
        operators=tuple(operators),
        delegates=tuple(table.text(0) for table in plan.tables(7)),
        calls=tuple(calls),
        constants=tuple(constants.values()),
        planned_bytes=sum(plan.numbers(8, "<q")),
    )


def _constant(value: Table, offsets: list[int]) -> Constant | None:
    """The constant tensor that an argument is; None for anything else."""
    tensor = value.table(1)
    if value.number(0, "<B") != _TENSOR or tensor is None:
        return None
    index, extra = tensor.number(5, "<I"), tensor.table(9)
    kind = (tuple(tensor.numbers(2, "<i")), tensor.number(0, "<b"))
    if extra is not None and extra.number(2, "<b") == _EXTERNAL:
        return Constant(*kind, 0, extra.text(1))
    if index and tensor.table(6) is None:
        return Constant(*kind, offsets[index])
    return None


def _strings(arguments: list[Table]) -> Iterator[str]:
    for argument in arguments:
        value = argument.table(1)
        if argument.number(0, "<B") == _STRING and value is not None:
            yield value.text(0)
