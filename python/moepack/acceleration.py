"""ExecuTorch's own operator `llama::quantized_moe_ffn` on moepack's kernels, for those who ask.

Programs and eager code that call it stay as they are. docs/how-to/accelerate-upstream.md says how
far results may differ.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moepack import ops
from moepack.attributes import RoutingAttributes
from moepack.errors import UnsupportedError
from moepack.undo import Undoable

OPERATOR = "llama::quantized_moe_ffn"
ARGUMENTS = (
    *("x", "gate_weight", "expert_bias", "packed_w13", "packed_w2", "num_activated_experts"),
    *("num_experts", "hidden_dim", "dim", "group_size", "weight_nbit", "score_func"),
    "route_scale",
)
_TENSORS = 5  # of these, the first
_SMALLEST_NORMAL = 2.0**-126  # below it upstream does not let the sum of the weights fall

_lock = threading.Lock()
_handles = 0
_eager: torch.library.Library | None = None


class Acceleration(Undoable):
    """What `accelerate_upstream` switched on, until `undo()` or the end of a `with`."""

    def __init__(self) -> None:
        self._is_on = True

    @property
    def is_on(self) -> bool:
        return self._is_on

    def undo(self) -> None:
        """Hands eager calls and programs, loaded ones too, back to ExecuTorch's own kernel.

        With several handles the last one does. ExecuTorch's registry forgets no kernel: moepack's
        stays in it and passes calls on.
        """
        global _handles
        with _lock:
            if not self._is_on:
                return
            self._is_on = False
            _handles -= 1
            if _handles == 0:
                _switch(on=False)


def accelerate_upstream() -> Acceleration:
    """Runs `llama::quantized_moe_ffn` on moepack's kernels: in eager calls, and in programs whose
    methods are loaded from now on.

    Loads ExecuTorch's custom operators, where eager calls find the operator; it makes no difference
    whether they were loaded before. Weights and routing are the same; activations are quantized to
    int8 as by moepack's own operators. Arguments that end the process in upstream's kernel raise
    (RuntimeError), groups other than 32, 64 and 128 too.
    """
    import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401

    global _handles
    with _lock:
        if _handles == 0:
            _switch(on=True)
        _handles += 1
    return Acceleration()


def routing(num_activated_experts: int, score_func: str, route_scale: float) -> RoutingAttributes:
    """Upstream's routing as attributes of moepack's operator.

    Raises UnsupportedError on a score_func that upstream does not have.
    """
    if score_func == "sigmoid":
        return RoutingAttributes(
            num_activated_experts,
            score_func,
            norm_topk=True,
            norm_eps=_SMALLEST_NORMAL,
            norm_clamp=True,
            route_scale=route_scale,
        )
    if score_func == "softmax":  # route_scale is not applied
        return RoutingAttributes(num_activated_experts, score_func)
    raise UnsupportedError(f"score_func {score_func!r}; supported by {OPERATOR}: sigmoid, softmax")


def require_bias_fits(has_expert_bias: bool, score_func: str) -> None:
    """Raises UnsupportedError on the combination at which upstream's kernel ends the process."""
    if has_expert_bias and score_func != "sigmoid":
        raise UnsupportedError(
            f"expert_bias with score_func {score_func!r}; supported by {OPERATOR}: sigmoid"
        )


def _switch(*, on: bool) -> None:
    global _eager
    ops.load_executorch()
    library = ctypes.CDLL(str(ops.executorch_library_path()))
    library.moepack_accelerate_upstream(ctypes.c_bool(on))
    if _eager is not None:
        _eager._destroy()
        _eager = None
    if on:
        _eager = torch.library.Library("llama", "IMPL")
        with warnings.catch_warnings():  # torch warns of what is overridden, here on request
            warnings.simplefilter("ignore")
            _override(_eager)


def _override(library: torch.library.Library) -> None:
    """Both of upstream's kernels: the one for every device, and the Meta kernel, which a single
    tensor without values calls. Tracing is still checked by upstream."""
    from executorch.extension.llm.custom_ops.custom_ops import quantized_moe_ffn_meta

    kernels = {"CompositeExplicitAutograd": _kernel, "Meta": quantized_moe_ffn_meta}
    for key, kernel in kernels.items():
        library.impl("quantized_moe_ffn", _functional(kernel), key, allow_override=True)
        library.impl("quantized_moe_ffn.out", _with_out(kernel), key, allow_override=True)


def _kernel(
    x: Tensor,
    gate_weight: Tensor,
    expert_bias: Tensor,
    packed_w13: Tensor,
    packed_w2: Tensor,
    num_activated_experts: int,
    num_experts: int,
    hidden_dim: int,
    dim: int,
    group_size: int,
    weight_nbit: int,
    score_func: str,
    route_scale: float,
) -> Tensor:
    """moepack's kernel, after what upstream's arguments say twice."""
    _require("x", x, [x.shape[0] if x.dim() else 0, dim])
    _require("gate_weight", gate_weight, [num_experts, dim])
    has_bias = expert_bias.shape != (0,)
    require_bias_fits(has_bias, score_func)
    how = routing(num_activated_experts, score_func, route_scale)
    return ops.quantized_moe_ffn(
        x,
        None,
        gate_weight,
        None,
        expert_bias if has_bias else None,
        packed_w13,
        packed_w2,
        None,
        None,
        num_activated_experts,
        hidden_dim,
        f"int{weight_nbit}-g{group_size}",
        "torchao",
        how.score_func,
        how.norm_topk,
        how.norm_eps,
        how.norm_clamp,
        how.route_scale,
    )


def _functional(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def functional(*arguments: Any) -> Tensor:
        _require_tensors(*arguments[:_TENSORS])
        return kernel(*arguments)

    return functional


def _with_out(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def with_out(*arguments: Any, out: Tensor) -> Tensor:
        _require_tensors(*arguments[:_TENSORS], out)
        result = kernel(*arguments)
        _require("out", out, list(result.shape))
        return out.copy_(result)

    return with_out


def _require_tensors(*tensors: Any) -> None:
    for name, tensor in zip((*ARGUMENTS[:_TENSORS], "out"), tensors, strict=False):
        if tensor is None:
            raise UnsupportedError(f"{OPERATOR}: {name} is None; expected a tensor")
        ops.require_same_device(OPERATOR, name, tensor, tensors[0])


def _require(name: str, tensor: Tensor, shape: list[int]) -> None:
    if tensor.dtype != torch.float32 or list(tensor.shape) != shape:
        raise UnsupportedError(
            f"{OPERATOR}: {name} is {tensor.dtype} {list(tensor.shape)}; expected float32 {shape}"
        )
