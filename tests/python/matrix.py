"""Every MoE family: packed, exported, run in ExecuTorch and compared with the packed eager model.

    python tests/python/matrix.py                 all; writes supported-models.json and its page
    python tests/python/matrix.py qwen3_moe ...   only these; prints what it found

An entry is exported by `moepack.export` (tokens at positions, with a cache) if it is a causal
language model whose cache that supports, otherwise as one forward pass over a fixed input through
transformers' own exporter. Each runs in a process of its own: some exports break the interpreter.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import multiprocessing
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import matrix_page
import tiny_families
import tiny_models

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "docs" / "reference" / "supported-models.json"
SCHEME = "int8-g32"
TOKENS, NEW_TOKENS, CONTEXT = 12, 8, 24
TIMEOUT = 1800
ENTRIES = [*tiny_families.FUSED, *tiny_families.OUTSIDE, *tiny_families.REFUSED]
# What decides how a model is read, called and given a cache. A change of the operators, the modules
# around them or the lowering changes all entries alike: their own tests and the entries that
# test_matrix.py runs show it, and making it does not cost a run of an hour.
SOURCES = (
    "python/moepack/attributes.py",
    "python/moepack/expert_calls.py",
    "python/moepack/exporter/attention.py",
    "python/moepack/exporter/decoder.py",
    "python/moepack/exporter/kv_cache.py",
    "python/moepack/families/*.py",
    "tests/python/matrix.py",
    "tests/python/tiny_families.py",
    "tests/python/tiny_models.py",
)


@dataclass(frozen=True)
class Row:
    """One entry. `program`: generate (moepack.export), forward (one pass) or none.

    Equal counts positions with the same argmax as eager, of how many; greedy likewise of new
    tokens. `difference`: the largest of logits, relative to the largest logit.
    """

    entry: str
    model_type: str
    blocks: str = ""
    router: str = ""
    activation: str = ""
    program: str = "none"
    backend: str = ""
    equal: str = ""
    greedy: str = ""
    difference: float | None = None
    in_the_way: str = ""

    @property
    def runs(self) -> bool:
        return matrix_page.runs(asdict(self))


def digest() -> str:
    """Of the sources that the result depends on, but for their blank lines and comments."""
    state = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        lines = [line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()]
        kept = [line for line in lines if line and not line.lstrip().startswith("#")]
        state.update("\n".join([path.relative_to(ROOT).as_posix(), *kept, ""]).encode())
    return state.hexdigest()


def run(entry: str) -> Row:
    import moepack

    torch.set_num_threads(1)
    model = tiny_models.build(entry)
    decided = moepack.plan(model, SCHEME)
    row = Row(entry, tiny_families.MODEL_TYPES.get(entry, entry))
    if decided.refused:
        return replace(row, in_the_way=decided.refused[0].why)
    blocks = decided.replaced
    found = moepack.families.find_blocks(model)
    activations = {b.spec.experts.attributes.activation for b in found if b.spec}
    row = replace(
        row,
        blocks=", ".join(sorted({b.block_class for b in blocks})),
        router=", ".join(sorted({b.router for b in blocks})),
        activation=", ".join(sorted(activations)),
    )
    model = moepack.quantize_(model, SCHEME).model
    reasons = []
    for name, attempt in (("generate", _generate), ("forward", _forward), ("portable", _portable)):
        try:
            row = attempt(row, entry, model)
        except Exception as error:
            reasons.append(f"{name}: {_short(error)}")
            continue
        if row.runs:
            return row
        reasons.append(f"{name}: other logits ({row.equal}, {row.difference:.2g})")
    return replace(row, in_the_way="; ".join(reasons))


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:200]


@torch.no_grad()
def _generate(row: Row, entry: str, model: nn.Module) -> Row:
    import moepack
    from moepack.errors import UnsupportedError
    from moepack.runtime import Program

    if not _is_language_model(entry, model):
        raise UnsupportedError("no causal language model")
    ids = tiny_models.tokens(TOKENS)
    expected, continuation = _eager(model, {"input_ids": ids}), _eager_tokens(model)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"linear": "float", "embedding": "float", "logits": "all"}
        moepack.export(model, f"{folder}/out", max_seq_len=CONTEXT, **settings)  # type: ignore[arg-type]
        program = Program.load(f"{folder}/out")
        row = _compared(row, expected, program.logits(ids))

        def after(text: list[int]) -> Tensor:
            seen = 0 if len(text) == TOKENS else len(text) - 1
            return program.last_logits(text[seen:], seen)

        row = _with_tokens(row, after, continuation)
    return replace(row, program="generate", backend="xnnpack")


def _is_language_model(entry: str, model: nn.Module) -> bool:
    return hasattr(model, "lm_head") and entry not in tiny_families.ENCODER_DECODER


def _greedy(after: Callable[[list[int]], Tensor]) -> list[int]:
    """New tokens of the prompt, `after` giving the logits of what follows a text."""
    text = tiny_models.tokens(TOKENS)[0].tolist()
    for _ in range(NEW_TOKENS):
        text.append(int(after(text).argmax()))
    return text[TOKENS:]


def _eager_tokens(model: nn.Module) -> list[int]:
    """Without a cache and without padding."""
    return _greedy(lambda text: _eager(model, {"input_ids": torch.tensor([text])})[-1])


def _with_tokens(row: Row, after: Callable[[list[int]], Tensor], expected: list[int]) -> Row:
    same = sum(a == b for a, b in zip(_greedy(after), expected, strict=True))
    return replace(row, greedy=f"{same}/{NEW_TOKENS}")


def _forward(row: Row, entry: str, model: nn.Module) -> Row:
    return replace(_one_pass(row, entry, model), backend="xnnpack")


def _portable(row: Row, entry: str, model: nn.Module) -> Row:
    from transformers.exporters import exporter_executorch

    def prepare(model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any], list[Any]]:
        return model, inputs, []

    with mock.patch.dict(exporter_executorch._BACKEND_PREPARE, {"xnnpack": prepare}):
        return replace(_one_pass(row, entry, model), backend="portable")


@torch.no_grad()
def _one_pass(row: Row, entry: str, model: nn.Module) -> Row:
    is_language_model = _is_language_model(entry, model)
    inputs = tiny_models.inputs(entry, TOKENS)
    if is_language_model:
        inputs = {"input_ids": _padded(inputs["input_ids"][0].tolist())}
    expected = _eager(model, inputs)
    continuation = _eager_tokens(model) if is_language_model else []
    with tempfile.TemporaryDirectory() as folder:
        run = _lowered(model, inputs, expected, Path(folder) / "model.pte")
        row = replace(_compared(row, expected, run(inputs)), program="forward")
        if not is_language_model:
            return row

        def after(text: list[int]) -> Tensor:
            return run({"input_ids": _padded(text)})[len(text) - 1]

        return _with_tokens(row, after, continuation)


def _padded(text: list[int]) -> Tensor:
    """[1, L]: what stands right of a token does not reach a causal model's logits there."""
    return torch.tensor([text + [0] * (TOKENS + NEW_TOKENS - len(text))])


