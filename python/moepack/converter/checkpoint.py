"""Directories of a packed checkpoint: safetensors files, copied but for their packed experts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moepack.attributes import ExpertAttributes
from moepack.converter.stacks import ScaleChanges, StackForm, converted_blobs
from moepack.converter.state import forms_of
from moepack.errors import MoePackError, PackedFormatError, UnsupportedError
from moepack.json_text import read_object
from moepack.manifest import METHOD_NAME, PACKED_FILE
from moepack.modules import PackedExperts
from moepack.online.files import Replacement, copy_tensors
from moepack.online.loading import meta_model, place_empty, read_config, settings_of
from moepack.safetensors_file import open_tensors, read_entries
from moepack.staging import staged

_INDEX = "model.safetensors.index.json"


def convert_checkpoint(
    source: Path, target: Path, layout: str, changes: ScaleChanges, force: bool
) -> Path:
    """Writes the new directory, one expert in memory at a time."""
    forms = {name: form for name, form in _forms(source).items() if form.layout != layout}
    if not forms:
        raise UnsupportedError(f"{source}: its experts are in the layout {layout!r} already")
    for name, form in forms.items():
        try:
            form.converted(layout)
        except UnsupportedError as error:
            raise UnsupportedError(f"{source}: {name}: {error}") from error
    with staged(target, force, [source]) as stage:
        missing = set(forms)
        total = 0
        for path in sorted(source.iterdir()):
            if path.suffix == ".safetensors":
                names = read_entries(path)[0]
                here = {name: forms[name] for name in names if name in forms}
                total += _convert_tensors(path, stage / path.name, here, layout, changes)
                missing -= here.keys()
            elif path.is_file():
                shutil.copyfile(path, stage / path.name)
        if missing:
            raise PackedFormatError(f"{source}: lacks {', '.join(sorted(missing)[:4])}")
        _describe(stage, layout, total)
    return target


def _forms(source: Path) -> dict[str, StackForm]:
    """What each packed tensor of the checkpoint holds, by its name."""
    if (source / PACKED_FILE).is_file():
        return _forms_of_blocks(read_object(source / PACKED_FILE))
    config = read_config(source)
    settings: Any = getattr(config, "quantization_config", None)
    if not isinstance(settings, dict) or settings.get("quant_method") != METHOD_NAME:
        raise MoePackError(f"{source}: its experts are not packed; `moepack quantize` packs them")
    model = meta_model(config, torch.float32)
    place_empty(model, settings_of(settings))
    return {
        f"{path}.{name}".removeprefix("."): form
        for path, module in model.named_modules()
        if isinstance(module, PackedExperts)
        for name, form in forms_of(module.attributes, module.dim).items()
    }


def _forms_of_blocks(description: Mapping[str, Any]) -> dict[str, StackForm]:
    return {
        f"{path}.{name}": form
        for path, block in description["blocks"].items()
        for name, form in forms_of(ExpertAttributes(**block["experts"]), block["dim"]).items()
    }


def _convert_tensors(
    source: Path, target: Path, forms: Mapping[str, StackForm], layout: str, changes: ScaleChanges
) -> int:
    """One safetensors file; returns the bytes of its tensors."""
    entries, _ = read_entries(source)
    replaced: dict[str, Replacement] = {}
    for name, form in forms.items():
        dtype, shape = entries[name]["dtype"], entries[name]["shape"]
        if len(shape) != 2 or shape[1] != form.blob_bytes or dtype != "U8":
            raise PackedFormatError(
                f"{source}: {name} is {dtype} {shape}; {form.scheme} in the layout {form.layout!r} "
                f"is U8 [E, {form.blob_bytes}]"
            )
        new_shape = [shape[0], form.converted(layout).blob_bytes]
        replaced[name] = Replacement(
            new_shape, partial(_blobs, source, name, shape[0], form, changes)
        )
    return copy_tensors(source, entries, target, replaced)


def _blobs(
    source: Path, name: str, experts: int, form: StackForm, changes: ScaleChanges
) -> Iterator[bytes]:
    with open_tensors(source) as file:
        stack = file.get_slice(name)
        blobs = (stack[expert] for expert in range(experts))
        for blob in converted_blobs(blobs, form, changes, f"{source}: {name}"):
            yield blob.numpy().tobytes()


def _describe(stage: Path, layout: str, total: int) -> None:
    if (stage / _INDEX).is_file():
        _update(stage / _INDEX, lambda index: index["metadata"].update(total_size=total))
    if (stage / PACKED_FILE).is_file():
        _update(stage / PACKED_FILE, partial(_set_layout, layout=layout))
        return
    _update(
        stage / "config.json", lambda config: config["quantization_config"].update(layout=layout)
    )


def _set_layout(description: dict[str, Any], layout: str) -> None:
    for block in description["blocks"].values():
        block["experts"]["layout"] = layout


def _update(path: Path, change: Any) -> None:
    content = read_object(path)
    change(content)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
