"""Loading and running programs: limits, sampling, damage, memory."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from made_programs import CONTEXT, VOCAB, checkpoint, copied, exported, scratch
from moepack.attributes import ExpertAttributes, RoutingAttributes
from moepack.bench import bench
from moepack.errors import MoePackError
from moepack.evaluate import open_model
from moepack.exporter.lowering import write_program
from moepack.manifest import FILE_NAME, PROGRAM
from moepack.modules import QuantizedMoEFFN
from moepack.online import Settings
from moepack.program_file import open_program
from moepack.runtime import (
    Generation,
    Program,
    Sampling,
    executorch_runtime,
    missing_from_runtime,
    refuse_missing,
    set_threads,
    stream_text,
    thread_count,
)
from moepack.tokenizer import Tokenizer

PROMPT = list(range(3, 20))


@pytest.fixture(scope="module")
def program() -> Program:
    return Program.load(exported())


def test_program_knows_its_limits(program: Program) -> None:
    assert (program.max_seq_len, program.vocab_size) == (CONTEXT, VOCAB)
    assert program.eos_ids == {2}
    assert program.all_logits


def test_generation_ends_at_the_context(program: Program) -> None:
    generation = Generation(program, PROMPT)
    tokens = list(generation)
    # The token after the last position is still predicted; it has no place to be fed.
    assert len(tokens) == CONTEXT - len(PROMPT) + 1
    assert generation.stats.stop == "context"
    assert generation.stats.new_tokens == len(tokens)
    assert generation.stats.decode_steps == len(tokens) - 1
    assert generation.stats.decode_rate > 0


def test_generation_ends_after_the_asked_number(program: Program) -> None:
    generation = Generation(program, PROMPT, max_new_tokens=3)
    assert len(list(generation)) == 3
    assert generation.stats.stop == "length"
    with pytest.raises(MoePackError, match="max_new_tokens is 0"):
        Generation(program, PROMPT, max_new_tokens=0)


def test_generation_ends_at_the_end_of_text(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = list(Generation(program, PROMPT, max_new_tokens=8))
    monkeypatch.setattr(program, "eos_ids", frozenset({tokens[4]}))
    generation = Generation(program, PROMPT, max_new_tokens=8)
    assert list(generation) == tokens[: tokens.index(tokens[4])]
    assert generation.stats.stop == "eos"


def test_seed_fixes_what_is_drawn(program: Program) -> None:
    def drawn(seed: int) -> list[int]:
        sampling = Sampling(temperature=1.5, seed=seed)
        return list(Generation(program, PROMPT, max_new_tokens=20, sampling=sampling))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    for temperature in (-1, math.nan, math.inf):
        with pytest.raises(MoePackError, match="temperature"):
            Sampling(temperature=temperature)
    for seed in (1 << 64, -(1 << 63) - 1, 10**30):
        with pytest.raises(MoePackError, match=f"seed is {seed}"):
            Sampling(1.0, seed)


@pytest.mark.parametrize("temperature", [1e-40, 5e-324])
def test_tiny_temperatures_choose_the_likeliest_token(program: Program, temperature: float) -> None:
    sampling = Sampling(temperature, seed=(1 << 64) - 1)
    found = list(Generation(program, PROMPT, max_new_tokens=8, sampling=sampling))
    assert found == list(Generation(program, PROMPT, max_new_tokens=8))


@pytest.mark.parametrize("threads", [0, -1, 1025, 99_999_999, 10**30])
def test_thread_counts_have_bounds(threads: int) -> None:
    with pytest.raises(MoePackError, match=f"threads is {threads}; it must be 1 to 1024"):
        Program.load(exported(), threads=threads)
    with pytest.raises(MoePackError, match="1 to 1024"):
        set_threads(threads)
    with pytest.raises(MoePackError, match="1 to 1024"):
        open_model(checkpoint("mixtral"), threads)
    with pytest.raises(MoePackError, match="1 to 1024"):
        Settings(threads=threads)
    with pytest.raises(MoePackError, match="1 to 1024"):
        bench((64, 48, 4, 2), (1,), threads=threads)


def test_second_sequence_does_not_see_the_first(program: Program) -> None:
    first = program.logits(PROMPT)
    program.logits(list(range(40, 40 + CONTEXT)))
    assert torch.equal(program.logits(PROMPT), first)


def test_longest_prompt_runs_and_a_longer_one_is_refused(program: Program) -> None:
    longest = [5] * CONTEXT
    assert len(list(Generation(program, longest))) == 1
    with pytest.raises(MoePackError, match=f"{CONTEXT + 1} tokens.*{CONTEXT}"):
        Generation(program, [*longest, 5])
    with pytest.raises(MoePackError, match="no tokens"):
        Generation(program, [])


@pytest.mark.parametrize(("ids", "position"), [([VOCAB], 0), ([-1], 0), ([3], CONTEXT), ([], 0)])
def test_tokens_out_of_range_are_refused(program: Program, ids: list[int], position: int) -> None:
    with pytest.raises(MoePackError):
        program.logits(ids, position)
    assert program.logits([3]).isfinite().all()


def test_streamed_text_is_the_decoded_text(program: Program) -> None:
    tokenizer = Tokenizer.load(exported())
    sampling = Sampling(temperature=2.0, seed=3)
    tokens = list(Generation(program, PROMPT, sampling=sampling))
    pieces = list(stream_text(Generation(program, PROMPT, sampling=sampling), tokenizer))
    assert "".join(pieces) == tokenizer.decode(tokens)


def test_thread_count_is_set_and_changes_no_bit(program: Program) -> None:
    results = []
    for threads in (1, 2):
        set_threads(threads)
        assert thread_count() == threads
        results.append(Program.load(exported()).logits(PROMPT))
    assert torch.equal(results[0], results[1])
    with pytest.raises(MoePackError, match="1 to 1024"):
        set_threads(0)


def test_missing_kernels_are_named_before_loading() -> None:
    file, runtime = open_program(exported() / PROGRAM), executorch_runtime()
    assert missing_from_runtime(file, runtime) == []
    names = {n for n in runtime.operator_registry.operator_names if not n.startswith("moepack")}
    poor = SimpleNamespace(
        operator_registry=SimpleNamespace(operator_names=names),
        backend_registry=SimpleNamespace(registered_backend_names=[]),
    )
    missing = ["moepack::quantized_moe_ffn.out", "XnnpackBackend"]
    assert missing_from_runtime(file, poor) == missing
    with pytest.raises(MoePackError, match=r"moepack::quantized_moe_ffn\.out.*doctor"):
        refuse_missing(file, poor)


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.3, 0.999])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_program_cut_short_is_an_error(tmp_path: Path, keep: float, with_manifest: bool) -> None:
    out = copied(exported(), tmp_path / "out")
    content = (out / PROGRAM).read_bytes()
    (out / PROGRAM).write_bytes(content[: int(len(content) * keep)])
    if not with_manifest:
        (out / FILE_NAME).unlink()
    with pytest.raises(MoePackError, match="model"):
        Program.load(out / PROGRAM)


@pytest.mark.parametrize("name", ["model.pte", "tokenizer.json"])
def test_flipped_bit_is_found_when_verified(tmp_path: Path, name: str) -> None:
    out = copied(exported(), tmp_path / "out")
    content = bytearray((out / name).read_bytes())
    content[-100] ^= 1
    (out / name).write_bytes(content)
    with pytest.raises(MoePackError, match=f"{name}: content differs"):
        Program.load(out, verify=True)


def test_damage_in_what_the_runtime_follows_is_always_found(tmp_path: Path) -> None:
    out = copied(exported(), tmp_path / "out")
    content = (out / PROGRAM).read_bytes()
    size = open_program(out / PROGRAM).program_bytes
    draw = random.Random(0)
    for _ in range(50):
        damaged = bytearray(content)
        damaged[draw.randrange(size)] ^= 1 << draw.randrange(8)
        (out / PROGRAM).write_bytes(damaged)
        with pytest.raises(MoePackError):
            Program.load(out)


@pytest.mark.parametrize("values", [[], [1, 2], [0], [None]])
def test_constant_methods_that_give_no_number_are_an_error(
    monkeypatch: pytest.MonkeyPatch, values: list[Any]
) -> None:
    file = open_program(exported() / PROGRAM)
    method = SimpleNamespace(execute=lambda inputs: values)
    damaged = SimpleNamespace(
        method_names={"forward", "get_max_seq_len"}, load_method=lambda name: method
    )
    with pytest.raises(MoePackError, match="'get_max_seq_len' is damaged"):
        Program(file, damaged, None)


def test_refusals_of_kernels_are_one_line(
    program: Program, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(inputs: object) -> None:
        os.write(2, b"native: first\nnative: the reason\n")
        raise RuntimeError("error 0x12")

    monkeypatch.setattr(program, "_forward", SimpleNamespace(execute=refuse))
    with pytest.raises(MoePackError, match=r"model\.pte: error 0x12 \(native: the reason\)$"):
        program.logits([5])
    assert capfd.readouterr().err == ""


def test_unknown_instruction_set_is_one_line() -> None:
    command = [sys.executable, "-m", "moepack.cli", "run", str(exported()), "--prompt", "x"]
    environment = os.environ | {"MOEPACK_ISA": "bogus"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("moepack: MOEPACK_ISA=bogus: no such instruction set")


_FUZZ = """
import random, sys
from pathlib import Path
from moepack.errors import MoePackError
from moepack.runtime import Program
content, copy = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
draw = random.Random(int(sys.argv[3]))
for _ in range(30):
    damaged = bytearray(content)
    damaged[draw.randrange(int(sys.argv[4]))] ^= 1 << draw.randrange(8)
    copy.write_bytes(damaged)
    try:
        Program.load(copy).logits([5, 6, 7])
    except MoePackError:
        pass
