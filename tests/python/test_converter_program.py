"""Programs of ExecuTorch's own operator become moepack's; what cannot be converted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import moepack
from expert_layer import DIM, Layer
from moepack.acceleration import accelerate_upstream
from moepack.errors import MoePackError, PackedFormatError, UnsupportedError
from moepack.exporter.lowering import Method, write_methods, write_program
from moepack.inspection import inspect
from moepack.runtime import executorch_runtime
from moepack.universal_blob import encode
from packed_models import W2, W13


class Upstream(nn.Module):
    """One layer that calls ExecuTorch's own operator."""

    packed_w13: Tensor
    packed_w2: Tensor
    gate_weight: Tensor
    expert_bias: Tensor

    def __init__(self, score_func: str = "sigmoid", has_bias: bool = True) -> None:
        super().__init__()
        self.score_func = score_func
        generator = torch.Generator().manual_seed(3)

        def stack(rows: int, cols: int) -> Tensor:
            codes = torch.randint(-8, 8, (4, rows, cols), generator=generator, dtype=torch.int8)
            scales = torch.rand(4, rows, cols // 32, generator=generator) * cols**-0.5
            return torch.stack([encode(c, s, 4, 32) for c, s in zip(codes, scales, strict=True)])

        self.register_buffer(W13, stack(128, 96))
        self.register_buffer(W2, stack(96, 64))
        self.register_buffer("gate_weight", torch.randn(4, 96, generator=generator))
        bias = torch.randn(4, generator=generator) if has_bias else torch.empty(0)
        self.register_buffer("expert_bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.llama.quantized_moe_ffn(
            x, self.gate_weight, self.expert_bias, self.packed_w13, self.packed_w2,
            2, 4, 64, 96, 32, 4, self.score_func, 2.5,
        )  # fmt: skip
        return result


@pytest.mark.parametrize(("score_func", "has_bias"), [("sigmoid", True), ("softmax", False)])
def test_a_program_of_upstreams_becomes_ours(
    score_func: str, has_bias: bool, tmp_path: Path
) -> None:
    import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401
    from executorch.exir import to_edge

    module = Upstream(score_func, has_bias)
    count = torch.export.Dim("count", max=16)
    exported = torch.export.export(module, (torch.randn(3, 96),), dynamic_shapes=({0: count},))
    data = bytes(to_edge(exported).to_executorch().buffer)
    done = moepack.convert(data, layout="moepack")
    assert 0 < done.changes.changed <= done.changes.scales
    assert 0 < done.changes.largest <= 2**-11
    path = tmp_path / "ours.pte"
    path.write_bytes(done.result)
    assert inspect(path).operators == ["moepack::quantized_moe_ffn.out"]
    method = executorch_runtime().load_program(path).load_method("forward")
    for tokens in (1, 5):
        x = torch.randn(tokens, 96, generator=torch.Generator().manual_seed(tokens))
        (found,) = method.execute((x,))
        with accelerate_upstream():
            expected = module(x)  # the same kernel, with scales that are not rounded
        error = (found - expected).norm() / expected.norm()
        assert error < 2**-8, error


def test_methods_that_share_weights(tmp_path: Path) -> None:
    layer, path = Layer(), tmp_path / "ours.pte"
    methods = {name: Method(layer, (torch.zeros(n, DIM),)) for name, n in (("one", 1), ("two", 2))}
    write_methods(methods, {}, path)
    data = path.read_bytes()
    done = moepack.convert(data, layout="torchao")
    assert done.changes.scales == layer.scales()
    path = tmp_path / "there.pte"
    path.write_bytes(done.result)
    program = executorch_runtime().load_program(path)
    for name, tokens in (("one", 1), ("two", 2)):
        x = torch.randn(tokens, DIM)
        (found,) = program.load_method(name).execute((x,))
        assert torch.equal(found, layer(x))
    assert len(done.result) < 1.5 * len(data)  # stored once


class ReadTwice(Layer):
    """Bytes of the packed experts are also what another operator reads."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.packed_w2[:1, :1].float()


def test_programs_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MoePackError, match="damaged ExecuTorch program"):
        moepack.convert(b"ET12" * 20, layout="moepack")
    path = tmp_path / "layer.pte"
    layer, example = Layer(), (torch.zeros(1, DIM),)
    write_program(layer, example, None, {}, path, tmp_path / "layer.ptd")
    with pytest.raises(UnsupportedError, match=r"call 0 packed_w13: is no constant of the program"):
        moepack.convert(path.read_bytes(), layout="torchao")
    write_program(ReadTwice(), example, None, {}, path)
    with pytest.raises(UnsupportedError, match="an argument of another operator"):
        moepack.convert(path.read_bytes(), layout="torchao")
    write_program(layer, example, None, {}, path)
    with pytest.raises(UnsupportedError, match="in the layout 'moepack' already"):
        moepack.convert(path.read_bytes(), layout="moepack")
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(b"MOEP") + 100] ^= 1
    with pytest.raises(PackedFormatError, match=r"call 0 packed_w13 expert 0: .*checksum"):
        moepack.convert(bytes(damaged), layout="torchao")
