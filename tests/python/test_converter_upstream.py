"""moepack's programs become those of ExecuTorch's own operator, and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import made_programs
import moepack
from expert_layer import DIM, EXPERTS, INNER, Layer
from moepack import ops, packing
from moepack.acceleration import accelerate_upstream
from moepack.errors import UnsupportedError
from moepack.exporter.lowering import write_program
from moepack.inspection import inspect
from moepack.program_file import Constant, open_program
from moepack.quantizer import QuantizedMatrix
from moepack.runtime import Program, executorch_runtime
from moepack.universal_blob import read_universal
from moepack.weights_file import weights_of

UPSTREAM, OURS = "llama::quantized_moe_ffn.out", "moepack::quantized_moe_ffn.out"


def blobs(path: Path) -> list[Tensor]:
    """The stacks [E, bytes] of a program's calls: w13, w2 of the first, of the second..."""
    program = open_program(path)
    weights = weights_of(program)

    def read(constant: Constant) -> Tensor:
        data, offset = program.data, constant.offset
        if weights is not None:
            data, offset = weights.data, weights.stored[constant.name].segment.offset
        rows, size = constant.shape
        copied = bytearray(data[offset : offset + rows * size])
        return torch.frombuffer(copied, dtype=torch.uint8).view(rows, size)

    calls = [c for m in program.methods for c in m.calls if "quantized_moe_ffn" in c.operator]
    return [read(constant) for call in calls for constant in call.constants[-2:]]


def exact_scales(matrix: QuantizedMatrix) -> Tensor:
    return torch.ldexp(matrix.scales.double(), torch.tensor(matrix.exponent))


def assert_upstream_holds(path: Path, matrices: list[QuantizedMatrix]) -> None:
    """The same codes, and fp16 scales times a power of two as the same numbers in fp32."""
    found = [blob for stack in blobs(path) for blob in stack]
    for blob, matrix in zip(found, matrices, strict=True):
        rows, cols = matrix.codes.shape
        held = read_universal(blob, rows, cols, matrix.scheme.group)
        assert torch.equal(held.codes, matrix.codes)
        assert torch.equal(held.scales.double(), exact_scales(matrix))


def assert_ours_holds(path: Path, matrices: list[QuantizedMatrix]) -> None:
    found = [packing.unpack(blob) for stack in blobs(path) for blob in stack]
    for held, matrix in zip(found, matrices, strict=True):
        assert torch.equal(held.codes, matrix.codes)
        assert torch.equal(exact_scales(held), exact_scales(matrix))


def run(path: Path, x: Tensor) -> Tensor:
    data = path.with_suffix(".ptd")
    runtime = executorch_runtime()
    program = runtime.load_program(path, data_path=data if data.is_file() else None)
    (found,) = program.load_method("forward").execute((x,))
    result: Tensor = found.clone()
    return result


@pytest.mark.parametrize(
    ("name", "has_bias", "apart"),
    [
        ("int4-g32", False, False),
        ("int4-g64", False, True),
        ("int4-g128", True, True),
        ("int8-g32", True, False),
        ("int8-g128", False, True),
    ],
)
def test_a_layer_there_and_back(name: str, has_bias: bool, apart: bool, tmp_path: Path) -> None:
    import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401  upstream's own kernel

    bias = {"expert_bias": torch.randn(EXPERTS)} if has_bias else {}
    layer = Layer(name, weights=bias)
    ours = layer.write(tmp_path / "ours.pte", tmp_path / "ours.ptd" if apart else None)
    matrices = [*layer.w13, *layer.w2]
    there = tmp_path / "there.pte"
    done = moepack.convert(ours, there, layout="torchao", upstream=True)
    assert (done.changes.scales, done.changes.changed) == (layer.scales(), 0)
    assert inspect(there, verify=True).operators == [UPSTREAM]
    assert there.with_suffix(".ptd").is_file() == apart
    assert_upstream_holds(there, matrices)
    back = moepack.convert(there, tmp_path / "back.pte", layout="moepack").result
    assert inspect(back, verify=True).operators == [OURS]
    assert_ours_holds(back, matrices)
    for tokens in (1, 5):
        x = torch.randn(tokens, DIM, generator=torch.Generator().manual_seed(tokens))
        expected = run(ours, x)
        assert torch.equal(expected, layer(x))
        assert torch.equal(run(back, x), expected)
        with accelerate_upstream():
            assert torch.equal(run(there, x), expected)
        # Upstream's own kernel does not quantize activations.
        torch.testing.assert_close(run(there, x), layer.in_float(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "softmax_all"])
def test_softmax_over_the_selected(kind: str, tmp_path: Path) -> None:
    """Over all experts and divided by the sum of the selected, it is the same but for rounding."""
    routing: dict[str, Any] = {
        "score_func": kind,
        "norm_topk": kind == "softmax_all",
        "norm_eps": 0.0,
    }
    layer = Layer(**routing, route_scale=1.0)
    ours = layer.write(tmp_path / "ours.pte")
    there = moepack.convert(ours, tmp_path / "there.pte", layout="torchao", upstream=True).result
    back = moepack.convert(there, tmp_path / "back.pte", layout="moepack").result
    x = torch.randn(9, DIM)
    expected = run(ours, x)
    for path in (there, back):
        with accelerate_upstream():
            found = run(path, x)
        if kind == "softmax":
            assert torch.equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("apart", [False, True])
