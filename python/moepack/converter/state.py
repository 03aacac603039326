"""State dicts and models in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from moepack import packing
from moepack.attributes import ExpertAttributes
from moepack.converter.stacks import (
    ScaleChanges,
    StackForm,
    convert_stack,
    integer_codes,
)
from moepack.errors import PackedFormatError, UnsupportedError
from moepack.modules import PackedExperts

_W13, _W2 = "packed_w13", "packed_w2"


def forms_of(attributes: ExpertAttributes, dim: int) -> dict[str, StackForm]:
    """What the stacks of a packed module hold, by buffer."""
    kind = (attributes.layout, *integer_codes(attributes.scheme))
    return {
        _W13: StackForm(*kind, attributes.rows13, dim, attributes.row_order13),
        _W2: StackForm(*kind, dim, attributes.hidden_dim, "plain"),
    }


def convert_module(model: nn.Module, layout: str, changes: ScaleChanges) -> nn.Module:
    """Every packed module of the model, in place; a module with two names once."""
    todo = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, PackedExperts) and module.attributes.layout != layout
    }
    if not todo:
        raise _nothing(type(model).__name__, layout)
    for path, module in todo.items():
        for name, form in forms_of(module.attributes, module.dim).items():
            _checked(form, layout, f"{path or '(root)'} {name}")
    for path, module in todo.items():
        new = {
            name: convert_stack(
                module.get_buffer(name), form, layout, changes, f"{path or '(root)'} {name}"
            )
            for name, form in forms_of(module.attributes, module.dim).items()
        }
        with module.lock.writing():
            for name, stack in new.items():
                module.register_buffer(name, stack)
            module.attributes = replace(module.attributes, layout=layout)
    return model


def convert_state_dict(
    state: Mapping[str, Tensor],
    layout: str,
    changes: ScaleChanges,
    scheme: str | None,
    dim: int | None,
) -> dict[str, Tensor]:
    """A new dict; tensors other than packed experts are those of the old one."""
    prefixes = [name.removesuffix(_W13) for name in state if name.rpartition(".")[2] == _W13]
    new = dict(state)
    for prefix in prefixes:
        w13, w2 = state[f"{prefix}{_W13}"], state.get(f"{prefix}{_W2}")
        if w2 is None:
            raise PackedFormatError(f"{prefix}{_W2} is missing beside {prefix}{_W13}")
        forms = _read_forms(state, prefix, w13, w2, scheme, dim)
        for name, stack in ((_W13, w13), (_W2, w2)):
            if forms[name].layout != layout:
                where = f"{prefix}{name}"
                new[where] = convert_stack(stack, forms[name], layout, changes, where)
    if not changes.scales:
        raise _nothing("the state dict", layout)
    return new


def _nothing(what: str, layout: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what}: nothing to convert: no packed experts, or all in the layout {layout!r} already"
    )


def _checked(form: StackForm, layout: str, where: str) -> None:
    try:
        form.converted(layout)
    except UnsupportedError as error:
        raise UnsupportedError(f"{where}: {error}") from error


def _read_forms(
    state: Mapping[str, Tensor],
    prefix: str,
    w13: Tensor,
    w2: Tensor,
    scheme: str | None,
    dim: int | None,
) -> dict[str, StackForm]:
    """From the headers of moepack's blobs, or for torchao's from the sizes around them."""
    for name, stack in ((_W13, w13), (_W2, w2)):
        if stack.dim() != 2 or not stack.numel() or stack.is_meta:
            raise PackedFormatError(f"{prefix}{name}: {list(stack.shape)}; expected [E, bytes]")
    if bytes(w13[0, :4].tolist()) == b"MOEP":
        return {_W13: _form_of(w13[0]), _W2: _form_of(w2[0])}
    gate = state.get(f"{prefix}gate_weight")
    width = dim if gate is None else gate.shape[1]
    if scheme is None or width is None:
        raise UnsupportedError(
            f"{prefix}{_W13}: torchao's blobs do not say what they hold; pass scheme="
            + ("" if width is not None else " and the model's width, dim=")
        )
    bits, group = integer_codes(scheme)
    per_row = width // group * (group * bits // 8 + 8)
    rows13 = (w13.shape[1] - 64) // max(per_row, 1)
    # As many bytes as w13, and w13 is up alone; else it is gate and up.
    is_gated = w13.shape[1] != w2.shape[1]
    inner = rows13 // 2 if is_gated else rows13
    kind = ("torchao", bits, group)
    return {
        _W13: StackForm(*kind, rows13, width, "gate_up" if is_gated else "plain"),
        _W2: StackForm(*kind, width, inner, "plain"),
    }


def _form_of(blob: Tensor) -> StackForm:
    header = packing.read_header(blob)
    bits, group = integer_codes(header.scheme.name)
    return StackForm("moepack", bits, group, header.rows, header.cols, header.row_order)
