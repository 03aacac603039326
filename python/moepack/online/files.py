"""Safetensors files that are made in place: sized first, then filled where they lie on the disk."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from moepack.errors import MoePackError
from moepack.safetensors_file import read_entries

_DTYPE_NAMES = {torch.uint8: "U8", torch.float32: "F32"}
_CHUNK = 64 << 20
_ALIGNMENT = 64


class MappedFile:
    """A new file of uint8 and fp32 tensors, whose memory is the file's: none of it is anonymous.

    `tensors` may be written to, and see what `write` puts there. The file has its name only when
    `finish` has put everything on the disk; until then a suffix.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    ) -> None:
        self._path, self._draft = path, path.with_suffix(".unfinished")
        entries: dict[str, Any] = {}
        offset = 0
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
            size = dtype.itemsize * torch.Size(shape).numel()
            entries[name] = {
                "dtype": _DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        header = _header(entries)
        with self._draft.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + offset)
        self._writer = self._draft.open("rb+", buffering=0)
        self._starts = {n: len(header) + e["data_offsets"][0] for n, e in entries.items()}
        storage = torch.UntypedStorage.from_file(
            str(self._draft), shared=True, nbytes=len(header) + offset
        )
        everything = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]
        self.tensors: dict[str, Tensor] = {}
        for name, (dtype, shape) in tensors.items():
            first, last = (len(header) + end for end in entries[name]["data_offsets"])
            self.tensors[name] = everything[first:last].view(dtype).view(shape)

    def write(self, name: str, row: int, values: Tensor) -> None:
        """Puts contiguous values in the place of `tensors[name][row]`."""
        left = memoryview(values.numpy().data).cast("B")
        offset = self._starts[name] + row * len(left)
        while left:
            count = os.pwrite(self._writer.fileno(), left, offset)
            left, offset = left[count:], offset + count

    def finish(self) -> None:
        self.tensors.clear()
        with self._writer as file:
            os.fsync(file.fileno())
        self._draft.rename(self._path)


class Finishing:
    """Puts finished files on the disk beside other work, one at a time: more would fill memory.

    Leaving it waits for the last one, and raises what went wrong with it.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def finish(self, file: MappedFile) -> None:
        self._wait()
        self._last = self._thread.submit(file.finish)

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()

    def __enter__(self) -> Finishing:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._thread.shutdown()
        if error is None:
            self._wait()


class Replacement(NamedTuple):
    """uint8 bytes in the place of a stored tensor; `pieces()` gives them from first to last."""

    shape: list[int]
    pieces: Callable[[], Iterator[bytes]]


def copy_tensors(
    source: Path,
    names: Iterable[str],
    target: Path,
    replaced: Mapping[str, Replacement] | None = None,
) -> int:
    """Copies some tensors of a file byte for byte into a new one; returns their bytes.

    Those that are `replaced` keep their names and nothing else.
    """
    entries, start = read_entries(source)
    replaced = replaced or {}
    kept: dict[str, Any] = {}
    total = 0
    for name in sorted(names, key=lambda n: entries[n]["data_offsets"][0]):
        entry = entries[name]
        first, last = entry["data_offsets"]
        size = last - first
        if name in replaced:
            entry = {"dtype": "U8", "shape": replaced[name].shape}
            size = torch.Size(replaced[name].shape).numel()
        kept[name] = entry | {"data_offsets": [total, total + size]}
        total += size
    draft = target.with_suffix(".unfinished")
    with source.open("rb") as reader, draft.open("wb") as writer:
        writer.write(_header(kept))
        for name in kept:
            stored = _stored_pieces(reader, source, start, entries[name]["data_offsets"])
            for piece in replaced[name].pieces() if name in replaced else stored:
                writer.write(piece)
        writer.flush()
        os.fsync(writer.fileno())
    draft.rename(target)
    return total


def _stored_pieces(
    reader: BinaryIO, source: Path, start: int, offsets: list[int]
) -> Iterator[bytes]:
    first, last = offsets
    reader.seek(start + first)
    size = last - first
    while size:
        chunk = reader.read(min(size, _CHUNK))
        if not chunk:
            raise MoePackError(f"{source}: ends before its tensors do")
        yield chunk
        size -= len(chunk)


def _header(entries: Mapping[str, Any]) -> bytes:
    text = json.dumps({"__metadata__": {"format": "pt"}} | dict(entries)).encode()
    padding = -(len(text) + 8) % _ALIGNMENT
    return struct.pack("<Q", len(text) + padding) + text + b" " * padding
