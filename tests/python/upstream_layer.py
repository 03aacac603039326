"""Layers of upstream's operator, made, and programs that call it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moepack.reference import exact
from moepack.reference.bound import activation_error_bound, logit_rounding
from moepack.universal_blob import encode, read_universal

ROUTE_SCALE = 2.5


@dataclass(frozen=True)
class Layer:
    """Experts as upstream takes them, with fp32 scales that fp16 does not hold."""

    gate_weight: Tensor
    expert_bias: Tensor
    packed_w13: Tensor
    packed_w2: Tensor
    K: int
    F: int
    group: int
    bits: int
    score_func: str

    @property
    def experts(self) -> int:
        return self.gate_weight.shape[0]

    @property
    def dim(self) -> int:
        return self.gate_weight.shape[1]

    def arguments(self, x: Tensor) -> list[Any]:
        tensors = [x, self.gate_weight, self.expert_bias, self.packed_w13, self.packed_w2]
        numbers = [self.K, self.experts, self.F, self.dim, self.group, self.bits]
        return [*tensors, *numbers, self.score_func, ROUTE_SCALE]

    def call(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.llama.quantized_moe_ffn(*self.arguments(x))
        return result

    def bound(self, x: Tensor) -> Tensor:
        """Of the difference, for the experts that both sides select."""
        logits = exact.router_logits(x, self.gate_weight, None, "float32")
        scores = exact.score(logits, self.score_func)
        choice = scores + self.expert_bias if len(self.expert_bias) else scores
        ids = exact.select(choice, self.K, 1, 1, "top2sum")
        rounding = logit_rounding(x, self.gate_weight)
        best = choice.double().sort(descending=True).values
        is_clear = best[:, self.K - 1] - best[:, self.K :].amax(1) > 2 * rounding
        assert is_clear.all(), "a tie: the sides may select different experts"
        is_sigmoid = self.score_func == "sigmoid"
        weights = exact.weigh(
            scores.gather(1, ids), self.score_func, is_sigmoid, 2.0**-126, True,
            ROUTE_SCALE if is_sigmoid else 1.0,
        )  # fmt: skip

        def read(stack: Tensor, rows: int, cols: int) -> Any:
            return lambda e: read_universal(stack[e], rows, cols, self.group).dequantize()

        w13 = read(self.packed_w13, 2 * self.F, self.dim)
        w2 = read(self.packed_w2, self.dim, self.F)
        return activation_error_bound(x, ids, weights, w13, w2, rounding)


def layer(
    bits: int = 4,
    group: int = 32,
    score_func: str = "sigmoid",
    E: int = 6,
    D: int = 256,
    F: int = 128,
    K: int = 2,
) -> Layer:
    generator = torch.Generator().manual_seed(bits * group)

    def stack(rows: int, cols: int) -> Tensor:
        high = 1 << (bits - 1)
        scales = torch.rand(E, rows, cols // group, generator=generator) * cols**-0.5 / high
        codes = torch.randint(-high, high, (E, rows, cols), generator=generator, dtype=torch.int8)
        return torch.stack([encode(c, s, bits, group) for c, s in zip(codes, scales, strict=True)])

    gate = torch.randn(E, D, generator=generator) * D**-0.5
    has_bias = score_func == "sigmoid"
    bias = torch.randn(E, generator=generator) / 4 if has_bias else torch.empty(0)
    return Layer(gate, bias, stack(2 * F, D), stack(D, F), K, F, group, bits, score_func)


def tokens(count: int, width: int, seed: int = 1) -> Tensor:
    """Of sizes that differ, an outlier in one."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    if count > 4:
        x[2, 7] *= 100
        x[3] *= 1e-3
    return x


class Program(nn.Module):
    def __init__(self, case: Layer) -> None:
        super().__init__()
        self.case = case
        for name in ("gate_weight", "expert_bias", "packed_w13", "packed_w2"):
            self.register_buffer(name, getattr(case, name))

    def forward(self, x: Tensor) -> Tensor:
        here = {n: getattr(self, n) for n in dict(self.named_buffers())}
        return replace(self.case, **here).call(x)


def export(case: Layer) -> torch.export.ExportedProgram:
    shapes = {"x": {0: torch.export.Dim("count", max=64)}}
    return torch.export.export(Program(case), (tokens(4, case.dim),), dynamic_shapes=shapes)


def to_pte(case: Layer, path: Path) -> Path:
    from executorch.exir import to_edge

    path.write_bytes(to_edge(export(case)).to_executorch().buffer)
    return path


def method_of(path: Path) -> Any:
    from executorch.runtime import Runtime

    return Runtime.get().load_program(path).load_method("forward")
