"""Damages files that moepack reads, and reads them: every answer is a result or a MoePackError.

    python tests/fuzz/readers.py [--seconds N] [--seed S] [--first I] [--count N] [TARGET ...]

Input I of a seed is always the same. Native code that reads a file runs in another process: its
death is a finding too.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "python"))
sys.path.insert(0, str(Path(__file__).parent))

import made_programs
import moepack
from damage import damaged
from moepack import checkpoint, convert, online, packing, universal_blob
from moepack.errors import MoePackError
from moepack.exporter import export
from moepack.inspection import inspect
from moepack.manifest import PROGRAM, WEIGHTS, Manifest
from moepack.quantizer import quantize
from moepack.schemes import SCHEMES
from moepack.tokenizer import Tokenizer


@dataclass(frozen=True)
class Target:
    """`make` fills a directory; `read` reads it after one of its `files` was damaged.

    What `read` draws first of several is what a file that is not damaged can be read with.
    """

    make: Callable[[Path], object]
    read: Callable[[Path, random.Random], object]
    files: str = "*"


class Ordinary(random.Random):
    """Draws the first of every choice, and nothing that happens only at times."""

    def choice(self, seq: Any) -> Any:
        return seq[0]

    def random(self) -> float:
        return 0.999


def make_program(directory: Path) -> None:
    shutil.copytree(made_programs.exported(), directory, dirs_exist_ok=True)


def make_program_and_weights(directory: Path) -> None:
    export(made_programs.checkpoint("mixtral"), directory, weights_file=True, force=True)


def read_program(directory: Path, draw: random.Random) -> None:
    inspect(draw.choice((directory, directory / PROGRAM)), verify=draw.random() < 0.3)
    Manifest.read(directory)


def read_tokenizer(directory: Path, draw: random.Random) -> None:
    tokenizer = Tokenizer.load(directory)
    tokenizer.decode(tokenizer.chat("an expert \N{GRINNING FACE}"))


def make_packed_checkpoint(directory: Path) -> None:
    source = made_programs.checkpoint("mixtral")
    model = checkpoint.load_model(source)
    moepack.quantize_(model)
    checkpoint.save_packed(model, source, directory, force=True)


def read_checkpoint(directory: Path, draw: random.Random) -> None:
    if draw.random() < 0.7:
        inspect(directory, verify=True)
    else:
        checkpoint.load_model(directory)


def make_float_checkpoint(directory: Path) -> None:
    shutil.copytree(made_programs.checkpoint("mixtral"), directory, dirs_exist_ok=True)


def read_online(directory: Path, draw: random.Random) -> None:
    match draw.choice(("quantize", "load", "float")):
        case "quantize":
            online.quantize_checkpoint(directory, directory.with_suffix(".out"), force=True)
        case "load":
            online.load(directory)
        case "float":
            checkpoint.load_model(directory)


def make_converted_checkpoint(directory: Path) -> None:
    online.quantize_checkpoint(made_programs.checkpoint("mixtral"), directory, force=True)


def read_converted(directory: Path, draw: random.Random) -> None:
    if draw.choice((True, False)):
        convert(directory, directory.with_suffix(".out"), layout="torchao", force=True)
    else:
        online.load_packed(directory)


def convert_program(directory: Path, draw: random.Random) -> None:
    upstream = draw.choice((True, False))
    source = draw.choice((directory / PROGRAM, directory))
    target = directory.with_name(f"converted-{source.name}")
    convert(source, target, layout="torchao", upstream=upstream, force=True)


def make_blobs(directory: Path) -> None:
    for name, scheme in SCHEMES.items():
        matrix = quantize(torch.randn(32, 128), scheme)
        blob = packing.pack(matrix, "gate_up" if scheme.group == 32 else "plain")
        (directory / f"{name}.blob").write_bytes(blob.numpy().tobytes())
        if scheme.is_integer:
            universal = universal_blob.pack_universal(matrix)
            (directory / f"{name}.universal").write_bytes(universal.numpy().tobytes())


def read_blobs(directory: Path, draw: random.Random) -> None:
    for path in sorted(directory.glob("*.blob")):
        inspect(path, verify=True)
        packing.unpack(_bytes(path))
    for path in sorted(directory.glob("*.universal")):
        shape = [32, 128, SCHEMES[path.stem].group]
        if draw.random() < 0.2:
            shape[draw.randrange(3)] = draw.choice((-1, 0, 16, 128, 1 << 40))
        universal_blob.unpack_universal(_bytes(path), *shape)


def _bytes(path: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes() or b"\0"), dtype=torch.uint8)


class NativeLoad:
    """Loads and runs programs in a process of its own, started again when it has died."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._start()

    def _start(self) -> None:
        self._here, there = self._context.Pipe()
        self._process = self._context.Process(target=_serve_loads, args=(there,), daemon=True)
        self._process.start()
        there.close()

    def __call__(self, directory: Path) -> None:
        self._here.send(directory)
        try:
            if not self._here.poll(60):
                self._process.kill()
                raise RuntimeError("the load did not end within 60 seconds")
            error = self._here.recv()
        except (EOFError, RuntimeError, ConnectionError) as gone:
            self._process.join()
            code = self._process.exitcode
            self._start()
            raise RuntimeError(f"the loading process ended with {code}: {gone}") from gone
        if error is not None:
            raise error


