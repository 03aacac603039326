"""Handles of what was switched on, which can be switched off again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Undoable(ABC):
    """Holds until `undo()`, or until the end of a `with`."""

    @abstractmethod
    def undo(self) -> None:
        """A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()
