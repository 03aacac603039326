"""`moepack quantize` on checkpoints of DeepSeek-V3's layers: memory, time, and what bounds it, in one run.

    python tests/bench/streaming.py [--experts 256] [--layers 1] [--threads N] [--folder DIR] [--json FILE]

Makes an FP8 checkpoint of one dense layer and so many MoE layers (256 experts: 11.3 GB each), quantizes it by the command
in a process of its own, and deletes both. With several counts (`--experts 32 --layers 1,2,4`) what starting costs drops
out: rates are those of one layer more. Measured beside it, before and after each: the quantizer alone, on a matrix that lies
in memory, and reading the files from the disk. Printed are rates, and the stream's as a fraction of the slower of the
two; in processor time too, which other work on the machine leaves alone. Memory is what /proc says of the process, and
what it says itself. A sample of experts is compared, byte for byte, with quantizing their weights dequantized in fp64.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import made_deepseek
import torch
from safetensors import safe_open
from torch import Tensor

from moepack import packing, quantizer
from moepack.schemes import scheme as scheme_of

D, F = 7168, 2048
WEIGHTS = 3 * D * F  # of one expert
PUBLISHED_LAYERS, PUBLISHED_EXPERTS, PUBLISHED_BYTES = 58, 256, 688_586_727_753
QUANTIZER_SECONDS = 3.0
READ_BYTES = 4 << 30


@dataclass
class Run:
    """Of one checkpoint: seconds of the command's work, of its process's cores, peaks in bytes."""

    layers: int
    weights: int
    source_bytes: int
    packed_bytes: int
    seconds: float
    cpu_seconds: float
    peak_seen: int
    peak_said: int
    checked: list[str]


@dataclass
class Limit:
    """Weights per second: wall clock with all threads, and per second of one core."""

    wall: float
    cpu: float


def quantizer_alone(scheme: str, threads: int) -> Limit:
    torch.set_num_threads(1)
    weight = 0.02 * torch.randn(F, D, generator=torch.Generator().manual_seed(0))
    quantizer.quantize(weight, scheme)
    end = time.perf_counter() + QUANTIZER_SECONDS

    def work(_: int) -> tuple[int, float]:
        count, began = 0, time.thread_time()
        while time.perf_counter() < end:
            quantizer.quantize(weight, scheme)
            count += 1
        return count, time.thread_time() - began

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(work, range(threads)))
    weights = weight.numel() * sum(count for count, _ in found)
    return Limit(weights / (time.perf_counter() - began), weights / sum(cpu for _, cpu in found))


def forget(directory: Path) -> None:
    """Takes the files out of the page cache, once they are on the disk."""
    for file in directory.glob("*.safetensors"):
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_rate(directory: Path) -> float:
    """Bytes per second, from the disk, in one stream."""
    forget(directory)
    room, total, began = bytearray(64 << 20), 0, time.perf_counter()
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            while total < READ_BYTES and (count := opened.readinto(room)):
                total += count
    rate = total / (time.perf_counter() - began)
    forget(directory)
    return rate


def quantize(source: Path, out: Path, scheme: str, threads: int) -> tuple[dict[str, Any], int]:
    """What the command says, and the most anonymous memory that was seen of its process."""
    command = [sys.executable, "-m", "moepack.cli", "quantize", str(source), "-o", str(out)]
    command += ["--scheme", scheme, "--threads", str(threads), "--json"]
    peak = 0
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(command, stdout=said)
        while child.poll() is None:
            peak = max(peak, anonymous_bytes(child.pid))
            time.sleep(0.01)
        if child.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
        said.seek(0)
        return json.loads(said.read()), peak


def anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return 1024 * next((int(li.split()[1]) for li in lines if li.startswith("RssAnon:")), 0)


def check(source: Path, out: Path, scheme: str, layer: int, expert: int) -> str:
    """Raises unless the expert's bytes are those of its fp64 weights; returns which it was."""
    mlp = f"model.layers.{layer}.mlp"
    gate, up, down = (
        exact(source, f"{mlp}.experts.{expert}.{part}_proj.weight")
        for part in ("gate", "up", "down")
    )
    for name, weight, order in (
        ("packed_w13", torch.cat([gate, up]), "gate_up"),
        ("packed_w2", down, "plain"),
    ):
        expected = packing.pack(quantizer.quantize(weight, scheme), order)  # type: ignore[arg-type]
        if not torch.equal(stored(out, f"{mlp}.{name}", expert), expected):
            raise SystemExit(f"layer {layer} expert {expert} {name}: differs from its fp64 weights")
    return f"layer {layer} expert {expert}"


