"""Checkpoints that are in a scheme's format already: kept bit for bit, whatever way they come."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import moepack
import tiny_models
from made_checkpoints import (
    ENCODERS,
    Stored,
    copied,
    encoded,
    fp8_block,
    fp8_scaled,
    mxfp4,
    saved,
    stored_tensors,
)
from moepack import MoePackConfig, cli, ops, packing
from moepack.errors import UnsupportedError
from moepack.modules import PackedExperts
from moepack.online import Loaded, Settings, load, quantize_checkpoint
from moepack.online.loading import fill, load_packed, meta_model
from moepack.online.sources import Pieces
from moepack.quantizer import QuantizedMatrix

FP8, MXFP4 = Settings("fp8-b128", threads=1), Settings("mxfp4", threads=1)
SIZES: dict[str, Any] = {"hidden_size": 300, "moe_intermediate_size": 200}
U = 2.0**-24
LAYER = "model.layers.1.mlp.experts"
FUSED = [
    ("granitemoe", "model.layers.{}.block_sparse_moe.experts", False),
    ("gemma4_text", "model.layers.{}.experts", False),
    ("llama4_text", "model.layers.{}.feed_forward.experts", True),
]
FUSED_ENCODERS: dict[str, Callable[[str, Tensor], Stored]] = {
    "block": fp8_block,
    "ue8m0": ENCODERS["ue8m0"],
    "per expert": lambda n, t: fp8_scaled(n, t, (-2, -1), "_scale"),
}
# Expert, "w13" or "w2" -> codes [N, K] and scales [N, groups], as they are stored.
Expected = Callable[[int, str], tuple[Tensor, Tensor]]


def fp8_experts(directory: Path, encoder: str, family: str = "deepseek_v3") -> tuple[Path, Path]:
    """A checkpoint with experts in FP8, and one of the values that they stand for."""
    source = saved(tiny_models.build(family, **SIZES), directory / "plain")

    def encode(name: str, tensor: Tensor) -> Stored | None:
        return ENCODERS[encoder](name, tensor) if ".experts." in name else None

    stored, exact = encoded(stored_tensors(source), encode)
    assert len(stored) > len(exact)
    return copied(source, directory / "fp8", stored), copied(source, directory / "exact", exact)


def mxfp4_experts(directory: Path, **sizes: Any) -> tuple[Path, Path]:
    source = saved(tiny_models.build("gpt_oss", **sizes), directory / "plain")
    stored, exact = encoded(
        stored_tensors(source), lambda n, t: mxfp4(n, t) if t.dim() == 3 else None
    )
    assert len(stored) == len(exact) + 4
    return copied(source, directory / "fp4", stored), copied(source, directory / "exact", exact)


def matrices(module: PackedExperts) -> Iterator[tuple[int, str, QuantizedMatrix]]:
    for name, blobs in (("w13", module.packed_w13), ("w2", module.packed_w2)):
        for expert, blob in enumerate(blobs):
            yield expert, name, packing.unpack(blob)


def stored_fp8(tensors: dict[str, Tensor], layer: str = LAYER) -> Expected:
    def one(name: str) -> tuple[Tensor, Tensor]:
        codes = tensors[name].view(torch.int8)
        scales = next(t for n, t in tensors.items() if n.startswith(f"{name}_scale")).float()
        rows, groups = codes.shape[0], -(-codes.shape[1] // 128)
        if scales.shape not in ((), (rows, 1)):
            scales = scales.repeat_interleave(128, 0)[:rows]
        return codes, scales.expand(rows, groups)

    def expected(expert: int, which: str) -> tuple[Tensor, Tensor]:
        names = ("gate_proj", "up_proj") if which == "w13" else ("down_proj",)
        found = [one(f"{layer}.{expert}.{name}.weight") for name in names]
        codes, scales = zip(*found, strict=True)
        return torch.cat([c.view(torch.uint8) for c in codes]), torch.cat(scales)

    return expected


def stored_mxfp4(tensors: dict[str, Tensor], layer: str = LAYER) -> Expected:
    def expected(expert: int, which: str) -> tuple[Tensor, Tensor]:
        name = f"{layer}.{'gate_up_proj' if which == 'w13' else 'down_proj'}"
        blocks = tensors[f"{name}_blocks"][expert].flatten(1)
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(1)
        scales = tensors[f"{name}_scales"][expert]
        if which == "w13":  # gate and up rows alternate
            codes, scales = (torch.cat([t[::2], t[1::2]]) for t in (codes, scales))
        return codes, scales

    return expected


def assert_kept(module: PackedExperts, expected: Expected) -> None:
    """Codes and scales are the stored ones, and so are the values, rounded once."""
    count = 0
    for expert, name, matrix in matrices(module):
        codes, scales = expected(expert, name)
        assert torch.equal(matrix.codes.view(torch.uint8), codes), (expert, name)
        assert torch.equal(matrix.scales, scales), (expert, name)
        assert matrix.exponent == 0
        count += 1
    assert count == 2 * len(module.packed_w13)


def assert_values(module: PackedExperts, experts: Any, *, transposed: bool = False) -> None:
    """The matrices of transformers' float module, to the bit."""
    for expert, name, matrix in matrices(module):
        weight = (experts.gate_up_proj if name == "w13" else experts.down_proj)[expert]
        weight = weight.T if transposed else weight
        if name == "w13" and not getattr(experts, "is_concatenated", True):
            weight = torch.cat([weight[::2], weight[1::2]])
        assert torch.equal(matrix.dequantize(), weight), (expert, name)


