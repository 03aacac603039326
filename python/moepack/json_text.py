"""JSON text and files. Infinity and NaN, which JSON has not, are written as null."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from moepack.errors import MoePackError
from moepack.regular_file import require_regular


def finite(value: Any) -> Any:
    """The same value, at any depth, with None for floats that are not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_text(value: Any) -> str:
    return json.dumps(finite(value), indent=2, allow_nan=False)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises MoePackError when it is missing or holds something else."""
    try:
        require_regular(path)
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MoePackError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise MoePackError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content
