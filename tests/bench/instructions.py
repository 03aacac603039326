"""Instructions per multiply-accumulate of one expert, decode and prefill, for every scheme.

    python tests/bench/instructions.py build/selftest/cpp/selftest/moepack_selftest \\
                                       build/selftest-arm/cpp/selftest/moepack_selftest

Counts are exact, whatever else the machine does: valgrind's callgrind counts x86-64 programs, a
plugin of QEMU's user mode those for Arm. They are compared with instructions.json, which holds
figures by compiler; `--update` rewrites them there and in docs/explanation/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIGURES = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs/explanation/performance.md"
PLUGIN = ROOT / "tests/emulation/count_instructions.cpp"

# The same program counts the same to 0.1 % (what it prints differs in length). gcc 11 and 12 differ
# by up to 2 % on AVX2, clang 14 by up to 14 %: each major version has figures of its own.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Phase:
    tokens: int  # rows of the one expert
    calls: int  # enough of them that what is printed at the end counts for nothing


PHASES = {"decode": Phase(1, 10), "prefill": Phase(32, 1)}

# [scheme][phase] = instructions per multiply-accumulate
Figures = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Program:
    """A moepack_selftest and the emulator that counts its instructions."""

    path: Path
    plugin: Path

    @cached_property
    def machine(self) -> str:
        machines = {0x3E: "x86-64", 0xB7: "aarch64"}
        with self.path.open("rb") as file:
            return machines[int.from_bytes(file.read(20)[18:20], "little")]

    @property
    def counter(self) -> str:
        return "valgrind" if self.machine == "x86-64" else "QEMU"

    @cached_property
    def _emulator(self) -> list[str]:
        if self.machine == "x86-64":
            return ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
        # -L: where Debian's cross compiler has the libraries of a program that is not static.
        return [
            *("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"),
            *("-cpu", "max", "-plugin", str(self.plugin)),
        ]

    def _run(self, *arguments: object) -> tuple[Any, int]:
        command = [*self._emulator, str(self.path), *map(str, arguments)]
        if not shutil.which(command[0]):
            raise SystemExit(f"{command[0]} is missing (Debian: valgrind, qemu-user)")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        (count,) = re.findall(r"(?:Collected :|^instructions) (\d+)", done.stderr, re.MULTILINE)
        return json.loads(done.stdout), int(count)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """compiler, isas with whether the emulated processor runs them, schemes."""
        facts: dict[str, Any] = self._run("list")[0]
        return facts

    def per_mac(self, isa: str, scheme: str, phase: Phase) -> float:
        """What calls after the first take, so that nothing but the operator is counted."""
        result, more = self._run("op", isa, scheme, phase.tokens, 1 + phase.calls)
        _, one = self._run("op", isa, scheme, phase.tokens, 1)
        macs: int = result["macs"]
        return round((more - one) / phase.calls / macs, 5)

    def count(self, workers: ThreadPoolExecutor) -> dict[str, Figures]:
        isas = [isa for isa, runs in self.facts["isas"].items() if runs]
        jobs = {
            (isa, scheme, phase): workers.submit(self.per_mac, isa, scheme, PHASES[phase])
            for isa in reversed(isas)
            for scheme in self.facts["schemes"]
            for phase in PHASES
        }
        figures: dict[str, Figures] = {}
        for (isa, scheme, phase), job in jobs.items():
            figures.setdefault(isa, {}).setdefault(scheme, {})[phase] = job.result()
        return figures

    def not_counted(self) -> list[str]:
        return [isa for isa, runs in self.facts["isas"].items() if not runs]


def differences(counted: Figures, committed: Figures) -> Iterator[str]:
    """What is out of tolerance, new or gone, in words."""
    for scheme, phases in counted.items():
        for phase, figure in phases.items():
            expected = committed.get(scheme, {}).get(phase)
            if expected is None:
                yield f"{scheme} {phase}: {figure}, no figure is committed"
            elif abs(figure / expected - 1) > TOLERANCE:
                change = 100 * (figure / expected - 1)
                yield f"{scheme} {phase}: {figure}, committed {expected}: {change:+.1f} %"
    for scheme in committed.keys() - counted.keys():
        yield f"{scheme}: figures are committed, there is no such scheme"


def table(figures: dict[str, dict[str, Figures]]) -> str:
    """Markdown: a row for each scheme, a column for each instruction set, "decode / prefill"."""
    columns = [(machine, isa) for machine in figures for isa in figures[machine]]
    schemes = list(dict.fromkeys(s for machine, isa in columns for s in figures[machine][isa]))
    lines = ["scheme | " + " | ".join(f"{isa} ({machine})" for machine, isa in columns)]
    lines.append("|".join("---" for _ in range(len(columns) + 1)))
    for scheme in schemes:
        cells = [figures[machine][isa].get(scheme) for machine, isa in columns]
        lines.append(
            f"{scheme} | "
            + " | ".join(f"{c['decode']:.3f} / {c['prefill']:.3f}" if c else "-" for c in cells)
        )
    return "".join(f"| {line} |\n" if "---" not in line else f"|{line}|\n" for line in lines)


def with_table(page: str, rows: str) -> str:
    """The page with the table of its section on instruction counts replaced."""
    before, heading, section = page.partition("\n## Instruction counts\n")
    assert heading, f"{PAGE} has no section on instruction counts"
    return before + heading + re.sub(r"(^\|.*\n)+", rows, section, count=1, flags=re.MULTILINE)


def check(program: Program, counted: dict[str, Figures], committed: dict[str, Any]) -> int:
    """Prints how the figures compare; how many instruction sets differ."""
    compiler, failed = program.facts["compiler"], 0
    for isa in program.not_counted():
        print(f"{program.machine} {isa}: not counted, {program.counter} does not run it")
    for isa, figures in counted.items():
        where = f"{program.machine} {isa}, {compiler}"
        if compiler not in committed:
            print(f"{where}: not compared, there are figures for {', '.join(committed)}")
            print("\n".join(f"  {scheme}: {phases}" for scheme, phases in figures.items()))
            continue
        found = list(
            differences(figures, committed[compiler].get(program.machine, {}).get(isa, {}))
        )
        print(
            "\n  ".join([f"{where}: {'differs' if found else f'within {TOLERANCE:.0%}'}", *found])
        )
        failed += bool(found)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "programs", type=Path, nargs="+", help="moepack_selftest, x86-64 or aarch64"
    )
    parser.add_argument("--json", action="store_true", help="print the figures, compare nothing")
    parser.add_argument("--update", action="store_true", help="rewrite the committed figures")
    arguments = parser.parse_args()
    committed: dict[str, Any] = json.loads(FIGURES.read_text())
    failed = compared = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as workers:
        plugin = Path(folder) / "count.so"
        subprocess.run(["c++", "-O2", "-shared", "-fPIC", PLUGIN, "-o", plugin], check=True)
        for path in arguments.programs:
            program = Program(path, plugin)
            counted = program.count(workers)
            if arguments.json:
                facts = {"machine": program.machine, "compiler": program.facts["compiler"]}
                print(
                    json.dumps(facts | {"figures": counted, "not_counted": program.not_counted()})
                )
            elif arguments.update:
                machines = committed.setdefault(program.facts["compiler"], {})
                machines.setdefault(program.machine, {}).update(counted)
            else:
                failed += check(program, counted, committed)
                compared += len(counted) * (program.facts["compiler"] in committed)
    if arguments.update:
        FIGURES.write_text(json.dumps(committed, indent=1) + "\n")
        PAGE.write_text(with_table(PAGE.read_text(), table(next(iter(committed.values())))))
    elif not arguments.json:
        print(f"{compared - failed} passed, {failed} failed")
        if failed:
            sys.exit("a change that is meant: make update-instructions")


if __name__ == "__main__":
    main()
