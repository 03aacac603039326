"""A .pte whose packed experts are in the other layout, by ExecuTorch's own reader and writer.

Constants are replaced and the calls that use them are rewritten; everything else, delegates and
memory plan included, stays as it was. ExecuTorch's own operator `llama::quantized_moe_ffn` becomes
moepack's, which computes the same with its attributes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from moepack import ops
from moepack.acceleration import ARGUMENTS, require_bias_fits, routing
from moepack.acceleration import OPERATOR as UPSTREAM
from moepack.attributes import UNGATED, ExpertAttributes
from moepack.converter.stacks import (
    ScaleChanges,
    StackForm,
    convert_stack,
    integer_codes,
)
from moepack.errors import MoePackError, UnsupportedError

_OPS = ("quantized_moe_ffn", "quantized_experts")
_STACKS = ("packed_w13", "packed_w2")
_KEPT = ("x", "gate_weight", "expert_bias", *_STACKS)  # upstream's tensors, under moepack's names
_CONSTANT_ALIGNMENT = 64  # as moepack's exporter writes constants


def convert_program(data: bytes, layout: str, changes: ScaleChanges, where: str) -> bytes:
    """The bytes of a .pte -> those of one whose packed experts are in `layout`.

    All of it is in memory, about three times the size of the file. Raises MoePackError if there is
    nothing to convert, or what there is cannot be: named by method and call.
    """
    from executorch.exir._serialize import _deserialize_pte_binary, _serialize_pte_binary

    try:
        file = _deserialize_pte_binary(data)
        converter = _Converter(file.program, layout, changes)
        for plan in file.program.execution_plan:
            converter.convert(plan)
    except MoePackError:
        raise
    except Exception as error:  # values of other kinds, and what the flatbuffer reader raises
        raise MoePackError(f"{where}: damaged ExecuTorch program: {error!r}") from error
    if not converter.calls:
        raise UnsupportedError(
            f"{where}: no call with packed experts to convert: the program has none, or they are "
            f"in the layout {layout!r} already"
        )
    written = _serialize_pte_binary(
        file, extract_delegate_segments=True, constant_tensor_alignment=_CONSTANT_ALIGNMENT
    )
    return bytes(written)


@dataclass(frozen=True)
class _Arguments:
    """The arguments of one call by the names of its operator's schema, as indices of values."""

    values: list[Any]
    index: dict[str, int]

    def value(self, name: str) -> Any:
        return self.values[self.index[name]].val

    def integer(self, name: str) -> int:
        return int(self.value(name).int_val)

    def text(self, name: str) -> str:
        return str(self.value(name).string_val)


class _Converter:
    def __init__(self, program: Any, layout: str, changes: ScaleChanges) -> None:
        self.program, self.layout, self.changes = program, layout, changes
        self.calls = 0
        self._done: dict[int, tuple[StackForm, int]] = {}  # by constant: its form, bytes per expert

    def convert(self, plan: Any) -> None:
        """Rewrites the calls of one method."""
        _refuse_other_uses(plan)
        for number, call in enumerate(_expert_calls(plan)):
            operator = plan.operators[call.op_index].name
            arguments = _Arguments(
                plan.values, dict(zip(_argument_names(operator), call.args, strict=False))
            )
            if operator != UPSTREAM and arguments.text("layout") == self.layout:
                continue
            if operator == UPSTREAM and self.layout == "torchao":
                continue
            where = f"method {plan.name!r} call {number}"
            group = self._convert_stacks(arguments, _forms(operator, arguments), where)
            if operator == UPSTREAM:
                call.args = _rewritten(plan, arguments, group) + call.args[len(arguments.index) :]
            else:
                position = list(arguments.index).index("layout")
                call.args[position] = _new(plan, self.layout)
            self.calls += 1
        for operator in plan.operators:
            if self.layout == "moepack" and operator.name == UPSTREAM:
                operator.name = "moepack::quantized_moe_ffn"

    def _convert_stacks(
        self, arguments: _Arguments, forms: dict[str, StackForm], where: str
    ) -> int:
        """Returns the group of the converted codes."""
        for name, form in forms.items():
            tensor = arguments.value(name)
            stored = tensor.data_buffer_idx
            if not _is_constant_of_the_file(tensor):
                raise UnsupportedError(
                    f"{where} {name}: is no constant of this file (an input, or in a .ptd); "
                    "export the program with its weights inside, or convert the checkpoint"
                )
            before = self._done.get(stored)
            if before is None:
                new = self._converted(tensor, form, f"{where} {name}")
                self.program.constant_buffer[stored].storage = new.numpy().tobytes()
                before = self._done[stored] = (form, new.shape[1])
            if before[0] != form:
                raise UnsupportedError(f"{where} {name}: another call reads it in another form")
            tensor.sizes = [tensor.sizes[0], before[1]]
        return forms["packed_w13"].converted(self.layout).group

    def _converted(self, tensor: Any, form: StackForm, where: str) -> Tensor:
        if len(tensor.sizes) != 2:
            raise UnsupportedError(f"{where}: is {tensor.sizes}; expected [E, bytes]")
        experts, size = tensor.sizes
        stored = self.program.constant_buffer[tensor.data_buffer_idx].storage
        if len(stored) < experts * size:
            raise MoePackError(f"{where}: the file holds {len(stored)} bytes of {experts * size}")
        packed = torch.frombuffer(bytearray(stored[: experts * size]), dtype=torch.uint8)
        return convert_stack(packed.view(experts, size), form, self.layout, self.changes, where)


