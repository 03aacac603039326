"""What may be opened to be read: a pipe keeps its reader waiting, a device may have no end."""

from __future__ import annotations

import errno
import stat
from pathlib import Path


def require_regular(path: Path) -> None:
    """Raises OSError when `path` is missing or leads to anything but a regular file."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is no regular file", str(path))
