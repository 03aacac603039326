"""The command line: arguments to calls, results to text or JSON. No logic."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moepack.errors import MoePackError
from moepack.json_text import json_text

if TYPE_CHECKING:
    from moepack.report import Steps

app = typer.Typer(
    name="moepack",
    help="Packs Mixture-of-Experts language models and runs them fast on CPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT_DIR", help="Local Hugging Face checkpoint.")
]
Out = Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="Directory to write.")]
SchemeName = Annotated[str, typer.Option("--scheme", help="How experts are packed.")]
Layout = Annotated[str, typer.Option("--layout", help="Of packed experts: moepack or torchao.")]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if moepack made it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="PATTERN", help="Block to leave in float, by path."),
]
Floor = Annotated[
    float | None,
    typer.Option("--sqnr-floor", metavar="DB", help="Worst SQNR that a packed block may have."),
]
WeightFloor = Annotated[
    float | None,
    typer.Option("--sqnr-floor", metavar="DB", help="Worst SQNR that a packed matrix may have."),
]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads to use.")]
Verify = Annotated[bool, typer.Option("--verify", help="Check every checksum.")]


@app.command()
def plan(
    checkpoint: Checkpoint,
    scheme: SchemeName = "int4-g32",
    layout: Layout = "moepack",
    exclude: Exclude = None,
    as_json: Json = False,
) -> None:
    """Say what would be packed and how, without reading weights."""
    import moepack
    from moepack.checkpoint import empty_model

    model = empty_model(checkpoint)
    _print(moepack.plan(model, scheme, exclude=exclude or (), layout=layout), as_json)


@app.command()
def quantize(
    checkpoint: Checkpoint,
    out: Out,
    scheme: SchemeName = "int4-g32",
    layout: Layout = "moepack",
    exclude: Exclude = None,
    weight_floor: WeightFloor = None,
    threads: Threads = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Pack the experts of a checkpoint into a new one, expert by expert (safetensors).

    After an interruption the same command goes on where it was.
    """
    from moepack.online import Settings, quantize_checkpoint

    settings = Settings(
        scheme,
        exclude=exclude or (),
        layout=layout,
        sqnr_floor=weight_floor,
        threads=threads,
    )
    with _steps() as steps:
        steps.begin("Reading names")
        done = quantize_checkpoint(checkpoint, out, settings, force=force, progress=_follow(steps))
    _print(done, as_json)


