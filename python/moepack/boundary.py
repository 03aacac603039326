"""What is around a command: errors, signals and exit codes."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable

from moepack.errors import MoePackError

_LONGEST_PATH = 200


def run(command: Callable[[], object]) -> None:
    """Errors are one line on stderr and exit code 1; MOEPACK_DEBUG shows where they came from.

    SIGTERM and SIGHUP end the command as Ctrl-C does, with exit codes 143 and 129.
    """
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in kept.items():
        if handler != signal.SIG_IGN:  # under nohup, it stays ignored
            signal.signal(number, _end)
    try:
        _run(command)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _end(number: int, frame: object) -> None:
    """Unwinds, so that what is half written is removed; a second signal would stop that."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_IGN)
    sys.exit(128 + number)


def _run(command: Callable[[], object]) -> None:
    if os.environ.get("MOEPACK_DEBUG"):
        command()
        return
    # What libraries remark about themselves is not for the user of this command.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    try:
        command()
    except MoePackError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        _fail(_refused(error))
    except Exception as error:
        _fail(_unexpected(error))


def _refused(error: OSError) -> str:
    """What the system says of a path is no fault of moepack's."""
    if not isinstance(error.filename, str | bytes) or error.strerror is None:
        return _unexpected(error)
    path = os.fsdecode(error.filename)
    shown = path if len(path) <= _LONGEST_PATH else f"{path[:_LONGEST_PATH]}..."
    return f"{shown}: {error.strerror}"


def _unexpected(error: Exception) -> str:
    text = str(error).strip() or "no message"
    place = "MOEPACK_DEBUG=1 shows where"
    return f"unexpected {type(error).__name__}: {text.splitlines()[0]} ({place})"


def _fail(message: str) -> None:
    print("moepack: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(1)
