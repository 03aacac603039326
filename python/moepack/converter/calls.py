"""Calls of packed experts in an ExecuTorch program: what they say of their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moepack.acceleration import OPERATOR as UPSTREAM
from moepack.attributes import UNGATED
from moepack.converter.stacks import StackForm, integer_codes
from moepack.packed_stacks import OPERATORS, argument_names


@dataclass(frozen=True)
class Call:
    """One call of a method `plan`; `where` names it. Arguments by the names of the schema."""

    plan: Any
    instruction: Any
    where: str

    @property
    def operator(self) -> str:
        return str(self.plan.operators[self.instruction.op_index].name)

    @property
    def index(self) -> dict[str, int]:
        """Of every argument's value in the method."""
        return dict(zip(argument_names(self.operator), self.instruction.args, strict=False))

    def value(self, name: str) -> Any:
        return self.plan.values[self.index[name]].val

    def tensor(self, name: str) -> Any:
        """None for an argument that is left out."""
        found = self.value(name)
        return None if type(found).__name__ == "Null" else found

    def integer(self, name: str) -> int:
        return int(self.value(name).int_val)

    def number(self, name: str) -> float:
        return float(self.value(name).double_val)

    def flag(self, name: str) -> bool:
        return bool(self.value(name).bool_val)

    def text(self, name: str) -> str:
        return str(self.value(name).string_val)

    @property
    def layout(self) -> str:
        return "torchao" if self.operator == UPSTREAM else self.text("layout")

    def forms(self) -> dict[str, StackForm]:
        """What the call says of its two stacks."""
        inner, dim = self.integer("hidden_dim"), int(self.value("x").sizes[-1])
        if self.operator == UPSTREAM:
            bits, group, gated = self.integer("weight_nbit"), self.integer("group_size"), True
        else:
            bits, group = integer_codes(self.text("scheme"))
            gated = self.text("activation") not in UNGATED
        kind = (self.layout, bits, group)
        w13 = (2 * inner, dim, "gate_up") if gated else (inner, dim, "plain")
        return {
            "packed_w13": StackForm(*kind, *w13),  # type: ignore[arg-type]
            "packed_w2": StackForm(*kind, dim, inner, "plain"),
        }

    def set(self, name: str, value: Any) -> None:
        """Another attribute; what other calls read stays as it is."""
        self.instruction.args[list(self.index).index(name)] = added(self.plan, value)

    def rewrite(self, arguments: Sequence[int]) -> None:
        """Those of another operator, of which it becomes a call; the results stay."""
        self.instruction.args = [*arguments, *self.instruction.args[len(self.index) :]]


def all_calls(plan: Any) -> Iterator[Any]:
    """Every instruction of a method that has arguments: calls of kernels and delegates."""
    for chain in plan.chains:
        for instruction in chain.instructions:
            if hasattr(instruction.instr_args, "args"):
                yield instruction.instr_args


def expert_calls(plan: Any) -> list[Call]:
    found = [
        call
        for call in all_calls(plan)
        if hasattr(call, "op_index") and plan.operators[call.op_index].name in OPERATORS
    ]
    return [
        Call(plan, instruction, f"method {plan.name!r} call {number}")
        for number, instruction in enumerate(found)
    ]


def added(plan: Any, value: Any) -> int:
    """Adds a value to a method; returns its index. A tensor of the schema is taken as it is."""
    from executorch.exir import schema

    kinds: dict[type, Any] = {
        type(None): lambda _: schema.Null(),
        bool: schema.Bool,
        int: schema.Int,
        float: schema.Double,
        str: schema.String,
        schema.Tensor: lambda tensor: tensor,
    }
    plan.values.append(schema.EValue(kinds[type(value)](value)))
    return len(plan.values) - 1