@functools.cache
def _native_load() -> NativeLoad:
    return NativeLoad()


def read_natively(directory: Path, draw: random.Random) -> None:
    _native_load()(directory)


def read_weights(directory: Path, draw: random.Random) -> None:
    if draw.choice((True, False)):
        read_natively(directory, draw)
    else:
        inspect(draw.choice((directory, directory / WEIGHTS)), verify=draw.random() < 0.3)


def _serve_loads(connection: Connection) -> None:
    from moepack.runtime import Program

    torch.set_num_threads(1)
    while True:
        directory = connection.recv()
        try:
            Program.load(directory, threads=1).logits([3, 1, 4])
            connection.send(None)
        except MoePackError as error:
            connection.send(MoePackError(str(error)))
        except BaseException as error:
            connection.send(RuntimeError("".join(traceback.format_exception(error))))


TARGETS = {
    "blobs": Target(make_blobs, read_blobs),
    "program": Target(make_program, read_program),
    "tokenizer": Target(make_program, read_tokenizer, "*token*"),
    "checkpoint": Target(make_packed_checkpoint, read_checkpoint),
    "load": Target(make_program, read_natively),
    "weights": Target(make_program_and_weights, read_weights, "model.pt*"),
    "online": Target(make_float_checkpoint, read_online),
    "converted": Target(make_converted_checkpoint, read_converted),
    "convert": Target(make_program_and_weights, convert_program),
}


class Fuzzer:
    """One target: a directory that is damaged, read, and mended."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self._target = TARGETS[name]
        self._directory = directory
        directory.mkdir(parents=True)
        self._target.make(directory)
        self._files = sorted(path for path in directory.glob(self._target.files) if path.is_file())
        self._contents = {path: path.read_bytes() for path in self._files}
        self._target.read(directory, Ordinary(0))
        self.answers: Counter[str] = Counter()

    def run(self, seed: int, number: int) -> str | None:
        """One input; the text of a finding if there is one."""
        draw = random.Random(f"{self.name} {seed} {number}")
        path = draw.choice(self._files)
        path.write_bytes(damaged(self._contents[path], draw))
        try:
            with redirect_stderr(StringIO()):
                self._target.read(self._directory, draw)
            self.answers["accepted"] += 1
        except MoePackError:
            self.answers["refused"] += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return f"{path.name}: {''.join(traceback.format_exception(error))}"
        finally:
            path.write_bytes(self._contents[path])
        return None


def fuzz(fuzzer: Fuzzer, seconds: float, seed: int, first: int, count: int) -> list[str]:
    findings: list[str] = []
    begin, number = time.monotonic(), first
    while number < first + count and time.monotonic() - begin < seconds and len(findings) < 5:
        found = fuzzer.run(seed, number)
        if found is not None:
            repeat = f"--seed {seed} --first {number} --count 1 {fuzzer.name}"
            findings.append(f"{repeat}\n{found}")
            print(f"finding: {findings[-1]}", flush=True)
        number += 1
    answers = ", ".join(f"{n} {answer}" for answer, n in sorted(fuzzer.answers.items()))
    print(
        f"{fuzzer.name}: seed {seed}, {number - first} inputs in {time.monotonic() - begin:.0f} s, "
        f"{answers}, {len(findings) or 'no'} findings",
        flush=True,
    )
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1 << 60)
    parser.add_argument("targets", nargs="*", default=list(TARGETS))
    options = parser.parse_args()
    findings: list[str] = []
    with tempfile.TemporaryDirectory(prefix="moepack-fuzz-") as folder:
        for name in options.targets:
            fuzzer = Fuzzer(name, Path(folder) / name)
            findings += fuzz(fuzzer, options.seconds, options.seed, options.first, options.count)
    return bool(findings)


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
