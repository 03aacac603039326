"""Packed models that tests convert, and when two of them hold the same."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

import moepack
import tiny_models
from moepack import packing
from moepack.modules import PackedExperts

W13, W2 = "packed_w13", "packed_w2"


def tiny(layout: str = "moepack", family: str = "qwen3_moe") -> nn.Module:
    model = tiny_models.build(family)
    return moepack.quantize_(model, layout=layout, sqnr_floor=0.0).model


def logits(model: nn.Module) -> Tensor:
    ids = torch.arange(12)[None] % tiny_models.VOCAB
    with torch.no_grad():
        result: Tensor = model(ids).logits
    return result


def packed_modules(model: nn.Module) -> list[PackedExperts]:
    return [module for module in model.modules() if isinstance(module, PackedExperts)]


def weights(model: nn.Module) -> list[Tensor]:
    """Every expert's dequantized matrices."""
    return [
        read(expert)
        for module in packed_modules(model)
        for read in (module.w13, module.w2)
        for expert in range(module.num_experts)
    ]


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Equal to the bit but for the split of moepack's scales into fp16 and a matrix's exponent."""

    def same(name: str) -> bool:
        if not name.endswith((W13, W2)) or bytes(a[name][0, :4].tolist()) != b"MOEP":
            return torch.equal(a[name], b[name])
        return all(same_matrix(*pair) for pair in zip(a[name], b[name], strict=True))

    return a.keys() == b.keys() and all(map(same, a))


def same_matrix(a: Tensor, b: Tensor) -> bool:
    first, second = packing.unpack(a), packing.unpack(b)
    is_same_form = replace(packing.read_header(a), exponent=0, crc32=0) == replace(
        packing.read_header(b), exponent=0, crc32=0
    )
    scales = [torch.ldexp(m.scales.double(), torch.tensor(m.exponent)) for m in (first, second)]
    return is_same_form and torch.equal(first.codes, second.codes) and torch.equal(*scales)
