"""llama.cpp: `mul_mat_id` on Q4_0 weights as it loads them by default (repacked for the CPU)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from ggml import TYPE_F32, TYPE_I32, TYPE_Q4_0, USAGE_WEIGHTS, Ggml, InitParams
from layers import GROUP, Floats, Layer, Matrix, Work


@dataclass
class _Weights:
    gate: int
    up: int
    down: int


@dataclass
class _Graph:
    graph: int
    x: int
    ids: int
    weights: int
    y: int


class Peer:
    def __init__(self, layer: Layer, threads: int) -> None:
        self.ggml = Ggml()
        self.shape = layer.shape
        self.backend = self.ggml.backend_cpu_init()
        self.ggml.backend_cpu_set_n_threads(self.backend, threads)
        self.weights = [self._load(layer) for _ in range(layer.shape.copies)]
        self.graphs: dict[tuple[int, int], _Graph] = {}

    def prepare(self, work: Work) -> None:
        key = (work.copy, len(work.x))
        if key not in self.graphs:
            self.graphs[key] = self._build(self.weights[work.copy], len(work.x))
        self.graph = self.graphs[key]
        self._set(self.graph.x, work.x)
        self._set(self.graph.ids, work.ids.astype(np.int32))
        self._set(self.graph.weights, work.weights)
        self.y = np.empty_like(work.x)

    def run(self) -> None:
        if self.ggml.backend_graph_compute(self.backend, self.graph.graph) != 0:
            raise RuntimeError("ggml could not compute the graph")

    def result(self) -> Floats:
        self.ggml.backend_tensor_get(self.graph.y, self.y.ctypes.data, 0, self.y.nbytes)
        return self.y

    def _context(self, tensors: int) -> int:
        size = self.ggml.tensor_overhead() * tensors + self.ggml.graph_overhead()
        return int(self.ggml.init(InitParams(size, None, True)))

    def _set(self, tensor: int, values: npt.NDArray[np.generic]) -> None:
        values = np.ascontiguousarray(values)
        self.ggml.backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)

    def _load(self, layer: Layer) -> _Weights:
        s, ggml = self.shape, self.ggml
        context = self._context(3)
        weights = _Weights(
            ggml.new_tensor_3d(context, TYPE_Q4_0, s.D, s.F, s.E),
            ggml.new_tensor_3d(context, TYPE_Q4_0, s.D, s.F, s.E),
            ggml.new_tensor_3d(context, TYPE_Q4_0, s.F, s.D, s.E),
        )
        buffer = ggml.backend_alloc_ctx_tensors_from_buft(context, ggml.default_weight_buffer())
        ggml.backend_buffer_set_usage(buffer, USAGE_WEIGHTS)
        for name in ("gate", "up", "down"):
            blocks = [_q4_0(getattr(expert, name)) for expert in layer.experts]
            self._set(
                getattr(weights, name), np.stack([blocks[e % len(blocks)] for e in range(s.E)])
            )
        return weights

    def _build(self, weights: _Weights, tokens: int) -> _Graph:
        s, ggml = self.shape, self.ggml
        context = self._context(64 + 2 * s.K)
        x = ggml.new_tensor_2d(context, TYPE_F32, s.D, tokens)
        ids = ggml.new_tensor_2d(context, TYPE_I32, s.K, tokens)
        topk_weights = ggml.new_tensor_3d(context, TYPE_F32, 1, s.K, tokens)
        for tensor in (x, ids, topk_weights):
            ggml.set_input(tensor)
            ggml.set_output(tensor)
        row = ggml.reshape_3d(context, x, s.D, 1, tokens)
        gate = ggml.mul_mat_id(context, weights.gate, row, ids)
        up = ggml.mul_mat_id(context, weights.up, row, ids)
        hidden = ggml.swiglu_split(context, gate, up)
        out = ggml.mul(context, ggml.mul_mat_id(context, weights.down, hidden, ids), topk_weights)
        slots = [
            ggml.view_2d(context, out, s.D, tokens, 4 * s.D * s.K, 4 * s.D * k) for k in range(s.K)
        ]
        y = slots[0]
        for slot in slots[1:]:
            y = ggml.add(context, y, slot)
        ggml.set_output(y)
        graph = ggml.new_graph(context)
        ggml.build_forward_expand(graph, y)
        ggml.gallocr_alloc_graph(ggml.gallocr_new(ggml.backend_cpu_buffer_type()), graph)
        return _Graph(graph, x, ids, topk_weights, y)


def _q4_0(matrix: Matrix) -> npt.NDArray[np.uint8]:
    """Blocks of 32: fp16 scale, 16 bytes with value j low and value j + 16 high; -8 is 0."""
    codes = (matrix.codes + 8).astype(np.uint8).reshape(len(matrix.codes), -1, 2, GROUP // 2)
    nibbles = codes[:, :, 0] | codes[:, :, 1] << 4
    scales = np.ascontiguousarray(matrix.scales)[..., None].view(np.uint8)
    return np.concatenate([scales, nibbles], axis=2).reshape(len(matrix.codes), -1)
