"""What is installed: imports that load nothing else, binaries that hold no path, wheels, CMake."""

import ast
import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import moepack
from cmake_builds import configured_and_built, install_moepack
from made_programs import made_model
from moepack import _core, ops
from moepack.modules import QuantizedMoEFFN

ROOT = Path(__file__).parents[2]
OPTIONAL = ["transformers", "executorch", "torchao", "matplotlib", "typer", "rich", "omegaconf"]
# One layer of Mixtral, int4-g32, read from files; the bytes of the result on stdout.
CONSUMER = """
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>
#include "moepack/ffn.h"

std::vector<char> read(const char* name) {
  std::ifstream file(name, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

int main(int, char** sizes) {
  const auto size = [sizes](int i) { return std::atoll(sizes[i]); };
  const moepack::Shape shape{size(1), size(2), size(3), size(4), size(5)};
  const auto x = read("x"), gate = read("gate"), w13 = read("w13"), w2 = read("w2");
  moepack::ExpertAttributes experts;
  experts.scheme = "int4-g32";
  experts.layout = "moepack";
  experts.activation = "silu";
  moepack::RoutingAttributes routing;
  routing.score_func = "softmax_all";
  routing.norm_topk = true;
  routing.group_score = "top2sum";
  routing.router_dtype = "float32";
  const auto bytes13 = static_cast<std::int64_t>(w13.size()) / shape.E;
  const auto bytes2 = static_cast<std::int64_t>(w2.size()) / shape.E;
  const moepack::ExpertSizes lengths{shape.E, bytes13, shape.E, bytes2};
  moepack::Status status = moepack::check_experts(shape, experts, lengths);
  if (status.ok()) status = moepack::check_routing(shape, routing);
  std::vector<char> out(x.size()), memory(moepack::ffn_workspace_bytes(shape, experts, 1) + 64);
  char* workspace = memory.data() + (64 - reinterpret_cast<std::size_t>(memory.data()) % 64);
  const auto bytes_of = [](const std::vector<char>& blob) {
    return reinterpret_cast<const std::uint8_t*>(blob.data());
  };
  const moepack::RouterTensors router{nullptr, reinterpret_cast<const float*>(gate.data())};
  const moepack::ExpertTensors tensors{bytes_of(w13), bytes_of(w2), bytes13, bytes2};
  if (status.ok())
    status = moepack::quantized_moe_ffn(shape, routing, router, experts, tensors, x.data(),
                                        moepack::DType::f32, out.data(), workspace,
                                        moepack::serial());
  if (!status.ok()) std::fputs(status.message(), stderr);
  std::fwrite(out.data(), 1, out.size(), stdout);
  return status.ok() ? 0 : 1;
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
    accelerate = ["moepack_accelerate_upstream"]
    for name, more in {"libmoepack_torch.so": [], "libmoepack_executorch.so": accelerate}.items():
        library = ops.executorch_library_path().with_name(name)
        symbols = run("nm", "-DC", "--defined-only", library).splitlines()
        ours = [line for line in symbols if "moepack" in line]
        assert [line.split()[-1] for line in ours] == [*more, "moepack_force_isa"]


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
def test_an_installed_core_runs_a_layer_in_a_project_of_its_own(tmp_path: Path) -> None:
    prefix = install_moepack(tmp_path / "moepack")
    assert not list(prefix.rglob("*executorch.*"))
    consumer = tmp_path / "consumer"
    consumer.mkdir()
    (consumer / "consumer.cpp").write_text(CONSUMER, encoding="utf-8")
    (consumer / "CMakeLists.txt").write_text(CONSUMER_CMAKE, encoding="utf-8")
    configured_and_built(consumer, consumer / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    block = made_block()
    x = torch.randn(5, block.dim, generator=torch.Generator().manual_seed(0))
    files = {"x": x, "gate": block.gate_weight, "w13": block.packed_w13, "w2": block.packed_w2}
    for name, tensor in files.items():
        tensor.numpy().tofile(tmp_path / name)
    sizes = (5, block.dim, block.hidden_dim, block.num_experts, block.num_activated_experts)
    done = subprocess.run(
        [consumer / "build/consumer", *map(str, sizes)],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with torch.inference_mode():
        assert done.stdout == block(x).numpy().tobytes()


def made_block() -> QuantizedMoEFFN:
    model = made_model("mixtral")
    moepack.quantize_(model, "int4-g32")
    (block,) = (module for module in model.modules() if isinstance(module, QuantizedMoEFFN))
    return block