def assert_same_state(found: nn.Module, expected: nn.Module) -> None:
    a, b = found.state_dict(), expected.state_dict()
    assert a.keys() == b.keys()
    assert [name for name in b if not torch.equal(a[name], b[name])] == []


def float_experts(directory: Path, layer: str = LAYER) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.get_submodule(layer)


def assert_all_kept(loaded: Loaded) -> list[PackedExperts]:
    modules = [m for m in loaded.model.modules() if isinstance(m, PackedExperts)]
    assert list(loaded.kept.values()) == [2 * len(m.packed_w13) for m in modules]
    return modules


@pytest.mark.parametrize("encoder", ENCODERS)
def test_fp8_experts_are_kept(encoder: str, tmp_path: Path) -> None:
    source, exact = fp8_experts(tmp_path, encoder)
    tensors = stored_tensors(source)
    loaded = load(source, FP8)
    (module,) = assert_all_kept(loaded)
    assert_kept(module, stored_fp8(tensors))
    assert_values(module, float_experts(exact))

    pieces = list(tensors.items())
    random.Random(0).shuffle(pieces)
    model = meta_model(loaded.model.config, torch.bfloat16)
    (module,) = assert_all_kept(fill(model, Pieces(pieces), FP8))
    assert_kept(module, stored_fp8(tensors))


def test_mxfp4_experts_are_kept(tmp_path: Path) -> None:
    source, exact = mxfp4_experts(tmp_path)
    tensors = stored_tensors(source)
    for number, module in enumerate(assert_all_kept(load(source, MXFP4))):
        layer = f"model.layers.{number}.mlp.experts"
        assert_kept(module, stored_mxfp4(tensors, layer))
        assert_values(module, float_experts(exact, layer), transposed=True)


@pytest.mark.parametrize("encoder", FUSED_ENCODERS)
@pytest.mark.parametrize(("family", "path", "transposed"), FUSED)
def test_fused_fp8_experts_are_kept(
    family: str, path: str, transposed: bool, encoder: str, tmp_path: Path
) -> None:
    inner = "moe_intermediate_size" if family == "gemma4_text" else "intermediate_size"
    sizes: dict[str, Any] = {"hidden_size": 320, inner: 136}
    source = saved(tiny_models.build(family, **sizes), tmp_path / "plain")
    stored, exact = encoded(
        stored_tensors(source), lambda n, t: FUSED_ENCODERS[encoder](n, t) if t.dim() == 3 else None
    )
    assert len(stored) == len(exact) + 4
    directory = copied(source, tmp_path / "exact", exact)
    settings = replace(FP8, router="outside")  # in the operator, w2 includes the router's scales
    modules = assert_all_kept(load(copied(source, tmp_path / "fp8", stored), settings))
    assert len(modules) == 2
    for number, module in enumerate(modules):
        experts = float_experts(directory, path.format(number))
        assert_values(module, experts, transposed=transposed)


