"""Tiny checkpoints in the layout of the hub, plain and in quantized formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]).double()
# values, scales -> what they stand for, in fp64
Stored = tuple[dict[str, Tensor], Tensor]


def saved(model: Any, directory: Path, shard: str = "60KB") -> Path:
    """The checkpoint of a model, in many small files."""
    model.save_pretrained(directory, max_shard_size=shard)
    return directory


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    return {n: t for f in sorted(directory.glob("*.safetensors")) for n, t in load_file(f).items()}


def rewrite(directory: Path, tensors: dict[str, Tensor]) -> Path:
    """The same checkpoint with other tensors, in one file."""
    for file in directory.glob("model*"):
        file.unlink()
    save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors")
    return directory


def copied(directory: Path, target: Path, tensors: dict[str, Tensor]) -> Path:
    target.mkdir()
    for file in directory.glob("*.json"):
        if "index" not in file.name:
            (target / file.name).write_bytes(file.read_bytes())
    return rewrite(target, tensors)


def fp8_block(name: str, weight: Tensor, block: int = 128, ue8m0: bool = False) -> Stored:
    """One scale per block of 128 x 128, the last ones cut off, as `weight_scale_inv`."""
    rows, cols = weight.shape[-2:]
    grid = [-(-n // block) for n in (rows, cols)]
    padded = torch.zeros(*weight.shape[:-2], grid[0] * block, grid[1] * block)
    padded[..., :rows, :cols] = weight
    tiles = padded.unflatten(-1, (grid[1], block)).unflatten(-3, (grid[0], block))
    scales = tiles.abs().amax((-3, -1)) / 448 + 1e-12
    if ue8m0:
        scales = torch.exp2(scales.log2().ceil())
    spread = scales.repeat_interleave(block, -2).repeat_interleave(block, -1)[..., :rows, :cols]
    values = (weight / spread).to(torch.float8_e4m3fn)
    exact = values.double() * spread.double()
    stored_scales = scales.to(torch.float8_e8m0fnu) if ue8m0 else scales
    return {name: values, f"{name}_scale_inv": stored_scales}, exact


def fp8_scaled(name: str, weight: Tensor, dims: tuple[int, ...], suffix: str) -> Stored:
    """One scale per tensor (all dims) or per row (the last)."""
    scales = weight.abs().amax(dims, keepdim=True) / 448
    values = (weight / scales).to(torch.float8_e4m3fn)
    exact = values.double() * scales.double()
    stored = scales.reshape(()) if len(dims) == weight.dim() else scales
    return {name: values, f"{name}{suffix}": stored}, exact


ENCODERS: dict[str, Callable[[str, Tensor], Stored]] = {
    "block": fp8_block,
    "ue8m0": lambda n, w: fp8_block(n, w, ue8m0=True),
    "per tensor": lambda n, w: fp8_scaled(n, w, tuple(range(w.dim())), "_scale_inv"),
    "per channel": lambda n, w: fp8_scaled(n, w, (-1,), "_scale"),
}


def mxfp4(name: str, stack: Tensor) -> Stored:
    """A stack [E, in, out] as blocks [E, out, in / 32, 16] and scales, as gpt-oss ships them."""
    groups = stack.transpose(1, 2).unflatten(-1, (-1, 32)).double()
    exponents = (groups.abs().amax(-1).log2().floor() - 2).clamp(-127, 127)
    scaled = groups / torch.exp2(exponents)[..., None]
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    exact = E2M1[codes] * scaled.sign() * torch.exp2(exponents)[..., None]
    codes = codes + 8 * (scaled < 0)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    scales = (exponents + 127).to(torch.uint8)
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return tensors, exact.flatten(-2).transpose(1, 2)


def encoded(
    tensors: dict[str, Tensor], encode: Callable[[str, Tensor], Stored | None]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors with some encoded, and the fp32 tensors that they stand for."""
    stored: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found = encode(name, tensor)
        if found is None:
            stored[name], exact[name] = tensor, tensor
        else:
            stored.update(found[0])
            exact[name] = found[1].float()
    return stored, exact