def test_an_exported_model_there_and_back(apart: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    checkpoint = made_programs.checkpoint("qwen3_moe")
    moepack.export(checkpoint, source, logits="all", weights_file=apart)
    matrices = [packing.unpack(b) for stack in blobs(source / "model.pte") for b in stack]
    torchao = moepack.convert(source, tmp_path / "torchao", layout="torchao").result
    there = moepack.convert(torchao, tmp_path / "there", layout="torchao", upstream=True)
    assert there.changes.scales == 0  # the operator alone was left to change
    assert "weights as they were" in str(there)
    assert_upstream_holds(there.result / "model.pte", matrices)
    back = moepack.convert(there.result, tmp_path / "back", layout="moepack").result
    assert_ours_holds(back / "model.pte", matrices)
    ids = list(range(3, 20))
    expected = Program.load(source).logits(ids)
    with accelerate_upstream():
        found = Program.load(there.result, verify=True).logits(ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(Program.load(back, verify=True).logits(ids), found, rtol=0, atol=0)


class Outside(Layer):
    """The router is outside of the operator."""

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.zeros(x.shape[0], 2, dtype=torch.int64) + torch.arange(2)
        weights = torch.full((x.shape[0], 2), 0.5)
        held = (self.get_buffer("packed_w13"), self.packed_w2)
        scheme = self.attributes["scheme"]
        return ops.quantized_experts(
            x, ids, weights, *held, None, None, INNER, scheme, "moepack", "silu"
        )


ROWS = torch.zeros(EXPERTS, 2 * INNER)
SOFTMAX = {"score_func": "softmax", "norm_topk": False, "route_scale": 1.0}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"weights": {"gate_bias": torch.zeros(EXPERTS)}}, "gate_bias; supported by .*: none"),
    ({"weights": {"bias13": ROWS}}, "bias13; supported by .*: none"),
    ({"weights": {"bias2": torch.zeros(EXPERTS, DIM)}}, "bias2; supported by .*: none"),
    ({"activation": "gelu_tanh"}, "activation 'gelu_tanh'; supported by .*: 'silu'"),
    ({"act_limit": 7.0}, r"act_limit 7\.0; supported by .*: 0\.0"),
    ({"gate_softcap": 7.0}, r"gate_softcap 7\.0"),
    ({"up_softcap": 7.0}, r"up_softcap 7\.0"),
    ({"weight_on_input": True}, "weight_on_input True; supported by .*: False"),
    ({"router_dtype": "bfloat16"}, "router_dtype 'bfloat16'"),
    ({"n_group": 2, "topk_group": 1}, "n_group 2; supported by .*: 1"),
    ({"norm_topk": False}, "norm_topk False.*supported by .*: sigmoid with norm_topk"),
    ({"norm_eps": 1e-6}, "norm_eps 1e-06.*at most 1e-20"),
    (SOFTMAX | {"score_func": "softmax_all"}, "'softmax_all', norm_topk False"),
    (SOFTMAX | {"route_scale": 2.5}, r"route_scale 2\.5.*softmax.* route_scale 1"),
    (SOFTMAX | {"weights": {"expert_bias": torch.ones(EXPERTS)}}, "expert_bias; .*no expert_bias"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_upstream_does_not_compute(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = Layer(**changed).write(tmp_path / "ours.pte")
    with pytest.raises(UnsupportedError, match=f"ours.pte: method 'forward' call 0: .*{message}"):
        moepack.convert(path, tmp_path / "out.pte", layout="torchao", upstream=True)
    assert not (tmp_path / "out.pte").exists()
    moepack.convert(path, tmp_path / "out.pte", layout="torchao")  # as the message says


def test_other_inputs_and_operators(tmp_path: Path) -> None:
    path = tmp_path / "ours.pte"
    to: dict[str, Any] = {"layout": "torchao", "upstream": True}
    write_program(Layer(), (torch.zeros(2, DIM, dtype=torch.bfloat16),), None, {}, path)
    with pytest.raises(UnsupportedError, match=r"x bfloat16 \[2, 128\]; supported by .*float \[T"):
        moepack.convert(path.read_bytes(), **to)
    write_program(Outside(), (torch.zeros(2, DIM),), None, {}, path)
    with pytest.raises(UnsupportedError, match="call 0: a router outside the operator"):
        moepack.convert(path.read_bytes(), **to)
    for source in (nn.Linear(2, 2), {"a": torch.zeros(1)}):
        with pytest.raises(UnsupportedError, match="only programs call operators"):
            moepack.convert(source, **to)
    with pytest.raises(UnsupportedError, match="reads 'torchao'"):
        moepack.convert(path.read_bytes(), layout="moepack", upstream=True)
    mxfp4 = Layer("mxfp4").write(path)
    with pytest.raises(UnsupportedError, match="'mxfp4' in torchao's layout"):
        moepack.convert(mxfp4.read_bytes(), **to)