@app.command()
def export(
    checkpoint: Checkpoint,
    out: Out,
    scheme: SchemeName = "int4-g32",
    layout: Layout = "moepack",
    linear: Annotated[str, typer.Option(help="Other linear layers: 8da4w or float.")] = "8da4w",
    embedding: Annotated[str, typer.Option(help="Embedding: int8 or float.")] = "int8",
    logits: Annotated[str, typer.Option(help="Logits of the last token, or of all.")] = "last",
    max_seq_len: Annotated[int | None, typer.Option(help="Longest sequence, in tokens.")] = None,
    weights_file: Annotated[
        bool, typer.Option("--weights-file", help="Keep weights apart, in model.ptd.")
    ] = False,
    exclude: Exclude = None,
    sqnr_floor: Floor = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Export a checkpoint to an ExecuTorch program that generates text."""
    from moepack.exporter import export as write

    with _steps() as steps:
        result = write(
            checkpoint,
            out,
            scheme=scheme,
            linear=linear,
            embedding=embedding,
            logits=logits,
            max_seq_len=max_seq_len,
            weights_file=weights_file,
            force=force,
            progress=steps.begin,
            layout=layout,
            exclude=exclude or (),
            sqnr_floor=sqnr_floor,
        )
    _print(result, as_json)


@app.command(
    name="export-llm",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def export_llm(context: typer.Context) -> None:
    """ExecuTorch's own LLM export, with its arguments and moepack's experts."""
    from moepack.export_llm import export_llm as write

    write(context.args)


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(help="Packed checkpoint, exported directory, or .pte file.")
    ],
    out: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT", help="Directory or .pte to write.")
    ],
    layout: Annotated[str, typer.Option(help="Of packed experts: moepack or torchao.")],
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Change the layout of packed experts, without the original weights.

    Programs of ExecuTorch's own MoE operator become moepack's with --layout moepack.
    """
    import moepack

    with _steps() as steps:
        steps.begin("Converting")
        done = moepack.convert(source, out, layout=layout, force=force)
    _print(done, as_json)


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
        _print_json({"text": "".join(pieces), **generation.stats.to_json()})
        return
    sys.stdout.write("\n")
    _note(generation.stats)


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

    with _steps() as steps:
        steps.begin("Loading")
        model = open_model(target, threads)
        tokenizer = Tokenizer.load(target if target.is_dir() else target.parent)
        ids = tokenizer.encode(_read(text), special_tokens=False)
        steps.begin("Scoring")
        found = perplexity(model, ids, window=window, stride=stride, progress=steps.advance)
    _print(found, as_json)
    if not found.is_finite:
        raise MoePackError(f"{target}: the perplexity is {found.value}; its weights are damaged")


@app.command()
def bench(
    shape: Annotated[str, typer.Option(help="A known shape, or D,F,E,K.")] = "qwen3-30b-a3b",
    tokens: Annotated[str, typer.Option(help="Numbers of tokens.")] = "1,4,16,128,512",
    scheme: SchemeName = "int4-g32",
    threads: Threads = None,
    isa: Annotated[str | None, typer.Option(help="Instruction set; default: the best.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of the interleaved run.")] = 15,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a roofline chart there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the operator next to the limits of this machine."""
    from moepack import bench as measure

    counts = measure.parse_tokens(tokens)
    if plot is not None:
        from moepack.bench.chart import require_writable, save

        require_writable(plot)
    with _steps() as steps:
        steps.begin("Measuring")
        result = measure.bench(
            measure.parse_shape(shape), counts, scheme, threads, isa, rounds, steps.advance
        )
    if plot is not None:
        save(result, plot)
    _print(result, as_json)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help=".pte, exported directory, blob or safetensors.")],
    verify: Verify = False,
    as_json: Json = False,
) -> None:
    """Show operators, sizes and schemes, and what this machine lacks."""
    from moepack.inspection import inspect as look

    found = look(path, verify=verify)
    _print(found, as_json)
    if found.problems:
        raise typer.Exit(1)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show what moepack runs on here, and what is wrong with it."""
    from moepack.doctor import diagnose

    found = diagnose()
    _print(found, as_json)
    if not found.healthy:
        raise typer.Exit(1)


@app.command()
def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", help="Keep the exported program there.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Pack, export, run and measure the small model that ships with moepack."""
    from moepack.demo import run as run_demo
    from moepack.report import Steps, console

    with Steps(console()) as steps:
        result = run_demo(steps, out_dir=out, threads=threads)
    if json_file is not None:
        json_file.write_text(json_text(result.to_json()) + "\n", encoding="utf-8")


def main() -> None:
    """Errors are one line on stderr and exit code 1; MOEPACK_DEBUG shows where they came from.

    SIGTERM and SIGHUP end the command as Ctrl-C does, with exit codes 143 and 129.
    """
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in kept.items():
        if handler != signal.SIG_IGN:  # under nohup, it stays ignored
            signal.signal(number, _end)
    try:
        _main()
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _end(number: int, frame: object) -> None:
    """Unwinds, so that what is half written is removed; a second signal would stop that."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_IGN)
    sys.exit(128 + number)


def _main() -> None:
    if os.environ.get("MOEPACK_DEBUG"):
        app()
        return
    # What libraries remark about themselves is not for the user of this command.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    try:
        app()
    except MoePackError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        text = str(error).strip() or "no message"
        _fail(
            f"unexpected {type(error).__name__}: {text.splitlines()[0]} "
            "(MOEPACK_DEBUG=1 shows where)"
        )


def _fail(message: str) -> None:
    print("moepack: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(1)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MoePackError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _steps() -> Steps:
    """Progress on stderr, so that stdout holds the result alone."""
    from moepack.report import Steps, console

    return Steps(console(stderr=True))


def _follow(steps: Steps) -> Any:
    def follow(what: str, done: int, total: int) -> None:
        steps.begin(what)
        steps.advance(done / total)

    return follow


def _print(value: Any, as_json: bool) -> None:
    if as_json:
        _print_json(value.to_json())
        return
    from moepack.report import console, renderable

    console().print(renderable(value))


def _print_json(value: Any) -> None:
    print(json_text(value))


def _note(value: object) -> None:
    from moepack.report import console, renderable

    console(stderr=True).print(renderable(value))


if __name__ == "__main__":
    main()
