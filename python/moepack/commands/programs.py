"""Commands on what was exported: run, score, look inside."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moepack.commands.app import app
from moepack.commands.options import Json, Threads, Verify
from moepack.commands.output import note, print_json, print_result, steps_on_stderr
from moepack.errors import MoePackError


@app.command()
def run(
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Exported directory.")],
    prompt: Annotated[str, typer.Option(help="Text to continue, or to answer.")],
    max_new_tokens: Annotated[int | None, typer.Option(help="Stop after so many tokens.")] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed for temperatures above 0.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Do not use the chat template.")] = False,
    threads: Threads = None,
    verify: Verify = False,
    as_json: Json = False,
) -> None:
    """Generate text from an exported program."""
    from moepack.runtime import Generation, Program, Sampling, stream_text
    from moepack.tokenizer import Tokenizer

    sampling = Sampling(temperature, seed)
    program = Program.load(target, threads=threads, verify=verify)
    tokenizer = Tokenizer.load(program.file.path.parent)
    ids = tokenizer.encode(prompt) if raw else tokenizer.chat(prompt)
    generation = Generation(program, ids, max_new_tokens=max_new_tokens, sampling=sampling)
    pieces = []
    for piece in stream_text(generation, tokenizer):
        pieces.append(piece)
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if as_json:
        print_json({"text": "".join(pieces), **generation.stats.to_json()})
        return
    sys.stdout.write("\n")
    note(generation.stats)


@app.command(name="eval")
def evaluate(
    target: Annotated[Path, typer.Argument(help="Exported directory, .pte, or checkpoint.")],
    text: Annotated[Path, typer.Option(help="Text file to score.")],
    window: Annotated[int, typer.Option(help="Tokens in a window.")] = 512,
    stride: Annotated[
        int | None, typer.Option(help="Between windows; default: the window.")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Perplexity per token of a program or a checkpoint on a text."""
    from moepack.evaluate import open_model, perplexity
    from moepack.tokenizer import Tokenizer

    with steps_on_stderr() as steps:
        steps.begin("Loading")
        model = open_model(target, threads)
        tokenizer = Tokenizer.load(target if target.is_dir() else target.parent)
        ids = tokenizer.encode(read_text(text), special_tokens=False)
        steps.begin("Scoring")
        found = perplexity(model, ids, window=window, stride=stride, progress=steps.advance)
    print_result(found, as_json)
    if not found.is_finite:
        raise MoePackError(f"{target}: the perplexity is {found.value}; its weights are damaged")


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help=".pte, exported directory, blob or safetensors.")],
    verify: Verify = False,
    as_json: Json = False,
) -> None:
    """Show operators, sizes and schemes, and what this machine lacks."""
    from moepack.inspection import inspect as look

    found = look(path, verify=verify)
    print_result(found, as_json)
    if found.problems:
        raise typer.Exit(1)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MoePackError(f"{path}: cannot be read as UTF-8 text: {error}") from error
