"""The files of ExecuTorch's LLM export: checked before it begins, written whole or not at all.

Upstream does without what it cannot read, and logs what it cannot write.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from moepack.errors import BadWeights, MoePackError, reported
from moepack.json_text import read_object
from moepack.staging import require_file, writing


def require_files(config: Any) -> list[str]:
    """Checks the output, the metadata, the params file and the checkpoint of a configuration.

    Returns the names of the stored weights. Raises MoePackError naming the file or the option,
    BadWeights for a checkpoint without weights.
    """
    _require_output(config.export)
    if config.base.metadata:
        _require_metadata(config.base.metadata)
    if config.base.params:
        read_object(Path(config.base.params))
    return [] if config.base.checkpoint is None else _stored_names(config.base.checkpoint)


def _stored_names(checkpoint: str) -> list[str]:
    """Upstream takes what torch.save has written, also with a "model" around it."""
    if not zipfile.is_zipfile(checkpoint):
        raise MoePackError(
            f"{checkpoint}: missing, cut short, or no checkpoint of torch.save (a .pth file)"
        )
    with reported(checkpoint):
        held = torch.load(checkpoint, map_location="cpu", mmap=True)
        names = list(dict(held.get("model", held)))
    if not names:
        raise BadWeights(f"{checkpoint}: holds no weights")
    return names


def save_program(program: Any, name: str, output_dir: str = "") -> str:
    """Upstream's `save_pte_program`: writes the .pte and the .ptd files, returns the path.

    They appear complete, the program last. Raises MoePackError if they cannot be written.
    """
    path = _output(name, output_dir)
    target, data = path.resolve(), Path(output_dir).resolve()
    hidden = f".{target.name}."
    with (
        writing(path),
        TemporaryDirectory(prefix=hidden, dir=target.parent) as draft,
        TemporaryDirectory(prefix=hidden, dir=data) as data_drafts,
    ):
        written = Path(draft, target.name)
        with written.open("wb") as file:
            program.write_to_file(file)
        program.write_tensor_data_to_file(outdir=data_drafts)
        for finished in Path(data_drafts).iterdir():
            finished.replace(data / finished.name)
        written.replace(target)
    return str(path)


def _output(name: str, output_dir: str) -> Path:
    """As upstream understands a name."""
    return Path(name) if name.endswith(".pte") else Path(output_dir, f"{name}.pte")


def _require_output(export: Any) -> None:
    output = _output(export.output_name or "", export.output_dir)
    require_file(output)
    if output.exists() and not output.is_file():
        raise MoePackError(f"{output}: cannot be written; it is there and no regular file")


def _require_metadata(text: str) -> None:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise MoePackError(f"metadata {text!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise MoePackError(f"metadata {text!r}; expected a JSON object")
