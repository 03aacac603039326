"""JSON that is written and read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from moepack.errors import MoePackError
from moepack.json_text import json_text, read_object


def test_what_json_has_not_is_null() -> None:
    value = {"a": [1.5, math.inf], "b": ({"c": math.nan},), "d": -math.inf}
    assert json.loads(json_text(value)) == {"a": [1.5, None], "b": [{"c": None}], "d": None}


def test_objects_come_back(tmp_path: Path) -> None:
    value = {"name": "\N{GREEK SMALL LETTER MU}", "items": [1, {}]}
    (tmp_path / "a.json").write_text(json_text(value), encoding="utf-8")
    assert read_object(tmp_path / "a.json") == value


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"3", b'{"a": "\xff"}', b"[" * 100_000])
def test_anything_else_is_an_error_that_names_the_file(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(MoePackError, match=r"a\.json: (cannot be read as JSON|expected a JSON ob)"):
        read_object(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MoePackError, match=r"none\.json: cannot be read"):
        read_object(tmp_path / "none.json")
