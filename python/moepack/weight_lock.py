"""Many may read weights at once; who replaces them waits for the readers, and they for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class WeightLock:
    """A read-write lock. A thread that reads may read again, also while a writer waits.

    Copies and pickles are locks of their own: what is locked are one module's tensors.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = 0
        self._writers_waiting = 0
        self._is_writing = False
        self._held = threading.local()

    @contextmanager
    def reading(self) -> Iterator[None]:
        depth = getattr(self._held, "depth", 0)
        if depth == 0:
            with self._condition:
                # Waiting writers come first, or a busy server would never take new weights.
                self._condition.wait_for(lambda: not self._is_writing and not self._writers_waiting)
                self._readers += 1
        self._held.depth = depth + 1
        try:
            yield
        finally:
            self._held.depth = depth
            if depth == 0:
                with self._condition:
                    self._readers -= 1
                    self._condition.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self._condition:
            self._writers_waiting += 1
            try:
                self._condition.wait_for(lambda: not self._is_writing and not self._readers)
            finally:
                self._writers_waiting -= 1
            self._is_writing = True
        try:
            yield
        finally:
            with self._condition:
                self._is_writing = False
                self._condition.notify_all()

    def __reduce__(self) -> tuple[type[WeightLock], tuple[()]]:
        return WeightLock, ()
