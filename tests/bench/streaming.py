"""`moepack quantize` on checkpoints of DeepSeek-V3's layers: memory, time, and what bounds it, in one run.

    python tests/bench/streaming.py [--experts 256] [--layers 1] [--threads N] [--folder DIR] [--json FILE]

Makes an FP8 checkpoint of one dense layer and so many MoE layers (256 experts: 11.3 GB each), quantizes it by the command
in a process of its own, and deletes both. With several counts (`--experts 32 --layers 1,2,4`) what starting costs drops
out: rates are those of one layer more. Measured beside it, before and after each: the quantizer alone, on a matrix that lies
in memory, and reading the files from the disk. Printed are rates, and the stream's as a fraction of the slower of the
two; in processor time too, which other work on the machine leaves alone. The quantizer alone is the search for scales
and codes: neither decoding, nor comparing, packing and writing are in it. Memory is what /proc says of the process, and
what it says itself. Every expert is compared, byte for byte, with quantizing its weights dequantized in fp64.
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
    equal_experts: int


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


class Stored:
    """The tensors of a directory, mapped, by name."""

    def __init__(self, directory: Path) -> None:
        files = [safe_open(file, framework="pt") for file in directory.glob("*.safetensors")]
        self._home = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def whole(self, name: str) -> Tensor:
        return self._home[name].get_tensor(name)

    def entry(self, name: str, index: int) -> Tensor:
        found: Tensor = self._home[name].get_slice(name)[index]
        return found

    def exact(self, name: str) -> Tensor:
        """value * scale in fp64, rounded once to fp32."""
        values, scales = self.whole(name).double(), self.whole(f"{name}_scale_inv").double()
        rows, cols = values.shape
        block = made_deepseek.BLOCK
        for first in range(0, rows, block):
            spread = scales[first // block].repeat_interleave(block)[:cols]
            values[first : first + block] *= spread
        return values.float()


def check(source: Path, out: Path, options: argparse.Namespace, layers: int) -> int:
    """How many experts were compared. Raises unless every expert's bytes are those of its weights
    dequantized in fp64; a few are in memory at a time."""
    floats, packed = Stored(source), Stored(out)
    todo = [(layer, e) for layer in range(1, layers + 1) for e in range(options.experts)]

    def one(place: tuple[int, int]) -> None:
        require_equal(floats, packed, options.scheme, *place)

    torch.set_num_threads(1)
    with ThreadPoolExecutor(options.threads) as pool:
        for done, _ in enumerate(pool.map(one, todo), start=1):
            if done % 32 == 0 or done == len(todo):
                print(f"{done} of {len(todo)} experts are equal", file=sys.stderr, flush=True)
    return len(todo)


def require_equal(floats: Stored, packed: Stored, scheme: str, layer: int, expert: int) -> None:
    mlp = f"model.layers.{layer}.mlp"
    gate, up, down = (
        f"{mlp}.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")
    )
    order: packing.RowOrder
    for name, order, parts in (
        ("packed_w13", "gate_up", (gate, up)),
        ("packed_w2", "plain", (down,)),
    ):
        weight = torch.cat([floats.exact(part) for part in parts])
        expected = packing.pack(quantizer.quantize(weight, scheme), order)
        if not torch.equal(packed.entry(f"{mlp}.{name}", expert), expected):
            raise SystemExit(f"layer {layer} expert {expert} {name}: differs from its fp64 weights")


def run(folder: Path, layers: int, options: argparse.Namespace) -> tuple[Run, float]:
    source, out = folder / "float", folder / "packed"
    try:
        size = made_deepseek.write(source, layers, options.experts)
        rate = read_rate(source)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        said, peak = quantize(source, out, options.scheme, options.threads)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        checked = check(source, out, options, layers)
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
            print(json.dumps(asdict(done)), flush=True)
    found = summary(runs, limits, reads, options.threads)
    print(json.dumps(found, indent=1))
    if options.json:
        text = json.dumps({"summary": found, "runs": [asdict(r) for r in runs]}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
