"""Everything but the experts: linear layers for XNNPACK, the embedding in int8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moepack.errors import UnsupportedError

LINEAR_FORMATS = ("8da4w", "float")
EMBEDDING_FORMATS = ("int8", "float")

_GROUP = 32
_ROWS = 4096


@dataclass(frozen=True)
class LayerFormat:
    """What became of one linear layer or embedding."""

    path: str
    format: str


class Int8Embedding(nn.Module):
    """Rows of int8 codes with one fp32 scale each: row = code * scale, scale = amax / 127."""

    weight: Tensor
    scales: Tensor

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        weight = embedding.weight.detach()
        self.register_buffer("weight", torch.empty(weight.shape, dtype=torch.int8))
        self.register_buffer("scales", torch.empty(len(weight), 1))
        # Some rows at a time: vocabularies are large, and this takes several fp32 copies.
        parts = (t.split(_ROWS) for t in (weight, self.weight, self.scales))
        for given, codes, scales in zip(*parts, strict=True):
            rows = given.float()
            scales.copy_(rows.abs().amax(1, keepdim=True) / 127)
            divisor = torch.where(scales > 0, scales, 1.0)
            codes.copy_((rows / divisor).round())

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = torch.ops.quantized_decomposed.embedding_byte.default(
            self.weight, self.scales, None, -128, 127, ids
        )
        return result


def quantize_embedding(model: nn.Module) -> list[LayerFormat]:
    """Replaces every nn.Embedding; an output layer tied to it keeps the float weights.

    Raises UnsupportedError for an embedding that does more than look rows up.
    """
    # Defines the operator embedding_byte for torch, with its out variant.
    import executorch.exir.passes._quant_patterns_and_replacements  # noqa: F401

    done = []
    for path, module in list(model.named_modules()):
        if not isinstance(module, nn.Embedding):
            continue
        if type(module) is not nn.Embedding or module.max_norm is not None:
            raise UnsupportedError(
                f"{path}: {type(module).__name__} is not a plain embedding; use --embedding float"
            )
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, Int8Embedding(module))
        done.append(LayerFormat(path, "int8"))
    return done


def quantize_linears(model: nn.Module, excluded: frozenset[str]) -> list[LayerFormat]:
    """8-bit dynamic activations, 4-bit weights in groups of 32, for every plain nn.Linear.

    XNNPACK needs whole groups: a layer whose inputs are no multiple of 32 takes 8-bit weights, one
    scale per output, instead. `excluded` names modules that stay in float (routers).
    """
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup

    _untie(model)
    formats = {}
    for path, module in model.named_modules():
        if type(module) is nn.Linear and path not in excluded and _is_plain(module.weight):
            formats[path] = "8da4w" if module.in_features % _GROUP == 0 else "8da8w"
    configs = {
        "8da4w": Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4,  # type: ignore[attr-defined]
            weight_granularity=PerGroup(_GROUP),
            intx_choose_qparams_algorithm="hqq_scale_only",
        ),
        "8da8w": Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int8, weight_granularity=PerAxis(0)
        ),
    }
    for name, config in configs.items():
        quantize_(model, config, lambda _, path, name=name: formats.get(path) == name)
    return [LayerFormat(path, name) for path, name in formats.items()]


def _is_plain(weight: Tensor) -> bool:
    """Whether nobody has quantized it before."""
    return type(weight.data) is Tensor


def _untie(model: nn.Module) -> None:
    """Linear layers that share a weight (tied to the embedding) get a parameter of their own."""
    owners: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            owners.add(id(module.weight))
    for module in model.modules():
        if type(module) is nn.Linear:
            if id(module.weight) in owners:
                module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)
            owners.add(id(module.weight))
