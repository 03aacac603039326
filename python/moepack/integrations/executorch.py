"""ExecuTorch's own LLM export with moepack's experts behind its `use_moe_quantized_op`.

Upstream's switch calls a source transform that needs kernels which wheels do not have. Inside
`quantized_experts(options)` it calls moepack's instead; afterwards everything is as before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from moepack.errors import BadWeights, MoePackError, NoMoEBlock, UnsupportedError, reported
from moepack.families import executorch as family
from moepack.integrations.export_files import require_files, save_program
from moepack.modules import QuantizedMoEFFN
from moepack.schemes import Scheme, scheme
from moepack.torchao_layout import install_packing_ops
from moepack.transform import quantize_
from moepack.transform_report import Report
from moepack.universal_blob import require_integers

LAYOUTS = ("moepack", "torchao")
_NAMED_LIKE_EXPERTS = re.compile(r"expert|moe|cond_ffn", re.IGNORECASE)


@dataclass(frozen=True)
class ExpertOptions:
    """What upstream's configuration has no keys for.

    `scheme` or `group_size` (4-bit codes) say how experts are packed; without them the group is
    that of the export's own quantization, 32 if it has none. `layout="torchao"` writes upstream's
    operator and blobs instead of moepack's. `sqnr_floor`: as in `moepack.quantize_`.
    """

    scheme: str | None = None
    group_size: int | None = None
    layout: str = "moepack"
    sqnr_floor: float | None = None

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise UnsupportedError(f"layout {self.layout!r}; supported: {', '.join(LAYOUTS)}")
        if self.layout == "torchao" and self.sqnr_floor is not None:
            raise UnsupportedError(
                "sqnr_floor with the layout 'torchao': upstream's transform measures no noise; "
                "export in the layout 'moepack', then `moepack convert --layout torchao --upstream`"
            )
        if self.scheme is not None and self.group_size not in (None, scheme(self.scheme).group):
            raise UnsupportedError(
                f"the scheme {self.scheme} and groups of {self.group_size} contradict each other; "
                "give one of them"
            )

    def resolve(self, group_size: int, bits: int) -> Scheme:
        """The scheme, given the group and the bits of the export's own configuration."""
        if self.scheme is not None:
            return scheme(self.scheme)
        group = group_size if self.group_size is None else self.group_size
        return scheme(f"int{bits}-g{group}")


@contextmanager
def quantized_experts(
    options: ExpertOptions, tell: Callable[[Report], None] = lambda report: None
) -> Iterator[None]:
    """Within it `export_llama` packs experts by moepack where `use_moe_quantized_op` is set.

    Constants are written from where they lie, aligned to 64 bytes. `tell` gets the report of the
    packing. The export raises NoMoEBlock where there is nothing to pack, BadWeights where expert
    weights are missing from the checkpoint or would not be used.
    """
    from executorch.examples.models.llama import export_llama_lib
    from executorch.examples.models.llama.source_transformation import moe
    from executorch.extension.llm.export import builder

    from moepack.exporter.constants import constants_in_place
    from moepack.exporter.lowering import CONSTANT_ALIGNMENT

    upstream_transform = moe.replace_moe_with_quantized_op
    upstream_load = export_llama_lib._load_llama_model

    def replace_moe_with_quantized_op(
        model: nn.Module, *, group_size: int = 32, weight_nbit: int = 4
    ) -> nn.Module:
        found = options.resolve(group_size, weight_nbit)
        if options.layout == "torchao":
            return _pack_as_upstream(model, found, upstream_transform)
        report = quantize_(model, found, sqnr_floor=options.sqnr_floor)
        for module in report.model.modules():
            if isinstance(module, QuantizedMoEFFN):
                module.returns = "shaped"
        tell(report)
        return report.model

    def load_model(config: Any) -> Any:
        packs, checkpoint = config.model.use_moe_quantized_op, config.base.checkpoint
        if options != ExpertOptions() and not packs:
            raise UnsupportedError(
                "moepack's options for experts are given, but use_moe_quantized_op is not set; add "
                "model.use_moe_quantized_op=True or --use_moe_quantized_op"
            )
        stored = require_files(config)
        with reported(f"{checkpoint or 'the model'} as {config.base.params or 'it is built in'}"):
            loaded = upstream_load(config)
        if packs and checkpoint is None:
            _randomize(loaded.model)
        elif packs:
            _check_checkpoint(loaded.model, checkpoint, stored)
        return loaded

    with ExitStack() as undo:
        _put(undo, moe, "replace_moe_with_quantized_op", replace_moe_with_quantized_op)
        _put(undo, export_llama_lib, "_load_llama_model", load_model)
        _put(undo, builder, "save_pte_program", save_program)
        config = partial(
            builder.ExecutorchBackendConfig, constant_tensor_alignment=CONSTANT_ALIGNMENT
        )
        _put(undo, builder, "ExecutorchBackendConfig", config)
        undo.enter_context(constants_in_place())
        yield


def _put(undo: ExitStack, module: Any, name: str, value: object) -> None:
    undo.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    return {path: m for path, m in model.named_modules() if family.is_candidate(m)}


def _randomize(model: nn.Module) -> None:
    """Without a checkpoint upstream fills linear layers; experts hold what lay in memory."""
    for block in _blocks(model).values():
        for weight in block.get_submodule("cond_ffn").parameters():
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)


def _check_checkpoint(model: nn.Module, checkpoint: str, stored: list[str]) -> None:
    """Upstream asks for missing names that end in ".weight"; those of experts do not."""
    prefixes = tuple(f"{path}." for path in _blocks(model))
    weights = model.state_dict()
    # The model is built on the meta device: what the checkpoint did not fill is still there.
    missing = [n for n, w in weights.items() if n.startswith(prefixes) and w.is_meta]
    if missing:
        raise BadWeights(
            f"{checkpoint}: lacks {_listed(missing)}; the MoE blocks of the model need them. "
            "Compare the checkpoint's names and the params file"
        )
    unused = [
        name
        for name in stored
        if name not in weights and (name.startswith(prefixes) or _NAMED_LIKE_EXPERTS.search(name))
    ]
    if unused:
        raise BadWeights(
            f"{checkpoint}: {_listed(unused)} would not be used: the model has no such weights. "
            "Compare the checkpoint's names and the params file"
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _pack_as_upstream(
    model: nn.Module, found: Scheme, transform: Callable[..., nn.Module]
) -> nn.Module:
    """Upstream's transform, without what it lets through and its kernel then fails at."""
    blocks = _blocks(model)
    if not blocks:
        raise NoMoEBlock("the model has no MoE block; set `moe` in its params file")
    require_integers(found)
    for path, block in blocks.items():
        for name, weight in block.named_parameters():
            if not bool(weight.isfinite().all()):
                raise BadWeights(f"{path}.{name}: holds NaN or infinity; check the checkpoint")
        if block.score_func != "sigmoid" and block.expert_bias is not None:
            raise UnsupportedError(
                f"{path}: expert biases with score_func {block.score_func!r} end the process that "
                "runs upstream's operator; supported by it: sigmoid. Use the layout 'moepack'"
            )
    try:
        with install_packing_ops():
            result = transform(model, group_size=found.group, weight_nbit=found.bits)
    except (ValueError, NotImplementedError) as error:  # its words for a group or a routing
        raise UnsupportedError(f"the layout 'torchao': {error}") from error
    if left := _blocks(result):
        raise MoePackError(f"{', '.join(left)}: not replaced by upstream's transform")
    return result
