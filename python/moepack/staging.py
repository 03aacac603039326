"""A directory that appears complete or not at all, and never in the place of somebody's files."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from moepack.errors import MoePackError
from moepack.json_text import read_object
from moepack.manifest import FILE_NAME, METHOD_NAME, PACKED_FILE, PROGRAM, WEIGHTS
from moepack.tokenizer import FILES as TOKENIZER_FILES

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST_NAME = 230  # the names of unfinished work are longer, and file systems end at 255

# Everything that moepack writes; `replace` deletes nothing else.
_OWN_FILES = (
    *(FILE_NAME, PROGRAM, WEIGHTS, "README.md", PACKED_FILE),
    *("config.json", "generation_config.json"),
    *("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"),
    *("experts-*.safetensors", "rest-*.safetensors", *TOKENIZER_FILES),
)


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """What the system refuses becomes a MoePackError that names what was to be written."""
    try:
        yield
    except MoePackError:
        raise
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise MoePackError(f"{target}: cannot be written: {reason}") from error


@contextmanager
def staged(target: Path, replace: bool, sources: Sequence[Path] = ()) -> Iterator[Path]:
    """Gives an empty folder beside `target`; at the end it is renamed to `target`.

    On any exception the folder is removed and all is as it was. Raises MoePackError as
    `require_output`, before and after the work.
    """
    require_output(target, replace, sources)
    made = _make_parents(target)
    try:
        with writing(target):
            stage = Path(
                tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
            )
    except MoePackError:
        _remove_empty(made)
        raise
    try:
        yield stage
        require_output(target, replace, sources)
        _make_ordinary(stage)
        put_in_place(stage, target)
    except BaseException as error:
        shutil.rmtree(stage, ignore_errors=True)
        _remove_empty(made)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise MoePackError(f"{target}: cannot be written: {error.strerror}") from error
        raise


def require_output(target: Path, replace: bool, sources: Sequence[Path] = ()) -> None:
    """Raises MoePackError unless the directory `target` can be made without loss.

    It may exist if `replace` is set and it is empty or holds moepack's own output alone. It may
    not be one of the `sources`, nor contain one, nor lie inside one.
    """
    with writing(target):
        _require_place(target)
        for source in sources:
            _require_apart(target, source)
        if target.exists():
            _require_replaceable(target, replace)


def require_file(path: Path) -> None:
    """Raises MoePackError where a file cannot be written, before the work whose result it takes."""
    with writing(path):
        is_blocked = path.is_dir() or not path.absolute().parent.is_dir()
        place = path if path.exists() else path.absolute().parent
    if is_blocked or not os.access(place, os.W_OK):
        raise MoePackError(f"{path}: cannot be written; name a file in a directory that exists")


def put_in_place(stage: Path, target: Path) -> None:
    """Renames `stage` to `target`; a directory that is there goes when the new one has come."""
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


def _require_place(target: Path) -> None:
    if target.name in ("", ".."):
        raise MoePackError(f"{target}: names no directory of its own; choose a new name as output")
    if "\0" in str(target):
        raise ValueError("the path has a null character")
    length = len(os.fsencode(target.name))
    if length > _LONGEST_NAME:
        raise MoePackError(
            f"{target.name[:40]}...: the name has {length} bytes; at most {_LONGEST_NAME}"
        )
    if target.is_symlink():
        raise MoePackError(f"{target} is a symbolic link; name the directory itself as output")
    if target.exists() and not target.is_dir():
        raise MoePackError(f"{target} is a file; choose a directory as output")
    parent = next(path for path in target.absolute().parents if path.exists())
    if not parent.is_dir():
        raise MoePackError(f"{target}: {parent} is a file, no directory can be made in it")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise MoePackError(f"{target}: no permission to write in {parent}")


def _require_apart(target: Path, source: Path) -> None:
    # A link that leads to itself is the reader's to refuse; Path.resolve would raise for it.
    out, given = (Path(os.path.realpath(path)) for path in (target, source))
    if out == given or given in out.parents or out in given.parents:
        how = "is" if out == given else "lies inside" if given in out.parents else "contains"
        raise MoePackError(
            f"{target} {how} the source {source}, which is never changed; choose another output"
        )


def _require_replaceable(target: Path, replace: bool) -> None:
    if not replace:
        raise MoePackError(f"{target} exists; choose another output or pass --force to replace it")
    paths = sorted(target.iterdir())
    foreign = [p.name for p in paths if not _is_own_file(p)]
    if foreign or (paths and not _has_marker(target)):
        found = f"it holds {foreign[0]}" if foreign else "it was not made by moepack"
        raise MoePackError(
            f"{target} exists and is not replaced: {found}; --force replaces moepack's own output "
            "only. Choose another output or remove it yourself"
        )


def _is_own_file(path: Path) -> bool:
    is_plain = path.is_file() and not path.is_symlink()
    return is_plain and any(fnmatchcase(path.name, pattern) for pattern in _OWN_FILES)


def _has_marker(directory: Path) -> bool:
    quantization = _object(directory / "config.json").get("quantization_config")
    return (
        "program_structure_sha256" in _object(directory / FILE_NAME)
        or "blocks" in _object(directory / PACKED_FILE)
        or (isinstance(quantization, dict) and quantization.get("quant_method") == METHOD_NAME)
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except MoePackError:
        return {}


def _make_parents(target: Path) -> list[Path]:
    """Makes the directories above `target`; returns those that were not there, inner ones first."""
    new = [path for path in target.absolute().parents if not path.exists()]
    try:
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
    except MoePackError:
        _remove_empty(new)
        raise
    return new


def _remove_empty(directories: Sequence[Path]) -> None:
    with suppress(OSError):
        for path in directories:
            path.rmdir()


def _make_ordinary(stage: Path) -> None:
    """mkdtemp and safetensors make what they write private; the result is for whom umask says."""
    mask = _umask()
    stage.chmod(0o777 & ~mask)
    for path in stage.iterdir():
        path.chmod(0o666 & ~mask)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
