"""The experts of one MoE layer in moepack and in what people use today, in one interleaved run.

    pip install onnx onnxruntime llama-cpp-python==0.3.36
    python tests/bench/peers.py [--shape NAME] [--tokens 1,4,16,128,512] [--threads N] [--json FILE]

int4 in groups of 32 everywhere, the same codes, scales, ids and weights; routing is not timed, except that ONNX Runtime's
and ExecuTorch's operators route by themselves. Each peer lives in a process of its own and is called in turn: of few tokens several times in
a row, as a model calls it layer after layer, after calls that wake its threads. One token walks over all experts, so that
weights come from memory. Every result is compared with a float64 computation before anything is timed. Printed: median
milliseconds, and the median over the rounds of how many times as long as moepack (on huge pages) a peer took.
"""  # noqa: E501

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from layers import GROUP, SHAPES, Floats, Layer, Matrix, Shape, Work, work

CALLS = 8  # of one token, in a row
# Threads wait by spinning: those of the peer before need time to give up the cores, a peer's own
# to take one each.
PAUSE, WARM_UP = 0.03, 0.02  # seconds
MIN_SNR_DB = 28.0  # int8 activations with one scale per 32 to all values, rounded twice


@dataclass(frozen=True)
class Contender:
    module: str
    options: dict[str, Any]
    most_tokens: int = 512


CONTENDERS = {
    "moepack": Contender("peer_moepack", {}),
    "moepack, 4 KiB pages": Contender("peer_moepack", {"huge": False}),
    "llama.cpp Q4_0": Contender("peer_llama_cpp", {}),
    "ONNX Runtime QMoE": Contender("peer_onnxruntime", {}),
    "ExecuTorch": Contender("peer_executorch", {}, most_tokens=4),
    "torch fp32 loop": Contender("peer_torch", {}),
}


def serve(connection: Connection, contender: Contender, shape: Shape, threads: int) -> None:
    """A peer's process: for every (tokens, steps), the seconds of each call and a result."""
    layer = Layer(shape)
    peer = importlib.import_module(contender.module).Peer(layer, threads, **contender.options)
    connection.send("ready")
    while (request := connection.recv()) is not None:
        tokens, steps, wants_result = request
        calls = [work(shape, tokens, step) for step in steps]
        time.sleep(PAUSE)
        warm = time.perf_counter() + WARM_UP
        seconds = [timed(peer, calls[0])]
        while time.perf_counter() < warm:
            timed(peer, calls[0])
        seconds += [timed(peer, each) for each in calls[1:]]
        connection.send((seconds, np.array(peer.result()) if wants_result else None))


def timed(peer: Any, call: Work) -> float:
    peer.prepare(call)
    start = time.perf_counter()
    peer.run()
    return time.perf_counter() - start


class Process:
    def __init__(self, contender: Contender, shape: Shape, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(theirs, contender, shape, threads), daemon=True
        )
        self.process.start()
        theirs.close()
        self.connection.recv()

    def call(
        self, tokens: int, steps: Iterable[int], wants_result: bool = False
    ) -> tuple[list[float], Any]:
        self.connection.send((tokens, list(steps), wants_result))
        seconds, result = self.connection.recv()
        return seconds, result


def expected(layer: Layer, call: Work) -> Floats:
    def weight(matrix: Matrix) -> Any:
        return matrix.codes * np.repeat(matrix.scales.astype(np.float64), GROUP, axis=1)

    y = np.zeros(call.x.shape)
    for e in range(len(layer.experts)):
        expert = layer.experts[e]
        token, slot = (call.ids % len(layer.experts) == e).nonzero()
        x = call.x[token].astype(np.float64)
        gate, up = x @ weight(expert.gate).T, x @ weight(expert.up).T
        hidden = gate / (1 + np.exp(-gate)) * up
        outputs = hidden @ weight(expert.down).T * call.weights[token, slot][:, None]
        np.add.at(y, token, outputs)
    return y.astype(np.float32)


def check(name: str, process: Process, layer: Layer, tokens: int) -> None:
    _, result = process.call(tokens, [0], wants_result=True)
    exact = expected(layer, work(layer.shape, tokens, 0))
    snr = 20 * np.log10(np.linalg.norm(exact) / np.linalg.norm(result - exact))
    if not snr >= MIN_SNR_DB:
        raise SystemExit(f"{name}: {snr:.1f} dB against float64, expected at least {MIN_SNR_DB}")


def rounds_for(tokens: int) -> int:
    return {1: 30, 4: 20, 16: 15}.get(tokens, 7)


def measure(processes: dict[str, Process], tokens: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in processes}
    calls = 1 + max(1, CALLS // tokens)
    for first in range(1, 1 + calls * rounds_for(tokens), calls):
        for name, process in processes.items():
            seconds, _ = process.call(tokens, range(first, first + calls))
            times[name].append(statistics.mean(seconds[1:]))
    return times


def summary(times: dict[str, list[float]], shape: Shape, tokens: int) -> dict[str, Any]:
    ours = times["moepack"]
    return {
        name: {
            "ms": 1e3 * statistics.median(values),
            "times_moepack": statistics.median(v / o for v, o in zip(values, ours, strict=True)),
            "gmac_per_s": tokens * shape.macs_per_token / statistics.median(values) / 1e9,
        }
        for name, values in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default="1,4,16,128,512")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", default=",".join(CONTENDERS).replace(", 4", " 4"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    chosen = {
        name: c
        for name, c in CONTENDERS.items()
        if name.replace(",", "") in arguments.peers.split(",")
    }
    results: dict[str, Any] = {}
    for shape_name in SHAPES if arguments.shape == "all" else [arguments.shape]:
        shape = SHAPES[shape_name]
        layer = Layer(shape)
        processes = {n: Process(c, shape, arguments.threads) for n, c in chosen.items()}
        for tokens in map(int, arguments.tokens.split(",")):
            taking_part = {n: p for n, p in processes.items() if tokens <= chosen[n].most_tokens}
            if tokens <= 16:
                for name, process in taking_part.items():
                    check(name, process, layer, tokens)
            rows = summary(measure(taking_part, tokens), shape, tokens)
            results.setdefault(shape_name, {})[tokens] = rows
            print(f"\n{shape_name}, {tokens} tokens, {arguments.threads} threads")
            for name, row in rows.items():
                print(f"  {name:22} {row['ms']:9.3f} ms {row['times_moepack']:7.2f}x "
                      f"{row['gmac_per_s']:7.1f} GMAC/s", flush=True)  # fmt: skip
        for process in processes.values():
            process.connection.send(None)
            process.process.join()
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
