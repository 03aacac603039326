"""Values as JSON that every reader takes: infinity and NaN, which JSON has not, become null."""

from __future__ import annotations

import json
import math
from typing import Any


def finite(value: Any) -> Any:
    """The same value, at any depth, with None for floats that are not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_text(value: Any) -> str:
    return json.dumps(finite(value), indent=2, allow_nan=False)
