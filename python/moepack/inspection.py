"""What a file holds: a .pte, a .ptd, an exported directory, a packed blob, or safetensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from moepack.errors import MoePackError, PackedFormatError
from moepack.json_text import read_object
from moepack.manifest import (
    FILE_NAME,
    PROGRAM,
    Manifest,
    content_differences,
    size_differences,
)
from moepack.packed_stacks import (
    PackedStack,
    described,
    mapped_stack,
    packed_constants,
    readonly,
    stack_of,
)
from moepack.program_file import ProgramFile, open_program
from moepack.runtime import executorch_runtime, missing_from_runtime
from moepack.safetensors_file import open_tensors
from moepack.weights_file import IDENTIFIER as WEIGHTS_IDENTIFIER
from moepack.weights_file import WeightsFile, open_weights, weights_of

_BLOB_MAGIC = b"MOEP"


@dataclass
class Inspection:
    """`problems` are what is wrong with the file; `missing` is what this machine lacks."""

    path: str
    kind: str
    bytes: int
    methods: list[dict[str, Any]] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    delegates: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    packed: list[PackedStack] = field(default_factory=list)
    manifest: dict[str, Any] | None = None
    verified: bool = False
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect(path: str | Path, *, verify: bool = False) -> Inspection:
    """Reads structure and headers; with `verify` every checksum as well.

    Raises MoePackError when the file is missing, of no known kind, or too damaged to describe.
    """
    place = Path(path)
    try:
        head = _head(place)
    except OSError as error:
        raise MoePackError(f"{place}: cannot be read: {error.strerror}") from error
    if head is None:
        return _inspect_directory(place, verify)
    if head[4:8] == b"ET12":
        return _inspect_program(place, verify)
    if head[4:8] == WEIGHTS_IDENTIFIER:
        return _inspect_weights(place, verify)
    if head[:4] == _BLOB_MAGIC:
        return _inspect_blob(place, verify)
    if place.suffix == ".safetensors":
        return _inspect_safetensors(place, verify)
    raise MoePackError(
        f"{place}: neither an ExecuTorch program or its weights, nor an exported directory, nor a "
        "packed blob, nor a .safetensors file"
    )


def _head(path: Path) -> bytes | None:
    """The first bytes of a file, None for a directory."""
    if path.is_dir():
        return None
    if not path.is_file():
        raise MoePackError(f"{path}: no such file")
    with path.open("rb") as file:
        return file.read(8)


def _inspect_directory(directory: Path, verify: bool) -> Inspection:
    if not (directory / FILE_NAME).is_file() and any(directory.glob("*.safetensors*")):
        return _inspect_checkpoint(directory, verify)
    manifest = Manifest.read(directory)
    differences = (content_differences if verify else size_differences)(directory, manifest.files)
    size = sum(path.stat().st_size for path in directory.iterdir() if path.is_file())
    if not (directory / PROGRAM).is_file():
        raise MoePackError(f"{directory}: no {PROGRAM}; export it again")
    try:
        found = _inspect_program(directory / PROGRAM, verify)
    except MoePackError as error:
        found = Inspection(str(directory), "exported directory", size)
        differences.append(str(error))
    found.path, found.kind, found.bytes = str(directory), "exported directory", size
    found.manifest = manifest.to_json()
    found.problems = differences + found.problems
    return found


def _inspect_checkpoint(directory: Path, verify: bool) -> Inspection:
    """A packed checkpoint, or any other directory of safetensors files."""
    result = Inspection(str(directory), "checkpoint directory", 0, verified=verify)
    for path in sorted(directory.glob("*.safetensors")):
        part = _inspect_safetensors(path, verify)
        result.bytes += part.bytes
        result.packed += part.packed
        result.problems += part.problems
    result.problems += _missing_shards(directory)
    return result


def _missing_shards(directory: Path) -> list[str]:
    """One line for each file that the index names and the directory does not hold."""
    lines = []
    for index in sorted(directory.glob("*.safetensors.index.json")):
        try:
            homes = read_object(index)["weight_map"]
            counts = Counter(str(home) for home in homes.values())
        except (MoePackError, LookupError, TypeError, AttributeError) as error:
            lines.append(f"{index.name}: damaged index: {error!r}")
            continue
        lines += [
            f"{name}: missing, {count} tensors according to {index.name}"
            for name, count in sorted(counts.items())
            if not (directory / name).is_file()
        ]
    return lines


def _inspect_program(path: Path, verify: bool) -> Inspection:
    file = open_program(path)
    result = Inspection(
        path=str(path),
        kind="ExecuTorch program",
        bytes=len(file.data),
        methods=[
            {
                "name": method.name,
                "instructions": len(method.calls),
                "delegates": len(method.delegates),
                "planned_bytes": method.planned_bytes,
            }
            for method in file.methods
        ],
        operators=sorted(file.operators()),
        delegates=sorted(file.delegates()),
        missing=_missing(file),
        verified=verify,
    )
    weights = _weights(file, result)
    for where, constant in packed_constants(file):
        with _problems(result, where):
            stack = stack_of(file, weights, constant)
            if stack is not None:
                _add_stack(result, where, stack, verify)
    return result


def _weights(file: ProgramFile, result: Inspection) -> WeightsFile | None:
    """What lies beside the program; a file that is not there is missing, a wrong one a problem."""
    path, apart = file.path.with_suffix(".ptd"), file.kept_apart()
    if apart and not path.is_file():
        result.missing.append(f"{len(apart)} tensors in a .ptd file ({path.name} is not there)")
        return None
    try:
        return weights_of(file)
    except MoePackError as error:
        result.problems.append(str(error))
        return None


def _inspect_weights(path: Path, verify: bool) -> Inspection:
    file = open_weights(path)
    result = Inspection(str(path), "ExecuTorch weights", len(file.data), verified=verify)
    for name, stored in file.stored.items():
        data = file.bytes_of(name)
        if stored.shape is not None and data[:4] == _BLOB_MAGIC:
            with _problems(result, name):
                _add_stack(result, name, mapped_stack(data, stored.shape), verify)
    return result


def _missing(file: ProgramFile) -> list[str]:
    """What this machine lacks to run the program, also where no library of ours can be loaded."""
    try:
        return missing_from_runtime(file, executorch_runtime())
    except MoePackError:
        return missing_from_runtime(file, executorch_runtime(moepack_kernels=False))
    except ImportError:
        return sorted(file.operators()) + sorted(file.delegates())


def _inspect_blob(path: Path, verify: bool) -> Inspection:
    result = Inspection(str(path), "packed blob", path.stat().st_size, verified=verify)
    blob = readonly(np.fromfile(path, dtype=np.uint8))
    _add_stack(result, path.name, blob[None], verify)
    return result


def _inspect_safetensors(path: Path, verify: bool) -> Inspection:
    result = Inspection(str(path), "safetensors", path.stat().st_size, verified=verify)
    with open_tensors(path) as file:
        for name in file.keys():  # noqa: SIM118  not a dict
            if name.endswith(("packed_w13", "packed_w2")):
                _add_stack(result, name, file.get_tensor(name), verify)
    return result


def _add_stack(result: Inspection, where: str, stack: Tensor, verify: bool) -> None:
    found, problems = described(where, stack, verify)
    result.problems += problems
    if found is not None:
        result.packed.append(found)


@contextmanager
def _problems(result: Inspection, where: str) -> Iterator[None]:
    """What is no stack is described as a problem, next to what is."""
    try:
        yield
    except PackedFormatError as error:
        result.problems.append(f"{where}: {error}")