def _is_constant_of_the_file(tensor: Any) -> bool:
    from executorch.exir.schema import TensorDataLocation

    extra = tensor.extra_tensor_info
    is_external = extra is not None and extra.location == TensorDataLocation.EXTERNAL
    return bool(tensor.data_buffer_idx) and tensor.allocation_info is None and not is_external


def _is_expert_operator(name: str) -> bool:
    return name == UPSTREAM or name in {f"moepack::{op}" for op in _OPS}


def _calls(plan: Any) -> Iterator[Any]:
    """Every instruction of a method that has arguments: calls of kernels and delegates."""
    for chain in plan.chains:
        for instruction in chain.instructions:
            if hasattr(instruction.instr_args, "args"):
                yield instruction.instr_args


def _expert_calls(plan: Any) -> Iterator[Any]:
    for call in _calls(plan):
        if hasattr(call, "op_index") and _is_expert_operator(plan.operators[call.op_index].name):
            yield call


def _refuse_other_uses(plan: Any) -> None:
    """Packed tensors change their size: nothing else may read them."""
    uses: Counter[int] = Counter()
    for call in _calls(plan):
        uses.update(call.args)
    packed: Counter[int] = Counter()
    for call in _expert_calls(plan):
        names = _argument_names(plan.operators[call.op_index].name)
        packed.update(call.args[names.index(name)] for name in _STACKS)
    for value, count in packed.items():
        if uses[value] != count or value in (*plan.inputs, *plan.outputs):
            raise UnsupportedError(
                f"method {plan.name!r}: a packed tensor is also an input, an output or an argument "
                "of another operator; convert the checkpoint and export again"
            )


def _argument_names(operator: str) -> list[str]:
    if operator == UPSTREAM:
        return list(ARGUMENTS)
    return list(signature(getattr(ops, operator.removeprefix("moepack::"))).parameters)


def _forms(operator: str, arguments: _Arguments) -> dict[str, StackForm]:
    """What the call says of its two stacks."""
    inner, dim = arguments.integer("hidden_dim"), int(arguments.value("x").sizes[-1])
    if operator == UPSTREAM:
        layout, gated = "torchao", True
        bits, group = arguments.integer("weight_nbit"), arguments.integer("group_size")
    else:
        layout, (bits, group) = arguments.text("layout"), integer_codes(arguments.text("scheme"))
        gated = arguments.text("activation") not in UNGATED
    w13 = (2 * inner, dim, "gate_up") if gated else (inner, dim, "plain")
    return {
        "packed_w13": StackForm(layout, bits, group, *w13),  # type: ignore[arg-type]
        "packed_w2": StackForm(layout, bits, group, dim, inner, "plain"),
    }


def _rewritten(plan: Any, arguments: _Arguments, group: int) -> list[int]:
    """Upstream's arguments as those of moepack::quantized_moe_ffn, values that it adds included."""
    has_bias = arguments.value("expert_bias").sizes != [0]
    score_func = arguments.text("score_func")
    require_bias_fits(has_bias, score_func)
    scale = float(arguments.value("route_scale").double_val)
    how = routing(arguments.integer("num_activated_experts"), score_func, scale)
    experts = ExpertAttributes(
        arguments.integer("hidden_dim"), f"int{arguments.integer('weight_nbit')}-g{group}"
    )
    kept = {name: arguments.index[name] for name in _KEPT if name != "expert_bias" or has_bias}
    attributes = asdict(how) | asdict(experts)
    return [
        kept[name] if name in kept else _new(plan, attributes.get(name))
        for name in _argument_names("moepack::quantized_moe_ffn")
    ]


def _new(plan: Any, value: Any) -> int:
    """Adds a value to a method; returns its index."""
    from executorch.exir import schema

    kinds: dict[type, Any] = {
        type(None): lambda _: schema.Null(),
        bool: schema.Bool,
        int: schema.Int,
        float: schema.Double,
        str: schema.String,
    }
    plan.values.append(schema.EValue(kinds[type(value)](value)))
    return len(plan.values) - 1
