"""The application that commands register with."""

import typer

app = typer.Typer(
    name="moepack",
    help="Packs Mixture-of-Experts language models and runs them fast on CPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
