"""A program and its file of weights as ExecuTorch's values, whose bytes stay in the mapped files.

Read and written by ExecuTorch's own (de)serializers: what is not replaced, delegates and memory
plan included, stays as it was.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from executorch.exir._serialize._cord import Cord, FileBackedData
from executorch.exir._serialize._flatbuffer_program import _flatbuffer_to_program
from executorch.exir._serialize._program import (
    _get_extended_header,
    _restore_segments,
    serialize_pte_binary,
)
from executorch.exir._serialize.data_serializer import DataEntry, DataPayload
from executorch.exir.schema import Buffer, TensorDataLocation
from executorch.extension.flat_tensor.serialize.serialize import (
    FlatTensorSerializer,
    _deserialize_to_flat_tensor,
)
from torch import Tensor

from moepack.converter.stacks import ScaleChanges, StackForm, converted_blobs
from moepack.exporter.constants import MemoryData
from moepack.exporter.lowering import CONSTANT_ALIGNMENT
from moepack.weights_file import WeightsFile


class ConvertedStack(FileBackedData):  # type: ignore[misc]
    """A stack in its new layout, converted while it is written: one expert in memory at a time."""

    def __init__(
        self, memory: memoryview, form: StackForm, layout: str, changes: ScaleChanges, where: str
    ) -> None:
        self._memory, self._form = memory, form
        self._changes, self._where = changes, where
        self.shape = [len(memory) // form.blob_bytes, form.converted(layout).blob_bytes]

    def __len__(self) -> int:
        return self.shape[0] * self.shape[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> ConvertedStack:
        return self

    def to_bytes(self) -> bytes:
        written = io.BytesIO()
        self.write_to_file(written)
        return written.getvalue()

    def write_to_file(self, outfile: io.BufferedIOBase) -> None:
        for blob in converted_blobs(self._blobs(), self._form, self._changes, self._where):
            outfile.write(blob.numpy().tobytes())

    def close(self) -> None:
        pass

    def _blobs(self) -> Iterator[Tensor]:
        size = self._form.blob_bytes
        for start in range(0, len(self._memory), size):
            copied = bytearray(self._memory[start : start + size])
            yield torch.frombuffer(copied, dtype=torch.uint8)


@dataclass
class _Named:
    """What a file of weights holds under a name; `layout` is a tensor's."""

    buffer: Any
    layout: Any


class StoredProgram:
    """`program` is ExecuTorch's dataclass, to be changed in place."""

    def __init__(self, data: memoryview, weights: WeightsFile | None = None) -> None:
        self._file = _read_program(data)
        self._apart = {} if weights is None else _read_weights(weights)

    @property
    def program(self) -> Any:
        return self._file.program

    def buffer(self, tensor: Any) -> Any:
        """The `Buffer` that holds the bytes of a constant; None if these files do not."""
        extra = tensor.extra_tensor_info
        if extra is not None and extra.location == TensorDataLocation.EXTERNAL:
            named = self._apart.get(extra.fully_qualified_name)
            return named and named.buffer
        if not tensor.data_buffer_idx or tensor.allocation_info is not None:
            return None
        return self.program.constant_buffer[tensor.data_buffer_idx]

    def replace(self, buffer: Any, stack: ConvertedStack) -> None:
        buffer.storage = stack
        for named in self._apart.values():
            if named.buffer is buffer:
                named.layout.sizes = stack.shape

    def add_constant(self, data: bytes) -> int:
        """Its index among the program's own."""
        buffers = self.program.constant_buffer
        if not buffers:
            buffers.append(Buffer(b""))  # the first one stands for "no constant"
        buffers.append(Buffer(data))
        return len(buffers) - 1

    def written(self) -> Cord:
        """The .pte."""
        return serialize_pte_binary(
            self._file, extract_delegate_segments=True, constant_tensor_alignment=CONSTANT_ALIGNMENT
        )

    def written_weights(self) -> Cord | None:
        """The .ptd; None where the program keeps nothing apart."""
        if not self._apart:
            return None
        buffers: dict[int, Any] = {}  # in the order of their names
        for named in self._apart.values():
            buffers.setdefault(id(named.buffer), named.buffer)
        places = {identity: place for place, identity in enumerate(buffers)}
        entries = {
            name: DataEntry(places[id(named.buffer)], CONSTANT_ALIGNMENT, named.layout)
            for name, named in self._apart.items()
        }
        payload = DataPayload([buffer.storage for buffer in buffers.values()], entries)
        return FlatTensorSerializer().serialize(payload)


def _read_program(data: memoryview) -> Any:
    header = _get_extended_header(bytes(data[:128]))
    program = _flatbuffer_to_program(bytes(data[: header.program_size if header else len(data)]))
    # Without a header the program may name segments, of no bytes.
    start = header.segment_base_offset if header and header.segment_base_offset else len(data)
    return _restore_segments(program, MemoryData(data[start:]))


def _read_weights(file: WeightsFile) -> dict[str, _Named]:
    structure = _deserialize_to_flat_tensor(bytes(file.data[: file.structure_bytes]))
    segments = {
        segment: Buffer(MemoryData(file.data[segment.offset : segment.offset + segment.size]))
        for segment in {stored.segment for stored in file.stored.values()}
    }
    return {
        entry.key: _Named(segments[file.stored[entry.key].segment], entry.tensor_layout)
        for entry in structure.named_data
    }
