"""Upstream's operator on moepack's kernels: results within the bound, eager and in programs, in
every order of loading, never without being asked."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moepack import ops, reference
from moepack.acceleration import accelerate_upstream
from moepack.reference.bound import activation_error_bound
from moepack.universal_blob import encode, read_universal
from pages import DOCS
from upstream_layer import ROUTE_SCALE, Layer, layer, method_of, to_pte, tokens

pytestmark = pytest.mark.usefixtures("upstreams_operator")


@pytest.mark.parametrize("score_func", ["sigmoid", "softmax"])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 64)])
def test_results_are_within_the_bound(bits: int, group: int, score_func: str) -> None:
    case = layer(bits, group, score_func)
    x = tokens(17, case.dim)
    theirs = case.call(x)
    with accelerate_upstream():
        ours = case.call(x)
    bound = case.bound(x)
    difference = (ours.double() - theirs.double()).abs()
    assert not torch.equal(ours, theirs)
    assert (difference <= bound).all()
    # Errors that point in all directions stay far below: 1 to 2 % of the result.
    assert difference.norm() < 0.05 * theirs.norm()


def test_the_bound_is_nearly_reached() -> None:
    """Every activation is rounded by almost half a step, and always against its weight."""
    D, F = 128, 32
    generator = torch.Generator().manual_seed(4)
    sign = torch.randint(0, 2, (D,), generator=generator) * 2 - 1
    x = sign * (torch.randint(1, 100, (D,), generator=generator) + 0.49)
    x[0] = 127.0  # one step is 1
    w13 = encode(sign.to(torch.int8).repeat(2 * F, 1), torch.full((2 * F, 4), 1e-3), 4, 32)
    w2 = encode(torch.ones(D, F, dtype=torch.int8), torch.ones(D, 1), 4, 32)
    gate = torch.zeros(1, D)
    case = Layer(gate, torch.empty(0), w13[None], w2[None], 1, F, 32, 4, "softmax")
    theirs = case.call(x[None])
    with accelerate_upstream():
        ours = case.call(x[None])
    bound = activation_error_bound(
        x[None],
        torch.zeros(1, 1, dtype=torch.int64),
        torch.ones(1, 1),
        lambda e: read_universal(w13, 2 * F, D, 32).dequantize(),
        lambda e: read_universal(w2, D, F, 32).dequantize(),
    )
    difference = (ours.double() - theirs.double()).abs()
    assert (difference <= bound).all()
    assert (difference > bound / 2).all()


def test_the_bound_is_of_activations_that_are_rounded() -> None:
    """With activations that are whole steps of their groups, little of it is left."""
    case = layer(score_func="softmax", K=5)
    x = torch.randint(-127, 128, (5, case.dim), generator=torch.Generator().manual_seed(2)).float()
    x[:, ::128] = 127.0
    theirs = case.call(x)
    with accelerate_upstream():
        ours = case.call(x)
    rough = case.bound(x)
    assert ((ours - theirs).abs() <= rough).all()
    assert (ours - theirs).norm() < rough.norm() / 20


def test_semantics_are_those_of_the_attributes() -> None:
    """Bit-equal to moepack's own operator, which the reference states."""
    case = layer()
    x = tokens(9, case.dim)
    x[4] = 0.0
    x[6, 5] = float("nan")
    with accelerate_upstream():
        ours = case.call(x)
    expected = reference.quantized_moe_ffn(
        x, None, case.gate_weight, None, case.expert_bias, case.packed_w13, case.packed_w2,
        None, None, case.K, case.F, "int4-g32", "torchao", "sigmoid", True, 2.0**-126, True,
        ROUTE_SCALE, 1, 1, "top2sum", "float32", "silu", 1.0, 0.0, 0.0, 0.0, False, False,
    )  # fmt: skip
    assert torch.equal(ours.nan_to_num(123.0), expected.nan_to_num(123.0))
    assert ours[:6].isfinite().all()


def test_weights_that_sum_to_nothing_are_divided_by_the_smallest_normal() -> None:
    case = layer()
    x = torch.zeros(2, case.dim)
    x[:, 0] = 1.0
    gate = torch.zeros_like(case.gate_weight)
    gate[:, 0] = -90.0  # sigmoid: 8e-40, subnormal
    case = replace(case, gate_weight=gate)
    theirs = case.call(x)
    with accelerate_upstream():
        ours = case.call(x)
    # exp is clamped to +-87 and so a little above: but for this a tenth of a percent would do.
    assert ours.norm() < 1.1 * layer().call(x).norm()
    assert theirs.norm() < 1.1 * layer().call(x).norm()


