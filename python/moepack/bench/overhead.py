"""What a call of the operator costs besides its experts, and what its router costs, at one token.

A call on experts so small that computing them takes under a microsecond is nearly all fixed cost:
what torch does to get there. It is measured right after a call on the layer itself, with the caches
as they are between the layers of a model, and alone. In a program of ExecuTorch one operator's
share is the difference between a program of many such operators and of one.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moepack import ops
from moepack.bench.layers import Layers, timed, timed_in_a_row
from moepack.errors import VerificationError
from moepack.exporter.lowering import write_program
from moepack.runtime import executorch_runtime, set_threads, thread_count

_TINY = (32, 32, 1, 1)
_CHAINED = 17  # operators in the longer program
_REPEATS = 10  # calls in a row, timed together: little time for another process to come between


@dataclass(frozen=True)
class Overhead:
    """Medians in microseconds. The first three are of tiny experts, the others of the layer.

    `call_us`: quantized_moe_ffn in eager torch right after a call on the layer; `call_alone_us`:
    in a row; `executorch_us`: quantized_experts in a row, in a program. `experts_us` and `ffn_us`:
    quantized_experts and quantized_moe_ffn, one token, weights from memory.
    """

    call_us: float
    call_alone_us: float
    executorch_us: float
    experts_us: float
    ffn_us: float

    @property
    def call_share(self) -> float:
        """Of a call on the layer in eager torch, at most: the tiny experts are in it."""
        return self.call_us / self.ffn_us

    @property
    def executorch_share(self) -> float:
        """Of a call on the layer, at most."""
        return self.executorch_us / self.experts_us

    @property
    def router_share(self) -> float:
        """Of quantized_moe_ffn; noise can make it negative where routing is next to nothing."""
        return 1 - self.experts_us / self.ffn_us

    def to_json(self) -> dict[str, Any]:
        shares = {
            "call_share": self.call_share,
            "executorch_share": self.executorch_share,
            "router_share": self.router_share,
        }
        return {**asdict(self), **shares}


def measured_overhead(layers: Layers, rounds: int) -> Overhead:
    """Measures in `rounds` interleaved rounds, with the threads and instruction set in use.

    Raises VerificationError where a program gives other bits than eager torch.
    """
    tiny = Layers(_TINY, layers.scheme, 0)
    x, ids, weights, copy = tiny.inputs(1, 0)
    tiny_call = partial(tiny.call_with_router, x, copy)
    times: dict[str, list[float]] = {name: [] for name in ("experts", "ffn", "after", "alone")}
    with tempfile.TemporaryDirectory(prefix="moepack-bench-") as scratch, _torchs_threads():
        programs = {n: _program(tiny, ids, weights, n, Path(scratch)) for n in (1, _CHAINED)}
        chains: dict[int, list[float]] = {n: [] for n in programs}
        for step in range(1, rounds + 1):
            inputs = layers.calls(1, step)
            times["experts"].append(timed_in_a_row(layers.call, inputs))
            routed = [(x, copy) for x, _, _, copy in inputs]
            times["ffn"].append(timed_in_a_row(layers.call_with_router, routed))
            times["after"].append(timed(tiny_call))
            times["alone"].append(timed(partial(_repeat, tiny_call)) / _REPEATS)
            for n, program in programs.items():
                chains[n].append(timed(partial(_repeat, program)) / _REPEATS)
    median = {name: 1e6 * statistics.median(found) for name, found in times.items()}
    one, many = (1e6 * statistics.median(found) for found in chains.values())
    return Overhead(
        call_us=median["after"],
        call_alone_us=median["alone"],
        executorch_us=(many - one) / (_CHAINED - 1),
        experts_us=median["experts"],
        ffn_us=median["ffn"],
    )


@contextmanager
def _torchs_threads() -> Iterator[None]:
    """As many for ExecuTorch as torch has; restored after."""
    before, wanted = thread_count(), torch.get_num_threads()
    if before == wanted:
        yield
        return
    set_threads(wanted)
    try:
        yield
    finally:
        set_threads(before)


class _Chain(nn.Module):
    """`count` operators, each on what the one before gave."""

    def __init__(self, layers: Layers, ids: Tensor, weights: Tensor, count: int) -> None:
        super().__init__()
        self.layers, self.count = layers, count
        self.ids, self.weights = nn.Buffer(ids), nn.Buffer(weights)
        self.w13, self.w2 = map(nn.Buffer, layers.copies[0])

    def forward(self, x: Tensor) -> Tensor:
        _, f, _, _ = self.layers.shape
        for _ in range(self.count):
            x = ops.quantized_experts(
                x, self.ids, self.weights, self.w13, self.w2, None, None, f, self.layers.scheme.name
            )
        return x


def _program(
    layers: Layers, ids: Tensor, weights: Tensor, count: int, scratch: Path
) -> Callable[[], Any]:
    """A call of an ExecuTorch program, whose result is that of eager torch."""
    chain, x = _Chain(layers, ids, weights, count), torch.ones(1, layers.shape[0])
    path = scratch / f"{count}.pte"
    write_program(chain, (x,), None, {}, path)
    method = executorch_runtime().load_program(path).load_method("forward")
    if not torch.equal(method.execute((x,))[0], chain(x)):
        raise VerificationError(f"{count} operators in a program differ from eager torch")
    return partial(method.execute, (x,))


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(_REPEATS):
        call()
