"""A checkpoint that is quantized while it is loaded: the float model never exists."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from moepack.errors import MoePackError, NoMoEBlock, UnsupportedError, reported
from moepack.families import FoundBlock, find_blocks
from moepack.modules import PackedExperts
from moepack.online.adapter import check_classes, read_with_values
from moepack.online.blocks import Allocate, OnlineBlock, in_memory
from moepack.online.completeness import require_float, require_layers
from moepack.online.filling import Filled, Filling
from moepack.online.methods import OnlineMethod, method_for
from moepack.online.model_tensors import (
    finish_buffers,
    keep_from_init,
    set_tensor,
    zero_what_is_unknown,
)
from moepack.online.sources import Dummy, SafetensorsDirectory, Source
from moepack.placement import put
from moepack.planner import Plan, plan_blocks
from moepack.schemes import Scheme
from moepack.threads import require_threads
from moepack.verification import AdapterCheck

LoadFormat = Literal["safetensors", "dummy"]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Settings:
    """How blocks are quantized. `methods` replaces the arithmetic of schemes, by their names."""

    scheme: str | Scheme = "int4-g32"
    exclude: Sequence[str] = ()
    recipe: Mapping[str, str] | None = None
    router: Literal["auto", "outside"] = "auto"
    layout: str = "moepack"
    sqnr_floor: float | None = None
    threads: int | None = None
    methods: Mapping[str, OnlineMethod] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_threads(self.threads)

    @property
    def workers(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))


def settings_of(config: Mapping[str, Any]) -> Settings:
    """The settings that config.json holds as `quantization_config`.

    Raises MoePackError for values of other kinds.
    """
    with reported("quantization_config"):
        settings = Settings(
            scheme=config["scheme"],
            exclude=tuple(config.get("exclude") or ()),
            recipe=dict(config.get("modules") or {}),
            router=config.get("router", "auto"),
            layout=config.get("layout", "moepack"),
            sqnr_floor=config.get("sqnr_floor"),
        )
    recipe = settings.recipe or {}
    texts = (settings.scheme, settings.layout, *settings.exclude, *recipe, *recipe.values())
    for text in texts:
        if not isinstance(text, str):
            raise UnsupportedError(f"quantization_config: {text!r}; expected text in its place")
    return settings


@dataclass
class Loaded:
    """`model` is the root; `worst_db` by block path is the worst matrix's SQNR of weights.

    `kept`: by block path, how many matrices a checkpoint stored in their format already: their
    codes and scales are the stored ones, and no noise is counted for them.
    `adapter_checks`: of the blocks that stand for their class and shape, by path.
    """

    model: nn.Module
    plan: Plan
    worst_db: dict[str, float] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    adapter_checks: dict[str, AdapterCheck] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)


def load(
    directory: str | Path,
    settings: Settings | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    load_format: LoadFormat = "safetensors",
    allow_unexpected: bool = False,
    progress: Progress | None = None,
) -> Loaded:
    """Builds the model of a checkpoint directory, packing its experts as they are read.

    Peak anonymous memory is the result and about one layer. FP8 and MXFP4 weights are kept bit for
    bit by a scheme that has their codes and scales, and dequantized exactly for any other.
    `load_format="dummy"` reads config.json alone and draws random weights. Stored tensors that the
    model has no place for are an error, or `Loaded.unexpected` if they are allowed. Raises
    NoMoEBlock, UnsupportedError, BadWeights (names, shapes, values), VerificationError (a class
    that computes something else, the SQNR floor).
    """
    config, model = described_model(Path(directory), dtype)
    if load_format != "dummy" and getattr(config, "quantization_config", None) is None:
        require_float(Path(directory))
    source: Source = (
        Dummy(model) if load_format == "dummy" else SafetensorsDirectory(Path(directory))
    )
    return fill(
        model,
        source,
        settings or Settings(),
        allow_unexpected=allow_unexpected,
        progress=progress,
    )


def load_packed(directory: str | Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """A checkpoint that is packed already, its weights mapped from the files.

    What was left in FP8 or MXFP4 is dequantized. Raises BadWeights if tensors are missing
    or have no place in the model.
    """
    config, model = described_model(Path(directory), dtype)
    with reported(directory):
        place_empty(model, settings_of(config.quantization_config))
    source = SafetensorsDirectory(Path(directory))

    def apply(filled: Filled) -> None:
        for name, tensor in filled.tensors.items():
            set_tensor(model, name, tensor)

    filling = Filling(model, (), apply, source.names)
    filling.require_buffers_of(PackedExperts)
    filling.check_names()
    filling.check_places()
    for stored in source:
        filling.add(stored)
    filling.end()
    filling.require_everything()
    finish_buffers(model)
    return model


def read_config(directory: Path) -> Any:
    """The config of a checkpoint directory. Raises MoePackError naming it and the reason."""
    from transformers import AutoConfig

    if not (directory / "config.json").is_file():
        raise MoePackError(f"{directory}: no config.json; expected a Hugging Face checkpoint")
    with reported(directory):
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    require_layers(directory, config)
    return config


def described_model(directory: Path, dtype: torch.dtype) -> tuple[Any, nn.Module]:
    """The config of a checkpoint directory and the model that it describes, without weights.

    Raises MoePackError naming the directory and the reason.
    """
    with reported(directory):
        config = read_config(directory)
        return config, meta_model(config, dtype)


def place_empty(model: nn.Module, settings: Settings) -> None:
    """Puts packed modules without values where `settings` say that blocks are packed."""
    blocks, _ = online_blocks(model, settings)
    for block in blocks:
        block.found.module._is_hf_initialized = True  # type: ignore[assignment]
        put(model, block.found, block.spec, block.empty())
    keep_from_init(model)


def meta_model(config: Any, dtype: torch.dtype, model_class: Any = None) -> nn.Module:
    """The model of a config without weights; parameters that stay in fp32 are declared so."""
    import transformers

    named = (config.architectures or [""])[0]
    model_class = model_class or getattr(transformers, named, None)
    with torch.device("meta"):
        if model_class is None:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            model = model_class._from_config(config, dtype=dtype)
    _keep_in_fp32(model, model._get_dtype_plan(dtype))
    built: nn.Module = model.eval()
    return built


def fill(
    model: nn.Module,
    source: Source,
    settings: Settings,
    *,
    allocate: Allocate = in_memory,
    allow_unexpected: bool = False,
    progress: Progress | None = None,
) -> Loaded:
    """Fills a model on the meta device. The result's parts are the model's own modules."""
    blocks, decided = online_blocks(model, settings, allocate)
    loaded = Loaded(model, decided, adapter_checks=check_classes(blocks))

    def apply(filled: Filled) -> None:
        for name, tensor in filled.tensors.items():
            set_tensor(loaded.model, name, tensor)
        for block, new in filled.packed:
            loaded.worst_db[block.path] = block.worst_db
            loaded.kept[block.path] = block.kept
            zero_what_is_unknown(new)
            block.found.module._is_hf_initialized = True  # type: ignore[assignment]
            loaded.model = put(loaded.model, block.found, block.spec, new)
        if progress is not None:
            done = sum(group.is_done for group in filling.groups.values())
            progress(f"packing {filled.group.name}", done, len(filling.groups))

    filling = Filling(model, blocks, apply, source.names)
    blocks.clear()
    if source.names is not None:
        filling.check_names()
    if not allow_unexpected:
        filling.check_places()
    for stored in source:
        filling.add(stored)
    filling.end()
    if not allow_unexpected:
        filling.check_places()
    loaded.unexpected = filling.unexpected
    filling.require_everything()
    finish_buffers(loaded.model)
    return loaded


def online_blocks(
    model: nn.Module, settings: Settings, allocate: Allocate = in_memory
) -> tuple[list[OnlineBlock], Plan]:
    """Every block that is going to be packed. Raises as `quantize_` does, before any work."""
    found = [read_with_values(block) for block in find_blocks(model)]
    decided = plan_blocks(
        model,
        found,
        settings.scheme,
        exclude=settings.exclude,
        recipe=settings.recipe,
        router=settings.router,
        layout=settings.layout,
    )
    _refuse(model, decided)
    return [
        _online_block(block, decided, index, settings, allocate)
        for index, block in enumerate(found)
        if decided.blocks[index].action == "replace"
    ], decided


def _online_block(
    block: FoundBlock, decided: Plan, index: int, settings: Settings, allocate: Allocate
) -> OnlineBlock:
    decision = decided.blocks[index]
    method = settings.methods.get(decision.scheme) or method_for(decision.scheme)
    return OnlineBlock(block, decision, method, allocate, settings.sqnr_floor, settings.workers)


def _refuse(model: nn.Module, decided: Plan) -> None:
    if decided.refused:
        first = decided.refused[0]
        reasons = "; ".join(
            f"{b.path or '(root)'} ({b.block_class}): {b.why}" for b in decided.refused
        )
        raise UnsupportedError(
            f"{len(decided.refused)} MoE blocks cannot be packed: {reasons}. To leave them as they "
            f"are, name them: exclude=[{first.path!r}, ...]"
        )
    if not decided.blocks:
        raise NoMoEBlock(f"{type(model).__name__} holds no MoE block: nothing to quantize")


def _keep_in_fp32(model: nn.Module, plan: Mapping[str, torch.dtype]) -> None:
    if not plan:
        return
    from transformers.core_model_loading import build_glob_alternation

    pattern, _, _ = build_glob_alternation(list(plan))
    for name, parameter in model.named_parameters():
        if pattern.search(name):
            parameter.data = parameter.data.to(torch.float32)
