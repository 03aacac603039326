"""Our operator against ExecuTorch's own, `llama::quantized_moe_ffn`, in one interleaved run.

    python tests/bench/upstream.py [--json FILE]

One layer of Qwen3-30B-A3B (D 2048, F 768, 128 experts, 8 of them per token), int4 groups of 32, one token, router
included, on the same threads. Both hold the same codes and scales. Every call takes the next 8 experts, so that weights
come from memory and not from the cache. The results are compared before anything is timed: theirs computes with float
activations, ours quantizes them to int8 in groups of 128.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from moepack import ops
from moepack.packing import pack
from moepack.quantizer import QuantizedMatrix
from moepack.schemes import scheme
from moepack.torchao_layout import pack_universal

D, F, E, K = 2048, 768, 128, 8
SCHEME = scheme("int4-g32")
DISTINCT = 8  # different experts; their copies lie elsewhere in memory
ROUNDS = 30
CALLS_OF_OURS = 8  # per round: theirs takes so much longer
MIN_SNR_DB = 35.0  # int8 activations in groups of 128: |error| <= amax / 254, twice in a row


def made_matrix(rows: int, cols: int, seed: int) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (rows, cols), generator=generator, dtype=torch.int8)
    scales = torch.rand(rows, cols // SCHEME.group, generator=generator) + 0.5
    return QuantizedMatrix(SCHEME, codes, scales.to(torch.float16), -8)


def stacked(blobs: list[Tensor]) -> Tensor:
    return torch.stack([blobs[e % len(blobs)] for e in range(E)])


def layer() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same experts in our layout and in theirs."""
    ours: dict[str, list[Tensor]] = {"w13": [], "w2": []}
    theirs: dict[str, list[Tensor]] = {"w13": [], "w2": []}
    for e in range(DISTINCT):
        w13, w2 = made_matrix(2 * F, D, 2 * e), made_matrix(D, F, 2 * e + 1)
        ours["w13"].append(pack(w13, "gate_up"))
        ours["w2"].append(pack(w2, "plain"))
        theirs["w13"].append(pack_universal(w13))
        theirs["w2"].append(pack_universal(w2))
    return (
        {name: stacked(blobs) for name, blobs in ours.items()},
        {name: stacked(blobs) for name, blobs in theirs.items()},
    )


def calls(threads: int) -> tuple[Callable[[int], Tensor], Callable[[int], Tensor], int]:
    """Ours and theirs as functions of the step, and the bytes of weights that ours reads."""
    torch.set_num_threads(threads)
    ours, theirs = layer()
    gate = torch.randint(0, 2, (E, D), generator=torch.Generator().manual_seed(1)).float() * 2 - 1
    no_bias = torch.empty(0)

    def x(step: int) -> Tensor:
        """Rows of the gate are nearly orthogonal: their sum selects just these experts."""
        first = step * K % E
        return (gate[first : first + K].sum(0) / D**0.5)[None]

    def our_call(step: int) -> Tensor:
        return ops.quantized_moe_ffn(
            x(step), None, gate, None, None, ours["w13"], ours["w2"], None, None, K, F, SCHEME.name
        )

    def their_call(step: int) -> Tensor:
        result: Tensor = torch.ops.llama.quantized_moe_ffn(
            x(step), gate, no_bias, theirs["w13"], theirs["w2"],
            K, E, F, D, SCHEME.group, 4, "softmax", 1.0,
        )  # fmt: skip
        return result

    expert_bytes = ours["w13"].shape[1] + ours["w2"].shape[1]
    return our_call, their_call, K * expert_bytes


def snr_db(actual: Tensor, expected: Tensor) -> float:
    return float(20 * torch.log10(expected.norm() / (actual - expected).norm()))


def seconds(call: Callable[[int], Tensor], step: int) -> float:
    start = time.perf_counter()
    call(step)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401

    ours, theirs, weight_bytes = calls(arguments.threads)
    worst = min(snr_db(ours(step), theirs(step)) for step in range(3))
    if worst < MIN_SNR_DB:
        raise SystemExit(f"the results differ: {worst:.1f} dB, expected at least {MIN_SNR_DB}")
    our_times, their_times = [], []
    for step in range(ROUNDS):
        their_times.append(seconds(theirs, step))
        our_times += [seconds(ours, step * CALLS_OF_OURS + i) for i in range(CALLS_OF_OURS)]
    ours_ms, theirs_ms = (1e3 * statistics.median(times) for times in (our_times, their_times))
    result = {
        "shape": {"D": D, "F": F, "E": E, "K": K, "T": 1, "scheme": SCHEME.name},
        "threads": arguments.threads,
        "ours_ms": ours_ms,
        "theirs_ms": theirs_ms,
        "times_faster": theirs_ms / ours_ms,
        "bits_per_weight": 8 * weight_bytes / (3 * K * D * F),
        "weights_gb_per_s": weight_bytes / ours_ms / 1e6,
        "snr_db": worst,
    }
    for name, value in result.items():
        print(f"{name:18} {value:.4g}" if isinstance(value, float) else f"{name:18} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
