"""The tutorials, executed as they are written: Python blocks are saved, shell blocks run."""

import re
from pathlib import Path

import pytest

from pages import DOCS, follow


@pytest.mark.slow
def test_export_llm(tmp_path: Path) -> None:
    outputs = follow(DOCS / "tutorial/export-llm.md", tmp_path)
    assert len(outputs) == 3
    words = re.findall(r"[a-z]+", outputs[-1].partition("The old man")[2])
    assert len(words) >= 15
    assert {"the", "and", "a", "of", "to", "his"} & set(words)
