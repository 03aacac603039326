"""Upstream's operator on moepack's kernels: results within the bound, eager and in programs, in
every order of loading, never without being asked, and errors where upstream's own kernel aborts."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moepack import ops, reference
from moepack.acceleration import accelerate_upstream
from moepack.errors import UnsupportedError
from moepack.reference import exact
from moepack.reference.bound import activation_error_bound, logit_rounding
from moepack.universal_blob import encode, read_universal
from pages import DOCS

ROUTE_SCALE = 2.5


@pytest.fixture(scope="module", autouse=True)
def _upstreams_operator() -> None:
    import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401


@dataclass(frozen=True)
class Layer:
    """Experts as upstream takes them, with fp32 scales that fp16 does not hold."""

    gate_weight: Tensor
    expert_bias: Tensor
    packed_w13: Tensor
    packed_w2: Tensor
    K: int
    F: int
    group: int
    bits: int
    score_func: str

    @property
    def experts(self) -> int:
        return self.gate_weight.shape[0]

    @property
    def dim(self) -> int:
        return self.gate_weight.shape[1]

    def arguments(self, x: Tensor) -> list[Any]:
        tensors = [x, self.gate_weight, self.expert_bias, self.packed_w13, self.packed_w2]
        numbers = [self.K, self.experts, self.F, self.dim, self.group, self.bits]
        return [*tensors, *numbers, self.score_func, ROUTE_SCALE]

    def call(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.llama.quantized_moe_ffn(*self.arguments(x))
        return result

    def bound(self, x: Tensor) -> Tensor:
        """Of the difference, for the experts that both sides select."""
        logits = exact.router_logits(x, self.gate_weight, None, "float32")
        scores = exact.score(logits, self.score_func)
        choice = scores + self.expert_bias if len(self.expert_bias) else scores
        ids = exact.select(choice, self.K, 1, 1, "top2sum")
        rounding = logit_rounding(x, self.gate_weight)
        best = choice.double().sort(descending=True).values
        is_clear = best[:, self.K - 1] - best[:, self.K :].amax(1) > 2 * rounding
        assert is_clear.all(), "a tie: the sides may select different experts"
        is_sigmoid = self.score_func == "sigmoid"
        weights = exact.weigh(
            scores.gather(1, ids), self.score_func, is_sigmoid, 2.0**-126, True,
            ROUTE_SCALE if is_sigmoid else 1.0,
        )  # fmt: skip

        def read(stack: Tensor, rows: int, cols: int) -> Any:
            return lambda e: read_universal(stack[e], rows, cols, self.group).dequantize()

        w13 = read(self.packed_w13, 2 * self.F, self.dim)
        w2 = read(self.packed_w2, self.dim, self.F)
        return activation_error_bound(x, ids, weights, w13, w2, rounding)


def layer(
    bits: int = 4,
    group: int = 32,
    score_func: str = "sigmoid",
    E: int = 6,
    D: int = 256,
    F: int = 128,
    K: int = 2,
) -> Layer:
    generator = torch.Generator().manual_seed(bits * group)

    def stack(rows: int, cols: int) -> Tensor:
        high = 1 << (bits - 1)
        scales = torch.rand(E, rows, cols // group, generator=generator) * cols**-0.5 / high
        codes = torch.randint(-high, high, (E, rows, cols), generator=generator, dtype=torch.int8)
        return torch.stack([encode(c, s, bits, group) for c, s in zip(codes, scales, strict=True)])

    gate = torch.randn(E, D, generator=generator) * D**-0.5
    has_bias = score_func == "sigmoid"
    bias = torch.randn(E, generator=generator) / 4 if has_bias else torch.empty(0)
    return Layer(gate, bias, stack(2 * F, D), stack(D, F), K, F, group, bits, score_func)


def tokens(count: int, width: int, seed: int = 1) -> Tensor:
    """Of sizes that differ, an outlier in one."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    if count > 4:
        x[2, 7] *= 100
        x[3] *= 1e-3
    return x


class Program(nn.Module):
    def __init__(self, case: Layer) -> None:
        super().__init__()
        self.case = case
        for name in ("gate_weight", "expert_bias", "packed_w13", "packed_w2"):
            self.register_buffer(name, getattr(case, name))

    def forward(self, x: Tensor) -> Tensor:
        here = {n: getattr(self, n) for n in dict(self.named_buffers())}
        return replace(self.case, **here).call(x)


