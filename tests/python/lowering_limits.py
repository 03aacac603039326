"""What stops torch.export, ExecuTorch or transformers at some models, in a few lines each.

None of it needs moepack: the modules are plain torch, and `original` takes a model as transformers
builds it.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import tiny_models


class Rotary(nn.Module):
    def forward(self, angles: Tensor) -> Tensor:
        return torch.view_as_real(torch.polar(torch.ones_like(angles), angles))


class Count(nn.Module):
    def forward(self, mask: Tensor) -> Tensor:
        chosen = mask.nonzero()
        return chosen if chosen.shape[0] // 2 > 0 else mask


class Loop(nn.Module):
    def forward(self, mask: Tensor) -> Tensor:
        total = torch.zeros(())
        for hit in mask.nonzero():
            total = total + mask[hit[0]]
        return total


class Split(nn.Module):
    def forward(self, x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
        parts = x.split(sizes.tolist())
        return torch.cat([nn.functional.linear(part, weight) for part in parts])


class NoMask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = None if torch.compiler.is_compiling() else torch.ones_like(x)
        return x * mask[None]  # type: ignore[index]


@dataclass(frozen=True)
class Limit:
    """`error`, a pattern: what the module, and each entry, ends in. `why` is for the page."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    error: str
    entries: tuple[str, ...]
    why: str


LIMITS = (
    Limit(
        Rotary(),
        (torch.ones(3),),
        r"aten\.polar|error: 0x:14",  # refused by ExecuTorch's check, or by its runtime
        ("deepseek_v2", "deepseek_v2_greedy", "llama4_text"),
        "ExecuTorch has no kernels for complex numbers: rotary embeddings written with them are "
        "refused by its check of the graph, or do not load.",
    ),
    Limit(
        Count(),
        (torch.ones(4),),
        r"GuardOnDataDependentSymNode: .* (> 0|< 2) ",
        ("qwen4_exp_text", "glm5_next_text"),
        "torch.export refuses a branch on how many elements a mask selects: the indexer of sparse "
        "attention.",
    ),
    Limit(
        Loop(),
        (torch.ones(4),),
        r"GuardOnDataDependentSymNode: .*Eq\(u0, 0\)",
        ("nllb-moe",),
        "torch.export refuses a loop over what a mask selects: the block calls the experts that "
        "were hit one by one.",
    ),
    Limit(
        Split(),
        (torch.ones(6, 2), torch.ones(2, 2), torch.tensor([2, 4])),
        r"InternalError: Could not extract specialized integer",
        ("jetmoe",),
        "ExecuTorch refuses sizes that depend on values: the experts inside attention.",
    ),
    Limit(
        NoMask(),
        (torch.ones(3),),
        r"TypeError: 'NoneType' object is not subscriptable",
        ("switch_transformers",),
        "transformers makes no attention mask for the encoder while it is traced; with one given, "
        "the loop over experts above is next.",
    ),
)


def lines_of(limit: Limit) -> str:
    return inspect.getsource(type(limit.module))


def plain(limit: Limit) -> str:
    """What exporting, lowering and loading the module of a few lines ends in; "" if it runs."""
    from executorch.exir import to_edge_transform_and_lower

    def lower() -> bytes:
        exported = torch.export.export(limit.module, limit.inputs, strict=False)
        return bytes(to_edge_transform_and_lower(exported).to_executorch().buffer)

    return _error_of(lower)


def original(entry: str) -> str:
    """The same of a model as transformers builds it, in float, through transformers' exporter."""
    from transformers.exporters.exporter_executorch import ExecutorchConfig, ExecutorchExporter

    def lower() -> bytes:
        model = tiny_models.build(entry)
        inputs = {**tiny_models.inputs(entry, 12), "use_cache": False}
        program = ExecutorchExporter().export(model, inputs, config=ExecutorchConfig()).program
        return bytes(program.buffer)

    return _error_of(lower)


def _error_of(lower: Callable[[], bytes]) -> str:
    from executorch.runtime import Runtime

    try:
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.pte"
            path.write_bytes(lower())
            Runtime.get().load_program(path).load_method("forward")
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""
