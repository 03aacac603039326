"""Packed models from one layout of experts to the other, without the original weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from moepack import packing
from moepack.converter.checkpoint import convert_checkpoint
from moepack.converter.exported import convert_exported, convert_file
from moepack.converter.program import Target, convert_program
from moepack.converter.stacks import ScaleChanges
from moepack.converter.state import convert_module, convert_state_dict
from moepack.errors import MoePackError, UnsupportedError, reported
from moepack.manifest import FILE_NAME, PROGRAM

__all__ = ["Conversion", "ScaleChanges", "convert"]


@dataclass(frozen=True)
class Conversion:
    """`result`: the new directory, file, bytes or state dict, or the model that was changed.

    Codes are always the same. `changes` says what became of the scales: into torchao's layout
    (fp32) all stay; into moepack's (fp16 with one exponent for the matrix) some may be rounded.
    """

    result: Any
    layout: str
    changes: ScaleChanges

    def to_json(self) -> dict[str, Any]:
        return {
            "result": str(self.result) if isinstance(self.result, Path) else None,
            "layout": self.layout,
            "scales": self.changes.scales,
            "changed_scales": self.changes.changed,
            "largest_relative_change": self.changes.largest,
        }

    def __str__(self) -> str:
        changes = self.changes
        told = f"all codes kept, all {changes.scales:,} scales kept"
        if not changes.scales:
            told = "weights as they were"
        elif changes.changed:
            told = (
                f"all codes kept, {changes.changed:,} of {changes.scales:,} scales rounded to "
                f"fp16, by at most {changes.largest:.2e} of their value"
            )
        where = f"{self.result}: " if isinstance(self.result, Path) else ""
        return f"{where}experts in the layout {self.layout}; {told}"


def convert(
    source: nn.Module | Mapping[str, Tensor] | bytes | str | Path,
    out: str | Path | None = None,
    *,
    layout: str,
    scheme: str | None = None,
    dim: int | None = None,
    upstream: bool = False,
    force: bool = False,
) -> Conversion:
    """Turns a packed model into one whose experts are in `layout`, "moepack" or "torchao".

    `source` is one of
    - a directory: a packed checkpoint (of `moepack quantize`, `save_pretrained`), or what `moepack
      export` wrote; the new one goes to `out`,
    - a .pte file, written to the file `out` (with a .ptd, if one lies beside it), or the bytes of
      one that holds its weights. Calls of ExecuTorch's own operator `llama::quantized_moe_ffn`
      become calls of moepack's with layout="moepack", and moepack's its with `upstream` and
      layout="torchao",
    - a state dict: the result is a new one. torchao's blobs do not say what they hold: from these
      `scheme` is needed, and the model's width `dim` where no gate_weight beside them shows it,
    - a model with packed modules, which is changed in place.

    Codes are kept. Raises UnsupportedError for what the layout cannot hold (dimensions that are no
    multiple of the group, scales beyond its range, other groups), for what upstream's operator does
    not compute, for a source without packed experts or all in `layout` already; PackedFormatError
    for damaged blobs; MoePackError for `out`. Nothing is changed or written then.
    """
    packing.require_layout(layout)
    to = Target(layout, upstream)
    changes = ScaleChanges()
    result: Any
    if isinstance(source, (str, Path)):
        with reported(source):
            result = _convert_path(Path(source), out, to, changes, force)
    elif out is not None:
        raise MoePackError("`out` is for files and directories; the result is in memory")
    elif isinstance(source, bytes):
        stored = convert_program(memoryview(source), None, to, changes, "the program")
        result = bytes(stored.written())
    elif upstream:
        raise _only_programs(type(source).__name__)
    elif isinstance(source, nn.Module):
        result = convert_module(source, layout, changes)
    else:
        result = convert_state_dict(source, layout, changes, scheme, dim)
    return Conversion(result, layout, changes)


def _convert_path(
    source: Path, out: str | Path | None, to: Target, changes: ScaleChanges, force: bool
) -> Path:
    if out is None:
        raise MoePackError(f"{source}: say where the converted model goes: `out`")
    target = Path(out)
    if source.is_file():
        return convert_file(source, target, to, changes, force)
    if (source / FILE_NAME).is_file() and (source / PROGRAM).is_file():
        return convert_exported(source, target, to, changes, force)
    if (source / "config.json").is_file():
        if to.upstream:
            raise _only_programs(str(source))
        return convert_checkpoint(source, target, to.layout, changes, force)
    raise MoePackError(
        f"{source}: neither a .pte file, nor an exported directory ({FILE_NAME}, {PROGRAM}), nor a "
        "packed checkpoint (config.json)"
    )


def _only_programs(found: str) -> UnsupportedError:
    return UnsupportedError(
        f"{found} with upstream=True; only programs call operators: give a .pte or an exported "
        "directory"
    )
