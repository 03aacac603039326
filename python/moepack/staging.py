"""A directory that appears complete or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moepack.errors import MoePackError


@contextmanager
def staged(target: Path, replace: bool) -> Iterator[Path]:
    """Gives an empty folder beside `target`; at the end it is renamed to `target`.

    On any exception the folder is removed and `target` is as it was. Raises MoePackError when
    `target` exists and `replace` is false, before and after the work.
    """
    _refuse_existing(target, replace)
    target.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        yield stage
        _refuse_existing(target, replace)
        _make_ordinary(stage)
        _put_in_place(stage, target)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def _refuse_existing(target: Path, replace: bool) -> None:
    if target.exists() and not replace:
        raise MoePackError(f"{target} exists; choose another output or pass --force to replace it")
    if target.exists() and not target.is_dir():
        raise MoePackError(f"{target} is a file; choose a directory as output")


def _make_ordinary(stage: Path) -> None:
    """mkdtemp and safetensors make what they write private; the result is for whom umask says."""
    mask = _umask()
    stage.chmod(0o777 & ~mask)
    for path in stage.iterdir():
        path.chmod(0o666 & ~mask)


def _put_in_place(stage: Path, target: Path) -> None:
    if not target.exists():
        stage.rename(target)
        return
    # A directory cannot be renamed over a full one: the old one steps aside, and back on failure.
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    old = aside / target.name
    target.rename(old)
    try:
        stage.rename(target)
    except BaseException:
        old.rename(target)
        raise
    finally:
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
