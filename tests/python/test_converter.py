"""Packed models from one layout to the other and back: codes, scales, outputs, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import made_programs
import moepack
import tiny_models
from moepack import packing
from moepack.acceleration import accelerate_upstream
from moepack.checkpoint import load_model, save_packed
from moepack.converter import ScaleChanges
from moepack.converter.stacks import StackForm, convert_blob, convert_stack
from moepack.errors import MoePackError, PackedFormatError, UnsupportedError
from moepack.inspection import inspect
from moepack.modules import PackedExperts
from moepack.online import Settings, quantize_checkpoint
from moepack.quantizer import QuantizedMatrix, quantize
from moepack.runtime import Program, executorch_runtime
from moepack.schemes import scheme
from moepack.universal_blob import encode, read_universal

W13, W2 = "packed_w13", "packed_w2"


def packed_modules(model: nn.Module) -> list[PackedExperts]:
    return [module for module in model.modules() if isinstance(module, PackedExperts)]


def weights(model: nn.Module) -> list[Tensor]:
    """Every expert's dequantized matrices."""
    return [
        read(expert)
        for module in packed_modules(model)
        for read in (module.w13, module.w2)
        for expert in range(module.num_experts)
    ]


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Equal to the bit but for the split of moepack's scales into fp16 and a matrix's exponent."""

    def same(name: str) -> bool:
        if not name.endswith((W13, W2)) or bytes(a[name][0, :4].tolist()) != b"MOEP":
            return torch.equal(a[name], b[name])
        return all(same_matrix(*pair) for pair in zip(a[name], b[name], strict=True))

    return a.keys() == b.keys() and all(map(same, a))


def same_matrix(a: Tensor, b: Tensor) -> bool:
    first, second = packing.unpack(a), packing.unpack(b)
    is_same_form = replace(packing.read_header(a), exponent=0, crc32=0) == replace(
        packing.read_header(b), exponent=0, crc32=0
    )
    scales = [torch.ldexp(m.scales.double(), torch.tensor(m.exponent)) for m in (first, second)]
    return is_same_form and torch.equal(first.codes, second.codes) and torch.equal(*scales)


def test_a_blob_with_scales_that_fp16_does_not_hold() -> None:
    form = StackForm("torchao", 4, 32, 8, 64, "plain")
    codes = torch.randint(-8, 8, (8, 64), dtype=torch.int8)
    scales = torch.full((8, 2), 0.5)
    scales[3, 1] = 0.5 * (1 + 2**-12)  # between two fp16 numbers
    changes = ScaleChanges()
    new = packing.unpack(convert_blob(encode(codes, scales, 4, 32), form, changes))
    assert torch.equal(new.codes, codes)
    assert (changes.scales, changes.changed) == (16, 1)
    assert changes.largest == pytest.approx(2**-12 / (1 + 2**-12))


def test_codes_of_minus_128_are_kept() -> None:
    form = StackForm("torchao", 8, 64, 16, 64, "gate_up")
    codes = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).repeat(4).view(16, 64)
    new = convert_blob(encode(codes, torch.ones(16, 1), 8, 64), form, ScaleChanges())
    assert torch.equal(packing.unpack(new).codes, codes)


def test_scales_that_would_vanish_are_refused() -> None:
    form = StackForm("torchao", 4, 32, 8, 32, "plain")
    codes, scales = torch.ones(8, 32, dtype=torch.int8), torch.ones(8, 1)
    scales[5] = 1e-20
    with pytest.raises(UnsupportedError, match="row 5, group 0 is 1e-20 and the largest"):
        convert_blob(encode(codes, scales, 4, 32), form, ScaleChanges())
    codes[5] = 0  # then the scale says nothing
    convert_blob(encode(codes, scales, 4, 32), form, ScaleChanges())


def test_groups_that_are_multiples_are_taken_apart() -> None:
    form = StackForm("torchao", 4, 192, 8, 192, "plain")
    codes = torch.randint(-8, 8, (8, 192), dtype=torch.int8)
    scales = torch.rand(8, 1).half().float()
    changes = ScaleChanges()
    blob = convert_blob(encode(codes, scales, 4, 192), form, changes)
    assert form.converted("moepack").scheme == "int4-g64"
    assert torch.equal(packing.unpack(blob).dequantize(), codes * scales)
    assert changes.scales == 8


@pytest.mark.parametrize("name", ["int4-g32", "int8-g128"])
@pytest.mark.parametrize("order", ["plain", "gate_up"])
def test_stacks_there_and_back(name: str, order: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = [quantize(torch.randn(64, 256, generator=generator), name) for _ in range(3)]
    packed = packing.pack_experts(matrices, order)
    form = StackForm("moepack", scheme(name).bits, scheme(name).group, 64, 256, order)
    changes = ScaleChanges()
    there = convert_stack(packed, form, "torchao", changes, "w13")
    for blob, matrix in zip(there, matrices, strict=True):
        universal = read_universal(blob, 64, 256, form.group)
        assert torch.equal(universal.codes, matrix.codes)  # logical rows, in every order
    back = convert_stack(there, form.converted("torchao"), "moepack", changes, "w13")
    for blob, matrix in zip(back, matrices, strict=True):
        assert torch.equal(packing.unpack(blob).codes, matrix.codes)
        assert torch.equal(packing.unpack(blob).dequantize(), matrix.dequantize())
    assert changes.changed == 0
    assert changes.scales == 2 * 3 * 64 * 256 // form.group


def test_damaged_blobs_are_named() -> None:
    packed = packing.pack_experts([quantize(torch.randn(16, 32), "int4-g32") for _ in range(3)])
    form = StackForm("moepack", 4, 32, 16, 32, "plain")
    packed[2, 100] ^= 1
    with pytest.raises(PackedFormatError, match=r"layers.1 w2 expert 2: .*checksum"):
        convert_stack(packed, form, "torchao", ScaleChanges(), "layers.1 w2")
    other = StackForm("moepack", 4, 32, 32, 16, "plain")
    with pytest.raises(PackedFormatError, match="header says"):
        convert_blob(packed[0], other, ScaleChanges())
    with pytest.raises(PackedFormatError, match=r"w2: torch.uint8 \[3, 351\]"):
        convert_stack(packed[:, 1:], form, "torchao", ScaleChanges(), "w2")


def tiny(layout: str = "moepack", family: str = "qwen3_moe") -> nn.Module:
    model = tiny_models.build(family)
    return moepack.quantize_(model, layout=layout, sqnr_floor=0.0).model


def logits(model: nn.Module) -> Tensor:
    ids = torch.arange(12)[None] % tiny_models.VOCAB
    with torch.no_grad():
        result: Tensor = model(ids).logits
    return result


def test_a_model_there_and_back() -> None:
    model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected, kept = logits(model), weights(model)
    done = moepack.convert(model, layout="torchao")
    assert done.result is model
    assert done.changes.changed == 0
    assert done.changes.scales > 0
    assert {module.attributes.layout for module in packed_modules(model)} == {"torchao"}
    assert all(torch.equal(a, b) for a, b in zip(weights(model), kept, strict=True))
    # Not one bit: fp16 scales times a power of two are the same numbers as fp32 ones.
    assert torch.equal(logits(model), expected)
    moepack.convert(model, layout="moepack")
    assert torch.equal(logits(model), expected)
    assert same_tensors(dict(model.state_dict()), before)


def test_quantizing_into_torchaos_layout_is_the_same_as_converting() -> None:
    converted, packed = tiny(), tiny("torchao")
    moepack.convert(converted, layout="torchao")
    assert same_tensors(dict(converted.state_dict()), dict(packed.state_dict()))
    moepack.dequantize_(converted)
    assert torch.isfinite(logits(converted)).all()


def test_what_is_in_the_layout_already_or_does_not_fit() -> None:
    with pytest.raises(UnsupportedError, match="nothing to convert"):
        moepack.convert(tiny(), layout="moepack")
    with pytest.raises(UnsupportedError, match="nothing to convert"):
        moepack.convert(nn.Linear(2, 2), layout="torchao")
    with pytest.raises(UnsupportedError, match="supported: moepack, torchao"):
        moepack.convert(tiny(), layout="gguf")
    odd = moepack.quantize_(tiny_models.build("qwen3_moe", odd=True), sqnr_floor=0.0).model
    before = odd.state_dict()
    with pytest.raises(UnsupportedError, match=r"mlp packed_w13: .*no incomplete\s+groups"):
        moepack.convert(odd, layout="torchao")
    assert odd.state_dict().keys() == before.keys()
    plan = moepack.plan(tiny_models.build("qwen3_moe", odd=True), layout="torchao")
    assert all("no incomplete" in block.why for block in plan.refused)
    assert plan.refused


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_state_dicts(family: str) -> None:
    """With a gate beside the experts, without one, and with experts that have no gate of theirs."""
    model = tiny(family=family)
    state = dict(model.state_dict())
    there = moepack.convert(state, layout="torchao").result
    expected = dict(moepack.convert(model, layout="torchao").result.state_dict())
    assert same_tensors(there, expected)
    back = moepack.convert(there, layout="moepack", scheme="int4-g32", dim=tiny_models.WIDTH)
    assert back.changes.changed == 0
    assert same_tensors(back.result, state)


def test_state_dicts_that_do_not_say_enough() -> None:
    state = dict(tiny("torchao").state_dict())
    with pytest.raises(UnsupportedError, match="pass scheme="):
        moepack.convert(state, layout="moepack")
    with pytest.raises(MoePackError, match="packed_w13"):
        moepack.convert(state, layout="moepack", scheme="int4-g64")
    without = {name: t for name, t in state.items() if not name.endswith("gate_weight")}
    with pytest.raises(UnsupportedError, match="dim="):
        moepack.convert(without, layout="moepack", scheme="int4-g32")
    alone = {name: t for name, t in state.items() if not name.endswith(W2)}
    with pytest.raises(PackedFormatError, match="packed_w2 is missing"):
        moepack.convert(alone, layout="moepack", scheme="int4-g32")
    with pytest.raises(UnsupportedError, match="nothing to convert"):
        moepack.convert({}, layout="moepack")


def quantized(out: Path) -> Path:
    quantize_checkpoint(
        made_programs.checkpoint("qwen3_moe"), out, Settings(sqnr_floor=0.0, threads=1)
    )
    return out


def saved(out: Path) -> Path:
    source = made_programs.checkpoint("qwen3_moe")
    model = moepack.quantize_(load_model(source), sqnr_floor=0.0).model
    return save_packed(model, source, out)


def by_the_library(out: Path) -> Path:
    from transformers import AutoModelForCausalLM

    config = moepack.MoePackConfig(sqnr_floor=0.0)
    source = made_programs.checkpoint("qwen3_moe")
    AutoModelForCausalLM.from_pretrained(source, quantization_config=config).save_pretrained(out)
    return out


@pytest.mark.parametrize("make", [quantized, saved, by_the_library])
def test_checkpoints_there_and_back(make: Callable[[Path], Path], tmp_path: Path) -> None:
    source = make(tmp_path / "packed")
    done = moepack.convert(source, tmp_path / "there", layout="torchao")
    assert done.result == tmp_path / "there"
    assert done.changes.changed == 0
    assert not inspect(done.result).problems
    original, converted = load_model(source), load_model(done.result)
    assert {module.attributes.layout for module in packed_modules(converted)} == {"torchao"}
    assert torch.equal(logits(original), logits(converted))
    moepack.convert(done.result, tmp_path / "back", layout="moepack")
    for file in source.glob("*.safetensors"):
        assert same_tensors(load_file(tmp_path / "back" / file.name), load_file(file))
    assert torch.equal(logits(load_model(tmp_path / "back")), logits(original))
    index = source / "model.safetensors.index.json"
    if index.is_file():
        assert json.loads((tmp_path / "back" / index.name).read_text()) == json.loads(
            index.read_text()
        )


def test_packing_while_loading_into_torchaos_layout(tmp_path: Path) -> None:
    """By moepack's own streaming and by the library: the tensors of a converted checkpoint."""
    from transformers import AutoModelForCausalLM

    there = moepack.convert(quantized(tmp_path / "packed"), tmp_path / "there", layout="torchao")
    source = made_programs.checkpoint("qwen3_moe")
    settings = Settings(layout="torchao", sqnr_floor=0.0, threads=1)
    quantize_checkpoint(source, tmp_path / "directly", settings)
    for file in there.result.glob("*.safetensors"):
        assert same_tensors(load_file(tmp_path / "directly" / file.name), load_file(file))
    config = moepack.MoePackConfig(layout="torchao", sqnr_floor=0.0)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
    assert {module.attributes.layout for module in packed_modules(model)} == {"torchao"}
    model.save_pretrained(tmp_path / "saved")
    expected = logits(load_model(there.result))
    assert torch.equal(logits(load_model(tmp_path / "saved")), expected)


