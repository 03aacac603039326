"""A loop over experts in plain torch, fp32 weights: what a model does without any of this."""

from __future__ import annotations

import numpy as np
import torch
from layers import GROUP, Floats, Layer, Matrix, Work
from torch.nn import functional as F


class Peer:
    def __init__(self, layer: Layer, threads: int) -> None:
        torch.set_num_threads(threads)
        self.shape = layer.shape
        # As many experts as 4 GB hold, at least enough for one token; the rest share their memory.
        bytes_each = 12 * self.shape.D * self.shape.F
        held = min(self.shape.E, max(self.shape.K, int(4e9 / bytes_each)))
        self.experts = [
            tuple(dequantized(m) for m in (e.gate, e.up, e.down))
            for e in (layer.expert(i) for i in range(held))
        ]

    def prepare(self, work: Work) -> None:
        self.x, self.ids = torch.from_numpy(work.x), torch.from_numpy(work.ids)
        self.weights = torch.from_numpy(work.weights)

    @torch.no_grad()
    def run(self) -> None:
        y = torch.zeros_like(self.x)
        for e in self.ids.unique().tolist():
            token, slot = (self.ids == e).nonzero(as_tuple=True)
            gate, up, down = self.experts[e % len(self.experts)]
            x = self.x[token]
            hidden = F.silu(F.linear(x, gate)) * F.linear(x, up)
            y.index_add_(0, token, F.linear(hidden, down) * self.weights[token, slot, None])
        self.y = y

    def result(self) -> Floats:
        return self.y.numpy()


def dequantized(matrix: Matrix) -> torch.Tensor:
    scales = np.repeat(matrix.scales.astype(np.float32), GROUP, axis=1)
    return torch.from_numpy(matrix.codes.astype(np.float32) * scales)
