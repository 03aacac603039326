"""moepack and its runner, built and installed by CMake as an integrator does it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_MAKE = ("-G", "Unix Makefiles", "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON")


def cmake(*arguments: str | Path) -> None:
    command = [Path(sys.executable).with_name("cmake"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@cache
def wheel() -> Path:
    """ExecuTorch's folder in site-packages, which is its CMake prefix too."""
    import executorch

    return Path(next(iter(executorch.__path__)))


def jobs() -> int:
    return int(os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", os.cpu_count() or 1))


def configured_and_built(source: Path, build: Path, *options: str) -> None:
    cmake("-S", source, "-B", build, *_MAKE, *options)
    cmake("--build", build, "--parallel", str(jobs()))


def install_moepack(folder: Path, *options: str) -> Path:
    """The prefix of an installed moepack."""
    build, prefix = folder / "build", folder / "prefix"
    python = f"-DPython_EXECUTABLE={sys.executable}"
    configured_and_built(ROOT, build, python, f"-DCMAKE_INSTALL_PREFIX={prefix}", *options)
    cmake("--install", build)
    return prefix


def build_runner(folder: Path, *prefixes: str | Path) -> Path:
    """The runner, copied out of the repository as the page says."""
    source, build = folder / "copied", folder / "build"
    source.mkdir(parents=True)
    for file in (ROOT / "cpp/runner").iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    configured_and_built(source, build, f"-DCMAKE_PREFIX_PATH={';'.join(map(str, prefixes))}")
    return build / "moepack_runner"
