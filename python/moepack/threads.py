"""How many threads may be asked for."""

from __future__ import annotations

from moepack.errors import UnsupportedError

MOST = 1024  # above any machine's cores; thread pools abort the process where they get no more


def require_threads(threads: int | None) -> None:
    """Raises UnsupportedError unless it is 1 to 1024, or None: the default."""
    if threads is not None and not 1 <= threads <= MOST:
        raise UnsupportedError(f"threads is {threads}; it must be 1 to {MOST}")
