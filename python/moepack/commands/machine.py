"""Commands on this machine: measure it, diagnose it, show moepack on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moepack.commands.app import app
from moepack.commands.options import Force, Json, JsonFile, SchemeName, Threads
from moepack.commands.output import print_result, steps_on_stderr, write_json


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
    overhead: Annotated[
        bool,
        typer.Option("--overhead", help="Also what a call costs besides its experts: more time."),
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure the operator next to the limits of this machine."""
    from moepack import bench as measure
    from moepack.staging import require_file

    if json_file is not None:
        require_file(json_file)
    counts = measure.parse_tokens(tokens)
    if plot is not None:
        from moepack.bench.chart import require_writable, save

        require_writable(plot)
    with steps_on_stderr() as steps:
        steps.begin("Measuring")
        result = measure.bench(
            measure.parse_shape(shape),
            counts,
            scheme,
            threads,
            isa,
            rounds,
            steps.advance,
            with_overhead=overhead,
        )
    if plot is not None:
        save(result, plot)
    print_result(result, as_json=False)
    if json_file is not None:
        write_json(result.to_json(), json_file)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show what moepack runs on here, and what is wrong with it."""
    from moepack.doctor import diagnose

    found = diagnose()
    print_result(found, as_json)
    if not found.healthy:
        raise typer.Exit(1)


@app.command()
def demo(
    json_file: JsonFile = None,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", help="Keep the exported program there.")
    ] = None,
    force: Force = False,
    threads: Threads = None,
) -> None:
    """Pack, export, run and measure the small model that ships with moepack."""
    from moepack.demo import run as run_demo
    from moepack.report import Steps, console
    from moepack.staging import require_file

    if json_file is not None:
        require_file(json_file)
    with Steps(console()) as steps:
        result = run_demo(steps, out_dir=out, force=force, threads=threads)
    if json_file is not None:
        write_json(result.to_json(), json_file)
