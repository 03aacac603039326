"""From the names of a checkpoint to those of a model, by the library's own conversion mapping."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import Tensor, nn

from moepack.online.unit import Unit

# What old checkpoints hold although it is computed from the config.
COMPUTED = re.compile(r"(^|\.)(rotary_emb\.|\w*inv_freq$)")


class Target(NamedTuple):
    """Where a stored tensor goes: the first parameter that it is part of, and by which pattern."""

    name: str
    pattern: str | None


class NameMapping:
    """The mapping of one model, which lies on the meta device or not; a plain module has none."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shapes = {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        self._by_pattern: dict[str, Any] = {}
        self._prefix: str | None = None
        if hasattr(model, "base_model_prefix"):
            self._read_conversions(model)

    def _read_conversions(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        transforms = get_model_conversion_mapping(model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._by_pattern = {p: c for c in self._converters for p in c.source_patterns}
        self._prefix = model.base_model_prefix

    def target(self, name: str) -> Target | None:
        """Where the tensor of that name goes, or None if the model has no such parameter."""
        if self._prefix is None:
            return Target(name, None) if name in self.shapes else None
        from transformers.core_model_loading import rename_source_key

        renamed, pattern = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self.shapes
        )
        if renamed not in self.shapes and name in self.shapes:
            renamed, pattern = name, None
        if renamed not in self.shapes:
            renamed, pattern = rename_source_key(name, [], [], self._prefix, self.shapes)
        return Target(renamed, pattern) if renamed in self.shapes else None

    def unit(self, target: Target) -> Unit:
        converter = self._by_pattern[target.pattern] if target.pattern else None
        return Unit(self.model, self.shapes, target.name, converter)

    def is_ignored(self, name: str) -> bool:
        """Does the model say that checkpoints may hold this without meaning?"""
        patterns = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        return bool(COMPUTED.search(name)) or any(re.search(pattern, name) for pattern in patterns)

    def may_be_missing(self, name: str) -> bool:
        patterns = getattr(self.model, "_keys_to_ignore_on_load_missing", None) or ()
        return any(re.search(pattern, name) for pattern in patterns)
