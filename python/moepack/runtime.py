"""Running an exported program in this process, through ExecuTorch with moepack's kernels."""

from __future__ import annotations

import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moepack import _core, ops
from moepack.acceleration import OPERATOR as UPSTREAM
from moepack.errors import MoePackError
from moepack.manifest import (
    FILE_NAME,
    PROGRAM,
    Manifest,
    content_differences,
    size_differences,
)
from moepack.program_file import ProgramFile, open_program
from moepack.threads import require_threads
from moepack.tokenizer import TextStream, Tokenizer
from moepack.weights_file import WeightsFile, weights_of


class Program:
    """A loaded language model: logits of new tokens, given what it has seen before."""

    def __init__(self, file: ProgramFile, program: Any, manifest: Manifest | None) -> None:
        self.file = file
        self.manifest = manifest
        self._program = program
        self._forward = _method(program, "forward", file.path)
        self.max_seq_len = self._constant("get_max_seq_len")
        self.vocab_size = self._constant("get_vocab_size")
        self.eos_ids = frozenset(self._constants("get_eos_ids"))
        is_dynamic = self._constants("enable_dynamic_shape") != [0]
        self.tokens_per_call = self.max_seq_len if is_dynamic else 1
        self.all_logits = not is_dynamic or _logit_rows(program, file.path) != 1

    @classmethod
    def load(cls, path: str | Path, *, threads: int | None = None, verify: bool = False) -> Program:
        """Maps a .pte, or model.pte of an exported directory, and prepares it.

        Weights stay in the mapped file, or in that of the same name with the suffix .ptd, where the
        program keeps them apart. `threads` sets the size of ExecuTorch's thread pool for the
        process. `verify` reads every byte and compares it with the manifest. Raises MoePackError
        when a file is damaged or an operator or backend is missing here.
        """
        require_threads(threads)
        _require_instruction_set()
        place = Path(path)
        directory = place if place.is_dir() else place.parent
        file = open_program(place / PROGRAM if place.is_dir() else place)
        weights = weights_of(file)
        manifest = None
        if (directory / FILE_NAME).is_file():
            manifest = Manifest.read(directory)
            _check_files(directory, file, weights, manifest, verify)
        elif place.is_dir() or verify:
            manifest = Manifest.read(directory)
        runtime = executorch_runtime()
        refuse_missing(file, runtime)
        with _native_messages() as messages:
            set_threads(threads)
            try:
                program = runtime.load_program(file.path, data_path=weights and weights.path)
            except RuntimeError as error:
                raise MoePackError(f"{file.path}: {error}{messages()}") from error
            return cls(file, program, manifest)

    def logits(self, ids: Sequence[int] | Tensor, position: int = 0) -> Tensor:
        """Feeds the tokens of a sequence from `position` on; logits fp32 [1 or T, vocabulary].

        Position 0 begins a new sequence. Where `tokens_per_call` is 1 the program gets them one
        after the other. Raises MoePackError beyond the vocabulary or the context.
        """
        return torch.cat(list(self._passes(ids, position)))

    def last_logits(self, ids: Sequence[int] | Tensor, position: int = 0) -> Tensor:
        """As `logits`, of the last token alone: fp32 [vocabulary]."""
        for rows in self._passes(ids, position):
            last = rows[-1]
        return last

    def _passes(self, ids: Sequence[int] | Tensor, position: int) -> Iterator[Tensor]:
        tokens = self._checked(ids, position)
        positions = torch.arange(position, position + len(tokens))
        size = self.tokens_per_call
        for some, at in zip(tokens.split(size), positions.split(size), strict=True):
            yield self._run(some[None], at)

    def _checked(self, ids: Sequence[int] | Tensor, position: int) -> Tensor:
        tokens = torch.as_tensor(ids, dtype=torch.int64).reshape(-1)
        count = len(tokens)
        if count == 0:
            raise MoePackError("no tokens to run")
        if position + count > self.max_seq_len:
            raise MoePackError(
                f"{position + count} tokens, the context ends at {self.max_seq_len}; export with a "
                "larger --max-seq-len or shorten the text"
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            raise MoePackError(
                f"token ids from {int(tokens.min())} to {int(tokens.max())}; "
                f"the model's vocabulary is 0 to {self.vocab_size - 1}"
            )
        return tokens

    def _run(self, tokens: Tensor, positions: Tensor) -> Tensor:
        with _native_messages() as messages:
            try:
                result: Tensor = self._forward.execute((tokens, positions))[0]
                return result[0]
            except (RuntimeError, IndexError) as error:
                raise MoePackError(f"{self.file.path}: {error}{messages()}") from error

    def _constant(self, name: str) -> int:
        values = self._constants(name)
        if len(values) != 1 or values[0] < 1:
            raise MoePackError(
                f"{self.file.path}: method {name!r} is damaged: it gives {values}, not one number "
                "above 0"
            )
        return values[0]

    def _constants(self, name: str) -> list[int]:
        if name not in self._program.method_names:
            raise MoePackError(
                f"{self.file.path}: no method {name}; moepack runs programs that it exported"
            )
        method = _method(self._program, name, self.file.path)
        try:
            return [int(value) for value in method.execute(())]
        except (RuntimeError, TypeError, ValueError) as error:
            raise MoePackError(f"{self.file.path}: method {name!r} is damaged: {error}") from error


@dataclass(frozen=True)
class Sampling:
    """Greedy at temperature 0, else drawn from softmax(logits / temperature)."""

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise MoePackError(f"temperature is {self.temperature}; it must be 0 or more, finite")
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise MoePackError(f"seed is {self.seed}; it must be -2^63 to 2^64 - 1")


@dataclass
class GenerationStats:
    """What a generation did; `stop` is "eos", "length" (as asked) or "context" (limit reached)."""

    prompt_tokens: int
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    stop: str = ""

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first, which the prompt's pass already gives."""
        return self.decode_steps / self.decode_seconds if self.decode_seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        rates = {"prefill": self.prefill_rate, "decode": self.decode_rate}
        return {**asdict(self), "tokens_per_second": rates}


class Generation:
    """Iterating gives new token ids, the end-of-text token excluded; `stats` tells the rest."""

    def __init__(
        self,
        program: Program,
        prompt: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        if not prompt:
            raise MoePackError("the prompt has no tokens; give some text")
        if len(prompt) > program.max_seq_len:
            raise MoePackError(
                f"the prompt has {len(prompt)} tokens, the context ends at {program.max_seq_len}; "
                "shorten it or export with a larger --max-seq-len"
            )
        if max_new_tokens is not None and max_new_tokens < 1:
            raise MoePackError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        self.stats = GenerationStats(prompt_tokens=len(prompt))
        self._program = program
        self._prompt = list(prompt)
        self._limit = max_new_tokens
        self._sampling = sampling or Sampling()

    def __iter__(self) -> Iterator[int]:
        stats, program = self.stats, self._program
        generator = torch.Generator().manual_seed(self._sampling.seed)
        began = time.perf_counter()
        row = program.last_logits(self._prompt)
        stats.prefill_seconds = time.perf_counter() - began
        position = len(self._prompt)
        while True:
            token = _choose(row, self._sampling, generator)
            if token in program.eos_ids:
                stats.stop = "eos"
                return
            stats.new_tokens += 1
            yield token
            if self._limit is not None and stats.new_tokens >= self._limit:
                stats.stop = "length"
                return
            if position >= program.max_seq_len:
                stats.stop = "context"
                return
            began = time.perf_counter()
            row = program.last_logits([token], position)
            stats.decode_seconds += time.perf_counter() - began
            stats.decode_steps += 1
            position += 1


def stream_text(generation: Generation, tokenizer: Tokenizer) -> Iterator[str]:
    """The generation as text, in pieces that are complete characters."""
    stream = TextStream(tokenizer)
    for token in generation:
        if piece := stream.push(token):
            yield piece
    if rest := stream.finish():
        yield rest


def executorch_runtime(*, moepack_kernels: bool = True) -> Any:
    """ExecuTorch's runtime with its quantized kernels and moepack's registered.

    Raises MoePackError when moepack's library is missing, ImportError without executorch.
    """
    kept = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with _native_messages():
            import executorch.kernels.quantized  # noqa: F401
            from executorch.runtime import Runtime

            if moepack_kernels:
                ops.load_executorch()
            return Runtime.get()
    finally:
        logging.disable(kept)


def missing_from_runtime(file: ProgramFile, runtime: Any) -> list[str]:
    """Operators and backends that the program calls and the runtime does not have."""
    operators = file.operators() - runtime.operator_registry.operator_names
    backends = file.delegates() - set(runtime.backend_registry.registered_backend_names)
    return sorted(operators) + sorted(backends)


def refuse_missing(file: ProgramFile, runtime: Any) -> None:
    """Raises MoePackError naming what is missing: the runtime itself would give a number."""
    missing = missing_from_runtime(file, runtime)
    if missing:
        advice = "`moepack doctor` shows which libraries are loaded"
        if f"{UPSTREAM}.out" in missing:
            advice = (
                "moepack.accelerate_upstream() runs it in Python, and "
                "`moepack convert --layout moepack` makes a program of moepack's operator"
            )
        raise MoePackError(
            f"{file.path}: this process has no kernel for {', '.join(missing)}; {advice}"
        )


def set_threads(threads: int | None) -> None:
    """Sizes ExecuTorch's thread pool; None leaves it. No program may be running meanwhile."""
    if threads is None:
        return
    require_threads(threads)
    from executorch.extension.pybindings import portable_lib

    portable_lib._unsafe_reset_threadpool(threads)


def thread_count() -> int:
    from executorch.extension.pybindings import portable_lib

    with _native_messages():
        return int(portable_lib._threadpool_get_thread_count())


def _method(program: Any, name: str, path: Path) -> Any:
    if name not in program.method_names:
        raise MoePackError(f"{path}: no method {name!r}; it has {sorted(program.method_names)}")
    try:
        return program.load_method(name)
    except RuntimeError as error:
        raise MoePackError(f"{path}: method {name!r} cannot be loaded: {error}") from error


def _require_instruction_set() -> None:
    """Raises MoePackError when MOEPACK_ISA names none of this CPU: kernels would fail later."""
    try:
        _core.active_isa()
    except (ValueError, RuntimeError) as error:
        raise MoePackError(str(error)) from error


def _logit_rows(program: Any, path: Path) -> int:
    try:
        return int(program.metadata("forward").output_tensor_meta(0).sizes()[1])
    except (RuntimeError, IndexError) as error:
        raise MoePackError(
            f"{path}: method 'forward' gives no logits [1, T, V]: {error}"
        ) from error


def _check_files(
    directory: Path,
    file: ProgramFile,
    weights: WeightsFile | None,
    manifest: Manifest,
    verify: bool,
) -> None:
    check = content_differences if verify else size_differences
    differences = check(directory, manifest.files)
    if not differences and file.path.name in manifest.files:
        if file.structure_digest() != manifest.program_structure_sha256:
            differences.append(f"{file.path.name}: the program was damaged or replaced")
        if weights and weights.structure_digest() != manifest.weights_structure_sha256:
            differences.append(f"{weights.path.name}: its structure was damaged or replaced")
    if differences:
        raise MoePackError(f"{directory}: {'; '.join(differences)}; export or copy it again")


def _choose(row: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(row.argmax())
    below = row.double() - row.max()
    if not below.isfinite().any():
        raise MoePackError("the program's logits are not numbers; `moepack inspect --verify` it")
    # In fp64, and at most 0 before the division: the smallest temperature overflows to -inf only.
    weights = torch.softmax(below / sampling.temperature, -1)
    return int(torch.multinomial(weights, 1, generator=generator))


@contextmanager
def _native_messages() -> Iterator[Any]:
    """Keeps what C++ writes to stderr; the value given returns it for an error's text.

    ExecuTorch explains a failure only there, and remarks on the CPU on every start.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as sink:

        def read() -> str:
            sink.seek(0)
            lines = sink.read().decode(errors="replace").strip().splitlines()
            return f" ({lines[-1]})" if lines else ""

        os.dup2(sink.fileno(), 2)
        try:
            yield read
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
