"""From a checkpoint to a directory with an ExecuTorch program that generates text on a CPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from moepack import manifest
from moepack.checkpoint import DESCRIPTION_FILES
from moepack.errors import UnsupportedError
from moepack.exporter import lowering, tokens
from moepack.exporter.card import card
from moepack.exporter.decoder import cached_decoder
from moepack.exporter.experts import pack_experts, packed_scheme, router_paths
from moepack.exporter.kv_cache import tokens_per_call
from moepack.exporter.linears import (
    EMBEDDING_FORMATS,
    LINEAR_FORMATS,
    LayerFormat,
    quantize_embedding,
    quantize_linears,
)
from moepack.exporter.source import Source, open_source
from moepack.manifest import PROGRAM, WEIGHTS, Manifest
from moepack.program_file import open_program
from moepack.staging import staged
from moepack.weights_file import weights_of

__all__ = ["ExportOptions", "ExportResult", "Manifest", "export"]

LOGITS = ("last", "all")
_DEFAULT_CONTEXT = 2048
_PACKAGES = ("moepack", "torch", "executorch", "torchao", "transformers")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ExportOptions:
    """What the exported program is made of. Raises UnsupportedError naming what is supported."""

    scheme: str = "int4-g32"
    linear: str = "8da4w"
    embedding: str = "int8"
    logits: str = "last"
    max_seq_len: int | None = None
    weights_file: bool = False

    def __post_init__(self) -> None:
        _one_of("linear", self.linear, LINEAR_FORMATS)
        _one_of("embedding", self.embedding, EMBEDDING_FORMATS)
        _one_of("logits", self.logits, LOGITS)
        if self.max_seq_len is not None and self.max_seq_len < 2:
            raise UnsupportedError(f"max_seq_len is {self.max_seq_len}; it must be at least 2")


@dataclass(frozen=True)
class ExportResult:
    directory: Path
    manifest: Manifest

    def to_json(self) -> dict[str, Any]:
        return {"directory": str(self.directory), **self.manifest.to_json()}


def export(
    model_or_dir: PreTrainedModel | str | Path,
    out_dir: str | Path,
    *,
    scheme: str = "int4-g32",
    linear: str = "8da4w",
    embedding: str = "int8",
    logits: str = "last",
    max_seq_len: int | None = None,
    weights_file: bool = False,
    tokenizer_dir: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
    **quantize_options: Any,
) -> ExportResult:
    """Writes model.pte, manifest.json, the tokenizer and a README to `out_dir`.

    `model_or_dir` is a local Hugging Face checkpoint directory or a loaded causal language model,
    which is quantized in place: its experts by `moepack.quantize_` (which gets
    `quantize_options`) unless they are packed already, then its linear layers and embedding.
    The program's method `forward(input_ids [1, T] int64, cache_position [T] int64)` returns
    logits [1, T or 1, vocabulary] fp32 for 1 <= T <= max_seq_len (default: the model's context,
    at most 2048), and for T = 1 only where the model has linear attention or convolutions.
    `out_dir` appears complete or not at all; an existing one is refused unless `force` is given.

    With `weights_file` the weights go to model.ptd beside model.pte, which is then the code alone.

    Raises MoePackError (UnsupportedError, NoMoEBlock...) naming the place and what to do.
    """
    options = ExportOptions(scheme, linear, embedding, logits, max_seq_len, weights_file)
    tell = progress or (lambda step: None)
    target = Path(out_dir)
    given = [p for p in (model_or_dir, tokenizer_dir) if isinstance(p, (str, Path))]
    with staged(target, force, [Path(path) for path in given]) as stage:
        tell("Loading the model")
        source = open_source(model_or_dir, None if tokenizer_dir is None else Path(tokenizer_dir))
        text = None if source.directory is None else tokens.copy_tokenizer(source.directory, stage)
        special = tokens.special_tokens(source.model, source.directory)
        tokens.check_vocabulary(text, special, source.vocab_size)
        length = _sequence_length(source, options)
        tell("Packing the experts")
        sqnr = pack_experts(source.model, options.scheme, quantize_options)
        layers = _quantize_rest(source.model, options)
        tell("Lowering to ExecuTorch (minutes for a large model)")
        _write_program(source, options, special, length, stage)
        tell("Writing")
        result = _describe(source, options, special, length, sqnr, layers, stage)
    return ExportResult(target, result)


def _one_of(name: str, value: str, supported: tuple[str, ...]) -> None:
    if value not in supported:
        raise UnsupportedError(f"{name} is {value!r}; supported: {', '.join(supported)}")


def _sequence_length(source: Source, options: ExportOptions) -> int:
    config = source.model.config.get_text_config(decoder=True)
    context = int(getattr(config, "max_position_embeddings", _DEFAULT_CONTEXT))
    if options.max_seq_len is None:
        return min(context, _DEFAULT_CONTEXT)
    if options.max_seq_len > context:
        raise UnsupportedError(
            f"max_seq_len is {options.max_seq_len}; the model's context ends at {context}"
        )
    return options.max_seq_len


def _quantize_rest(model: nn.Module, options: ExportOptions) -> list[LayerFormat]:
    layers = []
    if options.linear != "float":
        layers += quantize_linears(model, router_paths(model))
    if options.embedding != "float":
        layers += quantize_embedding(model)
    return layers


def _write_program(
    source: Source, options: ExportOptions, special: tokens.SpecialTokens, length: int, stage: Path
) -> None:
    per_call = tokens_per_call(source.model.config, length)
    constants: dict[str, Any] = {
        "get_max_seq_len": length,
        "get_max_context_len": length,
        "get_vocab_size": source.vocab_size,
        "get_eos_ids": list(special.eos_ids),
        "use_kv_cache": True,
        "use_sdpa_with_kv_cache": False,
        "enable_dynamic_shape": per_call > 1,
    }
    if special.bos_id is not None:
        constants["get_bos_id"] = special.bos_id
    # An example of one token makes torch.export take the count for a constant.
    example_count = min(per_call, 2)
    example = (torch.zeros(1, example_count, dtype=torch.long), torch.arange(example_count))
    count = torch.export.Dim("tokens", min=1, max=length)
    shapes = {"input_ids": {1: count}, "cache_position": {0: count}} if per_call > 1 else None
    with cached_decoder(source.model, length, options.logits == "last") as decoder:
        weights = stage / WEIGHTS if options.weights_file else None
        lowering.write_program(decoder, example, shapes, constants, stage / PROGRAM, weights)


def _describe(
    source: Source,
    options: ExportOptions,
    special: tokens.SpecialTokens,
    length: int,
    sqnr: Mapping[str, float | None],
    layers: list[LayerFormat],
    stage: Path,
) -> Manifest:
    for name in DESCRIPTION_FILES:
        if source.directory is not None and (source.directory / name).is_file():
            shutil.copyfile(source.directory / name, stage / name)
    config = source.model.config.get_text_config(decoder=True)
    names = [path.name for path in stage.iterdir()]
    program = open_program(stage / PROGRAM)
    weights = weights_of(program)
    result = Manifest(
        versions=manifest.package_versions(_PACKAGES),
        scheme=packed_scheme(source.model),
        options={**asdict(options), "max_seq_len": length},
        model={
            "architecture": type(source.model).__name__,
            "model_type": config.model_type,
            "vocab_size": source.vocab_size,
            "hidden_size": getattr(config, "hidden_size", None),
            "num_hidden_layers": getattr(config, "num_hidden_layers", None),
        },
        methods=_methods(source, options, length),
        tokens=special.to_json(),
        sqnr_db=dict(sqnr),
        layers={layer.path: layer.format for layer in layers},
        program_structure_sha256=program.structure_digest(),
        weights_structure_sha256=weights.structure_digest() if weights else None,
        files=manifest.file_entries(stage, names),
    )
    result.write(stage)
    name = source.directory.name if source.directory else type(source.model).__name__
    (stage / "README.md").write_text(card(result, name), encoding="utf-8")
    return result


def _methods(source: Source, options: ExportOptions, length: int) -> dict[str, Any]:
    rows: int | str = 1 if options.logits == "last" else "T"
    return {
        "forward": {
            "inputs": [
                {"name": "input_ids", "dtype": "int64", "shape": [1, "T"]},
                {"name": "cache_position", "dtype": "int64", "shape": ["T"]},
            ],
            "outputs": [
                {"name": "logits", "dtype": "float32", "shape": [1, rows, source.vocab_size]}
            ],
            "T": {"min": 1, "max": tokens_per_call(source.model.config, length)},
        }
    }
