"""The whole path on the model that ships with moepack: plan, pack, export, generate, measure."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import moepack
from moepack.checkpoint import load_model
from moepack.demo.checks import Check, layer_check, token_check
from moepack.errors import VerificationError
from moepack.evaluate import Perplexity, perplexity
from moepack.exporter import ExportResult, export
from moepack.manifest import PROGRAM, package_versions
from moepack.runtime import Generation, Program, Sampling, stream_text, thread_count
from moepack.staging import require_output
from moepack.threads import one_thread_each, require_threads
from moepack.tokenizer import Tokenizer

MODEL = Path(__file__).parent / "model"
HELDOUT = Path(__file__).parent / "heldout.txt"

_PROMPT = "In the beginning"
_WINDOW = 512
_GREEDY_TOKENS = 64
_SAMPLE_TOKENS = 120
_SAMPLING = Sampling(temperature=0.7, seed=1)
_PREFILL_TOKENS = 256
_DECODE_TOKENS = 128
_REPEATS = 5


class Audience:
    """Who follows the demo. This one keeps silent; the command line shows tables."""

    def begin(self, step: str) -> None:
        """A step begins; the one before has ended."""

    def advance(self, share: float) -> None:
        """The share of the step that is done."""

    def show(self, value: object) -> None:
        """A result: a Plan, a Report, an ExportResult, a Sizes, a Sample or a DemoResult."""


@dataclass(frozen=True)
class Sizes:
    """Bytes in total. `float` and `packed` hold everything but the experts in fp32, as `pte` does;
    `checkpoint` is the file that ships, in bf16."""

    checkpoint: int
    float: int
    packed: int
    pte: int


@dataclass(frozen=True)
class Sample:
    prompt: str
    text: str


@dataclass(frozen=True)
class Speed:
    """Medians: tokens per second of one prompt of `prompt_tokens`, and of the tokens after it."""

    prefill: float
    decode: float
    prompt_tokens: int


@dataclass(frozen=True)
class DemoResult:
    perplexity: dict[str, Perplexity]
    sizes: Sizes
    sqnr_db: dict[str, float | None]
    speed: Speed
    sample: Sample
    checks: tuple[Check, ...]
    threads: dict[str, int]
    versions: dict[str, str]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        measured = self.perplexity["float"]
        return {
            "perplexity": {name: found.value for name, found in self.perplexity.items()},
            "perplexity_of": {
                "tokens": measured.tokens,
                "windows": measured.windows,
                "window": measured.window,
                "stride": measured.stride,
            },
            "bytes": asdict(self.sizes),
            "sqnr_db": self.sqnr_db,
            "tokens_per_second": {"prefill": self.speed.prefill, "decode": self.speed.decode},
            "prompt_tokens": self.speed.prompt_tokens,
            "text": self.sample.prompt + self.sample.text,
            "checks": {check.name: check.passed for check in self.checks},
            "threads": self.threads,
            "versions": self.versions,
            "seconds": self.seconds,
        }


def run(
    audience: Audience | None = None,
    *,
    out_dir: Path | None = None,
    force: bool = False,
    threads: int | None = None,
    heldout_tokens: int | None = None,
) -> DemoResult:
    """Runs everything and returns the numbers; `out_dir` keeps the exported program.

    An `out_dir` that exists is refused unless `force` is given, as by `moepack.export`.
    `threads` is for the exported program; torch's part runs on one.
    Raises VerificationError when the .pte and the eager packed model disagree.
    """
    require_threads(threads)
    if out_dir is not None:
        require_output(out_dir, force, [MODEL])
    watcher = audience or Audience()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="moepack-demo-") as scratch, one_thread_each():
        target = out_dir or Path(scratch) / "demo"
        result = _run(watcher, target, force, threads, heldout_tokens, began)
    watcher.show(result)
    failed = [check for check in result.checks if not check.passed]
    if failed:
        raise VerificationError("; ".join(f"{check.name}: {check.found}" for check in failed))
    return result


def _run(
    watcher: Audience,
    target: Path,
    force: bool,
    threads: int | None,
    heldout_tokens: int | None,
    began: float,
) -> DemoResult:
    watcher.begin("Loading the model")
    original = load_model(MODEL)
    tokenizer = Tokenizer.load(MODEL)
    heldout = tokenizer.encode(HELDOUT.read_text(encoding="utf-8"))[:heldout_tokens]
    watcher.show(moepack.plan(original))

    watcher.begin("Packing the experts")
    packed = {name: copy.deepcopy(original) for name in ("int4-g32", "int8-g32")}
    reports = {name: moepack.quantize_(model, name) for name, model in packed.items()}
    watcher.show(reports["int4-g32"])

    watcher.begin("Exporting to ExecuTorch")
    exported = export(
        MODEL,
        target,
        linear="float",
        embedding="float",
        logits="all",
        max_seq_len=_WINDOW,
        force=force,
    )
    watcher.show(exported)
    sizes = _sizes(original, packed["int4-g32"], exported)
    watcher.show(sizes)

    watcher.begin("Generating text")
    program = Program.load(target, threads=threads)
    sample = _sample(program, tokenizer)
    watcher.show(sample)
    speed = _speed(program, heldout)

    watcher.begin("Comparing the program with the eager model")
    prompt = tokenizer.encode(_PROMPT)
    block_path = reports["int4-g32"].blocks[0].path
    checks = (
        token_check(packed["int4-g32"], program, prompt, _GREEDY_TOKENS),
        layer_check(packed["int4-g32"], block_path, target.parent),
    )
    models: dict[str, nn.Module | Program] = {"float": original, **packed, "pte": program}
    return DemoResult(
        perplexity=_perplexities(watcher, models, heldout),
        sizes=sizes,
        sqnr_db=exported.manifest.sqnr_db,
        speed=speed,
        sample=sample,
        checks=checks,
        threads={"torch": torch.get_num_threads(), "executorch": thread_count()},
        versions=package_versions(("moepack", "torch", "executorch", "torchao", "transformers")),
        seconds=time.perf_counter() - began,
    )


def _sizes(original: nn.Module, packed: nn.Module, exported: ExportResult) -> Sizes:
    return Sizes(
        checkpoint=(MODEL / "model.safetensors").stat().st_size,
        float=_state_bytes(original),
        packed=_state_bytes(packed),
        pte=exported.manifest.files[PROGRAM].bytes,
    )


def _state_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, a tensor with two names once."""
    tensors = {t.data_ptr(): t for t in model.state_dict().values()}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _sample(program: Program, tokenizer: Tokenizer) -> Sample:
    generation = Generation(
        program, tokenizer.encode(_PROMPT), max_new_tokens=_SAMPLE_TOKENS, sampling=_SAMPLING
    )
    return Sample(_PROMPT, "".join(stream_text(generation, tokenizer)))


def _speed(program: Program, heldout: Sequence[int]) -> Speed:
    prompt = heldout[:_PREFILL_TOKENS]
    prefill, decode = [], []
    for _ in range(_REPEATS):
        generation = Generation(program, prompt, max_new_tokens=_DECODE_TOKENS)
        for _token in generation:
            pass
        prefill.append(generation.stats.prefill_rate)
        if generation.stats.decode_steps:
            decode.append(generation.stats.decode_rate)
    return Speed(median(prefill), median(decode) if decode else 0.0, len(prompt))


def _perplexities(
    watcher: Audience, models: dict[str, nn.Module | Program], heldout: Sequence[int]
) -> dict[str, Perplexity]:
    found = {}
    for name, model in models.items():
        watcher.begin(f"Perplexity of {name}")
        found[name] = perplexity(model, heldout, window=_WINDOW, progress=watcher.advance)
    return found
