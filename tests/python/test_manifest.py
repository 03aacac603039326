"""manifest.json: written and read alike, and what it finds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from made_programs import copied, exported
from moepack.errors import MoePackError
from moepack.manifest import FILE_NAME, Manifest, content_differences, size_differences


def test_reading_gives_what_was_written(tmp_path: Path) -> None:
    manifest = Manifest.read(exported())
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest


def test_infinite_sqnr_is_null_in_json(tmp_path: Path) -> None:
    sqnr: dict[str, float | None] = {"a": math.inf, "b": math.nan, "c": 20.5}
    Manifest({}, "", {}, {}, {}, {}, sqnr, {}, "", {}).write(tmp_path)
    text = (tmp_path / FILE_NAME).read_text(encoding="utf-8")
    assert json.loads(text)["sqnr_db"] == {"a": None, "b": None, "c": 20.5}
    assert Manifest.read(tmp_path).sqnr_db["a"] is None


def test_differences_name_the_file(tmp_path: Path) -> None:
    out = copied(exported(), tmp_path / "out")
    files = Manifest.read(out).files
    assert content_differences(out, files) == []
    content = (out / "config.json").read_text(encoding="utf-8")
    (out / "config.json").write_text(content[::-1], encoding="utf-8")
    assert size_differences(out, files) == []
    assert [line.split(":")[0] for line in content_differences(out, files)] == ["config.json"]
    (out / "config.json").write_text("{}", encoding="utf-8")
    (out / "tokenizer.json").unlink()
    found = [line.split(":")[0] for line in content_differences(out, files)]
    assert found == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', '{"format": "x"}'])
def test_damaged_manifest_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(MoePackError, match=r"manifest\.json"):
        Manifest.read(tmp_path)


def test_newer_format_is_refused_by_number(tmp_path: Path) -> None:
    content = Manifest.read(exported()).to_json() | {"format": 99}
    (tmp_path / FILE_NAME).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(MoePackError, match=r"format 99.*newer moepack"):
        Manifest.read(tmp_path)


def test_first_format_is_read(tmp_path: Path) -> None:
    """It knew no weights in a file of their own."""
    content = Manifest.read(exported()).to_json() | {"format": 1}
    assert content.pop("weights_structure_sha256") is None
    (tmp_path / FILE_NAME).write_text(json.dumps(content), encoding="utf-8")
    assert Manifest.read(tmp_path).files == Manifest.read(exported()).files


def test_other_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(MoePackError, match="moepack export"):
        Manifest.read(tmp_path)
