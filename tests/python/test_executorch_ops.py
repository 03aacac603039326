"""The ExecuTorch kernels: a .pte gives the bits of the eager operators, and bad input an Error."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moepack import ops, packing
from moepack.quantizer import quantize

D, F, E, K = 96, 40, 6, 2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def packed(rows: int, cols: int, order: Any) -> Tensor:
    random = torch.Generator().manual_seed(rows)
    weights = (torch.randn(rows, cols, generator=random) * cols**-0.5 for _ in range(E))
    return packing.pack_experts((quantize(w, "int4-g32") for w in weights), order)


class Ffn(torch.nn.Module):
    packed_w13: Tensor
    packed_w2: Tensor
    gate_weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed_w13", packed(2 * F, D, "gate_up"))
        self.register_buffer("packed_w2", packed(D, F, "plain"))
        random = torch.Generator().manual_seed(5)
        self.register_buffer("gate_weight", torch.randn(E, D, generator=random))

    def forward(self, x: Tensor) -> Tensor:
        blobs = (self.packed_w13, self.packed_w2, None, None)
        return ops.quantized_moe_ffn(
            x, None, self.gate_weight, None, None, *blobs, K, F, "int4-g32"
        )


class Experts(Ffn):
    """Experts whose ids, and blobs, are inputs: so that a test can bring bad ones."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor) -> Tensor:  # type: ignore[override]
        blobs = (w13, self.packed_w2, None, None)
        return ops.quantized_experts(x, ids, weights, *blobs, F, "int4-g32")


def to_pte(module: torch.nn.Module, example: tuple[Tensor, ...], path: Path, dynamic: Any) -> Path:
    from executorch.exir import to_edge

    program = torch.export.export(module.eval(), example, dynamic_shapes=dynamic)
    path.write_bytes(to_edge(program).to_executorch().buffer)
    return path


def load(path: Path) -> Any:
    ops.load_executorch()
    from executorch.runtime import Runtime

    return Runtime.get().load_program(path).load_method("forward")


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_program_gives_the_bits_of_eager(tmp_path: Path, dtype: torch.dtype) -> None:
    module = Ffn()
    tokens = torch.export.Dim("tokens", min=0, max=64)
    example = torch.randn(4, D).to(dtype)
    method = load(to_pte(module, (example,), tmp_path / "ffn.pte", ({0: tokens},)))
    for count in (1, 17, 64, 2):
        x = torch.randn(count, D, generator=torch.Generator().manual_seed(count)).to(dtype)
        x[0, 3] = float("nan") if count == 17 else x[0, 3]
        (found,) = method.execute([x])
        assert found.shape == (count, D)
        assert same(found, module(x))


@pytest.fixture(scope="module")
def experts_method(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experts, Any]:
    module = Experts()
    tokens = torch.export.Dim("tokens", max=64)
    example = (
        torch.randn(4, D),
        torch.zeros(4, K, dtype=torch.int64),
        torch.ones(4, K),
        module.packed_w13,
    )
    shapes = ({0: tokens}, {0: tokens}, {0: tokens}, None)
    path = tmp_path_factory.mktemp("experts") / "experts.pte"
    return module, load(to_pte(module, example, path, shapes))


def arguments(module: Experts, tokens: int = 3) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, E, (tokens, K), generator=random)
    return [
        torch.randn(tokens, D, generator=random),
        ids,
        torch.rand(tokens, K, generator=random),
        module.packed_w13,
    ]


def test_the_experts_alone_give_the_bits_of_eager(experts_method: tuple[Experts, Any]) -> None:
    module, method = experts_method
    given = arguments(module)
    assert torch.equal(method.execute(given)[0], module(*given))


@pytest.mark.parametrize("bad", [-1, E, 2**40])
def test_bad_ids_are_an_error_and_the_process_lives(
    experts_method: tuple[Experts, Any], bad: int
) -> None:
    module, method = experts_method
    given = arguments(module)
    given[1][1, 1] = bad
    with pytest.raises(RuntimeError, match="0x12"):
        method.execute(given)
    good = arguments(module)
    assert torch.equal(method.execute(good)[0], module(*good))


@pytest.mark.parametrize("offset", [0, 4, 6, 8, 12, 16, 28])
def test_foreign_blobs_are_an_error(experts_method: tuple[Experts, Any], offset: int) -> None:
    module, method = experts_method
    given = arguments(module)
    given[3] = given[3].clone()
    given[3][:, offset] ^= 0x3C
    with pytest.raises(RuntimeError, match="0x12"):
        method.execute(given)


def test_every_instruction_set_gives_the_same_bits(experts_method: tuple[Experts, Any]) -> None:
    module, method = experts_method
    given = arguments(module, 9)
    expected = module(*given)
    try:
        for isa in ("scalar", None):
            ops.force_isa(isa)
            assert torch.equal(method.execute(given)[0], expected)
    finally:
        ops.force_isa(None)


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_second_copy_of_the_library_is_harmless(tmp_path: Path) -> None:
    copy = shutil.copy(ops.executorch_library_path(), tmp_path / "copy.so")
    code = f"""
import ctypes, os
from moepack import ops
ops.load_executorch()
ops.load_executorch()
import executorch
lib = os.path.join(list(executorch.__path__)[0], "lib")
for name in ("libexecutorch.so", "libexecutorch_threadpool.so"):
    ctypes.CDLL(os.path.join(lib, name), ctypes.RTLD_GLOBAL)
ctypes.CDLL({str(copy)!r})
print("alive")
"""
    assert run_python(code).strip().endswith("alive")


def test_our_operators_live_beside_executorchs_custom_ops() -> None:
    for first, second in (("ours", "theirs"), ("theirs", "ours")):
        steps = {
            "ours": "from moepack import ops; ops.load_executorch()",
            "theirs": "import executorch.extension.llm.custom_ops.custom_ops",
        }
        code = f"{steps[first]}\n{steps[second]}\nfrom moepack import ops\nprint(ops.is_active())"
        assert run_python(code).strip().endswith("True")


def test_the_library_needs_nothing_of_torch() -> None:
    library = ops.executorch_library_path()
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    assert "libtorch" not in needed.stdout
    assert "$ORIGIN/../../executorch/lib" in needed.stdout
    assert ctypes.CDLL(str(library)) is not None
