"""The tutorials, executed as they are written: Python blocks are saved, shell blocks run."""

import re

import pytest

from pages import DOCS, followed


@pytest.mark.slow
def test_export_llm() -> None:
    _, outputs = followed(DOCS / "tutorial/export-llm.md")
    assert len(outputs) == 3
    words = re.findall(r"[a-z]+", outputs[-1].partition("The old man")[2])
    assert len(words) >= 15
    assert {"the", "and", "a", "of", "to", "his"} & set(words)