def test_checkpoints_that_are_refused(tmp_path: Path) -> None:
    float_one = made_programs.checkpoint("qwen3_moe")
    with pytest.raises(MoePackError, match="not packed; `moepack quantize`"):
        moepack.convert(float_one, tmp_path / "out", layout="torchao")
    source = quantized(tmp_path / "packed")
    with pytest.raises(UnsupportedError, match="layout 'moepack' already"):
        moepack.convert(source, tmp_path / "out", layout="moepack")
    with pytest.raises(MoePackError, match="which is never changed"):
        moepack.convert(source, source, layout="torchao")
    with pytest.raises(MoePackError, match="say where"):
        moepack.convert(source, layout="torchao")
    with pytest.raises(MoePackError, match=r"neither a \.pte file"):
        moepack.convert(tmp_path, tmp_path / "out", layout="torchao")
    damaged = next(source.glob("experts-*.safetensors"))
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 0x11
    damaged.write_bytes(data)
    with pytest.raises(PackedFormatError, match=r"packed_w. expert .*checksum"):
        moepack.convert(source, tmp_path / "out", layout="torchao")
    assert not (tmp_path / "out").exists()


def all_logits(path: Path) -> Tensor:
    return Program.load(path).logits(list(range(3, 20)))


def test_an_exported_directory_there_and_back(tmp_path: Path) -> None:
    source = made_programs.exported()
    expected = all_logits(source)
    there = moepack.convert(source, tmp_path / "there", layout="torchao").result
    assert torch.equal(all_logits(there), expected)
    Program.load(there, verify=True)  # the manifest is the new program's
    seen, before = inspect(there, verify=True), inspect(source)
    assert not seen.problems
    assert {(stack.layout, stack.scheme) for stack in seen.packed} == {("torchao", "int4")}
    assert [s.experts for s in seen.packed] == [s.experts for s in before.packed]
    assert (there / "model.pte").stat().st_size > (source / "model.pte").stat().st_size
    back = moepack.convert(there / "model.pte", tmp_path / "back.pte", layout="moepack").result
    assert torch.equal(all_logits(back), expected)
    with pytest.raises(MoePackError, match="exists"):
        moepack.convert(there / "model.pte", back, layout="moepack")
    with pytest.raises(UnsupportedError, match="no call with packed experts"):
        moepack.convert(back.read_bytes(), layout="moepack")


