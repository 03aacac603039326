"""The operators `moepack::quantized_moe_ffn` and `moepack::quantized_experts` for torch.

Importing this module registers them once: CPU kernels and a gradient that raises (from the library
that lies beside this package), and Meta kernels that make the same checks. docs/reference/op.md
says what they compute.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moepack
from moepack import _core
from moepack.errors import MoePackError, UnsupportedError

_TORCH_LIBRARY = "libmoepack_torch.so"
_EXECUTORCH_LIBRARY = "libmoepack_executorch.so"
_OPS: dict[str, Callable[..., None]] = {
    "quantized_moe_ffn": _core.check_quantized_moe_ffn,
    "quantized_experts": _core.check_quantized_experts,
}

_executorch_loaded = False


def quantized_moe_ffn(
    x: Tensor,
    router_x: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    expert_bias: Tensor | None,
    packed_w13: Tensor,
    packed_w2: Tensor,
    bias13: Tensor | None,
    bias2: Tensor | None,
    num_activated_experts: int,
    hidden_dim: int,
    scheme: str,
    layout: str = "moepack",
    score_func: str = "softmax",
    norm_topk: bool = False,
    norm_eps: float = 0.0,
    norm_clamp: bool = False,
    route_scale: float = 1.0,
    n_group: int = 1,
    topk_group: int = 1,
    group_score: str = "top2sum",
    router_dtype: str = "float32",
    activation: str = "silu",
    act_alpha: float = 1.0,
    act_limit: float = 0.0,
    gate_softcap: float = 0.0,
    up_softcap: float = 0.0,
    limit_after_act: bool = False,
    weight_on_input: bool = False,
) -> Tensor:
    """A whole MoE feed-forward block: routing, experts, weighted sum.

    x [T, D] fp32, bf16 or fp16; returns the same shape and dtype. Arguments as in the operator's
    schema; the defaults are the neutral values. Raises RuntimeError on what is not supported.
    """
    result: Tensor = torch.ops.moepack.quantized_moe_ffn(
        x,
        router_x,
        gate_weight,
        gate_bias,
        expert_bias,
        packed_w13,
        packed_w2,
        bias13,
        bias2,
        num_activated_experts,
        hidden_dim,
        scheme,
        layout,
        score_func,
        norm_topk,
        norm_eps,
        norm_clamp,
        route_scale,
        n_group,
        topk_group,
        group_score,
        router_dtype,
        activation,
        act_alpha,
        act_limit,
        gate_softcap,
        up_softcap,
        limit_after_act,
        weight_on_input,
    )
    return result


def quantized_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    packed_w13: Tensor,
    packed_w2: Tensor,
    bias13: Tensor | None,
    bias2: Tensor | None,
    hidden_dim: int,
    scheme: str,
    layout: str = "moepack",
    activation: str = "silu",
    act_alpha: float = 1.0,
    act_limit: float = 0.0,
    gate_softcap: float = 0.0,
    up_softcap: float = 0.0,
    limit_after_act: bool = False,
    weight_on_input: bool = False,
) -> Tensor:
    """The experts alone: topk_ids [T, K] int64 and topk_weights [T, K] fp32 come from the caller.

    An id may repeat within a token: both count. Ids outside 0 .. E-1 raise RuntimeError.
    """
    result: Tensor = torch.ops.moepack.quantized_experts(
        x,
        topk_ids,
        topk_weights,
        packed_w13,
        packed_w2,
        bias13,
        bias2,
        hidden_dim,
        scheme,
        layout,
        activation,
        act_alpha,
        act_limit,
        gate_softcap,
        up_softcap,
        limit_after_act,
        weight_on_input,
    )
    return result


def is_active() -> bool:
    """Whether the operators' kernels are registered with torch."""
    return hasattr(torch.ops.moepack, "_quantized_moe_ffn_active") and bool(
        torch.ops.moepack._quantized_moe_ffn_active()
    )


def executorch_library_path() -> Path:
    """The library that registers the kernels with ExecuTorch. Raises MoePackError if missing."""
    return _library(_EXECUTORCH_LIBRARY)


