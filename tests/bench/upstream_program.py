"""A program with ExecuTorch's own MoE operator, run on its own kernel and on moepack's.

One layer of Qwen3-30B-A3B (D 2048, F 768, 128 experts, 8 of them per token), int4 groups of 32, one
token: the same .pte, loaded before and after `accelerate_upstream()`. Every call takes the next 8
experts, so that weights come from memory. The results are held against the bound of
docs/reference/activation-error.md before anything is timed.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moepack.acceleration import accelerate_upstream
from moepack.quantizer import QuantizedMatrix
from moepack.reference import exact
from moepack.reference.bound import activation_error_bound, logit_rounding
from moepack.runtime import executorch_runtime, set_threads
from moepack.schemes import scheme
from moepack.torchao_layout import pack_universal, unpack_universal

D, F, E, K = 2048, 768, 128, 8
SCHEME = scheme("int4-g32")
DISTINCT = 8  # different experts; their copies lie elsewhere in memory
ROUNDS = 30
CALLS_OF_OURS = 8  # per round: theirs takes so much longer
MIN_TIMES_FASTER = 60.0


@dataclass(frozen=True)
class Timing:
    """Medians of a call, in milliseconds; the largest share of the bound that was reached."""

    theirs_ms: float
    accelerated_ms: float
    share_of_bound: float

    @property
    def times_faster(self) -> float:
        return self.theirs_ms / self.accelerated_ms


class Layer(nn.Module):
    packed_w13: Tensor
    packed_w2: Tensor
    gate_weight: Tensor
    no_bias: Tensor

    def __init__(self, packed_w13: Tensor, packed_w2: Tensor) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        gate = torch.randint(0, 2, (E, D), generator=generator).float() * 2 - 1
        self.register_buffer("packed_w13", packed_w13)
        self.register_buffer("packed_w2", packed_w2)
        self.register_buffer("gate_weight", gate)
        self.register_buffer("no_bias", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.llama.quantized_moe_ffn(
            x, self.gate_weight, self.no_bias, self.packed_w13, self.packed_w2,
            K, E, F, D, SCHEME.group, SCHEME.bits, "softmax", 1.0,
        )  # fmt: skip
        return result

    def x(self, step: int) -> Tensor:
        """Rows of the gate are nearly orthogonal: their sum selects just these experts."""
        first = step * K % E
        return (self.gate_weight[first : first + K].sum(0) / D**0.5)[None]

    def bound(self, x: Tensor) -> Tensor:
        logits = exact.router_logits(x, self.gate_weight, None, "float32")
        ids = exact.select(logits, K, 1, 1, "top2sum")
        weights = exact.weigh(logits.gather(1, ids), "softmax", False, 0.0, False, 1.0)

        def w13(e: int) -> Tensor:
            return unpack_universal(self.packed_w13[e], 2 * F, D, SCHEME.group).dequantize()

        def w2(e: int) -> Tensor:
            return unpack_universal(self.packed_w2[e], D, F, SCHEME.group).dequantize()

        rounding = logit_rounding(x, self.gate_weight)
        return activation_error_bound(x, ids, weights, w13, w2, rounding)


def made_matrix(rows: int, cols: int, seed: int) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (rows, cols), generator=generator, dtype=torch.int8)
    scales = torch.rand(rows, cols // SCHEME.group, generator=generator) + 0.5
    return QuantizedMatrix(SCHEME, codes, scales.to(torch.float16), -8)


def stacked(blobs: list[Tensor]) -> Tensor:
    return torch.stack([blobs[e % len(blobs)] for e in range(E)])


def made_layer() -> Layer:
    w13 = [pack_universal(made_matrix(2 * F, D, 2 * e)) for e in range(DISTINCT)]
    w2 = [pack_universal(made_matrix(D, F, 2 * e + 1)) for e in range(DISTINCT)]
    return Layer(stacked(w13), stacked(w2))


def measure(folder: Path, threads: int) -> Timing:
    """Raises SystemExit where a result is beyond the bound."""
    import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401
    from executorch.exir import to_edge

    layer = made_layer()
    path = folder / "layer.pte"
    with path.open("wb") as file:
        to_edge(torch.export.export(layer, (layer.x(0),))).to_executorch().write_to_file(file)
    set_threads(threads)
    plain = _method(path)
    with accelerate_upstream():
        accelerated = _method(path)
        share = max(_share_of_bound(layer, plain, accelerated, step) for step in range(3))
        theirs, ours = [], []
        for step in range(ROUNDS):
            theirs.append(_seconds(plain, layer.x(step)))
            first = step * CALLS_OF_OURS
            ours += [_seconds(accelerated, layer.x(first + i)) for i in range(CALLS_OF_OURS)]
    return Timing(1e3 * statistics.median(theirs), 1e3 * statistics.median(ours), share)


def _method(path: Path) -> Any:
    return executorch_runtime().load_program(path).load_method("forward")


def _share_of_bound(layer: Layer, plain: Any, accelerated: Any, step: int) -> float:
    x = layer.x(step)
    theirs, ours = (method.execute((x,))[0].clone() for method in (plain, accelerated))
    share = float(((ours - theirs).abs() / layer.bound(x)).max())
    if not 0 < share <= 1:
        raise SystemExit(f"step {step}: the results differ by {share:g} of the bound")
    return share


def _seconds(method: Any, x: Tensor) -> float:
    start = time.perf_counter()
    method.execute((x,))
    return time.perf_counter() - start
