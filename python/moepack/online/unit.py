"""What one parameter is made from: one stored tensor, or many that are put together.

An expert's each are merged, concatenated or transposed, by the library's converters. Where the
conversion treats every expert alike, one expert is made without the others.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moepack.errors import BadWeights
from moepack.online.stored import StoredTensor


class Unit:
    """The stored tensors of one parameter as they arrive, and the parameter made from them."""

    def __init__(
        self, model: nn.Module, shapes: Mapping[str, Tensor], name: str, converter: Any
    ) -> None:
        self._model, self._shapes = model, shapes
        self._converter = converter
        self._merges = converter is not None and _merges(converter.operations)
        self._joins_rows = converter is not None and _joins_rows(converter.operations)
        self._pieces: dict[str, dict[int, StoredTensor]] = defaultdict(dict)
        self._expected: dict[str, int] | None = None
        self.name = name
        self.shape = tuple(shapes[name].shape)
        self.dtype = shapes[name].dtype
        self.is_stack = len(self.shape) == 3 and (
            converter is None
            or (len(converter.target_patterns) == 1 and _treats_alike(converter.operations))
        )

    @property
    def outputs(self) -> list[str]:
        """Names of all parameters that this makes."""
        if self._converter is None:
            return [self.name]
        first, *others = self._converter.target_patterns
        names = [self.name] + [self.name.replace(first, other) for other in others]
        return [name for name in names if name in self._shapes]

    def expect(self, pattern: str | None) -> None:
        """One more tensor will come, by this pattern: to be said of all before the first."""
        self._expected = self._expected or {}
        self._expected[pattern or ""] = self._expected.get(pattern or "", 0) + 1

    def add(self, stored: StoredTensor, pattern: str | None) -> None:
        """Raises BadWeights, naming both, if the tensor does not fit the model's config."""
        index = _expert_of(stored.name) if self._merges else 0
        if self._converter is None and stored.shape != self.shape:
            raise BadWeights(
                f"{stored.name} is {list(stored.shape)} in the checkpoint, {self.name} is "
                f"{list(self.shape)} in the model of the config"
            )
        if self._merges and index >= self.shape[0]:
            raise BadWeights(
                f"{stored.name}: the checkpoint has an expert {index}, the model of the config has "
                f"{self.shape[0]} experts in {self.name}"
            )
        if index in self._pieces[pattern or ""]:
            raise BadWeights(f"{stored.name} came twice")
        self._pieces[pattern or ""][index] = stored

    @property
    def is_complete(self) -> bool:
        if self._converter is None:
            return bool(self._pieces)
        if self._expected is not None and not self._merges:
            return all(len(self._pieces[p]) == n for p, n in self._expected.items())
        each = self.shape[0] if self._merges else 1
        return all(len(self._pieces[p]) == each for p in self._patterns)

    @property
    def _patterns(self) -> list[str]:
        """The patterns that are used: a converter may have some for other spellings."""
        if self._converter is None:
            return [""]
        if self._expected is not None:
            return list(self._expected)
        return list(self._converter.source_patterns)

    def missing(self) -> list[str]:
        """What has not come, in words."""
        if not self._merges:
            return [] if self.is_complete else [self.name]
        gone = {e for p in self._patterns for e in range(self.shape[0]) if e not in self._pieces[p]}
        return [f"{self.name} expert {e}" for e in sorted(gone)]

    def halves(self) -> list[str]:
        """Parts of which some tensors came and others did not, in words."""
        if not self._merges:
            return [] if self.is_complete else [self.name]
        found = [set(self._pieces[p]) for p in self._patterns]
        return [
            f"{self.name} expert {e}"
            for e in sorted(set.union(*found) - found[0].intersection(*found))
        ]

    def has(self, expert: int) -> bool:
        """Can this expert's part of a stack be made?"""
        index = expert if self._merges else 0
        return self.is_stack and all(index in self._pieces[p] for p in self._patterns)

    def read_ahead(self, expert: int) -> None:
        """Lets the system read an expert's tensors while others are worked on."""
        if self._merges:
            for pattern in self._patterns:
                self._pieces[pattern][expert].read_ahead()

    def part(self, expert: int, *, scales: bool = False) -> Tensor:
        """[1, rows, columns]: one expert of the stack, or the scales of its values."""
        if self._converter is None:
            stored = self._piece("", expert, scales)
            return self._cast(stored.part(expert), stored.is_encoded)
        inputs: list[tuple[str, StoredTensor, Tensor]] = []
        for pattern in self._patterns:
            stored = self._piece(pattern, expert, scales)
            tensor = stored.read() if self._merges else stored.part(expert)
            inputs.append((pattern, stored, tensor))
        made = self._convert(inputs)[self.name]
        if tuple(made.shape[1:]) != self.shape[1:]:
            raise self._misshapen(inputs[0][1], (self.shape[0], *made.shape[1:]))
        return made

    def has_scales(self, expert: int) -> bool:
        """Does all of an expert's part come from a quantized format?"""
        return all(self._piece(p, expert).scales is not None for p in self._patterns)

    def part_dtype(self, expert: int) -> torch.dtype:
        """Of `part`: what comes from a quantized format is not rounded again."""
        is_encoded = any(self._piece(p, expert).is_encoded for p in self._patterns)
        return torch.float32 if is_encoded else self.dtype

    def fill(self, expert: int, room: Tensor, *, scales: bool = False) -> None:
        """Writes `part` into `room`, contiguous: where rows are only put together, row by row."""
        patterns = self._patterns if self._joins_rows else []
        stored = [self._piece(p, expert, scales) for p in patterns]
        shapes = [s.shape for s in stored]
        is_plain = all(len(s) == 2 and s[1:] == self.shape[2:] for s in shapes)
        if not stored or not is_plain or sum(s[0] for s in shapes) != self.shape[1]:
            room.copy_(self.part(expert, scales=scales))
            return
        for piece, rows in zip(stored, room[0].split([s[0] for s in shapes]), strict=True):
            if piece.decode_into is not None:
                piece.decode_into(rows)
            else:
                rows.copy_(self._cast(piece.read(), piece.is_encoded))

    def _piece(self, pattern: str, expert: int, scales: bool = False) -> StoredTensor:
        """What holds an expert's values, or what gives their scales."""
        stored = self._pieces[pattern][expert if self._merges else 0]
        if not scales:
            return stored
        assert stored.scales is not None
        return stored.scales

    def forget(self, expert: int) -> None:
        """Lets go of what one expert was made from; it stays counted as having come."""
        for pieces in self._pieces.values():
            if self._merges and expert in pieces:
                pieces[expert] = _GONE

    def whole(self) -> dict[str, Tensor]:
        """All parameters that this makes, by name."""
        if self._converter is None:
            stored = self._pieces[""][0]
            return {self.name: self._cast(stored.read(), stored.is_encoded)}
        inputs = [
            (pattern, self._pieces[pattern][index], self._pieces[pattern][index].read())
            for pattern in self._patterns
            for index in sorted(self._pieces[pattern])
        ]
        made = self._convert(inputs)
        for name, tensor in made.items():
            expected = self._shapes.get(name)
            if expected is not None and tensor.shape != expected.shape:
                raise self._misshapen(inputs[0][1], tuple(tensor.shape), name)
        return {n: t for n, t in made.items() if n in self._shapes}

    def _convert(self, inputs: list[tuple[str, StoredTensor, Tensor]]) -> dict[str, Tensor]:
        if self._keeps_orientation(inputs[0][1]):
            return {self.name: self._cast(inputs[0][2], inputs[0][1].is_encoded)}
        converter = copy.deepcopy(self._converter)
        for pattern, stored, tensor in inputs:
            converter.add_tensor(
                self.name, stored.name, pattern, self._cast(tensor, stored.is_encoded)
            )
        try:
            made = converter.convert(self.name, model=self._model, config=self._model.config)
        except (RuntimeError, ValueError) as error:
            raise BadWeights(
                f"{inputs[0][1].name} and {len(inputs) - 1} more cannot become {self.name} "
                f"{list(self.shape)}: {error}"
            ) from error
        return {n: t[0] if isinstance(t, list) else t for n, t in made.items()}

    def _keeps_orientation(self, stored: StoredTensor) -> bool:
        """A stack that is stored as the model has it, by a conversion that then does nothing."""
        operations = self._converter.operations
        return (
            len(operations) == 1
            and getattr(operations[0], "check_dims", False)
            and stored.shape == self.shape
        )

    def _cast(self, tensor: Tensor, is_encoded: bool) -> Tensor:
        """As loading casts it; what comes from a quantized format is not rounded again."""
        if not tensor.is_floating_point() or is_encoded:
            return tensor
        return tensor.to(self.dtype)

    def _misshapen(
        self, stored: StoredTensor, found: tuple[int, ...], name: str = ""
    ) -> BadWeights:
        name = name or self.name
        expected = list(self._shapes[name].shape)
        return BadWeights(
            f"{stored.name} ({list(stored.shape)}) and its like make {name} {list(found)}, which "
            f"is {expected} in the model of the config"
        )


def _gone() -> Tensor:
    raise AssertionError("an expert that is packed was read again")


_GONE = StoredTensor("", torch.float32, (), read=_gone, part=lambda i: _gone())


def _merges(operations: list[Any]) -> bool:
    """Does the conversion begin by stacking one tensor of each expert?"""
    return type(operations[0]).__name__ == "MergeModulelist" and operations[0].dim == 0


def _joins_rows(operations: list[Any]) -> bool:
    """Is an expert's part the rows of its tensors, one after the other?"""
    rest = operations[1:]
    return _merges(operations) and all(
        type(op).__name__ == "Concatenate" and op.dim == 1 for op in rest
    )


def _treats_alike(operations: list[Any]) -> bool:
    """Is one expert's result made from that expert's tensors alone, whatever the others are?"""
    rest = operations[1:] if _merges(operations) else operations
    dims = {"Concatenate": ("dim",), "Transpose": ("dim0", "dim1"), "Interleave": ("dim",)}
    return all(
        type(op).__name__ in dims and all(getattr(op, d) > 0 for d in dims[type(op).__name__])
        for op in rest
    )


def _expert_of(name: str) -> int:
    """The last number in a name that stands alone: `experts.12.w1.weight`."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    return int(numbers[-1]) if numbers else 0
