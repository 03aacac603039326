"""Against ExecuTorch's own operator, `llama::quantized_moe_ffn`: our operator, and theirs on our kernel.

    python tests/bench/upstream.py [--part op program tokens] [--windows N] [--scheme S] [--json FILE]

op       our operator and theirs in eager PyTorch, in one interleaved run, with the same codes and
         scales: theirs computes with float activations, ours quantizes them to int8 in groups of 128.
program  a .pte that calls theirs, without and with `accelerate_upstream()` (upstream_program.py): at
         least 60 times faster.
tokens   the greedy tokens of the model that ships with moepack, exported with theirs, without and with
         it (upstream_tokens.py): the same wherever the margin is above the bound, and 99 % of all.

All on one layer of Qwen3-30B-A3B but for the tokens. The command fails if one of these does not hold.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import upstream_tokens
from torch import Tensor
from upstream_program import (
    CALLS_OF_OURS,
    DISTINCT,
    MIN_TIMES_FASTER,
    ROUNDS,
    SCHEME,
    D,
    E,
    F,
    K,
    made_layer,
    made_matrix,
    measure,
    stacked,
)

from moepack import ops
from moepack.packing import pack

PARTS = ("op", "program", "tokens")
MIN_SNR_DB = 35.0  # int8 activations in groups of 128: |error| <= amax / 254, twice in a row


def calls(threads: int) -> tuple[Callable[[int], Tensor], Callable[[int], Tensor], int]:
    """Ours and theirs as functions of the step, and the bytes of weights that ours reads."""
    import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401

    torch.set_num_threads(threads)
    theirs = made_layer()
    w13 = stacked([pack(made_matrix(2 * F, D, 2 * e), "gate_up") for e in range(DISTINCT)])
    w2 = stacked([pack(made_matrix(D, F, 2 * e + 1), "plain") for e in range(DISTINCT)])

    def our_call(step: int) -> Tensor:
        return ops.quantized_moe_ffn(
            theirs.x(step), None, theirs.gate_weight, None, None, w13, w2, None, None,
            K, F, SCHEME.name,
        )  # fmt: skip

    def their_call(step: int) -> Tensor:
        result: Tensor = theirs(theirs.x(step))
        return result

    return our_call, their_call, K * (w13.shape[1] + w2.shape[1])


def snr_db(actual: Tensor, expected: Tensor) -> float:
    return float(20 * torch.log10(expected.norm() / (actual - expected).norm()))


def seconds(call: Callable[[int], Tensor], step: int) -> float:
    start = time.perf_counter()
    call(step)
    return time.perf_counter() - start


def measure_op(threads: int) -> dict[str, Any]:
    ours, theirs, weight_bytes = calls(threads)
    worst = min(snr_db(ours(step), theirs(step)) for step in range(3))
    if worst < MIN_SNR_DB:
        raise SystemExit(f"the results differ: {worst:.1f} dB, expected at least {MIN_SNR_DB}")
    our_times, their_times = [], []
    for step in range(ROUNDS):
        their_times.append(seconds(theirs, step))
        our_times += [seconds(ours, step * CALLS_OF_OURS + i) for i in range(CALLS_OF_OURS)]
    ours_ms, theirs_ms = (1e3 * statistics.median(times) for times in (our_times, their_times))
    return {
        "shape": {"D": D, "F": F, "E": E, "K": K, "T": 1, "scheme": SCHEME.name},
        "threads": threads,
        "ours_ms": ours_ms,
        "theirs_ms": theirs_ms,
        "times_faster": theirs_ms / ours_ms,
        "bits_per_weight": 8 * weight_bytes / (3 * K * D * F),
        "weights_gb_per_s": weight_bytes / ours_ms / 1e6,
        "snr_db": worst,
    }


def measure_program(threads: int, folder: Path, failures: list[str]) -> dict[str, Any]:
    found = measure(folder, threads)
    if found.times_faster < MIN_TIMES_FASTER:
        failures.append(f"{found.times_faster:.1f} times faster, not {MIN_TIMES_FASTER:g}")
    return {**asdict(found), "times_faster": found.times_faster}


def measure_tokens(windows: int, scheme: str, folder: Path, failures: list[str]) -> dict[str, Any]:
    found = upstream_tokens.compare(folder, windows, scheme)
    if not found.passed():
        failures.append(f"other tokens: {found}")
    return asdict(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--windows", type=int, default=8, help="of 128 tokens")
    parser.add_argument("--scheme", choices=upstream_tokens.SCHEMES, default="int4-g32")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if "op" in arguments.part:
            results["op"] = measure_op(arguments.threads)
        if "program" in arguments.part:
            results["program"] = measure_program(arguments.threads, folder, failures)
        if "tokens" in arguments.part:
            results["tokens"] = measure_tokens(
                arguments.windows, arguments.scheme, folder, failures
            )
    for part, values in results.items():
        print(part)
        for name, value in values.items():
            print(
                f"  {name:18} {value:.4g}" if isinstance(value, float) else f"  {name:18} {value}"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    if failures:
        raise SystemExit("; ".join(failures))


if __name__ == "__main__":
    main()