def _lowered(
    model: nn.Module, inputs: dict[str, Tensor], expected: Tensor, path: Path
) -> Callable[[dict[str, Tensor]], Tensor]:
    """The program for inputs of these shapes, as a function that gives what `expected` is."""
    from executorch.runtime import Runtime
    from transformers.exporters.exporter_executorch import ExecutorchConfig, ExecutorchExporter

    from moepack import ops

    twin, given = copy.deepcopy(model), {**inputs, "use_cache": False}
    program = ExecutorchExporter().export(twin, given, config=ExecutorchConfig()).program
    ops.load_executorch()
    with path.open("wb") as file:
        program.write_to_file(file)
    method = Runtime.get().load_program(path).load_method("forward")
    assert method is not None

    def run(inputs: dict[str, Tensor]) -> Tensor:
        outputs = method.execute([value.contiguous() for value in inputs.values()])
        found = (o for o in outputs if isinstance(o, Tensor) and o.numel() == expected.numel())
        return next(found).view(expected.shape).clone()

    return run


def _eager(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    output: Tensor = model(**inputs, use_cache=False)[0]
    return output[0].float()


def _compared(row: Row, expected: Tensor, found: Tensor) -> Row:
    same = int((expected.argmax(-1) == found.argmax(-1)).sum())
    difference = float((expected - found).abs().max() / expected.abs().max())
    return replace(row, equal=f"{same}/{len(expected)}", difference=difference)


def apart(entry: str) -> Row:
    """`run` in a process of its own, forked: what takes longest to import is imported once."""
    import executorch.exir  # noqa: F401
    from transformers.exporters import exporter_executorch  # noqa: F401

    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sending.send(run(entry)))
    process.start()
    sending.close()
    row = Row(entry, tiny_families.MODEL_TYPES.get(entry, entry))
    try:
        if receiving.poll(TIMEOUT):
            row = receiving.recv()
        else:
            row = replace(row, in_the_way=f"no end after {TIMEOUT} s")
    except EOFError:
        process.join()
        row = replace(row, in_the_way=f"the process ended with {process.exitcode}")
    process.kill()
    process.join()
    return row


def write(rows: list[Row]) -> None:
    from importlib.metadata import version

    result = {
        "sources": digest(),
        "transformers": version("transformers"),
        "executorch": version("executorch"),
        "rows": [asdict(row) for row in rows],
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    matrix_page.write(RESULT)


def main(say: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("entries", nargs="*")
    parser.add_argument("--keep", type=Path, help="rows are kept in this file, and taken from it")
    arguments = parser.parse_args()
    done = _kept(arguments.keep)
    rows = []
    for entry in arguments.entries or ENTRIES:
        row = done.get(entry) or apart(entry)
        rows.append(row)
        if arguments.keep and entry not in done:
            with arguments.keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"sources": digest(), **asdict(row)}) + "\n")
        say(f"{entry}: {row.program} {row.backend} {row.equal} {row.greedy} {row.in_the_way}")
    if not arguments.entries:
        write(rows)


def _kept(path: Path | None) -> dict[str, Row]:
    """Rows of an earlier run over the same sources."""
    if path is None or not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [Row(**line) for line in lines if line.pop("sources") == digest()]
    return {row.entry: row for row in rows}


if __name__ == "__main__":
    main()
