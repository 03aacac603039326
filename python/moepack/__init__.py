"""Packs the experts of Mixture-of-Experts language models and runs them fast on CPUs.

Importing moepack loads nothing else: names below are resolved when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from moepack.acceleration import accelerate_upstream
    from moepack.converter import convert
    from moepack.exporter import export
    from moepack.families import register_family
    from moepack.integrations.transformers import MoePackConfig
    from moepack.modules import QuantizedExperts, QuantizedMoEFFN
    from moepack.online.reload import reload_weights
    from moepack.online.serving import serving
    from moepack.planner import plan
    from moepack.transform import dequantize_, quantize_, replace_moe_with_quantized_op

__all__ = [
    "quantize_",
    "plan",
    "export",
    "convert",
    "dequantize_",
    "replace_moe_with_quantized_op",
    "accelerate_upstream",
    "reload_weights",
    "serving",
    "MoePackConfig",
    "register_family",
    "QuantizedMoEFFN",
    "QuantizedExperts",
    "__version__",
]

_HOMES = {
    "quantize_": "transform",
    "plan": "planner",
    "export": "exporter",
    "convert": "converter",
    "dequantize_": "transform",
    "replace_moe_with_quantized_op": "transform",
    "accelerate_upstream": "acceleration",
    "register_family": "families",
    "reload_weights": "online.reload",
    "serving": "online.serving",
    "MoePackConfig": "integrations.transformers",
    "QuantizedMoEFFN": "modules",
    "QuantizedExperts": "modules",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'moepack' has no attribute {name!r}")
    return getattr(import_module(f"moepack.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
