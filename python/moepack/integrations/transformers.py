"""`MoePackConfig` for `from_pretrained(..., quantization_config=...)` of transformers.

The library reads, renames and merges the weights; stacks of experts are packed as they come and
never become parameters. A packed model is saved and loaded with the library's own functions: plain
tensors in safetensors, and the settings in config.json. Importing this registers "moepack" with
transformers, and changes nothing else in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moepack.errors import BadWeights, MoePackError, UnsupportedError
from moepack.manifest import METHOD_NAME
from moepack.modules import PackedExperts
from moepack.online.adapter import check_classes
from moepack.online.blocks import OnlineBlock
from moepack.online.filling import shortened
from moepack.online.loading import Settings, online_blocks, place_empty, settings_of
from moepack.online.mapping import NameMapping, Target
from moepack.online.stored import Decoder, StoredTensor
from moepack.online.unit import Unit
from moepack.placement import put
from moepack.safetensors_file import read_entries


@register_quantization_config(METHOD_NAME)
class MoePackConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How experts are packed: `modules` maps patterns of block paths to schemes, or to "float".

    The first match wins, then `exclude`, then `scheme`; a pattern that matches no block is an
    UnsupportedError, raised by `from_pretrained`. `router="outside"` keeps all routers in PyTorch;
    `layout` as in `moepack.plan`.
    """

    def __init__(
        self,
        scheme: str = "int4-g32",
        modules: Mapping[str, str] | Sequence[Sequence[str]] = (),
        exclude: str | Sequence[str] = (),
        router: str = "auto",
        layout: str = "moepack",
        sqnr_floor: float | None = None,
        **kwargs: Any,
    ) -> None:
        self.quant_method = METHOD_NAME
        self.scheme = scheme
        # Pairs: config.json sorts the keys of objects, and the order of patterns matters.
        pairs = modules.items() if isinstance(modules, Mapping) else modules
        self.modules = [[pattern, chosen] for pattern, chosen in pairs]
        self.exclude = [exclude] if isinstance(exclude, str) else list(exclude)
        self.router = router
        self.layout = layout
        self.sqnr_floor = sqnr_floor

    @property
    def settings(self) -> Settings:
        return settings_of(self.to_dict())


