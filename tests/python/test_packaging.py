"""What is installed: imports that load nothing else, binaries that hold no path, wheels, CMake."""

import ast
import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import moepack
from moepack import _core, ops

ROOT = Path(__file__).parents[2]
OPTIONAL = ["transformers", "executorch", "torchao", "matplotlib", "typer", "rich", "omegaconf"]
CONSUMER = """
#include <cstdio>
#include "moepack/isa.h"
#include "moepack/scheme.h"
int main() {
  const char* name = nullptr;
  if (!moepack::active_isa(name).ok() || !moepack::find_scheme("int4-g32")) return 1;
  std::puts(name);
}
"""
CONSUMER_CMAKE = """
cmake_minimum_required(VERSION 3.28)
project(consumer LANGUAGES CXX)
find_package(moepack REQUIRED COMPONENTS kernels)
add_executable(consumer consumer.cpp)
target_link_libraries(consumer PRIVATE moepack::kernels)
"""


def run(*command: str | Path, **environment: str) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def loaded_by(code: str) -> set[str]:
    names = run(sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)")
    return {name.partition(".")[0] for name in names.split()}


def test_importing_moepack_loads_nothing() -> None:
    loaded = loaded_by("import moepack; moepack.__version__, dir(moepack)")
    assert "moepack" in loaded
    assert not loaded & {"torch", "numpy", *OPTIONAL}


@pytest.mark.parametrize("module", ["ops", "packing", "quantizer", "modules", "planner"])
def test_importing_the_parts_loads_no_optional_library(module: str) -> None:
    loaded = loaded_by(f"import moepack.{module}")
    assert not loaded & set(OPTIONAL)


def test_public_names_resolve() -> None:
    for name in moepack.__all__:
        assert getattr(moepack, name) is not None
    assert set(moepack.__all__) <= set(dir(moepack))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        moepack.nothing  # noqa: B018


def test_importing_twice_registers_once() -> None:
    code = """
import sys
from moepack import ops
for name in [n for n in sys.modules if n.partition(".")[0] == "moepack" and n != "moepack._core"]:
    del sys.modules[name]
from moepack import ops as again
assert again is not ops and again.is_active()
again.load()
import torch
assert torch.ops.moepack.quantized_experts.default is not None
print("alive")
"""
    assert run(sys.executable, "-c", code).strip() == "alive"


def test_one_version() -> None:
    assert importlib.metadata.version("moepack") == moepack.__version__


def test_the_stub_names_what_the_core_has() -> None:
    stub = ast.parse((ROOT / "python/moepack/_core.pyi").read_text())
    declared = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert declared == {name for name in vars(_core) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("name", "first"),
    [("libmoepack_torch.so", "libtorch_cpu.so"), ("libmoepack_executorch.so", "libexecutorch.so")],
)
def test_libraries_name_no_path_of_the_build_machine(name: str, first: str) -> None:
    library = ops.executorch_library_path().with_name(name)
    dynamic = run("readelf", "-d", library)
    paths = [line for line in dynamic.splitlines() if "RUNPATH" in line or "RPATH" in line]
    assert all("[$ORIGIN" in line and ":/" not in line for line in paths)
    needed = [line.split("[")[1][:-1] for line in dynamic.splitlines() if "NEEDED" in line]
    assert needed[0] == first
    assert ("libtorch" in dynamic) == (first == "libtorch_cpu.so")


def test_libraries_export_what_they_must_and_no_more() -> None:
    for name in ("libmoepack_torch.so", "libmoepack_executorch.so"):
        library = ops.executorch_library_path().with_name(name)
        symbols = run("nm", "-DC", "--defined-only", library).splitlines()
        ours = [line for line in symbols if "moepack" in line]
        assert [line.split()[-1] for line in ours] == ["moepack_force_isa"]


@pytest.mark.slow
def test_a_wheel_installs_without_a_compiler(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--quiet")
    run(*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for suffix in ("_torch.so", "_executorch.so", "py.typed", "_core.pyi"):
        assert any(name.endswith(suffix) for name in names)
    assert not any(name.endswith((".h", ".a", ".cmake")) for name in names)
    assert not any(name.startswith(("cpp/", "tests/")) for name in names)
    target = tmp_path / "site"
    run(*pip, "install", "--no-deps", "--no-index", "--target", target, wheel, PATH="/nonexistent")
    # A folder of its own first on the path; torch and the rest from this environment.
    code = (
        f"import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'moepack' not in repr(f)];"
        f"sys.path.insert(0, {str(target)!r}); from moepack import ops; print(ops.__file__)"
    )
    assert str(target) in run(sys.executable, "-c", code, PATH="/nonexistent")


@pytest.mark.slow
def test_the_core_builds_alone_and_is_found_by_cmake(tmp_path: Path) -> None:
    build, prefix, consumer = (tmp_path / name for name in ("build", "prefix", "consumer"))
    cmake = Path(sys.executable).with_name("cmake")
    run(cmake, "-S", ROOT, "-B", build, "-G", "Unix Makefiles", f"-DCMAKE_INSTALL_PREFIX={prefix}")
    run(cmake, "--build", build, "--parallel", "2")
    run(cmake, "--install", build)
    consumer.mkdir()
    (consumer / "consumer.cpp").write_text(CONSUMER)
    (consumer / "CMakeLists.txt").write_text(CONSUMER_CMAKE)
    run(cmake, "-S", consumer, "-B", consumer / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    run(cmake, "--build", consumer / "build")
    assert run(consumer / "build/consumer").strip() == _core.active_isa()
