"""How many threads may be asked for, and how many each of torch's operators takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moepack.errors import UnsupportedError

MOST = 1024  # above any machine's cores; thread pools abort the process where they get no more


def require_threads(threads: int | None) -> None:
    """Raises UnsupportedError unless it is 1 to 1024, or None: the default."""
    if threads is not None and not 1 <= threads <= MOST:
        raise UnsupportedError(f"threads is {threads}; it must be 1 to {MOST}")


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Operators of torch stay on the thread that calls them, here and in threads begun meanwhile.

    For work that is split already: small operators that are split again wait for each other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
