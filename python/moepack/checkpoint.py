"""Model directories: a local Hugging Face checkpoint, or one whose experts moepack has packed.

A packed checkpoint is a directory of plain tensors: model.safetensors (the model's state_dict,
tied tensors once), config.json and tokenizer files as they were, and moepack.json with the
attributes of each packed block, from which the modules are built again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from moepack import placement
from moepack.attributes import ExpertAttributes, RoutingAttributes
from moepack.errors import BadWeights, MoePackError, reported
from moepack.families import FoundBlock, find_blocks
from moepack.json_text import read_object
from moepack.manifest import METHOD_NAME, PACKED_FILE, package_versions
from moepack.modules import PackedExperts, QuantizedExperts, QuantizedMoEFFN, RoutedExperts
from moepack.online import completeness
from moepack.online.filling import shortened
from moepack.online.loading import load_packed, read_config
from moepack.online.model_tensors import finish_buffers, set_tensor
from moepack.staging import staged
from moepack.tokenizer import FILES as TOKENIZER_FILES

DESCRIPTION_FILES = ("config.json", "generation_config.json")
FORMAT = 1
_WEIGHTS = "model.safetensors"


def load_model(directory: Path) -> PreTrainedModel:
    """The model in fp32, from safetensors only, without running code that the checkpoint carries.

    It may be packed, by `save_packed`, `moepack quantize` or transformers' `save_pretrained`.

    Raises MoePackError with the directory and the reason: also for tensors that are missing, of
    another shape, or without a place in the model.
    """
    _require_checkpoint(directory)
    if not any(directory.glob("*.safetensors")):
        raise MoePackError(f"{directory}: no *.safetensors file; convert the checkpoint first")
    _require_generation_config(directory / "generation_config.json")
    with reported(directory), _experts_named(directory), _quiet():
        if (directory / PACKED_FILE).is_file():
            return _load_packed(directory)
        config = read_object(directory / "config.json")
        if (config.get("quantization_config") or {}).get("quant_method") == METHOD_NAME:
            return load_packed(directory)
        if not config.get("quantization_config"):
            completeness.require_float(directory)
        described = read_config(directory)
        completeness.require_weights(directory, _without_weights(described))
        # Asked to ignore other shapes, it reports them; else its error points to a hidden log.
        model, info = _auto_class(described).from_pretrained(
            directory,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        completeness.require_loaded(directory, info)
        return model.eval()


def empty_model(directory: Path) -> PreTrainedModel:
    """The model of the directory's config.json without weights, on the meta device."""
    _require_checkpoint(directory)
    with reported(directory), _quiet():
        return _without_weights(read_config(directory))


def save_packed(model: nn.Module, source: Path, out: Path, *, force: bool = False) -> Path:
    """Writes the packed model that came from the checkpoint `source`; returns `out`.

    `out` appears complete or not at all. Raises MoePackError when it exists and `force` is false.
    """
    with staged(out, force, [source]) as stage:
        tensors, ties = _untied(model.state_dict())
        save_file(tensors, stage / _WEIGHTS, metadata={"format": "pt"})
        description = {
            "format": FORMAT,
            "versions": package_versions(("moepack", "torch", "transformers")),
            "ties": ties,
            "blocks": _blocks(model),
        }
        text = json.dumps(description, indent=2) + "\n"
        (stage / PACKED_FILE).write_text(text, encoding="utf-8")
        for name in (*DESCRIPTION_FILES, *TOKENIZER_FILES):
            if (source / name).is_file():
                shutil.copyfile(source / name, stage / name)
    return out


def _load_packed(directory: Path) -> PreTrainedModel:
    description = read_object(directory / PACKED_FILE)
    if description["format"] > FORMAT:
        raise MoePackError(
            f"{directory}: packed checkpoint format {description['format']}, this moepack reads up "
            f"to {FORMAT}; use a newer moepack"
        )
    config = read_config(directory)
    tensors = load_file(directory / _WEIGHTS)
    model = _without_weights(config, dtype=torch.float32)
    found = find_blocks(model)
    for path, block in description["blocks"].items():
        _place(model, _block_at(path, found, directory), path, block, tensors)
    for name, owner in description["ties"].items():
        tensors[name] = tensors[owner]
    completeness.require_same(directory, tensors, model.state_dict())
    for name, tensor in tensors.items():
        set_tensor(model, name, tensor)
    finish_buffers(model)
    return model