@pytest.mark.parametrize("encoder", ["block", "per channel"])
def test_the_command_keeps_says_so_and_what_it_writes_is_read(
    encoder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    source, exact = fp8_experts(tmp_path, encoder)
    out, again = tmp_path / "out", tmp_path / "again"
    arguments = ["quantize", source, "-o", out, "--scheme", "fp8-b128", "--threads", "2"]
    monkeypatch.setattr("sys.argv", ["moepack", *map(str, arguments)])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert "16 of 16 matrices kept as stored; peak" in capsys.readouterr().out
    expected = load(source, FP8).model
    assert_same_state(load_packed(out), expected)
    assert MoePackConfig is not None
    found = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert_same_state(found, expected)
    found.save_pretrained(again)
    found = AutoModelForCausalLM.from_pretrained(again, dtype=torch.float32)
    assert_same_state(found, expected)
    assert_values(
        next(m for m in found.modules() if isinstance(m, PackedExperts)), float_experts(exact)
    )


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "gpt_oss"])
def test_loading_and_the_command_keep_the_same_bytes(family: str, tmp_path: Path) -> None:
    if family == "gpt_oss":
        (source, _), settings = mxfp4_experts(tmp_path), MXFP4
    else:
        (source, _), settings = fp8_experts(tmp_path, "block", family), FP8
    done = quantize_checkpoint(source, tmp_path / "out", settings)
    assert all(block.kept == block.matrices for block in done.blocks)
    loaded = load(source, settings)
    assert_all_kept(loaded)
    assert_same_state(load_packed(tmp_path / "out"), loaded.model)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert_same_state(found, loaded.model)


@pytest.mark.parametrize("form", ["fp8", "mxfp4"])
def test_from_pretrained_never_takes_codes_for_weights(form: str, tmp_path: Path) -> None:
    source, _ = mxfp4_experts(tmp_path) if form == "mxfp4" else fp8_experts(tmp_path, "block")
    ours = MoePackConfig("mxfp4" if form == "mxfp4" else "fp8-b128")
    stored = "_blocks is stored as U8" if form == "mxfp4" else "weight is stored as F8_E4M3"
    message = rf"{stored}, of which .* moepack\.online\.load\('.*', Settings\('{ours.scheme}'\)\)"
    with pytest.raises(UnsupportedError, match=message):
        AutoModelForCausalLM.from_pretrained(source, quantization_config=ours)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": form}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="but you are passing a MoePackConfig"):
        AutoModelForCausalLM.from_pretrained(source, quantization_config=ours)


def test_json_of_a_conversion_has_numbers(tmp_path: Path) -> None:
    source, _ = mxfp4_experts(tmp_path)
    for directory, kept in ((source, 16), (tmp_path / "plain", 0)):
        out = tmp_path / f"out{kept}"
        done = quantize_checkpoint(directory, out, MXFP4)
        assert [(b.kept, b.matrices) for b in done.blocks] == [(kept, 16)] * 2
        found = json.loads(json.dumps(done.to_json(), allow_nan=False))
        worst = [b["worst_weight_db"] for b in found["blocks"]]
        assert worst == [None, None] if kept else min(worst) > 10
        assert ("kept as stored" in str(done)) == bool(kept)
        assert ("worst matrix" in str(done)) != bool(kept)
        assert_same_state(load_packed(out), load(directory, MXFP4).model)


