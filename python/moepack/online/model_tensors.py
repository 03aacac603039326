"""Putting tensors into a model that was built without, and making what no checkpoint holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts a parameter or buffer in the place of the one on the meta device."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if leaf in owner._parameters:
        old = owner._parameters[leaf]
        value = tensor if old is None else tensor.to(old.dtype)
        tensor = nn.Parameter(value, requires_grad=False)
        owner._parameters[leaf] = tensor
    else:
        owner._buffers[leaf] = tensor
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def finish_buffers(model: Any) -> None:
    """Computes the buffers that no checkpoint holds, as the library does, and ties weights."""
    missing = {
        name for name, tensor in model.state_dict().items() if tensor.device.type == "meta"
    } - set(getattr(model, "all_tied_weights_keys", None) or ())
    if not hasattr(model, "_initialize_missing_keys"):
        return
    keep_from_init(model)
    model._move_missing_keys_from_meta_to_device(missing, {"": "cpu"}, None, None)
    model._initialize_missing_keys(False)
    model.tie_weights()
    model.requires_grad_(False)


def keep_from_init(model: nn.Module) -> None:
    """Packed modules are not for the library's code that initializes float ones."""
    for module in model.modules():
        if getattr(type(module), "is_moepack_module", False):
            module._is_hf_initialized = True  # type: ignore[assignment]


def zero_what_is_unknown(module: nn.Module) -> None:
    """Buffers that the checkpoint does not hold, such as a bias for selection, start at zero."""
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point() and bool(buffer.isnan().all()):
            buffer.zero_()
