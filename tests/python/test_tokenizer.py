"""Text in pieces, chat templates, damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_programs import checkpoint, copied, made_tokenizer
from moepack.errors import MoePackError
from moepack.tokenizer import REPLACEMENT, TextStream, Tokenizer

TOKENIZER = Tokenizer(made_tokenizer(), None, {})


@given(st.text(max_size=40))
def test_pieces_join_to_the_text(text: str) -> None:
    stream = TextStream(TOKENIZER)
    pieces = [stream.push(token) for token in TOKENIZER.encode(text)]
    assert "".join([*pieces, stream.finish()]) == text


def test_character_of_several_tokens_is_held_back_until_complete() -> None:
    ids = TOKENIZER.encode("\N{GRINNING FACE}")
    assert len(ids) > 1
    stream = TextStream(TOKENIZER)
    assert [stream.push(token) for token in ids] == [""] * (len(ids) - 1) + ["\N{GRINNING FACE}"]
    assert stream.finish() == ""


def test_character_that_never_completes_is_shown_at_the_end() -> None:
    stream = TextStream(TOKENIZER)
    first = TOKENIZER.encode("\N{GRINNING FACE}")[0]
    assert stream.push(first) == ""
    assert REPLACEMENT in stream.finish()
    assert stream.finish() == ""


def test_half_a_character_followed_by_text_delays_no_more_than_that() -> None:
    stream = TextStream(TOKENIZER)
    ids = [TOKENIZER.encode("\N{GRINNING FACE}")[0], *TOKENIZER.encode("expert")]
    pieces = [stream.push(token) for token in ids]
    assert "".join([*pieces, stream.finish()]).endswith("expert")


def test_chat_template_is_used_where_there_is_one(tmp_path: Path) -> None:
    directory = copied(checkpoint("qwen3_moe"), tmp_path / "model")
    plain = Tokenizer.load(directory)
    assert plain.chat("hello") == plain.encode("hello")
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    chat = Tokenizer.load(directory)
    assert chat.decode(chat.chat("hello"), skip_special=False) == "<s>[user] hello"
    (directory / "chat_template.jinja").unlink()
    _configure(directory, chat_template=[{"name": "default", "template": "{{ eos_token }}"}])
    assert Tokenizer.load(directory).chat("hello") == [2]


def test_chat_template_that_refuses_is_an_error(tmp_path: Path) -> None:
    directory = copied(checkpoint("qwen3_moe"), tmp_path / "model")
    _configure(directory, chat_template="{{ raise_exception('only tools') }}")
    with pytest.raises(MoePackError, match="only tools"):
        Tokenizer.load(directory).chat("hello")


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_tokenizer_cut_short_is_an_error(tmp_path: Path, keep: float) -> None:
    directory = copied(checkpoint("qwen3_moe"), tmp_path / "model")
    path = directory / "tokenizer.json"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(MoePackError, match=r"tokenizer\.json"):
        Tokenizer.load(directory)
    path.unlink()
    with pytest.raises(MoePackError, match=r"no tokenizer\.json"):
        Tokenizer.load(directory)


def test_damaged_settings_are_an_error(tmp_path: Path) -> None:
    directory = copied(checkpoint("qwen3_moe"), tmp_path / "model")
    (directory / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(MoePackError, match="tokenizer_config"):
        Tokenizer.load(directory)


def _configure(directory: Path, **settings: object) -> None:
    path = directory / "tokenizer_config.json"
    content = {**json.loads(path.read_text(encoding="utf-8")), **settings}
    path.write_text(json.dumps(content), encoding="utf-8")


def test_a_panic_of_the_library_is_an_error(tmp_path: Path) -> None:
    """Merges are cut by the length of the prefix, which here is longer than the tokens."""
    model = {
        "type": "BPE",
        "continuing_subword_prefix": "1234567",
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": ["a b"],
    }
    document = {"version": "1.0", "added_tokens": [], "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(MoePackError, match=r"tokenizer\.json: not a tokenizer: range"):
        Tokenizer.load(tmp_path)
