"""Constants of a program that go to the file from where they lie.

ExecuTorch's emitter copies every constant into a `bytes` object and keeps all of them until the
file is written: as much anonymous memory as the model is large. Within `constants_in_place` it
refers to the tensors' own memory instead. Where that is a mapped file, nothing is copied at all.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from executorch.exir._serialize._cord import FileBackedData
from executorch.exir.emit import _emitter
from executorch.exir.schema import EValue, TensorDataLocation
from executorch.exir.tensor import TensorSpec, make_tensor_value

_SMALLEST = 1 << 16  # below, a copy costs nothing


class MemoryData(FileBackedData):  # type: ignore[misc]
    """Bytes that lie in memory, such as a mapped file's, in the one form besides `bytes` that
    ExecuTorch's writers take; its readers take parts of it as of `bytes`."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory

    def __len__(self) -> int:
        return self.memory.nbytes

    def __getitem__(self, part: slice) -> MemoryData:
        return MemoryData(self.memory[part])

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryData:
        return self

    def prefix(self, size: int) -> bytes:
        return bytes(self.memory[:size])

    def sha256(self) -> bytes:
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        return hashlib.sha256(self.memory).digest()

    def to_bytes(self) -> bytes:
        return bytes(self.memory)

    def write_to_file(self, outfile: io.BufferedIOBase) -> None:
        outfile.write(self.memory)

    def close(self) -> None:
        pass


@contextmanager
def constants_in_place() -> Iterator[None]:
    """Within it, programs that are emitted refer to large constants and hold no copies of them.

    Tensors must not change until the program is written.
    """
    copying = _emitter._Emitter._tensor_spec_to_evalue
    seen: dict[int, MemoryData] = {}  # by address: methods share weights, hashing takes time

    def to_evalue(self: Any, spec: TensorSpec, constant_tag: str | None = None) -> Any:
        if not _is_large_constant(spec):
            return copying(self, spec, constant_tag)
        address = spec.storage.data_ptr()
        if address not in seen or len(seen[address]) != spec.nbytes():
            seen[address] = MemoryData(_memory(spec.storage))
        index = _buffer_index(self, spec, seen[address], constant_tag)
        return EValue(make_tensor_value(index, None, spec))

    _emitter._Emitter._tensor_spec_to_evalue = to_evalue
    try:
        yield
    finally:
        _emitter._Emitter._tensor_spec_to_evalue = copying


def _memory(storage: torch.UntypedStorage) -> memoryview:
    """The storage's own bytes, which keep it alive."""
    everything: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return memoryview(everything)


def _is_large_constant(spec: TensorSpec) -> bool:
    """Mutable state with a first value is copied when a method is loaded: it stays with upstream's
    code, as does whatever upstream refuses."""
    return bool(
        spec.const
        and spec.mem_id is None
        and spec.storage is not None
        and spec.storage.nbytes() == spec.nbytes() >= _SMALLEST
    )


def _buffer_index(emitter: Any, spec: TensorSpec, data: MemoryData, tag: str | None) -> int:
    """Where the program keeps these bytes: equal ones once, whatever their names."""
    state, key = emitter.program_state, data.sha256().hex()
    info = spec.extra_tensor_info
    is_external = info is not None and info.location == TensorDataLocation.EXTERNAL
    known = state.external_constant_hash if is_external else state.cached_spec_hash_values
    if key not in known:
        return int(emitter._save_new_const_tensor(spec, data, key, None, tag))
    if is_external:
        emitter._save_to_external_constant_map(info.fully_qualified_name, known[key], tag)
    return int(known[key])
