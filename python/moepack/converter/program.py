"""An ExecuTorch program whose packed experts are in the other layout, or whose calls of them are
those of ExecuTorch's own operator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from moepack.acceleration import OPERATOR as UPSTREAM
from moepack.converter.calls import Call, added, all_calls, expert_calls
from moepack.converter.stacks import ScaleChanges, StackForm
from moepack.converter.upstream import require_expressible, to_moepack, to_upstream
from moepack.errors import MoePackError, UnsupportedError
from moepack.packed_stacks import FFN, STACKS
from moepack.weights_file import WeightsFile

if TYPE_CHECKING:
    from moepack.converter.stored import StoredProgram


@dataclass(frozen=True)
class Target:
    """What the packed experts of a program become: `layout`, and whose operator reads them.

    With `upstream` it is ExecuTorch's own, which reads torchao's layout alone.
    """

    layout: str
    upstream: bool = False

    def __post_init__(self) -> None:
        if self.upstream and self.layout != "torchao":
            raise UnsupportedError(
                f"the layout {self.layout!r} with upstream=True; {UPSTREAM} reads 'torchao'"
            )

    def is_met(self, call: Call) -> bool:
        if call.operator == UPSTREAM:
            return self.layout == "torchao"
        return call.layout == self.layout and not self.upstream

    def __str__(self) -> str:
        return f"calls of {UPSTREAM}" if self.upstream else f"in the layout {self.layout!r}"


def convert_program(
    data: memoryview, weights: WeightsFile | None, target: Target, changes: ScaleChanges, where: str
) -> StoredProgram:
    """The program with the bytes `data` and, where it keeps weights apart, `weights`, converted.

    Stacks are converted, and damage in them found, when the result is written. Raises MoePackError
    if there is nothing to convert, or what there is cannot be: named by method and call.
    """
    from moepack.converter.stored import StoredProgram

    try:
        stored = StoredProgram(data, weights)
        converter = _Converter(stored, target, changes)
        for plan in stored.program.execution_plan:
            converter.convert(plan)
        for plan in stored.program.execution_plan:
            converter.refuse_other_names(plan)
    except MoePackError as error:
        raise type(error)(f"{where}: {error}") from error
    except Exception as error:  # values of other kinds, and what the flatbuffer reader raises
        raise MoePackError(f"{where}: damaged ExecuTorch program: {error!r}") from error
    if not converter.calls:
        raise UnsupportedError(
            f"{where}: no call with packed experts to convert: the program has none, or they are "
            f"{target} already"
        )
    return stored


class _Converter:
    def __init__(self, stored: StoredProgram, target: Target, changes: ScaleChanges) -> None:
        self.stored, self.target, self.changes = stored, target, changes
        self.calls = 0
        self._done: dict[int, tuple[StackForm, list[int]]] = {}  # by buffer: old form, new sizes

    def convert(self, plan: Any) -> None:
        """Rewrites the calls of one method."""
        _refuse_other_uses(plan)
        todo = [call for call in expert_calls(plan) if not self.target.is_met(call)]
        if self.target.upstream:
            for call in todo:
                require_expressible(call)
        no_bias = cache(partial(self._no_bias, plan))
        for call in todo:
            forms = call.forms()
            if call.layout != self.target.layout:
                for name, form in forms.items():
                    self._convert_stack(call, name, form)
            if call.operator == UPSTREAM:
                call.rewrite(to_moepack(call, forms[STACKS[0]].converted("moepack").group))
            elif self.target.upstream:
                call.rewrite(to_upstream(call, no_bias))
            else:
                call.set("layout", self.target.layout)
        self.calls += len(todo)
        self._rename(plan)

    def refuse_other_names(self, plan: Any) -> None:
        """Equal constants are stored once: what was converted may have other readers."""
        for value in plan.values:
            if type(value.val).__name__ != "Tensor":
                continue
            done = self._done.get(id(self.stored.buffer(value.val)))
            if done is not None and value.val.sizes != done[1]:
                raise _used_otherwise(plan)

    def _convert_stack(self, call: Call, name: str, form: StackForm) -> None:
        tensor, where = call.value(name), f"{call.where} {name}"
        buffer = self.stored.buffer(tensor)
        if buffer is None:
            raise UnsupportedError(
                f"{where}: is no constant of the program nor of its .ptd; convert the file itself, "
                "with the .ptd of its name beside it, or the checkpoint"
            )
        before = self._done.get(id(buffer))
        if before is None:
            stack = self._converted(tensor, buffer.storage, form, where)
            self.stored.replace(buffer, stack)
            before = self._done[id(buffer)] = (form, stack.shape)
        if before[0] != form:
            raise UnsupportedError(f"{where}: another call reads it in another form")
        tensor.sizes = before[1]

    def _converted(self, tensor: Any, storage: Any, form: StackForm, where: str) -> Any:
        from moepack.converter.stored import ConvertedStack

        if len(tensor.sizes) != 2 or tensor.sizes[1] != form.blob_bytes:
            raise UnsupportedError(
                f"{where}: is {tensor.sizes}; {form.scheme} of [{form.rows}, {form.cols}] in the "
                f"layout {form.layout!r} is [E, {form.blob_bytes}]"
            )
        memory = memoryview(getattr(storage, "memory", storage))
        size = tensor.sizes[0] * tensor.sizes[1]
        if len(memory) < size:
            raise MoePackError(f"{where}: the file holds {len(memory)} bytes of {size}")
        try:
            return ConvertedStack(memory[:size], form, self.target.layout, self.changes, where)
        except UnsupportedError as error:
            raise UnsupportedError(f"{where}: {error}") from error

    def _no_bias(self, plan: Any) -> int:
        """An empty tensor, upstream's way to leave the bias out."""
        from executorch.exir.schema import ScalarType, Tensor, TensorShapeDynamism

        constant = self.stored.add_constant(bytes(4))  # a segment of no bytes would not be written
        empty = Tensor(
            ScalarType.FLOAT, 0, [0], [0], False, 0, constant, None, TensorShapeDynamism.STATIC
        )
        return added(plan, empty)

    def _rename(self, plan: Any) -> None:
        """Calls of one operator have all become calls of one other."""
        old, new = (FFN, UPSTREAM) if self.target.upstream else (UPSTREAM, FFN)
        if self.target.upstream or self.target.layout == "moepack":
            for operator in plan.operators:
                if operator.name == old:
                    operator.name = new


def _refuse_other_uses(plan: Any) -> None:
    """Packed tensors change their size: nothing else may read them."""
    uses: Counter[int] = Counter()
    for call in all_calls(plan):
        uses.update(call.args)
    packed = Counter(call.index[name] for call in expert_calls(plan) for name in STACKS)
    for value, count in packed.items():
        if uses[value] != count or value in (*plan.inputs, *plan.outputs):
            raise _used_otherwise(plan)


def _used_otherwise(plan: Any) -> UnsupportedError:
    return UnsupportedError(
        f"method {plan.name!r}: a packed tensor is also an input, an output or an argument of "
        "another operator; convert the checkpoint and export again"
    )