@pytest.mark.parametrize("form", ["fp8", "mxfp4"])
def test_weights_are_reloaded_as_they_are_stored(form: str, tmp_path: Path) -> None:
    made: Callable[[Path], tuple[Path, Path]] = mxfp4_experts
    if form == "fp8":
        made = lambda directory: fp8_experts(directory, "block")  # noqa: E731
    settings = FP8 if form == "fp8" else MXFP4
    first, _ = made(tmp_path)
    tensors = {
        n: t.flip(0) if t.dim() > 1 and "experts" in n else t
        for n, t in stored_tensors(first).items()
    }
    second = copied(first, tmp_path / "second", tensors)
    model, expected = load(first, settings).model, load(second, settings)
    assert_all_kept(expected)
    moepack.reload_weights(model, second, settings=settings)
    assert_same_state(model, expected.model)


@pytest.mark.parametrize(("scheme", "form"), [("mxfp4", "fp8"), ("fp8-b128", "mxfp4")])
def test_another_format_is_quantized_from_its_exact_values(
    scheme: str, form: str, tmp_path: Path
) -> None:
    settings = Settings(scheme, threads=1)
    if form == "fp8":
        source, exact = fp8_experts(tmp_path, "block")
    else:
        source, exact = mxfp4_experts(tmp_path, hidden_size=128, intermediate_size=64)
    found = load(source, settings)
    assert set(found.kept.values()) == {0}
    assert_same_state(found.model, load(exact, settings).model)


def test_scales_along_the_other_dimension_are_not_kept(tmp_path: Path) -> None:
    source = saved(tiny_models.build("llama4_text"), tmp_path / "plain")
    stored, exact = encoded(
        stored_tensors(source),
        lambda n, t: fp8_scaled(n, t, (-1,), "_scale") if t.dim() == 3 else None,
    )
    found = load(copied(source, tmp_path / "fp8", stored), FP8)
    assert set(found.kept.values()) == {0}
    expected = load(copied(source, tmp_path / "exact", exact), FP8)
    assert_same_state(found.model, expected.model)


def test_kept_experts_compute_what_the_float_ones_do(tmp_path: Path) -> None:
    """Up to fp32: an fp8 kernel rounds no activation and no weight.

    A dot product of K terms in groups of 128 is at most 32 fma, 3 additions and one fma per group
    deep, and the exact weights were rounded once; n roundings are within n u / (1 - n u) of the
    sum of the absolute terms. silu's slope is below 1.1, its own error below 16 u.
    """
    source, exact = fp8_experts(tmp_path, "block")
    (module,) = assert_all_kept(load(source, FP8))
    experts = float_experts(exact)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, SIZES["hidden_size"], generator=generator)
    ids = torch.rand(7, 8, generator=generator).argsort(1)[:, :3].contiguous()
    weights = torch.rand(7, 3, generator=generator)

    def packed(x: Tensor) -> Tensor:
        return ops.quantized_experts(
            x, ids, weights, module.packed_w13, module.packed_w2, None, None,
            SIZES["moe_intermediate_size"], "fp8-b128",
        )  # fmt: skip

    w13, w2 = experts.gate_up_proj.detach().double(), experts.down_proj.detach().double()
    expected, bound = torch.zeros(2, *x.shape, dtype=torch.float64)
    for token, slot in ((t, s) for t in range(7) for s in range(3)):
        e, w, v = ids[token, slot], weights[token, slot].double(), x[token].double()
        (g, u), (dg, du) = (
            (w13[e] @ v).chunk(2),
            (rounding(300) * (w13[e].abs() @ v.abs())).chunk(2),
        )
        silu = torch.nn.functional.silu(g)
        h = silu * u
        dh = (1.1 * dg + 16 * U * silu.abs()) * (u.abs() + du) + silu.abs() * du + U * h.abs()
        expected[token] += w * (w2[e] @ h)
        bound[token] += w * (w2[e].abs() @ (dh + rounding(200) * (h.abs() + dh)))
        bound[token] += 3 * U * w * (w2[e].abs() @ h.abs())
    assert bool(((packed(x) - expected).abs() <= bound).all())
    rounded = packed(x.bfloat16().float())  # no bound that lets activations be rounded
    assert bool(((rounded - expected).abs() > bound).any())


def rounding(terms: int) -> float:
    n = 32 + 3 + -(-terms // 128) + 1
    return n * U / (1 - n * U)
