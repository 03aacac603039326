"""What modules that replace MoE blocks have in common: the packed experts of one layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from moepack import ops, packing
from moepack.attributes import ExpertAttributes
from moepack.errors import UnsupportedError
from moepack.weight_lock import WeightLock


class PackedExperts(nn.Module):
    """Buffers of one layer's packed experts: E experts of width D and inner size F (`hidden_dim`).

    packed_w13 [E, bytes] and packed_w2 [E, bytes] uint8, bias13 [E, 2F] (without a gate [E, F]) and
    bias2 [E, D] fp32 or None.
    """

    is_moepack_module = True

    packed_w13: Tensor
    packed_w2: Tensor
    bias13: Tensor | None
    bias2: Tensor | None

    def __init__(
        self,
        packed_w13: Tensor,
        packed_w2: Tensor,
        bias13: Tensor | None,
        bias2: Tensor | None,
        attributes: ExpertAttributes,
        dim: int,
    ) -> None:
        super().__init__()
        _check_packed(packed_w13, packed_w2, attributes, dim)
        self.attributes = attributes
        self.dim = dim
        self.hidden_dim = attributes.hidden_dim
        self.num_experts = packed_w13.shape[0]
        self.scheme = attributes.scheme
        self.lock = WeightLock()  # held by calls, and by who replaces the weights meanwhile
        self.register_buffer("packed_w13", packed_w13)
        self.register_buffer("packed_w2", packed_w2)
        self._register("bias13", fp32(bias13))
        self._register("bias2", fp32(bias2))

    def reading(self) -> AbstractContextManager[None]:
        """Holds the weights as they are; a graph that is being traced cannot."""
        return nullcontext() if torch.compiler.is_compiling() else self.lock.reading()

    def experts(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """x [T, D], ids int64 and weights fp32 [T, K] -> [T, D] in the dtype of x."""
        with self.reading():
            return self._experts(x, topk_ids, topk_weights)

    def _experts(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        a = self.attributes
        return ops.quantized_experts(
            x,
            topk_ids,
            topk_weights,
            self.packed_w13,
            self.packed_w2,
            self.bias13,
            self.bias2,
            a.hidden_dim,
            a.scheme,
            a.layout,
            a.activation,
            a.act_alpha,
            a.act_limit,
            a.gate_softcap,
            a.up_softcap,
            a.limit_after_act,
            a.weight_on_input,
        )

    def w13(self, expert: int) -> Tensor:
        """What an expert's blob of w13 stands for: fp32 [2F, D], rows [gate; up] ([F, D])."""
        a = self.attributes
        blob = self.packed_w13[expert]
        return packing.dequantize(blob, a.layout, a.scheme, a.rows13, self.dim)

    def w2(self, expert: int) -> Tensor:
        """fp32 [D, F]."""
        a = self.attributes
        blob = self.packed_w2[expert]
        return packing.dequantize(blob, a.layout, a.scheme, self.dim, a.hidden_dim)

    def _rows(self, x: Tensor, name: str) -> Tensor:
        """[..., D] -> [T, D]; a width that only divides the number of elements is refused."""
        if x.dim() == 0 or x.shape[-1] != self.dim:
            raise UnsupportedError(
                f"{name} is {list(x.shape)}; these experts take [..., {self.dim}]"
            )
        return x.reshape(-1, self.dim)

    def _register(self, name: str, tensor: Tensor | None) -> None:
        # A buffer registered as None makes torch.export miscount the buffers of a root module.
        if tensor is None:
            setattr(self, name, None)
        else:
            self.register_buffer(name, tensor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedExperts:
        """Applies moves between devices; casts leave this module's own buffers as they are."""
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, original in before.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != original.dtype:
                self._buffers[name] = original.to(moved.device)
        return self

    def extra_repr(self) -> str:
        a = self.attributes
        form = a.scheme if a.layout == "moepack" else f"{a.scheme} in {a.layout}'s layout"
        return f"E={self.num_experts}, D={self.dim}, F={a.hidden_dim}, {form}, {a.activation}"


def fp32(tensor: Tensor | None) -> Tensor | None:
    """An own, contiguous fp32 tensor: bf16 and fp16 values are kept exactly."""
    if tensor is None:
        return None
    return tensor.detach().to(torch.float32, copy=True).contiguous()


def _check_packed(
    packed_w13: Tensor, packed_w2: Tensor, attributes: ExpertAttributes, dim: int
) -> None:
    expected = zip(("packed_w13", "packed_w2"), _blob_sizes(attributes, dim), strict=True)
    for (name, size), tensor in zip(expected, (packed_w13, packed_w2), strict=True):
        if tensor.dtype != torch.uint8 or tensor.dim() != 2 or tensor.shape[1] != size:
            raise UnsupportedError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}; {attributes.scheme} experts of "
                f"width {dim} and inner size {attributes.hidden_dim} need uint8 [E, {size}] in the "
                f"layout {attributes.layout!r}"
            )


def _blob_sizes(attributes: ExpertAttributes, dim: int) -> tuple[int, int]:
    """Bytes of one expert's w13 and w2."""
    scheme, layout = attributes.scheme, attributes.layout
    rows, order = attributes.rows13, attributes.row_order13
    return (
        packing.packed_bytes(scheme, rows, dim, order, layout),
        packing.packed_bytes(scheme, dim, attributes.hidden_dim, "plain", layout),
    )


def empty_experts(
    num_experts: int,
    dim: int,
    attributes: ExpertAttributes,
    has_bias13: bool,
    has_bias2: bool,
    device: torch.device | str,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    bytes13, bytes2 = _blob_sizes(attributes, dim)
    rows = attributes.rows13
    return (
        torch.empty(num_experts, bytes13, dtype=torch.uint8, device=device),
        torch.empty(num_experts, bytes2, dtype=torch.uint8, device=device),
        torch.empty(num_experts, rows, dtype=torch.float32, device=device) if has_bias13 else None,
        torch.empty(num_experts, dim, dtype=torch.float32, device=device) if has_bias2 else None,
    )
