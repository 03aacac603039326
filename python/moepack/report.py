"""Results and progress as a person wants to see them on a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from moepack.demo import Audience
from moepack.tables import renderable

__all__ = ["Steps", "console", "renderable"]

_WIDTH = 140


def console(*, stderr: bool = False) -> Console:
    """As wide as the terminal; wide enough for the tables where there is none."""
    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(stderr=stderr, width=_WIDTH)


class Steps(Audience):
    """Shows steps as they go and results as they come; no motion where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task: Any = None

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begin(self, step: str) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(step, total=None)
        if not self._console.is_terminal:
            self._console.print(Text(f"{step}..."))

    def advance(self, share: float) -> None:
        if self._task is not None:
            self._progress.update(self._task, total=1.0, completed=share)

    def show(self, value: object) -> None:
        self._console.print(renderable(value))
