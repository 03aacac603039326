"""ONNX Runtime's com.microsoft.QMoE: 4-bit blocks of 32, accuracy level 4 (int8 activations)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from layers import GROUP, Floats, Layer, Matrix, Work
from onnx import TensorProto, helper, numpy_helper


class Peer:
    def __init__(self, layer: Layer, threads: int) -> None:
        self.shape = layer.shape
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        model = _model(layer).SerializeToString()
        self.sessions = [
            onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
            for _ in range(layer.shape.copies)
        ]

    def prepare(self, work: Work) -> None:
        # The operator routes by itself: softmax over the selected logits gives back the weights.
        logits = np.full((len(work.x), self.shape.E), -30.0, np.float32)
        np.put_along_axis(logits, work.ids, np.log(work.weights), axis=1)
        self.feed = {"x": work.x, "router": logits}
        self.session = self.sessions[work.copy]

    def run(self) -> None:
        (self.y,) = self.session.run(None, self.feed)

    def result(self) -> Floats:
        y: Floats = self.y
        return y


def _model(layer: Layer) -> onnx.ModelProto:
    s = layer.shape
    experts = [layer.expert(e) for e in range(s.E)]
    gate_up = [(_interleaved(e.gate, e.up)) for e in experts]
    tensors = {
        "w13": np.stack([_nibbles(m) for m in gate_up]),
        "s13": np.stack([m.scales.astype(np.float32) for m in gate_up]),
        "w2": np.stack([_nibbles(e.down) for e in experts]),
        "s2": np.stack([e.down.scales.astype(np.float32) for e in experts]),
    }
    node = helper.make_node(
        "QMoE", ["x", "router", "w13", "s13", "", "w2", "s2"], ["y"], domain="com.microsoft",
        k=s.K, activation_type="swiglu", swiglu_fusion=1, expert_weight_bits=4, block_size=GROUP,
        normalize_routing_weights=1, activation_alpha=1.0, activation_beta=0.0, accuracy_level=4,
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "layer",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", s.D]),
            helper.make_tensor_value_info("router", TensorProto.FLOAT, ["T", s.E]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", s.D])],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _interleaved(gate: Matrix, up: Matrix) -> Matrix:
    """Rows gate 0, up 0, gate 1, up 1, ...: what swiglu_fusion=1 expects."""
    codes, scales = (
        np.stack([getattr(gate, name), getattr(up, name)], axis=1).reshape(2 * len(gate.codes), -1)
        for name in ("codes", "scales")
    )
    return Matrix(codes, scales)


def _nibbles(matrix: Matrix) -> npt.NDArray[np.uint8]:
    codes = (matrix.codes + 8).astype(np.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4
