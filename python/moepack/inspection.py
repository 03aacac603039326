"""What a file holds: a .pte, a .ptd, an exported directory, a packed blob, or safetensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moepack import packing
from moepack.errors import MoePackError, PackedFormatError, UnsupportedError
from moepack.json_text import read_object
from moepack.manifest import (
    FILE_NAME,
    PROGRAM,
    Manifest,
    content_differences,
    size_differences,
)
from moepack.program_file import Constant, ProgramFile, open_program
from moepack.runtime import executorch_runtime, missing_from_runtime
from moepack.safetensors_file import open_tensors
from moepack.universal_blob import UNIVERSAL_MAGIC, is_universal, read_header
from moepack.weights_file import IDENTIFIER as WEIGHTS_IDENTIFIER
from moepack.weights_file import WeightsFile, open_weights, weights_of

_BLOB_MAGIC = b"MOEP"
_MAGICS = (_BLOB_MAGIC, UNIVERSAL_MAGIC)
_UNIVERSAL_TYPE = 1
_OPERATORS = ("moepack::", "llama::quantized_moe_ffn")


@dataclass(frozen=True)
class PackedStack:
    """One stacked tensor of packed experts, as its headers describe it.

    Those of torchao's layout say how many bits a code has, and nothing of shape and group.
    """

    where: str
    experts: int
    bytes: int
    scheme: str
    rows: int | None
    cols: int | None
    row_order: str
    version: int
    layout: str = "moepack"


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
    if place.is_dir():
        return _inspect_directory(place, verify)
    if not place.is_file():
        raise MoePackError(f"{place}: no such file")
    with place.open("rb") as file:
        head = file.read(8)
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
    for where, constant in _packed_constants(file, weights):
        stack = _stack(path, _data(file, weights, constant), constant.shape)
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
        data = file.data[stored.segment.offset :]
        if stored.shape is not None and data[:4] == _BLOB_MAGIC:
            _add_stack(result, name, _stack(path, data, stored.shape), verify)
    return result


def _missing(file: ProgramFile) -> list[str]:
    """What this machine lacks to run the program, also where no library of ours can be loaded."""
    try:
        return missing_from_runtime(file, executorch_runtime())
    except MoePackError:
        return missing_from_runtime(file, executorch_runtime(moepack_kernels=False))
    except ImportError:
        return sorted(file.operators()) + sorted(file.delegates())


def _packed_constants(
    file: ProgramFile, weights: WeightsFile | None
) -> Iterator[tuple[str, Constant]]:
    """Those of moepack's operators whose bytes begin like a blob, each once."""
    seen: set[Constant] = set()
    for method in file.methods:
        calls = [call for call in method.calls if call.operator.startswith(_OPERATORS)]
        for index, call in enumerate(calls):
            packed = [c for c in call.constants if _data(file, weights, c)[:4] in _MAGICS]
            for name, constant in zip(("w13", "w2"), packed, strict=False):
                if constant not in seen:
                    seen.add(constant)
                    yield f"{method.name} call {index} {name}", constant


def _data(file: ProgramFile, weights: WeightsFile | None, constant: Constant) -> memoryview:
    """The file from where the constant begins; nothing if it is in a file that is not there."""
    if not constant.name:
        return file.data[constant.offset :]
    if weights is None:
        return memoryview(b"")
    return weights.data[weights.stored[constant.name].segment.offset :]


def _stack(path: Path, data: memoryview, shape: tuple[int, ...]) -> Tensor:
    if len(shape) != 2 or min(shape) < 0 or math.prod(shape) > len(data):
        raise MoePackError(
            f"{path}: packed experts {list(shape)} in {len(data)} bytes; expected [E, bytes]"
        )
    mapped = np.frombuffer(data[: math.prod(shape)], dtype=np.uint8)
    return _readonly(mapped).view(shape)


def _inspect_blob(path: Path, verify: bool) -> Inspection:
    result = Inspection(str(path), "packed blob", path.stat().st_size, verified=verify)
    blob = _readonly(np.fromfile(path, dtype=np.uint8))
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
    if len(stack) and is_universal(stack[0]):
        _add_universal(result, where, stack)
        return
    try:
        headers = [packing.read_header(blob) for blob in stack]
    except PackedFormatError as error:
        result.problems.append(f"{where}: {error}")
        return
    first = headers[0]
    for expert, (header, blob) in enumerate(zip(headers, stack, strict=True)):
        if (header.scheme, header.rows, header.cols) != (first.scheme, first.rows, first.cols):
            result.problems.append(
                f"{where} expert {expert}: shape or scheme differs from expert 0"
            )
        if verify:
            try:
                packing.verify(blob)
            except PackedFormatError as error:
                result.problems.append(f"{where} expert {expert}: {error}")
    result.packed.append(
        PackedStack(
            where=where,
            experts=len(headers),
            bytes=stack.numel(),
            scheme=first.scheme.name,
            rows=first.rows,
            cols=first.cols,
            row_order=first.row_order,
            version=first.version,
        )
    )


def _add_universal(result: Inspection, where: str, stack: Tensor) -> None:
    try:
        bits = {read_header(blob) for blob in stack}
    except (PackedFormatError, UnsupportedError) as error:
        result.problems.append(f"{where}: {error}")
        return
    if len(bits) > 1:
        result.problems.append(f"{where}: codes of {sorted(bits)} bits in one stack")
        return
    kind = (f"int{bits.pop()}", None, None, "plain", _UNIVERSAL_TYPE, "torchao")
    result.packed.append(PackedStack(where, len(stack), stack.numel(), *kind))


def _readonly(array: np.ndarray[Any, np.dtype[np.uint8]]) -> Tensor:
    """A tensor over bytes that nobody here writes; torch would warn about each."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
