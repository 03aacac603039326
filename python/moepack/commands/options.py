"""Arguments and options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT_DIR", help="Local Hugging Face checkpoint.")
]
Out = Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="Directory to write.")]
SchemeName = Annotated[
    str,
    typer.Option(
        "--scheme",
        help="How experts are packed: int4 or int8 in groups (int4-g32, -g64, -g128), mxfp4, "
        "fp8-b128.",
    ),
]
Layout = Annotated[str, typer.Option("--layout", help="Of packed experts: moepack or torchao.")]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if moepack made it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there.")
]
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
