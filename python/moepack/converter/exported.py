"""Files and directories with an ExecuTorch program."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from moepack.converter.program import convert_program
from moepack.converter.stacks import ScaleChanges
from moepack.errors import MoePackError
from moepack.manifest import FILE_NAME, PROGRAM, Manifest, content_differences, file_entries
from moepack.program_file import open_program
from moepack.staging import staged


def convert_file(
    source: Path, target: Path, layout: str, changes: ScaleChanges, force: bool
) -> Path:
    """Writes the file `target`; it appears complete or not at all."""
    if target.exists() and (target.is_dir() or target.resolve() == source.resolve()):
        raise MoePackError(f"{target}: name a new file as output")
    if target.exists() and not force:
        raise MoePackError(f"{target} exists; choose another output or pass --force to replace it")
    data = _converted(source, layout, changes)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(draft).chmod(source.stat().st_mode & 0o777)
            Path(draft).rename(target)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise MoePackError(f"{target}: cannot be written: {error.strerror}") from error
    return target


def convert_exported(
    source: Path, target: Path, layout: str, changes: ScaleChanges, force: bool
) -> Path:
    """The directory of `moepack export` with a new program and a manifest that describes it."""
    manifest = Manifest.read(source)
    if differences := content_differences(source, manifest.files):
        raise MoePackError(f"{source}: {'; '.join(differences)}; export or copy it again")
    with staged(target, force, [source]) as stage:
        for path in source.iterdir():
            if path.is_file() and path.name not in (PROGRAM, FILE_NAME):
                shutil.copyfile(path, stage / path.name)
        (stage / PROGRAM).write_bytes(_converted(source / PROGRAM, layout, changes))
        replace(
            manifest,
            options={**manifest.options, "layout": layout},
            program_structure_sha256=open_program(stage / PROGRAM).structure_digest(),
            files=file_entries(stage, manifest.files),
        ).write(stage)
    return target


def _converted(source: Path, layout: str, changes: ScaleChanges) -> bytes:
    open_program(source)  # names a file that is missing, cut short or no program
    return convert_program(source.read_bytes(), layout, changes, str(source))