def exact(source: Path, name: str) -> Tensor:
    """value * scale in fp64, rounded once to fp32."""
    values, scales = stored(source, name).double(), stored(source, f"{name}_scale_inv").double()
    block = made_deepseek.BLOCK
    spread = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return (values * spread[: values.shape[0], : values.shape[1]]).float()


def stored(directory: Path, name: str, entry: int | None = None) -> Tensor:
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            if name in opened.keys():  # noqa: SIM118
                found: Tensor = (
                    opened.get_slice(name)[:] if entry is None else (opened.get_slice(name)[entry])
                )
                return found
    raise SystemExit(f"{directory}: no {name}")


def run(folder: Path, layers: int, options: argparse.Namespace) -> tuple[Run, float]:
    source, out = folder / "float", folder / "packed"
    try:
        size = made_deepseek.write(source, layers, options.experts)
        rate = read_rate(source)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        said, peak = quantize(source, out, options.scheme, options.threads)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        sample = sorted({0, options.experts - 1, *range(7, options.experts, 61)})
        checked = [
            check(source, out, options.scheme, layer, expert)
            for layer in range(1, layers + 1)
            for expert in sample
        ]
    finally:
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    weights = layers * options.experts * WEIGHTS
    sizes = (size, said["bytes_packed"])
    peaks = (peak, said["peak_anonymous_bytes"])
    return Run(layers, weights, *sizes, said["seconds"], cpu, *peaks, checked), rate


def per_weight(runs: list[Run], seconds: list[float]) -> float:
    """Seconds for one weight more; of a single run, all of its seconds for all of its weights."""
    if len(runs) == 1:
        return seconds[0] / runs[0].weights
    return statistics.linear_regression([r.weights for r in runs], seconds).slope


def summary(
    runs: list[Run], limits: list[Limit], reads: list[float], threads: int
) -> dict[str, Any]:
    wall = 1 / per_weight(runs, [r.seconds for r in runs])
    cpu = 1 / per_weight(runs, [r.cpu_seconds for r in runs])
    alone = Limit(*(statistics.median(getattr(m, n) for m in limits) for n in ("wall", "cpu")))
    read = statistics.median(reads)  # a byte is a weight
    every = PUBLISHED_LAYERS * PUBLISHED_EXPERTS * WEIGHTS
    return {
        "threads": threads,
        "stream_weights_per_s": wall,
        "quantizer_weights_per_s": alone.wall,
        "read_bytes_per_s": read,
        "fraction_of_the_slower": wall / min(alone.wall, read),
        "stream_weights_per_core_s": cpu,
        "quantizer_weights_per_core_s": alone.cpu,
        "fraction_of_cores": cpu / alone.cpu,
        "extrapolated_hours": every / wall / 3600,
        "extrapolated_hours_if_cores_are_free": every / (cpu * threads) / 3600,
        "extrapolated_packed_bytes": every / WEIGHTS * packed_expert(runs),
        "published_bytes": PUBLISHED_BYTES,
    }


def packed_expert(runs: list[Run]) -> float:
    return runs[-1].packed_bytes / (runs[-1].weights / WEIGHTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--layers", default="1", help="MoE layers: one count, or several")
    parser.add_argument("--scheme", default="int4-g32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, help="where checkpoints are made for a while")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    scheme_of(options.scheme)
    runs, limits, reads = [], [], []
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="streaming-") as folder:
        for layers in map(int, options.layers.split(",")):
            limits.append(quantizer_alone(options.scheme, options.threads))
            done, rate = run(Path(folder), layers, options)
            limits.append(quantizer_alone(options.scheme, options.threads))
            runs.append(done)
            reads.append(rate)
            print(json.dumps(asdict(done) | {"checked": len(done.checked)}), flush=True)
    found = summary(runs, limits, reads, options.threads)
    print(json.dumps(found, indent=1))
    if options.json:
        text = json.dumps({"summary": found, "runs": [asdict(r) for r in runs]}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
