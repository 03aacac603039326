"""Commands on checkpoints: plan, pack, export, convert."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moepack.commands.app import app
from moepack.commands.options import (
    Checkpoint,
    Exclude,
    Floor,
    Force,
    Json,
    Layout,
    Out,
    SchemeName,
    Threads,
    WeightFloor,
)
from moepack.commands.output import follow, print_result, steps_on_stderr


@app.command()
def plan(
    checkpoint: Checkpoint,
    scheme: SchemeName = "int4-g32",
    layout: Layout = "moepack",
    exclude: Exclude = None,
    as_json: Json = False,
) -> None:
    """Say what would be packed and how, without reading weights.

    The exit code is 1 where it cannot be: a block is refused, or there is none.
    """
    import moepack
    from moepack.checkpoint import empty_model

    model = empty_model(checkpoint)
    found = moepack.plan(model, scheme, exclude=exclude or (), layout=layout)
    print_result(found, as_json)
    if not found.is_possible:
        raise typer.Exit(1)


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
    with steps_on_stderr() as steps:
        steps.begin("Reading names")
        done = quantize_checkpoint(checkpoint, out, settings, force=force, progress=follow(steps))
    print_result(done, as_json)


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

    with steps_on_stderr() as steps:
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
    print_result(result, as_json)


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
    upstream: Annotated[
        bool, typer.Option("--upstream", help="Call ExecuTorch's own MoE operator (torchao).")
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Change the layout of packed experts, without the original weights.

    Programs of ExecuTorch's own MoE operator become moepack's with --layout moepack, and moepack's
    become its with --layout torchao --upstream. A .ptd beside a .pte is converted with it.
    """
    import moepack

    with steps_on_stderr() as steps:
        steps.begin("Converting")
        done = moepack.convert(source, out, layout=layout, upstream=upstream, force=force)
    print_result(done, as_json)