print("alive")
"""


def test_damaged_program_without_manifest_ends_no_process(tmp_path: Path) -> None:
    source = exported() / PROGRAM
    size = open_program(source).program_bytes
    command = [sys.executable, "-c", _FUZZ, str(source), str(tmp_path / PROGRAM), "0", str(size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "alive", done.stderr[-2000:]


_MEMORY = """
import re, sys
from pathlib import Path
import torch
from moepack.runtime import executorch_runtime

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

runtime = executorch_runtime()
torch.zeros(1)
before = anonymous()
method = runtime.load_program(Path(sys.argv[1])).load_method("forward")
method.execute((torch.zeros(1, int(sys.argv[2])),))
print(anonymous() - before)
"""


def test_loading_maps_the_weights(tmp_path: Path) -> None:
    experts, dim, inner = 48, 1024, 512
    block = QuantizedMoEFFN.empty(
        experts,
        dim,
        RoutingAttributes(4, "softmax"),
        ExpertAttributes(inner, "int4-g32"),
        device="cpu",
    )
    _fill(block, experts, dim, inner)
    path = scratch() / "wide.pte"
    write_program(block, (torch.zeros(1, dim),), None, {}, path)
    weights = block.packed_w13.nbytes + block.packed_w2.nbytes
    assert weights > 40e6
    command = [sys.executable, "-c", _MEMORY, str(path), str(dim)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert int(done.stdout) < weights / 4


def _fill(block: QuantizedMoEFFN, experts: int, dim: int, inner: int) -> None:
    """Every expert the same made-up weights: one matrix to quantize instead of many."""
    from moepack import packing, quantizer

    for name, rows, cols in (("w13", 2 * inner, dim), ("w2", dim, inner)):
        weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))
        order: packing.RowOrder = "gate_up" if name == "w13" else "plain"
        blob = packing.pack(quantizer.quantize(weight, "int4-g32"), order)
        block.get_buffer(f"packed_{name}").copy_(blob.expand(experts, -1))
    block.gate_weight.normal_(generator=torch.Generator().manual_seed(1))