def test_handles() -> None:
    case, x = layer(), tokens(3, 256)
    theirs = case.call(x)
    first, second = accelerate_upstream(), accelerate_upstream()
    ours = case.call(x)
    first.undo()
    first.undo()
    assert not first.is_on
    assert torch.equal(case.call(x), ours)
    second.undo()
    assert torch.equal(case.call(x), theirs)
    with accelerate_upstream() as third:
        assert third.is_on
        assert torch.equal(case.call(x), ours)
        out = torch.empty(3, 256)
        assert torch.ops.llama.quantized_moe_ffn.out(*case.arguments(x), out=out) is out
        assert torch.equal(out, ours)
    assert torch.equal(case.call(x), theirs)


def test_a_program_that_exists_runs_on_it(tmp_path: Path) -> None:
    case = layer()
    path = to_pte(case, tmp_path / "upstream.pte")
    plain = method_of(path)
    with accelerate_upstream():
        accelerated = method_of(path)
        for count in (1, 5, 64):
            x = tokens(count, case.dim, seed=count)
            assert torch.equal(accelerated.execute((x,))[0], case.call(x))
    x = tokens(5, case.dim)
    # Handed back: also a method that was loaded meanwhile.
    assert torch.equal(accelerated.execute((x,))[0], plain.execute((x,))[0])
    assert torch.equal(plain.execute((x,))[0], case.call(x))


def test_nothing_stays_registered() -> None:
    names = ("llama::quantized_moe_ffn", "llama::quantized_moe_ffn.out")
    before = [torch._C._dispatch_dump(name) for name in names]
    with accelerate_upstream():
        assert [torch._C._dispatch_dump(name) for name in names] != before
    assert [torch._C._dispatch_dump(name) for name in names] == before


def test_a_route_scale_of_zero() -> None:
    case = layer()
    arguments = case.arguments(tokens(3, case.dim))
    arguments[12] = 0.0
    with accelerate_upstream():
        assert (torch.ops.llama.quantized_moe_ffn(*arguments) == 0).all()


def test_no_tokens() -> None:
    case = layer()
    with accelerate_upstream():
        assert case.call(torch.empty(0, case.dim)).shape == (0, case.dim)


_IN_A_PROCESS = """
import sys, torch
from pathlib import Path
def theirs():
    import executorch.extension.llm.custom_ops.custom_ops
def ours():
    import moepack
    moepack.accelerate_upstream()
def kernels():
    from moepack import ops
    ops.load_executorch()
for step in sys.argv[2].split(","):
    globals()[step]()
from executorch.runtime import Runtime
method = Runtime.get().load_program(Path(sys.argv[1])).load_method("forward")
torch.save(method.execute((torch.load(sys.argv[1] + ".x"),))[0], sys.argv[1] + ".y")
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor, Tensor]:
    """A program, and what it gives without and with the acceleration."""
    case = layer()
    path = to_pte(case, tmp_path_factory.mktemp("orders") / "upstream.pte")
    x = tokens(5, case.dim)
    torch.save(x, f"{path}.x")
    with accelerate_upstream():
        ours = case.call(x)
    return path, case.call(x), ours


@pytest.mark.parametrize("order", ["ours", "theirs,ours", "ours,theirs", "kernels,theirs,ours"])
def test_every_order_of_loading(expected: tuple[Path, Tensor, Tensor], order: str) -> None:
    path, _, ours = expected
    assert torch.equal(_run(path, order), ours)


@pytest.mark.parametrize("order", ["theirs", "kernels,theirs", "theirs,kernels"])
def test_nothing_happens_by_import(expected: tuple[Path, Tensor, Tensor], order: str) -> None:
    path, theirs, ours = expected
    found = _run(path, order)
    # Upstream's sums of fp32 products depend on the number of threads: 256 roundings at most.
    assert (found - theirs).norm() < 256 * 2.0**-24 * theirs.norm()
    assert (found - ours).norm() > 1e-3 * theirs.norm()


def _run(path: Path, order: str) -> Tensor:
    command = [sys.executable, "-c", _IN_A_PROCESS, str(path), order]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: Tensor = torch.load(f"{path}.y")
    return result


def test_the_page_runs_as_it_is_written() -> None:
    page = (DOCS / "how-to" / "accelerate-upstream.md").read_text(encoding="utf-8")
    found = re.search(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert found is not None
    code = f"{found[1]}\nassert not acceleration.is_on"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_our_own_operator_without_it_is_the_same_as_before() -> None:
    case, x = layer(), tokens(3, 256)

    def own() -> Tensor:
        return ops.quantized_moe_ffn(
            x, None, case.gate_weight, None, None, case.packed_w13, case.packed_w2, None, None,
            2, case.F, "int4-g32", "torchao",
        )  # fmt: skip

    before = own()
    with accelerate_upstream():
        assert torch.equal(own(), before)
