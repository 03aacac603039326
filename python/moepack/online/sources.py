"""Where tensors come from: a directory of safetensors, a state_dict, pieces one by one, nowhere."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moepack.errors import MoePackError
from moepack.online.reading import Extent, ReadingRoom, read_extents
from moepack.online.stored import StoredTensor, natural_key
from moepack.safetensors_file import open_tensors

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Source(Protocol):
    """`names`: all that will come, or None where only the end tells."""

    names: frozenset[str] | None

    def __iter__(self) -> Iterator[StoredTensor]: ...


class SafetensorsDirectory:
    """Every tensor of a directory's safetensors files, mapped, in the natural order of names."""

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, Any] = {}
        self._extents: dict[str, Extent] = {}
        self._room = ReadingRoom()
        self._home: dict[str, str] = {}
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise MoePackError(f"{directory}: no *.safetensors file; convert the checkpoint first")
        for file in files:
            opened = open_tensors(file)
            self._files[file.name] = opened
            for name in opened.keys():  # noqa: SIM118
                if name in self._home:
                    raise MoePackError(
                        f"{directory}: {name} is in {self._home[name]} and in {file.name}"
                    )
                self._home[name] = file.name
            self._extents.update(read_extents(file))
        self.names: frozenset[str] | None = frozenset(self._home)

    def sorted_names(self) -> list[str]:
        return sorted(self._home, key=natural_key)

    def __iter__(self) -> Iterator[StoredTensor]:
        return map(self.tensor, self.sorted_names())

    def tensor(self, name: str) -> StoredTensor:
        file = self._files[self._home[name]]
        view = file.get_slice(name)
        kind = view.get_dtype()
        if kind not in _DTYPES:
            raise MoePackError(f"{name} is stored as {kind}; supported: {', '.join(_DTYPES)}")
        dtype, shape, extent = _DTYPES[kind], tuple(view.get_shape()), self._extents[name]
        return StoredTensor(
            name,
            dtype,
            shape,
            read=lambda: file.get_tensor(name),
            part=lambda i: view[i : i + 1],
            read_once=lambda: self._room.read(extent).view(dtype).view(shape),
            read_ahead=extent.read_ahead,
        )


class StateDict:
    """Tensors in memory; they stay the caller's."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.names: frozenset[str] | None = frozenset(tensors)

    def __iter__(self) -> Iterator[StoredTensor]:
        for name in sorted(self._tensors, key=natural_key):
            yield StoredTensor.of(name, self._tensors[name].detach())


class Pieces:
    """(name, tensor) one by one, in any order. Each is copied: its memory may be reused."""

    names: frozenset[str] | None = None

    def __init__(self, pieces: Iterable[tuple[str, Tensor]]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[StoredTensor]:
        for name, tensor in self._pieces:
            yield StoredTensor.of(name, tensor.detach().to("cpu", copy=True))


class Dummy:
    """Random weights for every name of a model on the meta device: for tests and benchmarks."""

    def __init__(self, model: nn.Module) -> None:
        self._shapes = {
            name: (p.shape, p.dtype)
            for name, p in model.state_dict().items()
            if p.is_floating_point()
        }
        self.names: frozenset[str] | None = frozenset(self._shapes)

    def __iter__(self) -> Iterator[StoredTensor]:
        for name in sorted(self._shapes, key=natural_key):
            shape, dtype = self._shapes[name]

            def part(i: int, name: str = name, shape: torch.Size = shape) -> Tensor:
                return _random(f"{name} {i}", torch.Size((1, *shape[1:])))

            def read(name: str = name, shape: torch.Size = shape) -> Tensor:
                return _random(name, shape)

            yield StoredTensor(name, dtype, tuple(shape), read, part)


def _random(name: str, shape: torch.Size) -> Tensor:
    """Ones for what is a norm's scale, else normal numbers that keep the size of what they see."""
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    spread: float = max(1, shape[-1]) ** -0.5
    return torch.randn(shape, generator=generator) * spread


def open_source(source: Any) -> Source:
    """A path, a state_dict or an iterable of (name, tensor) as a Source."""
    if isinstance(source, str | Path):
        return SafetensorsDirectory(Path(source))
    if isinstance(source, Mapping):
        return StateDict(source)
    if isinstance(source, SafetensorsDirectory | StateDict | Pieces | Dummy):
        return source
    return Pieces(source)
