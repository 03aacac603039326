"""Quantizing while loading, and reloading: tensors come in any order, packed layers go out."""

from __future__ import annotations

from moepack.online.conversion import quantize_checkpoint
from moepack.online.converted import Converted
from moepack.online.loading import Loaded, Settings, load, load_packed
from moepack.online.methods import IntegerMethod, OnlineMethod

__all__ = [
    "Converted",
    "IntegerMethod",
    "Loaded",
    "OnlineMethod",
    "Settings",
    "load",
    "load_packed",
    "quantize_checkpoint",
]
