"""One layer that calls moepack's operator, with attributes that tests choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moepack import ops, packing
from moepack.acceleration import routing
from moepack.attributes import ExpertAttributes
from moepack.exporter.lowering import write_program
from moepack.quantizer import QuantizedMatrix, quantize
from moepack.schemes import scheme

EXPERTS, DIM, INNER = 4, 128, 256


class Layer(nn.Module):
    """`weights`: optional tensors of the operator; `attributes`: other than upstream's sigmoid."""

    packed_w2: Tensor

    def __init__(
        self,
        name: str = "int4-g32",
        layout: str = "moepack",
        weights: Mapping[str, Tensor] | None = None,
        **attributes: Any,
    ) -> None:
        super().__init__()
        self.w13 = [_matrix(2 * INNER, DIM, name, seed) for seed in range(EXPERTS)]
        self.w2 = [_matrix(DIM, INNER, name, EXPERTS + seed) for seed in range(EXPERTS)]
        self.register_buffer("gate_weight", _drawn(EXPERTS, DIM, seed=100))
        self.register_buffer("packed_w13", packing.pack_experts(self.w13, "gate_up", layout=layout))
        self.register_buffer("packed_w2", packing.pack_experts(self.w2, layout=layout))
        for tensor, value in (weights or {}).items():
            self.register_buffer(tensor, value)
        self.attributes = {
            **asdict(routing(2, "sigmoid", 2.5)),
            **asdict(ExpertAttributes(INNER, name, layout)),
            **attributes,
        }

    def forward(self, x: Tensor) -> Tensor:
        optional = ("router_x", "gate_bias", "expert_bias", "bias13", "bias2")
        held: dict[str, Any] = dict.fromkeys(optional) | dict(self.named_buffers()) | {"x": x}
        return ops.quantized_moe_ffn(**held, **self.attributes)

    def in_float(self, x: Tensor) -> Tensor:
        """What upstream's sigmoid gives in fp64, with activations that are not quantized."""
        held = dict(self.named_buffers())
        scores = (x.double() @ held["gate_weight"].double().T).sigmoid()
        ids = (scores + held.get("expert_bias", 0)).topk(2).indices
        weights = scores.gather(1, ids)
        weights = 2.5 * weights / weights.sum(1, keepdim=True)
        result = torch.zeros(x.shape, dtype=torch.float64)
        for token, slot in ((t, k) for t in range(len(x)) for k in range(2)):
            expert = int(ids[token, slot])
            gate, up = (self.w13[expert].dequantize().double() @ x[token].double()).chunk(2)
            hidden = nn.functional.silu(gate) * up
            result[token] += weights[token, slot] * (self.w2[expert].dequantize().double() @ hidden)
        return result.float()

    def scales(self) -> int:
        return sum(matrix.scales.numel() for matrix in (*self.w13, *self.w2))

    def write(self, path: Path, weights: Path | None = None) -> Path:
        """The program with one method for 1 to 16 tokens."""
        shapes = ({0: torch.export.Dim("tokens", min=1, max=16)},)
        write_program(self, (torch.zeros(2, DIM),), shapes, {}, path, weights)
        return path


def _matrix(rows: int, cols: int, name: str, seed: int) -> QuantizedMatrix:
    return quantize(_drawn(rows, cols, seed=seed) * cols**-0.5, scheme(name))


def _drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