def test_exporting_in_torchaos_layout(tmp_path: Path) -> None:
    directory = made_programs.checkpoint("qwen3_moe")
    options: dict[str, Any] = {"linear": "float", "embedding": "float", "logits": "all"}
    moepack.export(directory, tmp_path / "out", layout="torchao", sqnr_floor=0.0, **options)
    assert torch.equal(all_logits(tmp_path / "out"), all_logits(made_programs.exported()))


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


def test_programs_that_are_refused() -> None:
    from executorch.exir import ExecutorchBackendConfig, to_edge

    with pytest.raises(MoePackError, match="damaged ExecuTorch program"):
        moepack.convert(b"ET12" * 20, layout="moepack")
    exported = torch.export.export(Upstream(), (torch.randn(3, 96),))
    apart = ExecutorchBackendConfig(external_constants=True)
    with pytest.raises(UnsupportedError, match=r"call 0 packed_w13: .*in a \.ptd"):
        moepack.convert(bytes(to_edge(exported).to_executorch(apart).buffer), layout="moepack")
    inside = bytes(to_edge(exported).to_executorch().buffer)
    with pytest.raises(UnsupportedError, match="no call with packed experts"):
        moepack.convert(inside, layout="torchao")


def matrix_with_exponent(exponent: int) -> QuantizedMatrix:
    codes = torch.ones(16, 32, dtype=torch.int8)
    return QuantizedMatrix(scheme("int4-g32"), codes, torch.full((16, 1), 4.0).half(), exponent)


def test_scales_beyond_fp32_are_refused() -> None:
    packed = packing.pack_experts([matrix_with_exponent(0), matrix_with_exponent(127)])
    form = StackForm("moepack", 4, 32, 16, 32, "plain")
    with pytest.raises(UnsupportedError, match=r"w2 expert 1: scales around 2\^127"):
        convert_stack(packed, form, "torchao", ScaleChanges(), "w2")
