"""What libraries raise becomes an error of moepack's."""

from __future__ import annotations

import pytest

from moepack.errors import BadWeights, MoePackError, reported


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (ValueError("a line\nand more"), "model: cannot be loaded: a line and more"),
        (KeyError("blocks"), "model: cannot be loaded: KeyError: 'blocks'"),
        (ValueError("word " * 1000), "model: cannot be loaded: " + "word " * 79 + "..."),
        (AssertionError(), "model: cannot be loaded: AssertionError"),
        (BadWeights("as it was"), "as it was"),
    ],
)
def test_the_place_is_named(raised: Exception, text: str) -> None:
    with pytest.raises(MoePackError) as caught, reported("model"):
        raise raised
    assert str(caught.value) == text


def test_an_interruption_is_none() -> None:
    with pytest.raises(KeyboardInterrupt), reported("model"):
        raise KeyboardInterrupt
