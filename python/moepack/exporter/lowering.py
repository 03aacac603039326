"""torch.export -> edge dialect -> .pte (+ .ptd), with XNNPACK for what it can run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from moepack import ops
from moepack.errors import UnsupportedError

# Vector loads of packed weights are unaligned everywhere; whole cache lines are still faster.
CONSTANT_ALIGNMENT = 64

Shapes = dict[str, Any] | tuple[Any, ...] | None


@dataclass(frozen=True)
class Method:
    """What becomes an entry point: a module, an example of its inputs, which sizes may vary."""

    module: nn.Module
    example: tuple[torch.Tensor, ...]
    dynamic_shapes: Shapes = None


def write_program(
    module: nn.Module,
    example: tuple[torch.Tensor, ...],
    dynamic_shapes: Shapes,
    constants: Mapping[str, Any],
    path: Path,
    weights: Path | None = None,
) -> None:
    """Exports `module` as the method `forward` and writes the program; see `write_methods`."""
    write_methods({"forward": Method(module, example, dynamic_shapes)}, constants, path, weights)


def write_methods(
    methods: Mapping[str, Method],
    constants: Mapping[str, Any],
    path: Path,
    weights: Path | None = None,
) -> None:
    """Exports modules as the methods of one program, which holds what they share once.

    `constants` become methods that return a value. State (buffers that a method mutates) is written
    in place: the cache is never copied. Weights go into the file from the memory in which they lie,
    aligned to 64 bytes; into the file `weights` (a .ptd beside `path`) where that is given.
    Raises UnsupportedError naming operators that ExecuTorch does not have.
    """
    ops.load()
    with torch.no_grad(), _quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

        from moepack.exporter.constants import constants_in_place

        edge = to_edge_transform_and_lower(
            {name: _exported(method) for name, method in methods.items()},
            partitioner=[XnnpackPartitioner()],
            constant_methods=dict(constants),
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        if weights is not None:
            _move_delegates_data(edge, weights.name)
        with constants_in_place(), _missing_kernels_named():
            program = edge.to_executorch(_backend_config(weights))
        with path.open("wb") as file:
            program.write_to_file(file)
        if weights is not None:
            program.write_tensor_data_to_file(weights.parent)


def _exported(method: Method) -> ExportedProgram:
    return torch.export.export(
        method.module, method.example, dynamic_shapes=method.dynamic_shapes, strict=False
    )


def _move_delegates_data(edge: Any, file: str) -> None:
    """Weights of XNNPACK's layers, too, go to `file`.

    Upstream's way, a tag on the graph's nodes, gets lost where torchao's tensors are unwrapped.
    """
    store = edge._named_data_store
    store.external_data.setdefault(file, {}).update(store.pte_data)
    store.pte_data = {}


def _backend_config(weights: Path | None) -> Any:
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes import MemoryPlanningPass

    return ExecutorchBackendConfig(
        constant_tensor_alignment=CONSTANT_ALIGNMENT,
        run_reinplace_pass=True,
        memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False),
        external_constants=False if weights is None else lambda node: weights.name,
    )


@contextmanager
def _missing_kernels_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        _, found, operators = str(error).partition("Missing out variants: ")
        if not found:
            raise
        raise UnsupportedError(
            f"ExecuTorch has no kernels for {operators}, which the model calls outside its packed "
            "experts; it cannot be exported"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the lowering's notes about its own internals off the user's terminal."""
    kept = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(kept)
