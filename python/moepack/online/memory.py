"""How much anonymous memory this process takes: pages mapped from files do not count."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType


def anonymous_bytes() -> int:
    """0 where the system does not tell."""
    try:
        resident, shared = Path("/proc/self/statm").read_text(encoding="ascii").split()[1:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """What the system can still give without swapping; 0 where it does not tell."""
    return _field(Path("/proc/meminfo"), "MemAvailable")


def _field(file: Path, name: str) -> int:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return 1024 * next((int(li.split()[1]) for li in lines if li.startswith(f"{name}:")), 0)


class PeakMemory:
    """Looks every few milliseconds; `peak` is the most that was seen, `before` what was there."""

    def __init__(self, every: float = 0.005) -> None:
        self.before = self.peak = anonymous_bytes()
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            self.peak = max(self.peak, anonymous_bytes())

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, anonymous_bytes())