def export(case: Layer) -> torch.export.ExportedProgram:
    shapes = {"x": {0: torch.export.Dim("count", max=64)}}
    return torch.export.export(Program(case), (tokens(4, case.dim),), dynamic_shapes=shapes)


def to_pte(case: Layer, path: Path) -> Path:
    from executorch.exir import to_edge

    path.write_bytes(to_edge(export(case)).to_executorch().buffer)
    return path


def method_of(path: Path) -> Any:
    from executorch.runtime import Runtime

    return Runtime.get().load_program(path).load_method("forward")


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


def test_damaged_weights_of_a_program_are_an_error(tmp_path: Path) -> None:
    case = layer()
    case.packed_w2[:, 0] ^= 1
    with accelerate_upstream():
        method = method_of(to_pte(case, tmp_path / "damaged.pte"))
        with pytest.raises(RuntimeError, match="0x12"):
            method.execute((tokens(2, case.dim),))
        with pytest.raises(RuntimeError, match="not a universal blob"):
            case.call(tokens(2, case.dim))


BAD: dict[str, tuple[dict[int, Any], str]] = {
    "bf16": ({0: torch.ones(3, 256, dtype=torch.bfloat16)}, "x is torch.bfloat16"),
    "3-D": ({0: torch.ones(3, 1, 256)}, "x is torch.float32"),
    "K > E": ({5: 7}, "7 activated experts of 6"),
    "score_func": ({11: "tanh"}, "score_func 'tanh'"),
    "group": ({9: 48}, "int4-g48"),
    "bits": ({10: 3}, "int3-g32"),
    "short": ({3: torch.zeros(6, 64, dtype=torch.uint8)}, "packed_w13 has 64 bytes"),
    "bias": ({11: "softmax"}, "expert_bias with score_func 'softmax'"),
    "E": ({6: 5}, "gate_weight is"),
    "D": ({8: 128}, "x is"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_aborts_upstream_raises(name: str) -> None:
    case = layer()
    arguments = case.arguments(tokens(3, case.dim))
    changes, message = BAD[name]
    for position, value in changes.items():
        arguments[position] = value
    with accelerate_upstream(), pytest.raises((RuntimeError, UnsupportedError), match=message):
        torch.ops.llama.quantized_moe_ffn(*arguments)


TENSORS = ("x", "gate_weight", "expert_bias", "packed_w13", "packed_w2", "out")


@pytest.mark.parametrize("position", range(6))
def test_no_tensor_and_one_without_values_raise(position: int) -> None:
    """Upstream's Meta kernel would hand out memory that nobody wrote."""
    case = layer()
    *arguments, out = [*case.arguments(tokens(3, case.dim)), torch.empty(3, case.dim)]
    tensors = [*arguments[:5], out]
    op, name = torch.ops.llama.quantized_moe_ffn, TENSORS[position]
    for wrong, message in (
        (
            tensors[position].to("meta"),
            r"gate_weight: is on cpu, x is on meta"
            if position == 0
            else f"{name}: is on meta, x is on cpu",
        ),
        (None, f"{name} is None"),
    ):
        *changed, into = [wrong if i == position else tensor for i, tensor in enumerate(tensors)]
        with accelerate_upstream():
            with pytest.raises((RuntimeError, UnsupportedError), match=message):
                op.out(*changed, *arguments[5:], out=into)
            if name != "out":
                with pytest.raises((RuntimeError, UnsupportedError), match=message):
                    op(*changed, *arguments[5:])


def test_other_backends_do_not_reach_upstreams_kernel() -> None:
    case = layer()
    with accelerate_upstream(), pytest.raises(NotImplementedError, match=r"moepack::.*SparseCPU"):
        case.call(tokens(3, case.dim).to_sparse())


@pytest.mark.parametrize("group", [16, 32])
def test_tracing_is_upstreams(group: int) -> None:
    case = layer(group=group)
    x = tokens(4, case.dim)
    expected = export(case)
    meta = [a.to("meta") if isinstance(a, Tensor) else a for a in case.arguments(x)]
    with accelerate_upstream():
        assert str(export(case).graph) == str(expected.graph)
        assert torch.ops.llama.quantized_moe_ffn(*meta).is_meta
        out = torch.empty(4, case.dim, device="meta")
        assert torch.ops.llama.quantized_moe_ffn.out(*meta, out=out) is out
        with pytest.raises(UnsupportedError, match="out is"):
            torch.ops.llama.quantized_moe_ffn.out(*meta, out=out[:3])


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
