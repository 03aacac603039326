"""Stored tensors against the tensors of the model that config.json describes.

A library that fills gaps with random numbers, or drops what does not fit, gives another model
without saying so; here every difference is an error that names the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from moepack.errors import BadWeights
from moepack.online.filling import shortened
from moepack.online.mapping import COMPUTED, NameMapping
from moepack.online.stored import Decoder
from moepack.safetensors_file import read_entries

_WEIGHT = re.compile(r"\bexperts\.|(\.weight|_proj|_w|w[123])$")
_EXPERT = re.compile(r"^(.*\bexperts\.)(\d+)(\..*)$")


def require_loaded(directory: Path, info: Mapping[str, Any]) -> None:
    """Checks what transformers' `output_loading_info` says, which leaves out what it may ignore.

    Raises BadWeights naming tensors: of another shape, missing, or without a place in the model.
    """
    differing = {name: (stored, made) for name, stored, made in info["mismatched_keys"]}
    _raise(directory, differing, info["missing_keys"], info["unexpected_keys"])


def require_same(directory: Path, stored: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> None:
    """The same for tensors whose names are the model's own."""
    differing = {
        name: (tensor.shape, made[name].shape)
        for name, tensor in stored.items()
        if name in made and made[name].shape != tensor.shape
    }
    _raise(directory, differing, made.keys() - stored.keys(), stored.keys() - made.keys())


def require_float(directory: Path) -> None:
    """Raises BadWeights naming a weight that is stored as integers.

    The library would take packed codes for numbers. For checkpoints that name no quantization.
    """
    entries = _entries(directory)
    decoder = Decoder(frozenset(entries))
    for name, entry in entries.items():
        is_weight = len(entry["shape"]) > 1 and _WEIGHT.search(name)
        is_encoded = decoder.logical_name(name) != name  # MXFP4 says so by its names
        if is_weight and not is_encoded and not entry["dtype"].startswith(("F", "BF")):
            raise BadWeights(
                f"{directory}: {name} is stored as {entry['dtype']}; without a "
                "quantization_config in config.json weights have to be floating point"
            )


def require_layers(directory: Path, config: Any) -> None:
    """Raises BadWeights where config.json asks for more layers than tensors are stored.

    Making a model takes time for every layer, whatever it is compared with then.
    """
    stored = len(_entries(directory))
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if stored and isinstance(layers, int) and layers > stored:
        raise BadWeights(
            f"{directory}: config.json asks for {layers:,} layers, and the files hold {stored:,} "
            "tensors: one of them is of another model, or damaged"
        )


def require_weights(directory: Path, model: nn.Module) -> None:
    """Raises BadWeights where the model has more weights than the files can hold, two to a byte.

    transformers makes room for all that config.json asks for, whatever is stored.
    """
    asked = sum(parameter.numel() for parameter in model.parameters())
    extents = (entry["data_offsets"] for entry in _entries(directory).values())
    stored = sum(last - first for first, last in extents)
    if asked > 2 * stored:
        raise BadWeights(
            f"{directory}: config.json asks for {asked:,} weights, and the files hold {stored:,} "
            "bytes: one of them is of another model, or damaged"
        )


def require_places(directory: Path, model: nn.Module, names: Iterable[str] | None) -> None:
    """Raises BadWeights for stored names, of any format, that the model neither takes nor ignores.

    What is copied beside the packed experts would have no place when it is loaded.
    """
    mapping, known = NameMapping(model), frozenset(names or ())
    logical = Decoder(known).logical_names(known)
    _raise(
        directory,
        {},
        (),
        (n for n in logical if not mapping.target(n) and not mapping.is_ignored(n)),
    )


def missing_of_experts(directory: Path) -> list[str]:
    """Names that other experts of the same block have, and this one does not."""
    names = _entries(directory).keys()
    found = [match.groups() for name in names if (match := _EXPERT.match(name))]
    experts = {(block, number) for block, number, _ in found}
    parts = {(block, part) for block, _, part in found}
    expected = {f"{b}{number}{part}" for b, number in experts for c, part in parts if b == c}
    return sorted(expected - names)


def _entries(directory: Path) -> dict[str, Any]:
    """What the headers of all files say, by the name of the tensor."""
    entries: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        entries.update(read_entries(file)[0])
    return entries


def _raise(
    directory: Path,
    differing: Mapping[str, tuple[Iterable[int], Iterable[int]]],
    missing: Iterable[str],
    unexpected: Iterable[str],
) -> None:
    for name, (stored, made) in sorted(differing.items()):
        more = f"; so do {len(differing) - 1} more tensors" if len(differing) > 1 else ""
        raise BadWeights(
            f"{directory}: {name} is stored as {list(stored)}, but has {list(made)} in the model "
            f"of config.json{more}; one of the two belongs to another model"
        )
    if gone := sorted(name for name in missing if not COMPUTED.search(name)):
        raise BadWeights(
            f"{directory}: the checkpoint lacks {len(gone)} tensors of the model: "
            f"{shortened(gone, 4)}; complete the files or correct config.json"
        )
    if left := sorted(name for name in unexpected if not COMPUTED.search(name)):
        raise BadWeights(
            f"{directory}: {len(left)} stored tensors have no place in the model of config.json: "
            f"{shortened(left, 4)}; correct config.json"
        )
