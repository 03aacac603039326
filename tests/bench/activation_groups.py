"""How long should an activation group be: 32, 128, or a whole token with one scale?

    python tests/bench/activation_groups.py [--json FILE]

Signal to quantization noise of one MoE layer's output, in dB, when only the activations (x and the hidden values) are
rounded to int8 and the int4-g32 weights are exact: on Gaussian activations, on the same with a few large channels, and
on what the layers of the demo model see. Speed is measured by building the core with
-DMOEPACK_ACTIVATION_GROUP=32 (or more than any K); docs/explanation/design.md has the numbers.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import moepack.demo
from moepack.quantizer import quantize

GROUPS = {"32": 32, "128": 128, "whole token": 1 << 30}
TOKENS = 512


def rounded(v: Tensor, group: int) -> Tensor:
    """v [T, n] through int8 with one scale per token and `group` values."""
    n = v.shape[1]
    group = min(group, n)
    padded = F.pad(v, (0, -n % group)).unflatten(1, (-1, group))
    scale = padded.abs().amax(-1, keepdim=True) / 127
    codes = (padded / scale.clamp(min=1e-30)).round()
    return (codes * scale).flatten(1)[:, :n]


def expert(x: Tensor, w13: Tensor, w2: Tensor, group: int | None) -> Tensor:
    gate, up = F.linear(x if group is None else rounded(x, group), w13).chunk(2, dim=1)
    hidden = F.silu(gate) * up
    return F.linear(hidden if group is None else rounded(hidden, group), w2)


def sqnr_db(x: Tensor, w13: Tensor, w2: Tensor, group: int) -> float:
    exact = expert(x, w13, w2, None)
    noise = expert(x, w13, w2, group) - exact
    return float(10 * torch.log10(exact.square().sum() / noise.square().sum()))


def int4(weight: Tensor) -> Tensor:
    return quantize(weight, "int4-g32").dequantize()


def made_layer(large: float) -> tuple[Tensor, Tensor, Tensor]:
    """D 2048, F 768; one channel in 256 is `large` times the others."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, 2048, generator=generator)
    x[:, ::256] *= large
    w13 = torch.randn(1536, 2048, generator=generator) / 2048**0.5
    w2 = torch.randn(2048, 768, generator=generator) / 768**0.5
    return x, int4(w13), int4(w2)


def demo_layers() -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """What the first expert of every layer computes on held-out text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(moepack.demo.__file__).parent
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    text = (folder / "heldout.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(folder / "model")(text)["input_ids"][:TOKENS]
    seen: dict[str, Tensor] = {}
    blocks = {name: m for name, m in model.named_modules() if hasattr(m, "experts")}
    for name, block in blocks.items():
        block.register_forward_pre_hook(
            lambda _, arguments, name=name: seen.__setitem__(name, arguments[0].flatten(0, 1))
        )
    with torch.no_grad():
        model(torch.tensor([ids]))
        for name, block in blocks.items():
            weights = block.experts
            yield name, seen[name], int4(weights.gate_up_proj[0]), int4(weights.down_proj[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    layers = [(f"Gaussian, outliers x{large:g}", *made_layer(large)) for large in (1, 10, 30, 100)]
    layers += [(f"demo {name}", *rest) for name, *rest in demo_layers()]
    table = {
        name: {label: sqnr_db(*tensors, group) for label, group in GROUPS.items()}
        for name, *tensors in layers
    }
    print(f"{'SQNR in dB':28}" + "".join(f"{label:>14}" for label in GROUPS))
    for name, row in table.items():
        print(f"{name:28}" + "".join(f"{row[label]:14.1f}" for label in GROUPS))
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
