"""Which constants of programs are packed experts: of both operators, whole and damaged."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import made_programs
from expert_layer import DIM, EXPERTS, INNER, Layer
from moepack.errors import PackedFormatError
from moepack.inspection import Inspection, inspect
from moepack.packed_stacks import described, packed_constants, stack_of
from moepack.program_file import open_program
from moepack.weights_file import weights_of


class Upstream(nn.Module):
    """ExecuTorch's own operator under softmax, which takes an empty tensor for no bias."""

    def __init__(self) -> None:
        super().__init__()
        experts = Layer(layout="torchao")
        self.register_buffer("gate_weight", experts.get_buffer("gate_weight"))
        self.register_buffer("expert_bias", torch.empty(0))
        self.register_buffer("packed_w13", experts.get_buffer("packed_w13"))
        self.register_buffer("packed_w2", experts.packed_w2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.llama.quantized_moe_ffn(
            x, *dict(self.named_buffers()).values(),
            2, EXPERTS, INNER, DIM, 32, 4, "softmax", 1.0,
        )  # fmt: skip
        return result


@functools.cache
def program(apart: bool) -> Path:
    """upstream.pte, written as upstream's own export writes it, with upstream.ptd or without."""
    import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401
    from executorch.exir import ExecutorchBackendConfig, to_edge

    path = made_programs.scratch() / f"upstream-{apart}.pte"
    config = ExecutorchBackendConfig(
        external_constants=(lambda node: path.stem) if apart else False
    )
    exported = torch.export.export(Upstream(), (torch.zeros(2, DIM),))
    made = to_edge(exported).to_executorch(config)
    path.write_bytes(made.buffer)
    if apart:
        made.write_tensor_data_to_file(path.parent)
    return path


def seen(found: Inspection) -> list[tuple[str, str, str, int]]:
    return [(s.where, s.layout, s.scheme, s.experts) for s in found.packed]


STACKS = [
    ("forward call 0 w13", "torchao", "int4", EXPERTS),
    ("forward call 0 w2", "torchao", "int4", EXPERTS),
]


@pytest.mark.parametrize("apart", [False, True])
def test_an_empty_tensor_before_the_stacks_is_none_of_them(apart: bool) -> None:
    path = program(apart)
    _, bias, w13, _ = open_program(path).methods[0].calls[0].constants
    assert bias.shape == (0,)
    assert apart or bias.offset == w13.offset  # the bytes that follow are another's
    found = inspect(path, verify=True)
    assert found.problems == []
    assert seen(found) == STACKS
    if apart:
        assert inspect(path.with_suffix(".ptd")).problems == []


def test_optional_tensors_do_not_shift_them(tmp_path: Path) -> None:
    biases = {"bias13": torch.zeros(EXPERTS, 2 * INNER), "bias2": torch.zeros(EXPERTS, DIM)}
    found = inspect(Layer(weights=biases).write(tmp_path / "a.pte"), verify=True)
    assert found.problems == []
    assert [(s.where, s.rows, s.cols) for s in found.packed] == [
        ("forward call 0 w13", 2 * INNER, DIM),
        ("forward call 0 w2", DIM, INNER),
    ]


def sizes(experts: int, of_each: int) -> bytes:
    """A shape as the program keeps it."""
    return b"".join(n.to_bytes(4, "little") for n in (2, experts, of_each))


def damaged_shape(experts: int) -> Callable[[bytearray, tuple[int, ...], int], None]:
    def damage(data: bytearray, shape: tuple[int, ...], offset: int) -> None:
        at = data.index(sizes(*shape))
        data[at : at + 12] = sizes(experts, shape[1])

    return damage


def damaged_magic(data: bytearray, shape: tuple[int, ...], offset: int) -> None:
    data[offset] ^= 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damaged_shape(0), r"packed experts \[0, \d+\] in \d+ bytes"),
        (damaged_shape(1 << 20), r"packed experts \[1048576, \d+\] in \d+ bytes"),
        (damaged_magic, "does not begin with MOEP"),
    ],
    ids=["none", "too many", "magic"],
)
def test_damage_is_a_problem_and_the_rest_is_shown(
    damage: Callable[[bytearray, tuple[int, ...], int], None], message: str, tmp_path: Path
) -> None:
    file = open_program(program(apart=False))
    (_, w13), _ = packed_constants(file)
    data = bytearray(file.data)
    damage(data, w13.shape, w13.offset)
    path = tmp_path / "damaged.pte"
    path.write_bytes(data)
    found = inspect(path, verify=True)
    (problem,) = found.problems
    assert problem.startswith("forward call 0 w13: ")
    assert re.search(message, problem)
    assert seen(found) == STACKS[1:]


@pytest.mark.parametrize("apart", [False, True])
def test_another_dtype_is_refused(apart: bool) -> None:
    file = open_program(program(apart))
    weights = weights_of(file)
    for _, constant in packed_constants(file):
        stack = stack_of(file, weights, constant)
        assert stack is not None
        assert stack.shape == constant.shape
        with pytest.raises(PackedFormatError, match="scalar type 6; expected uint8"):
            stack_of(file, weights, replace(constant, scalar_type=6))


@pytest.mark.parametrize(
    "stack", [torch.zeros(4), torch.zeros(2, 80), torch.zeros(0, 80, dtype=torch.uint8)]
)
def test_what_is_no_stack_of_blobs(stack: Tensor) -> None:
    found, (problem,) = described("here", stack, verify=True)
    assert found is None
    assert problem.startswith("here: ")
    assert "expected uint8 [E, bytes]" in problem
