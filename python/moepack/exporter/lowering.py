"""torch.export -> edge dialect -> .pte, with XNNPACK for what it can run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moepack import ops

# Vector loads of packed weights are unaligned everywhere; whole cache lines are still faster.
CONSTANT_ALIGNMENT = 64


def write_program(
    module: nn.Module,
    example: tuple[torch.Tensor, ...],
    dynamic_shapes: dict[str, Any] | tuple[Any, ...] | None,
    constants: Mapping[str, Any],
    path: Path,
) -> None:
    """Exports `module` as the method `forward` and writes the program.

    `constants` become methods that return a value. State (buffers that forward mutates) is written
    in place: the cache is never copied.
    """
    ops.load()
    with torch.no_grad(), _quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

        exported = torch.export.export(module, example, dynamic_shapes=dynamic_shapes, strict=False)
        edge = to_edge_transform_and_lower(
            exported,
            partitioner=[XnnpackPartitioner()],
            constant_methods=dict(constants),
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        program = edge.to_executorch(_backend_config())
    with path.open("wb") as file:
        program.write_to_file(file)


def _backend_config() -> Any:
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes import MemoryPlanningPass

    return ExecutorchBackendConfig(
        constant_tensor_alignment=CONSTANT_ALIGNMENT,
        run_reinplace_pass=True,
        memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False),
    )


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