def load_executorch() -> None:
    """Registers the kernels with the ExecuTorch runtime of this process, once.

    To be called before a program that uses them is loaded. Imports executorch.
    """
    global _executorch_loaded
    if _executorch_loaded:
        return
    # The runtime that Python uses has to be loaded first: our library then binds to its registry.
    import executorch.extension.pybindings.portable_lib  # noqa: F401

    ctypes.CDLL(str(executorch_library_path()))
    _executorch_loaded = True


def force_isa(name: str | None) -> None:
    """Makes every kernel of this process use one instruction set; None: the default again.

    Raises UnsupportedError, naming what this CPU runs. `MOEPACK_ISA` does the same at start.
    """
    try:
        _core.force_isa(name)
    except ValueError as error:
        raise UnsupportedError(str(error)) from None
    names = [_TORCH_LIBRARY, _EXECUTORCH_LIBRARY] if _executorch_loaded else [_TORCH_LIBRARY]
    for library_name in names:
        switch = ctypes.CDLL(str(_library(library_name))).moepack_force_isa
        switch.restype = ctypes.c_char_p
        refusal = switch(name.encode() if name is not None else None)
        if refusal is not None:
            raise UnsupportedError(refusal.decode())


def load() -> None:
    """Registers the operators with torch, unless this process has them already."""
    if not hasattr(torch.ops.moepack, "quantized_moe_ffn"):
        torch.ops.load_library(_library(_TORCH_LIBRARY))
    for name, check in _OPS.items():
        meta = _meta_kernel(getattr(torch.ops.moepack, name).default, check)
        torch.library.register_fake(f"moepack::{name}", meta)
        torch.library.register_fake(f"moepack::{name}.out", meta)


def _library(name: str) -> Path:
    # In an editable install the package has two folders: the sources and the built files.
    folders = [Path(folder) / "lib" for folder in moepack.__path__]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise MoePackError(
        f"{name} is in none of {', '.join(map(str, folders))}: the package was not built here; "
        "install it with `pip install .`"
    )


def _meta_kernel(op: Any, check: Callable[..., None]) -> Callable[..., Tensor]:
    names = [argument.name for argument in op._schema.arguments]
    per_token = {"x", "router_x", "topk_ids", "topk_weights"}

    def meta(*arguments: Any, out: Tensor | None = None) -> Tensor:
        described = [
            _described(value, dynamic=name in per_token) if isinstance(value, Tensor) else value
            for name, value in zip(names, arguments, strict=True)
        ]
        x: Tensor = arguments[0]
        if out is None:
            check(*described)
        else:
            check(*described, _described(out, dynamic=True))
        for name, value in zip((*names, "out"), (*arguments, out), strict=True):
            if isinstance(value, Tensor):
                require_same_device(op.name(), name, value, x)
                if name in per_token or name == "out":
                    _require_same_tokens(op, name, value, x)
        if out is not None:
            return out
        return x.new_empty(x.shape)

    return meta


def _described(tensor: Tensor, dynamic: bool) -> tuple[str, list[int]]:
    """dtype and sizes for the core's checks; a symbolic number of tokens stays open (-1)."""
    sizes = [
        -1 if dynamic and i == 0 and isinstance(size, torch.SymInt) else int(size)
        for i, size in enumerate(tensor.shape)
    ]
    return str(tensor.dtype).removeprefix("torch."), sizes


def require_same_device(op: str, name: str, tensor: Tensor, x: Tensor) -> None:
    """For Meta kernels. Raises RuntimeError, naming both devices."""
    # One meta tensor among real ones brings a call here, where nothing would be computed. Fake
    # tensors name the device that they stand for.
    if tensor.device != x.device:
        raise RuntimeError(
            f"{op}: {name}: is on {tensor.device}, x is on {x.device}; all tensors have to "
            "be on one device (meta: without values, the weights were not loaded)"
        )


def _require_same_tokens(op: Any, name: str, tensor: Tensor, x: Tensor) -> None:
    tokens, expected = tensor.shape[0], x.shape[0]
    if isinstance(tokens, torch.SymInt) or isinstance(expected, torch.SymInt):
        torch._check(
            tokens == expected,
            lambda: f"{op.name()}: {name}: got {tokens} tokens, expected T={expected}",
        )


load()
