"""A checkpoint of DeepSeek-V3's sizes, but fewer layers, as it is published: FP8 in blocks of 128 x 128, many files.

Values are normal numbers; every matrix is another window of one pool, with scales of its own, so that making it takes as
long as writing it.
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moepack.online.loading import meta_model

VOCABULARY = 1024  # its own, 129280, would only add bytes that are copied
BLOCK = 128
_SHARD = 2 << 30
_POOL = (1 << 27) + 8191
_QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}


def config(layers: int, experts: int) -> Any:
    """One dense layer, then `layers` MoE layers."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "deepseek_v3",
        vocab_size=VOCABULARY,
        num_hidden_layers=1 + layers,
        first_k_dense_replace=1,
        n_routed_experts=experts,
        n_group=min(8, experts // 2),
        architectures=["DeepseekV3ForCausalLM"],
        dtype="bfloat16",
    )


def write(directory: Path, layers: int, experts: int) -> int:
    """Makes the checkpoint; returns its bytes."""
    directory.mkdir(parents=True)
    made = config(layers, experts)
    model = meta_model(made, torch.float32)
    made.quantization_config = _QUANTIZATION
    made.save_pretrained(directory)
    shard: dict[str, Tensor] = {}
    size = total = number = 0
    for name, tensor in _tensors(model):
        shard[name] = tensor
        size += tensor.nbytes
        if size >= _SHARD:
            save_file(shard, directory / f"model-{number:05d}.safetensors")
            total, size, number, shard = total + size, 0, number + 1, {}
    if shard:
        save_file(shard, directory / f"model-{number:05d}.safetensors")
    return total + size


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    pool = (64 * torch.randn(_POOL, generator=generator)).clamp(-448, 448).to(torch.float8_e4m3fn)
    for name, shape in _stored(model):
        if "_proj" in name:
            start = int(torch.randint(_POOL - shape.numel(), (1,), generator=generator))
            yield name, pool[start : start + shape.numel()].clone().view(shape)
            grid = [-(-n // BLOCK) for n in shape]
            yield f"{name}_scale_inv", 3e-4 * (0.5 + torch.rand(grid, generator=generator))
        elif "correction_bias" in name:
            yield name, torch.randn(shape, generator=generator)
        elif len(shape) == 1:
            yield name, torch.ones(shape, dtype=torch.bfloat16)
        else:
            yield name, (0.02 * torch.randn(shape, generator=generator)).bfloat16()


def _stored(model: torch.nn.Module) -> Iterator[tuple[str, torch.Size]]:
    """Names and shapes as published: each expert's matrices apart."""
    for name, tensor in model.state_dict().items():
        if not (found := re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)):
            yield name, tensor.shape
            continue
        experts, rows, cols = tensor.shape
        parts = ("gate", "up") if found[2] == "gate_up" else ("down",)
        for expert in range(experts):
            for part in parts:
                shape = torch.Size((rows // len(parts), cols))
                yield f"{found[1]}.{expert}.{part}_proj.weight", shape