def _auto_class(config: Any) -> Any:
    """Encoders with decoders are read, packed and written too, though nothing exports them."""
    is_pair = getattr(config, "is_encoder_decoder", False)
    return AutoModelForSeq2SeqLM if is_pair else AutoModelForCausalLM


def _without_weights(config: Any, **options: Any) -> PreTrainedModel:
    """No memory until the files are seen to hold it all: a damaged config may ask for any size."""
    with torch.device("meta"):
        return _auto_class(config).from_config(config, **options).eval()


def _block_at(path: str, found: Sequence[FoundBlock], directory: Path) -> FoundBlock:
    """The float block in which the packed module at `path` has its place."""
    for block in found:
        if path == block.path or path.startswith(f"{block.path}.".removeprefix(".")):
            return block
    raise MoePackError(f"{directory}: {path} is packed, but the model has no MoE block there")


def _place(
    model: nn.Module,
    original: FoundBlock,
    path: str,
    block: dict[str, Any],
    tensors: dict[str, Tensor],
) -> None:
    """Builds the packed module of one block and puts it in the model, its tensors still empty."""
    attributes = ExpertAttributes(**block["experts"])
    has_bias13, has_bias2 = (f"{path}.{name}" in tensors for name in ("bias13", "bias2"))
    num_experts = tensors[f"{path}.packed_w13"].shape[0]
    new: PackedExperts
    if block["routing"] is None:
        new = QuantizedExperts.empty(
            num_experts, block["dim"], attributes, has_bias13=has_bias13, has_bias2=has_bias2
        )
    else:
        routing = RoutingAttributes(**block["routing"])
        kind = RoutedExperts if block.get("in_place", False) else QuantizedMoEFFN
        routed = kind.empty(
            num_experts,
            block["dim"],
            routing,
            attributes,
            has_gate_bias=f"{path}.gate_bias" in tensors,
            has_expert_bias=f"{path}.expert_bias" in tensors,
            has_bias13=has_bias13,
            has_bias2=has_bias2,
        )
        routed.returns = block["returns"]
        routed.keep_shared(
            *((n, original.module.get_submodule(n)) if n else None for n in block["shared"])
        )
        new = routed
    if original.spec is None:
        raise MoePackError(f"{path} is packed, but {original.refused_because}")
    placement.put(model, original, original.spec, new.eval())


def _blocks(model: nn.Module) -> dict[str, dict[str, Any]]:
    blocks: dict[str, dict[str, Any]] = {}
    for path, module in model.named_modules():
        if not isinstance(module, PackedExperts):
            continue
        block = {"experts": asdict(module.attributes), "dim": module.dim, "routing": None}
        if isinstance(module, QuantizedMoEFFN):
            block["routing"] = asdict(module.routing)
            block["in_place"] = isinstance(module, RoutedExperts)
            block["returns"] = module.returns
            block["shared"] = [module.shared_name, module.shared_gate_name]
        blocks[path] = block
    return blocks


def _untied(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors without those that are another one's storage, and which those were."""
    owners: dict[tuple[int, torch.Size], str] = {}
    tensors, ties = {}, {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and key in owners:
            ties[name] = owners[key]
        else:
            owners[key] = name
            tensors[name] = tensor.contiguous()
    return tensors, ties


def _require_checkpoint(directory: Path) -> None:
    if not directory.is_dir():
        raise MoePackError(f"{directory}: no such directory; expected a Hugging Face checkpoint")
    if not (directory / "config.json").is_file():
        raise MoePackError(f"{directory}: no config.json; expected a Hugging Face checkpoint")


def _require_generation_config(path: Path) -> None:
    """The library goes on with defaults instead of a broken one: another end of text, unseen."""
    if path.is_file():
        with reported(path):
            GenerationConfig.from_dict(read_object(path))


@contextmanager
def _experts_named(directory: Path) -> Iterator[None]:
    """Where transformers points to a report in its log, the tensors that are missing."""
    try:
        yield
    except RuntimeError as error:
        if "above report" not in str(error):
            raise
        gone = completeness.missing_of_experts(directory)
        missing = f"; missing: {shortened(gone, 4)}" if gone else ""
        raise BadWeights(
            f"{directory}: cannot be loaded: its experts' tensors do not fit together{missing}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar of transformers inside one of ours."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
