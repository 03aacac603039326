"""Stacks of packed experts in files: which constants of a program they are, what headers say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from math import prod

import numpy as np
import torch
from torch import Tensor

from moepack import ops, packing
from moepack.acceleration import ARGUMENTS
from moepack.acceleration import OPERATOR as UPSTREAM
from moepack.errors import PackedFormatError, UnsupportedError
from moepack.program_file import Constant, ProgramFile
from moepack.universal_blob import is_universal, read_header
from moepack.weights_file import WeightsFile

FFN, EXPERTS = "moepack::quantized_moe_ffn", "moepack::quantized_experts"
OPERATORS = (UPSTREAM, FFN, EXPERTS)
STACKS = ("packed_w13", "packed_w2")
_UINT8 = 0  # among ExecuTorch's scalar types
_UNIVERSAL_TYPE = 1


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


def argument_names(operator: str) -> list[str]:
    """Of one of the OPERATORS, as its schema has them."""
    if operator == UPSTREAM:
        return list(ARGUMENTS)
    return list(signature(getattr(ops, operator.removeprefix("moepack::"))).parameters)


def packed_constants(file: ProgramFile) -> Iterator[tuple[str, Constant]]:
    """Those that the program's calls take as packed experts, by method and call, each once."""
    seen: set[Constant] = set()
    for method in file.methods:
        named = [(call.operator.partition(".")[0], call.arguments) for call in method.calls]
        calls = [call for call in named if call[0] in OPERATORS]
        for index, (operator, arguments) in enumerate(calls):
            given = dict(zip(argument_names(operator), arguments, strict=False))
            for name in STACKS:
                constant = given.get(name)
                if constant is not None and constant not in seen:
                    seen.add(constant)
                    yield f"{method.name} call {index} {name.removeprefix('packed_')}", constant


def stack_of(file: ProgramFile, weights: WeightsFile | None, constant: Constant) -> Tensor | None:
    """The mapped stack, uint8 [E, bytes]; None if it is in a file of weights that is not there.

    Raises PackedFormatError for another dtype or shape, or fewer bytes.
    """
    if constant.scalar_type != _UINT8:
        raise PackedFormatError(
            f"packed experts of ExecuTorch's scalar type {constant.scalar_type}; expected uint8"
        )
    if not constant.name:
        return mapped_stack(file.constant_bytes(constant), constant.shape)
    if weights is None:
        return None
    return mapped_stack(weights.bytes_of(constant.name), constant.shape)


def mapped_stack(data: memoryview, shape: tuple[int, ...]) -> Tensor:
    """uint8 [E, bytes]. Raises PackedFormatError for another shape, or fewer bytes."""
    if len(shape) != 2 or min(shape) < 1 or prod(shape) > len(data):
        raise PackedFormatError(
            f"packed experts {list(shape)} in {len(data)} bytes; expected [E, bytes]"
        )
    return readonly(np.frombuffer(data[: prod(shape)], dtype=np.uint8)).view(shape)


def readonly(array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Tensor:
    """A tensor over bytes that nobody here writes; torch would warn about each."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def described(where: str, stack: Tensor, verify: bool) -> tuple[PackedStack | None, list[str]]:
    """What the headers of a stack, uint8 or int8 [E, bytes], say, and what is wrong with it.

    With `verify` checksums too, where the layout has them.
    """
    if stack.dim() != 2 or stack.element_size() != 1 or not stack.numel():
        return None, [f"{where}: {stack.dtype} {list(stack.shape)}; expected uint8 [E, bytes]"]
    blobs = stack.view(torch.uint8)
    try:
        if is_universal(blobs[0]):
            return _described_universal(where, blobs), []
        headers = [packing.read_header(blob) for blob in blobs]
    except (PackedFormatError, UnsupportedError) as error:
        return None, [f"{where}: {error}"]
    first = headers[0]
    found = PackedStack(
        where=where,
        experts=len(headers),
        bytes=stack.numel(),
        scheme=first.scheme.name,
        rows=first.rows,
        cols=first.cols,
        row_order=first.row_order,
        version=first.version,
    )
    same = (first.scheme, first.rows, first.cols)
    problems = [
        f"{where} expert {expert}: shape or scheme differs from expert 0"
        for expert, header in enumerate(headers)
        if (header.scheme, header.rows, header.cols) != same
    ]
    return found, problems + (_damaged(where, blobs) if verify else [])


def _described_universal(where: str, blobs: Tensor) -> PackedStack:
    bits = {read_header(blob) for blob in blobs}
    if len(bits) > 1:
        raise PackedFormatError(f"codes of {sorted(bits)} bits in one stack")
    kind = (f"int{bits.pop()}", None, None, "plain", _UNIVERSAL_TYPE, "torchao")
    return PackedStack(where, len(blobs), blobs.numel(), *kind)


def _damaged(where: str, blobs: Tensor) -> list[str]:
    problems = []
    for expert, blob in enumerate(blobs):
        try:
            packing.verify(blob)
        except PackedFormatError as error:
            problems.append(f"{where} expert {expert}: {error}")
    return problems
