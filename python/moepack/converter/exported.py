"""Files and directories with an ExecuTorch program."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moepack import program_file, weights_file
from moepack.converter.program import Target, convert_program
from moepack.converter.stacks import ScaleChanges
from moepack.errors import MoePackError
from moepack.exporter.card import renewed_card
from moepack.manifest import (
    FILE_NAME,
    PROGRAM,
    WEIGHTS,
    Manifest,
    content_differences,
    file_entries,
)
from moepack.program_file import open_program
from moepack.staging import staged, writing
from moepack.weights_file import weights_of

if TYPE_CHECKING:
    from executorch.exir._serialize._cord import Cord


def convert_file(
    source: Path, target: Path, to: Target, changes: ScaleChanges, force: bool
) -> Path:
    """Writes the file `target`, and one beside it with the suffix .ptd where `source` has one.

    Each appears complete or not at all, the program last.
    """
    apart = target.with_suffix(".ptd")
    if target.suffix.lower() == apart.suffix:
        raise MoePackError(f"{target}: its weights would go there; name the program, as a .pte")
    _require_new(target, source, force)
    program, weights = _converted(source, to, changes)
    files = {target: program}
    if weights is not None:
        files = {apart: weights, **files}
        _require_new(apart, source, force)
    mode = source.stat().st_mode & 0o777
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            drafts = {path: Path(folder) / path.name for path in files}
            for path, data in files.items():
                _write(data, drafts[path])
                drafts[path].chmod(mode)
            for path, draft in drafts.items():
                draft.rename(path)
    return target


def convert_exported(
    source: Path, target: Path, to: Target, changes: ScaleChanges, force: bool
) -> Path:
    """The directory of `moepack export` with a new program and a manifest that describes it."""
    manifest = Manifest.read(source)
    if differences := content_differences(source, manifest.files):
        raise MoePackError(f"{source}: {'; '.join(differences)}; export or copy it again")
    with staged(target, force, [source]) as stage:
        program, weights = _converted(source / PROGRAM, to, changes)
        written = {PROGRAM: program} if weights is None else {PROGRAM: program, WEIGHTS: weights}
        for path in source.iterdir():
            if path.is_file() and path.name not in (FILE_NAME, *written):
                shutil.copyfile(path, stage / path.name)
        for name, data in written.items():
            _write(data, stage / name)
        _describe(manifest, stage, to)
    return target


def _converted(source: Path, to: Target, changes: ScaleChanges) -> tuple[Cord, Cord | None]:
    """What the .pte and the .ptd, if there is one, are to hold."""
    file = open_program(source)  # names a file that is missing, cut short or no program
    stored = convert_program(file.data, weights_of(file), to, changes, str(source))
    return stored.written(), stored.written_weights()


def _write(data: Cord, path: Path) -> None:
    with path.open("wb") as file:
        data.write_to_file(file)


def _describe(manifest: Manifest, stage: Path, to: Target) -> None:
    program = open_program(stage / PROGRAM)
    weights = weights_of(program)
    described = replace(
        manifest,
        options={**manifest.options, "layout": to.layout, "upstream": to.upstream},
        program_structure_sha256=program.structure_digest(),
        weights_structure_sha256=weights.structure_digest() if weights else None,
        files=file_entries(stage, manifest.files),
    )
    described.write(stage)
    readme = stage / "README.md"
    if readme.is_file():
        card = renewed_card(described, readme.read_text(encoding="utf-8", errors="replace"))
        readme.write_text(card, encoding="utf-8")


def _require_new(path: Path, source: Path, force: bool) -> None:
    with writing(path):
        if path.is_symlink():
            raise MoePackError(f"{path} is a symbolic link; name the file itself as output")
        if path.exists():
            _require_replaceable(path, source, force)


def _require_replaceable(path: Path, source: Path, force: bool) -> None:
    sources = {source.resolve(), source.with_suffix(".ptd").resolve()}
    if path.is_dir() or path.resolve() in sources:
        raise MoePackError(f"{path}: name a new file as output")
    if not force:
        raise MoePackError(f"{path} exists; choose another output or pass --force to replace it")
    if not path.is_file() or not _is_of_executorch(path):
        raise MoePackError(f"{path} exists and is not replaced: it is no file of ExecuTorch's")


def _is_of_executorch(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(8)[4:] in (program_file.IDENTIFIER, weights_file.IDENTIFIER)
