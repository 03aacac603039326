"""FP8 and MXFP4 checkpoints: dequantized exactly, then quantized to any scheme."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models
from made_checkpoints import (
    E2M1,
    ENCODERS,
    Stored,
    copied,
    encoded,
    fp8_block,
    mxfp4,
    saved,
    stored_tensors,
)
from moepack.errors import BadWeights
from moepack.online import Settings, load
from moepack.online.decoding import FP8, decode_mxfp4, decode_scaled
from moepack.online.loading import fill, meta_model
from moepack.online.sources import Pieces
from moepack.online.stored import Decoder, StoredTensor


def random_weight(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).exp2()


@pytest.mark.parametrize("shape", [(576, 7168), (10944, 256), (300, 130), (128, 128), (1, 1)])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_fp8_is_decoded_as_in_fp64(encoder: str, shape: tuple[int, int]) -> None:
    stored, exact = ENCODERS[encoder]("w.weight", random_weight(*shape))
    values, scales = stored.values()
    assert torch.equal(decode_scaled(values, scales), exact.float())


@pytest.mark.parametrize("ue8m0", [False, True])
def test_fused_experts_with_scales_of_their_own(ue8m0: bool) -> None:
    stored, exact = fp8_block("experts.gate_up_proj", random_weight(3, 300, 200), ue8m0=ue8m0)
    decoder = Decoder()
    found = [t for n, s in stored.items() for t in decoder.feed(StoredTensor.of(n, s))]
    assert [tensor.name for tensor in found] == ["experts.gate_up_proj"]
    assert found[0].shape == (3, 300, 200)
    assert torch.equal(found[0].read(), exact.float())
    assert torch.equal(found[0].part(2), exact[2:].float())


def test_one_scale_for_each_of_the_fused_experts() -> None:
    values = random_weight(3, 8, 16).to(torch.float8_e4m3fn)
    scales = torch.tensor([0.1, 0.2, 0.3])
    expected = (values.double() * scales.double()[:, None, None]).float()
    assert torch.equal(decode_scaled(values, scales), expected)


def test_scales_as_bytes_are_powers_of_two() -> None:
    values = random_weight(4, 64).to(torch.float8_e4m3fn)
    scales = torch.tensor([[120, 127], [130, 1], [0, 254], [127, 127]], dtype=torch.uint8)
    factors = torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
    assert torch.equal(decode_scaled(values, scales), (values.double() * factors).float())


@pytest.mark.parametrize("dtype", FP8)
def test_every_fp8_code_is_widened_as_torch_does(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).view(16, 16)
    finite = codes[:, codes.float().isfinite().all(0)]
    for values in (codes, finite, codes[::3, ::5]):
        found = decode_scaled(values, torch.ones(1))
        assert torch.equal(found.nan_to_num(7.0), values.float().nan_to_num(7.0))
        assert torch.equal(found.signbit(), values.float().signbit())


def test_every_pair_of_fp4_codes_is_widened() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(16, 16)
    table = torch.cat([E2M1, -E2M1])
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()
    for scale in (2.0**-149, 1.0, 2.0**125):
        found = decode_scaled(codes, torch.tensor(scale))
        assert torch.equal(found, (table[nibbles] * scale).float())


def test_mxfp4_is_decoded_as_in_fp64() -> None:
    stored, exact = mxfp4("w", random_weight(3, 96, 40))
    found = decode_mxfp4(stored["w_blocks"], stored["w_scales"])
    assert torch.equal(found, exact.float())


def test_scales_that_fit_no_blocks_are_named() -> None:
    with pytest.raises(BadWeights, match=r"layer\.w: 3 scales along a dimension of 64"):
        decode_scaled(torch.zeros(64, 64).to(torch.float8_e4m3fn), torch.ones(3, 1), "layer.w")


def test_a_scale_for_half_a_byte_is_refused() -> None:
    with pytest.raises(BadWeights, match=r"layer\.w: one scale for 1 columns"):
        decode_scaled(torch.zeros(4, 8, dtype=torch.uint8), torch.ones(4, 16), "layer.w")


def test_scales_that_do_not_come_are_named() -> None:
    decoder = Decoder()
    values = StoredTensor.of("a.weight", torch.zeros(2, 2).to(torch.float8_e4m3fn))
    assert list(decoder.feed(values)) == []
    assert list(decoder.feed(StoredTensor.of("b.weight_scale_inv", torch.ones(1)))) == []
    unfinished = ["a.weight: its scales are missing", "b.weight: only its scales came"]
    assert decoder.unfinished() == unfinished


def test_scales_of_the_model_itself_pass_through() -> None:
    names = frozenset({"router.per_expert_scale", "router.scale", "q_norm.scale"})
    decoder = Decoder(names)
    found = [t.name for n in names for t in decoder.feed(StoredTensor.of(n, torch.ones(2)))]
    assert set(found) == names


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "minimax_m2"])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_an_fp8_checkpoint_quantizes_as_its_exact_values(
    family: str, encoder: str, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 192, "moe_intermediate_size": 144}
    if family == "minimax_m2":
        sizes = {"hidden_size": 192}
    source = saved(tiny_models.build(family, **sizes), tmp_path / "plain")

    def encode(name: str, tensor: Tensor) -> Stored | None:
        is_linear = name.endswith("proj.weight") or ".experts." in name or "kv_a_proj" in name
        return ENCODERS[encoder](name, tensor) if is_linear and tensor.dim() == 2 else None

    stored, exact = encoded(stored_tensors(source), encode)
    assert len(stored) > len(exact) + 20
    found = load(copied(source, tmp_path / "fp8", stored), Settings(threads=1))
    expected = load(copied(source, tmp_path / "exact", exact), Settings(threads=1))
    assert_equal(found.model, expected.model)
    assert found.unexpected == []

    pieces = list(stored.items())
    random.Random(0).shuffle(pieces)
    model = meta_model(found.model.config, torch.float32)
    assert_equal(fill(model, Pieces(pieces), Settings(threads=1)).model, expected.model)


def test_an_mxfp4_checkpoint_quantizes_as_its_exact_values(tmp_path: Path) -> None:
    source = saved(tiny_models.build("gpt_oss"), tmp_path / "plain")

    def encode(name: str, tensor: Tensor) -> Stored | None:
        return mxfp4(name, tensor) if tensor.dim() == 3 else None

    stored, exact = encoded(stored_tensors(source), encode)
    assert len(stored) == len(exact) + 4
    for scheme in ("int4-g32", "int8-g128"):
        settings = Settings(scheme, threads=1)
        name = scheme.replace("-", "_")
        found = load(copied(source, tmp_path / name, stored), settings)
        expected = load(copied(source, tmp_path / f"exact_{name}", exact), settings)
        assert_equal(found.model, expected.model)


def assert_equal(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    a, b = found.state_dict(), expected.state_dict()
    assert a.keys() == b.keys()
    assert [name for name in b if not torch.equal(a[name], b[name])] == []
