"""Text to token ids and back, from the files beside an exported program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from moepack.errors import MoePackError
from moepack.json_text import read_object

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# What a tokenizer is rebuilt from, in whichever of these a checkpoint has.
FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


@contextmanager
def _library_errors(where: str) -> Iterator[None]:
    """What the Rust side raises is a bare Exception, or a panic, which is not even that."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise MoePackError(f"{where}: {error}") from error


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer.json with the chat template of its neighbours, if there is one."""

    backend: tokenizers.Tokenizer
    template: str | None
    special: dict[str, str]

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Raises MoePackError naming the file that is missing or damaged."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise MoePackError(f"{directory}: no tokenizer.json; export with a fast tokenizer")
        with _library_errors(f"{path}: not a tokenizer"):
            backend = tokenizers.Tokenizer.from_file(str(path))
        config = _read_json(directory / "tokenizer_config.json")
        return cls(backend, _template(directory, config), _special_tokens(config))

    @property
    def largest_id(self) -> int:
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def token_id(self, token: str) -> int | None:
        found: int | None = self.backend.token_to_id(token)
        return found

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Raises MoePackError for what is no valid Unicode, such as undecodable arguments."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise MoePackError(
                f"the text is no valid Unicode: character {error.start} is half of a surrogate pair"
            ) from error
        with _library_errors("the tokenizer cannot encode the text"):
            ids: list[int] = self.backend.encode(text, add_special_tokens=special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        with _library_errors("the tokenizer cannot decode the ids"):
            text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def chat(self, prompt: str) -> list[int]:
        """The prompt as one user message in the model's chat template; plain without a template.

        Raises MoePackError when the template refuses.
        """
        if self.template is None:
            return self.encode(prompt)
        return self.encode(self._render(prompt), special_tokens=False)

    def _render(self, prompt: str) -> str:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        assert self.template is not None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        try:
            return environment.from_string(self.template).render(
                messages=[{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                **self.special,
            )
        except TemplateError as error:
            raise MoePackError(f"the chat template failed: {error}") from error


class TextStream:
    """Turns ids into text piece by piece, holding back what is no complete text yet.

    A token may be half of a UTF-8 character; and decoders treat the beginning of a text
    differently (a leading space). So ids are decoded together with those already printed, and
    text is given out when it no longer ends in a replacement character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self._pending.append(token)
        text = self._new_text()
        if text.endswith(REPLACEMENT):
            return ""
        self._advance()
        return text

    def finish(self) -> str:
        """What is left at the end, unfinished characters as replacement characters."""
        text = self._new_text() if self._pending else ""
        self._advance()
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        after = self._tokenizer.decode(self._context + self._pending)
        return after[len(before) :]

    def _advance(self) -> None:
        if self._pending:
            self._context, self._pending = self._pending, []


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _template(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... as text, under the names that templates use."""
    found = {}
    for name, token in config.items():
        if name.endswith("_token"):
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                found[name] = text
    return found


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
