"""Opening safetensors files: what the library refuses is a MoePackError that names the file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from moepack.errors import MoePackError
from moepack.regular_file import require_regular


def open_tensors(file: Path) -> Any:
    """The library's mapped file, a context too: keys(), get_tensor(name), get_slice(name).

    Raises MoePackError when the file is missing, cut short or none.
    """
    try:
        require_regular(file)
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise MoePackError(f"{file}: missing or damaged safetensors file: {error}") from error


def read_entries(file: Path) -> tuple[dict[str, Any], int]:
    """dtype, shape and data_offsets by name, checked by the library, and where data begin.

    Raises MoePackError as `open_tensors` does.
    """
    with open_tensors(file), file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        entries = json.loads(opened.read(length))
    entries.pop("__metadata__", None)
    return entries, 8 + length
