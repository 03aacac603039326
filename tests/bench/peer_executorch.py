"""ExecuTorch's own operator, `llama::quantized_moe_ffn`. It routes by itself, in fp32."""

from __future__ import annotations

import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401
import torch
from layers import GROUP, Floats, Layer, Work
from peer_moepack import quantized

from moepack.torchao_layout import pack_universal


class Peer:
    def __init__(self, layer: Layer, threads: int) -> None:
        torch.set_num_threads(threads)
        self.shape = s = layer.shape
        w13 = [pack_universal(quantized(e.gate, e.up)) for e in layer.experts]
        w2 = [pack_universal(quantized(e.down)) for e in layer.experts]
        self.w13, self.w2 = (
            torch.stack([blobs[e % len(blobs)] for e in range(s.E)]) for blobs in (w13, w2)
        )

    def prepare(self, work: Work) -> None:
        """A router whose logits are what the weights need: solved for, with T below D."""
        logits = torch.full((len(work.x), self.shape.E), -30.0, dtype=torch.float64)
        log_weights = torch.from_numpy(work.weights).double().log()
        logits.scatter_(1, torch.from_numpy(work.ids), log_weights)
        self.x = torch.from_numpy(work.x)
        self.router = (torch.linalg.pinv(self.x.double()) @ logits).T.float().contiguous()

    def run(self) -> None:
        s = self.shape
        self.y = torch.ops.llama.quantized_moe_ffn(
            self.x, self.router, torch.empty(0), self.w13, self.w2,
            s.K, s.E, s.F, s.D, GROUP, 4, "softmax", 1.0,
        )  # fmt: skip

    def result(self) -> Floats:
        y: Floats = self.y.numpy()
        return y