@register_quantizer(METHOD_NAME)
class MoePackHfQuantizer(HfQuantizer):  # type: ignore[misc]
    """Packs while loading, or gives a packed checkpoint the modules that it was saved from."""

    requires_calibration = False

    def __init__(self, quantization_config: MoePackConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.error: MoePackError | None = None
        self.missing_keys: set[str] = set()
        self._blocks: list[OnlineBlock] = []
        self._stacks: dict[str, tuple[OnlineBlock, str]] = {}
        self._units: dict[str, dict[str, Unit]] = {}
        self._mapping: NameMapping | None = None

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        device_map = kwargs.get("device_map")
        devices = device_map.values() if isinstance(device_map, dict) else [device_map]
        if any(str(device) not in ("None", "cpu", "auto") for device in devices):
            raise UnsupportedError(f"device_map {device_map!r}: packed experts run on the CPU")

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        settings = self.quantization_config.settings
        _refuse_encoded(kwargs.get("checkpoint_files") or (), settings, packed=self.pre_quantized)
        with _ordinary_tensors():
            if self.pre_quantized:
                place_empty(model, settings)
                return
            self._blocks, _ = online_blocks(model, settings)
            check_classes(self._blocks)
        self._mapping = NameMapping(model)
        for block in self._blocks:
            for name in block.stacks:
                for path in block.found.paths:
                    self._stacks[f"{path}.{name}".removeprefix(".")] = (block, name)

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        return param_name in self._stacks

    def get_quantize_ops(self) -> ConversionOps:
        return PackExperts(self)

    def take(self, name: str, stack: Tensor) -> None:
        """One stack of experts, merged by the library; experts that are complete are packed."""
        assert self._mapping is not None
        block, inside = self._stacks[name]
        units = self._units.setdefault(block.path, {})
        unit = units[inside] = self._mapping.unit(Target(name, None))
        unit.add(StoredTensor.of(name, stack.detach()), None)
        block.advance(units)
        if len(block.done) == block.spec.experts.num_experts:
            units.clear()

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.error is not None:
            raise self.error
        # Saved under the model's own names: patterns that restore a hub's names are written for
        # float modules, and some of them also match names of packed ones.
        model._weight_conversions = []
        if self.pre_quantized:
            _require_packed(model)
            return model
        for block in self._blocks:
            self._finish(model, block)
        self._blocks, self._stacks, self._mapping = [], {}, None
        return model

    def _finish(self, model: nn.Module, block: OnlineBlock) -> None:
        units = self._units.pop(block.path, {})
        names = {name: f"{block.path}.{name}".removeprefix(".") for name in block.needs}
        is_packed = len(block.done) == block.spec.experts.num_experts
        stacks = set() if is_packed else block.stacks.keys() - units.keys()
        gone = [names[name] for name in stacks]
        gone += [full for name, full in names.items() if full in self.missing_keys]
        if gone:
            raise BadWeights(
                f"the checkpoint lacks tensors of the model: {shortened(sorted(gone))}"
            )
        values = {
            name: _tensor(block.found.module, name).detach()
            for name in block.needs - block.stacks.keys()
        }
        put(model, block.found, block.spec, block.finish(units, values))

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


class PackExperts(ConversionOps):  # type: ignore[misc]
    """Hands a stack over to the quantizer; nothing of it goes into the float module."""

    def __init__(self, quantizer: MoePackHfQuantizer) -> None:
        self.quantizer = quantizer

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        missing_keys: set[str] | None = None,
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        self.quantizer.missing_keys = missing_keys if missing_keys is not None else set()
        for name, value in input_dict.items():
            self.quantizer.missing_keys.discard(name)
            model.get_parameter(name)._is_hf_initialized = True  # it stays on the meta device
            try:
                self.quantizer.take(name, value[0] if isinstance(value, list) else value)
            except MoePackError as error:  # the library would only log it
                self.quantizer.error = self.quantizer.error or error
        return {}


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """The library builds models where new tensors are on the meta device, in the model's dtype."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def _tensor(module: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(path), leaf)
    return tensor


def _refuse_encoded(files: Sequence[str], settings: Settings, *, packed: bool) -> None:
    """The library would take FP8 and FP4 codes for the values, without their scales."""
    stored = {
        name: (Path(file), entry["dtype"])
        for file in files
        if file.endswith(".safetensors")
        for name, entry in read_entries(Path(file))[0].items()
    }
    decoder = Decoder(frozenset(stored))
    for name, (file, dtype) in stored.items():
        is_bytes = dtype in ("U8", "I8") and decoder.logical_name(name) != name
        if not is_bytes and not dtype.startswith("F8_"):
            continue
        directory, found = file.parent, f"{file}: {name} is stored as {dtype}"
        if packed:
            raise UnsupportedError(
                f"{found}, which transformers does not read beside packed experts; use "
                f"moepack.online.load_packed({str(directory)!r})"
            )
        raise UnsupportedError(
            f"{found}, of which transformers would read the codes without their scales. Use "
            f"moepack.online.load({str(directory)!r}, Settings({settings.scheme!r})).model, or "
            "`moepack quantize` and load what it writes: both take codes and scales as stored"
        )


def _require_packed(model: nn.Module) -> None:
    """What the checkpoint lacks was filled with noise by the library, which marks what it loads."""
    gone = [
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        if isinstance(module, PackedExperts)
        for name, buffer in module.named_buffers(recurse=False)
        if not getattr(buffer, "_is_hf_initialized", False)
    ]
    if gone:
        raise BadWeights(f"the packed checkpoint lacks {shortened(gone)}")
