"""Results to stdout, as text or JSON; progress and remarks to stderr."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.json_text import json_text

if TYPE_CHECKING:
    from moepack.report import Steps


def steps_on_stderr() -> Steps:
    """Progress on stderr, so that stdout holds the result alone."""
    from moepack.report import Steps, console

    return Steps(console(stderr=True))


def follow(steps: Steps) -> Any:
    def follow(what: str, done: int, total: int) -> None:
        steps.begin(what)
        steps.advance(done / total)

    return follow


def print_result(value: Any, as_json: bool) -> None:
    if as_json:
        print_json(value.to_json())
        return
    from moepack.report import console, renderable

    console().print(renderable(value))


def write_json(value: Any, path: Path) -> None:
    from moepack.staging import writing

    with writing(path):
        path.write_text(json_text(value) + "\n", encoding="utf-8")


def print_json(value: Any) -> None:
    print(json_text(value))


def note(value: object) -> None:
    from moepack.report import console, renderable

    console(stderr=True).print(renderable(value))
