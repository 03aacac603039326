"""`moepack export-llm` and `python -m moepack.export_llm`: ExecuTorch's LLM export, MoE included.

Arguments are those of `executorch.extension.llm.export.export_llm` (--config FILE and a.b=c) or
those of `executorch.examples.models.llama.export_llama` (flags), which do the work. In addition,
for experts (in a configuration file: a section `moepack`):

    moepack.scheme=NAME        --moe_scheme NAME        how they are packed, as int4-g32
    moepack.group_size=N       --moe_group_size N       the same for 4-bit codes
    moepack.layout=LAYOUT      --moe_layout LAYOUT      moepack, or torchao: upstream's blobs
    moepack.sqnr_floor=DB      --moe_sqnr_floor DB      worst SQNR that a block may have
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from moepack.boundary import run
from moepack.errors import MoePackError, UnsupportedError
from moepack.integrations.executorch import ExpertOptions, quantized_experts

__all__ = ["export_llm", "main"]

_PROGRAM = "moepack export-llm"
_SECTION = "moepack"
_TYPES: dict[str, type] = {"scheme": str, "group_size": int, "layout": str, "sqnr_floor": float}
_NAMES = tuple(field.name for field in fields(ExpertOptions))
_OVERRIDE = re.compile(r"[+~]{0,2}[\w./@]+=")


def export_llm(arguments: Sequence[str]) -> None:
    """Exports a model as the arguments say, which are upstream's and those above.

    Raises MoePackError for what moepack finds wrong; what upstream raises passes through.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        _print_help()
        return
    rest, given = _take_options(_one_by_one(arguments))
    with ExitStack() as stack:
        if "--config" in rest:
            given = _take_section(rest, stack) | given
        options = ExpertOptions(**{name: _value(name, text) for name, text in given.items()})
        stack.enter_context(_command_line([_PROGRAM, *rest]))
        export = _upstream(rest)
        stack.enter_context(quantized_experts(options, lambda r: print(r, file=sys.stderr)))
        stack.enter_context(_configuration_errors())
        export()


def main() -> None:
    run(lambda: export_llm(sys.argv[1:]))


def _print_help() -> None:
    print(f"{__doc__}\nThe flags of export_llama:\n")
    _flag_parser().print_help()


def _upstream(arguments: Sequence[str]) -> Any:
    """Upstream's main function for the style in which the arguments are written."""
    configured = [a for a in arguments if a in ("--config", "--hydra") or _OVERRIDE.match(a)]
    if not configured:
        from executorch.examples.models.llama.export_llama import main as with_flags

        return with_flags
    flags = _flag_parser()._option_string_actions
    if mixed := [a for a in arguments if a.startswith("--") and a.partition("=")[0] in flags]:
        raise UnsupportedError(
            f"{mixed[0]} beside {configured[0]}: give everything as flags, or everything as a.b=c "
            "and --config FILE"
        )
    from executorch.extension.llm.export.export_llm import main as configured_main

    return configured_main


def _flag_parser() -> ArgumentParser:
    from executorch.examples.models.llama.export_llama_lib import build_args_parser

    parser: ArgumentParser = build_args_parser()
    parser.prog = _PROGRAM
    return parser


def _one_by_one(arguments: Sequence[str]) -> list[str]:
    """`--config=FILE` and `--moe_x=y` as two arguments: upstream takes the first only so."""
    single = re.compile(r"(--config|--moe_\w+)=(.*)", re.DOTALL)
    pairs = ((a, single.fullmatch(a)) for a in arguments if a != "--hydra")
    return [part for a, pair in pairs for part in (pair.groups() if pair else (a,))]


def _take_options(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments without moepack's own, and those."""
    rest: list[str] = []
    given: dict[str, str] = {}
    remaining = iter(arguments)
    for argument in remaining:
        name, _, value = argument.partition("=")
        if name.lstrip("+").startswith(f"{_SECTION}."):  # Hydra adds with +
            given[_known(name.lstrip("+").removeprefix(f"{_SECTION}."), argument)] = value
        elif argument.startswith("--moe_"):
            text = next(remaining, None)
            if text is None:
                raise UnsupportedError(f"{argument} needs a value")
            given[_known(argument.removeprefix("--moe_"), argument)] = text
        else:
            rest.append(argument)
    return rest, given


def _take_section(arguments: list[str], stack: ExitStack) -> dict[str, str]:
    """The section `moepack` of the --config file; upstream gets a copy of the file without it."""
    from omegaconf import OmegaConf

    place = arguments.index("--config") + 1
    path = Path(arguments[place]) if place < len(arguments) else None
    if path is None or not path.is_file():
        raise MoePackError(f"--config {path or ''}: there is no such file")
    if path.suffix != ".yaml":
        raise MoePackError(f"--config {path}: Hydra reads files that are named *.yaml")
    with _configuration_errors():
        config: Any = OmegaConf.load(path)
        if _SECTION not in config:
            return {}
        held = config[_SECTION]
        section = OmegaConf.to_container(held, resolve=True) if OmegaConf.is_config(held) else held
    if not isinstance(section, dict | None):
        raise UnsupportedError(f"{path}: {_SECTION} is {section!r}; expected its keys with values")
    config.pop(_SECTION)
    copy = Path(stack.enter_context(tempfile.TemporaryDirectory())) / path.name
    OmegaConf.save(config, copy)
    arguments[place] = str(copy)
    return {
        _known(str(name), f"{path}: {name!r}"): str(value)
        for name, value in (section or {}).items()
        if value is not None
    }


def _known(name: str, where: str) -> str:
    if name not in _NAMES:
        raise UnsupportedError(f"{where}: unknown; supported: {', '.join(_NAMES)}")
    return name


def _value(name: str, text: str) -> Any:
    try:
        return _TYPES[name](text)
    except ValueError:
        raise UnsupportedError(f"{name} is {text!r}; expected {_TYPES[name].__name__}") from None


@contextmanager
def _configuration_errors() -> Iterator[None]:
    """What Hydra and YAML's reader say about the text of a configuration, in one line."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        text = f"{error} {error.__cause__ or ''}"
        raise MoePackError(" ".join(text.split())) from error


@contextmanager
def _command_line(arguments: list[str]) -> Iterator[None]:
    """Upstream reads sys.argv, and Hydra hides exceptions unless told not to."""
    kept, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = arguments
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = kept
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


if __name__ == "__main__":
    main()
