"""moepack's operator in eager torch, on huge or on 4 KiB pages."""

from __future__ import annotations

import torch
from layers import Floats, Layer, Matrix, Work

from moepack import huge_pages, ops
from moepack.packing import pack
from moepack.quantizer import QuantizedMatrix
from moepack.schemes import scheme

SCHEME = "int4-g32"


class Peer:
    def __init__(self, layer: Layer, threads: int, huge: bool = True) -> None:
        torch.set_num_threads(threads)
        shape = layer.shape
        w13 = [pack(quantized(e.gate, e.up), "gate_up") for e in layer.experts]
        w2 = [pack(quantized(e.down)) for e in layer.experts]
        self.hidden_dim = shape.F
        self.copies = [
            tuple(_stacked(blobs, shape.E, huge) for blobs in (w13, w2))
            for _ in range(shape.copies)
        ]

    def prepare(self, work: Work) -> None:
        self.x, self.ids = torch.from_numpy(work.x), torch.from_numpy(work.ids)
        self.weights = torch.from_numpy(work.weights)
        self.w13, self.w2 = self.copies[work.copy]

    def run(self) -> None:
        self.y = ops.quantized_experts(
            self.x, self.ids, self.weights, self.w13, self.w2, None, None, self.hidden_dim, SCHEME
        )

    def result(self) -> Floats:
        return self.y.numpy()


def quantized(*parts: Matrix) -> QuantizedMatrix:
    """Matrices one above the other, as moepack's quantizer would have made them."""
    codes = torch.cat([torch.from_numpy(part.codes) for part in parts])
    scales = torch.cat([torch.from_numpy(part.scales) for part in parts])
    return QuantizedMatrix(scheme(SCHEME), codes, scales, 0)


def _stacked(blobs: list[torch.Tensor], experts: int, huge: bool) -> torch.Tensor:
    shape = (experts, blobs[0].numel())
    stacked = huge_pages.empty(*shape) if huge else torch.empty(shape, dtype=torch.uint8)
    for e in range(experts):
        stacked[e] = blobs[e % len(blobs)]
    return stacked
