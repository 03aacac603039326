"""manifest.json: what an exported directory holds, how it was made, how to check it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from moepack.errors import MoePackError
from moepack.json_text import finite, json_text, read_object

FILE_NAME = "manifest.json"
PROGRAM = "model.pte"
WEIGHTS = "model.ptd"  # beside it, where a program keeps its weights apart
PACKED_FILE = "moepack.json"  # marks a packed checkpoint
METHOD_NAME = "moepack"  # quant_method in the config.json of a packed checkpoint
FORMAT = 2
_CHUNK = 1 << 22


@dataclass(frozen=True)
class FileEntry:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json; `to_json` and `read` are inverse."""

    versions: dict[str, str]
    scheme: str
    options: dict[str, Any]
    model: dict[str, Any]
    methods: dict[str, Any]
    tokens: dict[str, Any]
    sqnr_db: dict[str, float | None]
    layers: dict[str, str]
    program_structure_sha256: str
    files: dict[str, FileEntry]
    weights_structure_sha256: str | None = None  # of WEIGHTS, where there is that file
    format: int = field(default=FORMAT)

    def to_json(self) -> dict[str, Any]:
        """Plain values; an infinite SQNR (no error at all) becomes null."""
        values: dict[str, Any] = finite(asdict(self))
        return values

    def write(self, directory: Path) -> None:
        text = json_text(self.to_json()) + "\n"
        (directory / FILE_NAME).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raises MoePackError when there is none, or it is damaged or of a newer format."""
        path = directory / FILE_NAME
        if not path.is_file():
            raise MoePackError(
                f"{directory}: no {FILE_NAME}; expected the output of moepack export"
            )
        try:
            content = read_object(path)
            if content["format"] > FORMAT:
                raise MoePackError(
                    f"{path}: format {content['format']}, this moepack reads up to {FORMAT}; "
                    "use a newer moepack"
                )
            content["files"] = {n: FileEntry(**e) for n, e in content["files"].items()}
            return cls(**content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MoePackError(f"{path}: damaged manifest: {error!r}") from error


def file_entry(path: Path) -> FileEntry:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return FileEntry(path.stat().st_size, digest.hexdigest())


def file_entries(directory: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    return {name: file_entry(directory / name) for name in sorted(names)}


def package_versions(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def size_differences(directory: Path, files: Mapping[str, FileEntry]) -> list[str]:
    """One line for each file that is missing or has another length: cheap enough for every load."""
    lines = []
    for name, entry in files.items():
        path = directory / name
        if not path.is_file():
            lines.append(f"{name}: missing")
        elif path.stat().st_size != entry.bytes:
            lines.append(f"{name}: {path.stat().st_size} bytes, exported with {entry.bytes}")
    return lines


def content_differences(directory: Path, files: Mapping[str, FileEntry]) -> list[str]:
    """One line for each file that is not, byte for byte, what was exported. Reads everything."""
    lines = size_differences(directory, files)
    wrong = {line.split(":")[0] for line in lines}
    for name, entry in files.items():
        if name not in wrong and file_entry(directory / name).sha256 != entry.sha256:
            lines.append(f"{name}: content differs from what was exported (sha256)")
    return lines
