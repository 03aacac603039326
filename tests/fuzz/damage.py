"""Ways to damage a file: bytes of any kind, and values of JSON documents, alone or as headers."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

_NUMBERS = (0, 1, 2, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 3, 1 << 70, 0.5, 1e308, float("inf"), float("nan"), "", "x", "\ud800",
    [], [0], {}, {"a": 1}, "../../etc", "int4-g32", "\x00", 10**5,
)  # fmt: skip


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Another file; JSON keeps its form two times out of three, so that its values are read."""
    if draw.random() < 0.67:
        if data[:1] == b"{":
            return _other_json(data, draw)
        if data[8:9] == b"{":
            return _other_header(data, draw)
    kinds = (_flip, _overwrite, _overwrite, _cut, _extend, _swap, _foreign)
    result = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        result = draw.choice(kinds)(result, draw)
    return bytes(result)


def _other_json(data: bytes, draw: random.Random) -> bytes:
    document = json.loads(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        document = _other_document(document, draw)
    return json.dumps(document).encode()


def _other_header(data: bytes, draw: random.Random) -> bytes:
    """A safetensors file whose header is damaged, and as long as the file says."""
    size = 8 + int.from_bytes(data[:8], "little")
    header = _other_json(data[8:size], draw)
    return struct.pack("<Q", len(header)) + header + data[size:]


def _place(data: bytearray, draw: random.Random) -> int:
    """Anywhere; often near the beginning or the end, where files keep their structure."""
    end = len(data)
    limit = draw.choice((end, end, min(end, 64), min(end, 4096)))
    at = draw.randrange(max(limit, 1))
    return max(end - 1 - at, 0) if draw.random() < 0.15 else at


def _flip(data: bytearray, draw: random.Random) -> bytearray:
    if data:
        data[_place(data, draw)] ^= 1 << draw.randrange(8)
    return data


def _overwrite(data: bytearray, draw: random.Random) -> bytearray:
    form = draw.choice("BHIQ")
    size = struct.calcsize(form)
    at = _place(data, draw) // size * size
    if at + size <= len(data):
        number = draw.choice((*_NUMBERS, len(data), at, draw.getrandbits(64)))
        struct.pack_into(f"<{form}", data, at, number % (1 << 8 * size))
    return data


def _cut(data: bytearray, draw: random.Random) -> bytearray:
    return data[: _place(data, draw)]


def _extend(data: bytearray, draw: random.Random) -> bytearray:
    return data + draw.randbytes(draw.choice((1, 64, 5000)))


def _swap(data: bytearray, draw: random.Random) -> bytearray:
    """One part of the file over another."""
    size = draw.choice((4, 16, 64, 1000))
    here, there = _place(data, draw), _place(data, draw)
    part = data[there : there + size]
    data[here : here + len(part)] = part
    return data


def _foreign(data: bytearray, draw: random.Random) -> bytearray:
    keep = draw.choice((0, 8, 64))
    return data[:keep] + draw.randbytes(draw.randrange(2000))


def _other_document(document: Any, draw: random.Random) -> Any:
    """The document with one value, somewhere, replaced, removed, or copied elsewhere."""
    places = list(_places(document))
    if not places:
        return copy.deepcopy(draw.choice(_VALUES))
    container, key = draw.choice(places)
    match draw.randrange(6):
        case 0:
            del container[key]
        case 1:
            other, name = draw.choice(places)
            container[key] = copy.deepcopy(other[name])
        case _:
            container[key] = copy.deepcopy(draw.choice(_VALUES))
    return document


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) of a document; long lists by their first items."""
    if not isinstance(value, dict | list):
        return []
    found: list[tuple[Any, Any]] = []
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))[:20]
    for key, item in items:
        found.append((value, key))
        found += _places(item)
    return found
