"""Every scheme and layout on one layer, in one interleaved run: what a format costs beside int4.

    python tests/bench/formats.py [--shape NAME|D,F,E,K] [--tokens 1,16,512] [--threads N] [--isa I] [--json FILE]

Each result is first compared with the scalar kernel's, bit for bit. A round calls each format, with few tokens several times in a
row; printed are medians
over the rounds: milliseconds, GB/s of weights, GMAC/s, and the time of int4-g32 in the same round by the format's. One
token walks over all experts, so that weights come from memory; they lie on huge pages. The line "router" is the operator
that routes by itself, on int4-g32.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from moepack import _core
from moepack.bench import SHAPES, parse_shape, parse_tokens
from moepack.bench.layers import Layers, timed_in_a_row
from moepack.schemes import SCHEMES

BASE = "int4-g32"
ROUTER = "int4-g32, router"
MIN_LAYER_BYTES = 192 << 20  # no cache holds what a walk over the experts reads


@dataclass(frozen=True)
class Row:
    """`speed`: int4-g32's time by this format's, the median over the rounds."""

    name: str
    tokens: int
    bits_per_weight: float
    median_ms: float
    gb_per_s: float
    gmac_per_s: float
    speed: float


def all_layers(shape: tuple[int, int, int, int]) -> dict[str, Layers]:
    made = {name: Layers(shape, found, MIN_LAYER_BYTES) for name, found in SCHEMES.items()}
    for name in ("int4-g32", "int8-g32"):
        made[f"{name}, torchao"] = Layers(shape, SCHEMES[name], MIN_LAYER_BYTES, "torchao")
    return made


def measure(layers: dict[str, Layers], tokens: int, rounds: int) -> list[Row]:
    times: dict[str, list[float]] = {name: [] for name in [*layers, ROUTER]}
    for step in track(range(rounds), f"{tokens} tokens"):
        for name, layer in layers.items():
            times[name].append(timed_in_a_row(layer.call, layer.calls(tokens, step)))
        base = layers[BASE]
        routed = [(x, copy) for x, _, _, copy in base.calls(tokens, step)]
        times[ROUTER].append(timed_in_a_row(base.call_with_router, routed))
    return [row(name, layers.get(name, layers[BASE]), tokens, times) for name in times]


def row(name: str, layer: Layers, tokens: int, times: dict[str, list[float]]) -> Row:
    d, f, _, k = layer.shape
    _, ids, _, _ = layer.inputs(tokens, 0)
    median = statistics.median(times[name])
    touched = len(set(ids.flatten().tolist())) * layer.expert_bytes
    ratios = [base / own for base, own in zip(times[BASE], times[name], strict=True)]
    return Row(
        name, tokens, 8 * layer.expert_bytes / (3 * d * f), 1e3 * median, touched / median / 1e9,
        3 * d * f * tokens * k / median / 1e9, statistics.median(ratios),
    )  # fmt: skip


def table(rows: list[Row]) -> Table:
    made = Table("format", "tokens", "bits/weight", "ms", "GB/s", "GMAC/s", f"{BASE} = 1")
    for r in rows:
        made.add_row(
            r.name, str(r.tokens), f"{r.bits_per_weight:.2f}", f"{r.median_ms:.3f}",
            f"{r.gb_per_s:.1f}", f"{r.gmac_per_s:.1f}", f"{r.speed:.2f}",
        )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-30b-a3b", help=f"{', '.join(SHAPES)} or D,F,E,K")
    parser.add_argument("--tokens", default="1,16,512")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    layers = all_layers(parse_shape(options.shape))
    for layer in layers.values():
        layer.check(options.isa)
    rows = [r for t in parse_tokens(options.tokens) for r in measure(layers, t, options.rounds)]
    Console().print(
        f"{options.shape}, {_core.active_isa()}, {options.threads} threads", table(rows)
    )
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=2) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
