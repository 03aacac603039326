"""torchao's layout of weights: blobs that ExecuTorch's own MoE operator reads, to and from ours,
and torchao's packing operators where its own library is missing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moepack.errors import BadWeights, UnsupportedError
from moepack.packing import RowOrder, pack_experts, unpack
from moepack.quantizer import QuantizedMatrix
from moepack.undo import Undoable
from moepack.universal_blob import (
    BITS,
    encode,
    pack_universal,
    universal_bytes,
    unpack_universal,
)

__all__ = [
    "PackingOps",
    "from_universal",
    "install_packing_ops",
    "pack_universal",
    "to_universal",
    "universal_bytes",
    "unpack_universal",
]

# torch takes operators back when their Library is collected: they live until undo(), whether or
# not the caller keeps the handle.
_installed: list[torch.library.Library] = []


def to_universal(packed: Tensor) -> Tensor:
    """A stack of moepack's blobs, uint8 [E, bytes], as a stack of universal blobs."""
    return torch.stack([pack_universal(unpack(blob)) for blob in packed])


def from_universal(
    packed: Tensor, rows: int, cols: int, group: int, row_order: RowOrder = "plain"
) -> tuple[Tensor, float]:
    """A stack of universal blobs as moepack's, uint8 [E, bytes], and the largest scale_error."""
    errors: list[float] = []

    def read(blob: Tensor) -> QuantizedMatrix:
        matrix = unpack_universal(blob, rows, cols, group)
        errors.append(matrix.scale_error)
        return matrix

    stacked = pack_experts((read(blob) for blob in packed), row_order, len(packed))
    return stacked, max(errors)


class PackingOps(Undoable):
    """What `install_packing_ops` registered. `undo()` takes it back; so does leaving a `with`."""

    def __init__(self, library: torch.library.Library | None) -> None:
        self._library = library

    @property
    def is_installed(self) -> bool:
        """Whether this handle's operators are registered; False where others were there first."""
        return self._library is not None

    def undo(self) -> None:
        """Removes the operators that this handle registered; a second call does nothing."""
        if self._library is not None:
            _installed.remove(self._library)
            self._library._destroy()
            self._library = None


def install_packing_ops() -> PackingOps:
    """Registers `torchao::_pack_8bit_act_4bit_weight` and `..._8bit_weight`, as torchao's kernels.

    ExecuTorch's own MoE transform needs them, and wheels for x86-64 come without. Where they are
    registered already, by torchao's library or by an earlier call, nothing is done. torchao takes
    the first for a sign that all its kernels are there: `undo()` the registration before its opaque
    tensors are used for linear layers.
    """
    if hasattr(torch.ops.torchao, _op_name(4)):
        return PackingOps(None)
    library = torch.library.Library("torchao", "FRAGMENT")
    for bits in BITS:
        library.define(
            f"{_op_name(bits)}(Tensor weight_qvals, Tensor weight_scales, Tensor? weight_zeros, "
            "int group_size, Tensor? bias, str? target) -> Tensor"
        )
        library.impl(_op_name(bits), _packing_kernel(bits), "CPU")
    _installed.append(library)
    return PackingOps(library)


def _op_name(bits: int) -> str:
    return f"_pack_8bit_act_{bits}bit_weight"


def _packing_kernel(bits: int) -> Callable[..., Tensor]:
    def kernel(
        weight_qvals: Tensor,
        weight_scales: Tensor,
        weight_zeros: Tensor | None,
        group_size: int,
        bias: Tensor | None,
        target: str | None,
    ) -> Tensor:
        if weight_zeros is not None or bias is not None:
            raise UnsupportedError(
                f"torchao::{_op_name(bits)}: zero points and a bias inside the blob are not "
                "written; supported: None for both"
            )
        if target not in (None, "universal"):
            raise UnsupportedError(
                f"torchao::{_op_name(bits)}: target {target!r}; supported: 'universal'"
            )
        if weight_qvals.dtype != torch.int8 or weight_qvals.dim() != 2:
            raise UnsupportedError(
                f"torchao::{_op_name(bits)}: codes are {weight_qvals.dtype} "
                f"{list(weight_qvals.shape)}; supported: int8 [N, K]"
            )
        scales = _checked_scales(weight_scales, weight_qvals.shape, group_size, bits)
        blob = encode(weight_qvals, scales, bits, group_size)
        return blob.view(torch.int8)  # torchao's kernel returns signed bytes

    return kernel


def _checked_scales(scales: Tensor, shape: torch.Size, group: int, bits: int) -> Tensor:
    """In fp32, which the layout holds; flat as torchao passes them, or [N, K / group]."""
    rows, cols = shape
    universal_bytes(bits, rows, cols, group)
    groups = cols // group
    if not scales.is_floating_point() or scales.shape not in ((rows * groups,), (rows, groups)):
        raise UnsupportedError(
            f"torchao::{_op_name(bits)}: scales are {scales.dtype} {list(scales.shape)}; supported "
            f"for codes {list(shape)} in groups of {group}: floating point [{rows * groups}] or "
            f"[{rows}, {groups}]"
        )
    found = scales.float()
    if not bool(found.isfinite().all()):
        raise BadWeights(f"torchao::{_op_name(bits)}: a scale is not finite in fp32")
    return found
