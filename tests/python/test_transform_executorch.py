"""The call and the block of ExecuTorch's own transform."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import moepack
import tiny_models
from block_traffic import sqnr_db
from moepack import ops
from moepack.errors import UnsupportedError


@pytest.mark.parametrize(
    ("score_func", "options"),
    [
        ("softmax", {"expert_bias": True}),
        ("sigmoid", {"expert_bias": True, "route_scale": 2.0}),
        ("softmax_all", {"shared": True}),
    ],
)
def test_the_call_of_executorchs_transform(score_func: str, options: dict[str, Any]) -> None:
    block = tiny_models.executorch_block(score_func, **options)
    x = torch.randn(6, tiny_models.WIDTH)
    with torch.no_grad():
        expected = block(x)
    model = nn.ModuleDict({"layer": block})
    found = moepack.replace_moe_with_quantized_op(model, group_size=32, weight_nbit=8)
    assert found is model
    with torch.no_grad():
        assert sqnr_db(expected, model["layer"](x)) > 25
        assert model["layer"](x.view(2, 3, -1)).shape == (2, 3, tiny_models.WIDTH)


def test_executorchs_arguments_are_checked() -> None:
    for arguments in ({"group_size": 48}, {"weight_nbit": 3}, {"group_size": -1}):
        with pytest.raises(UnsupportedError, match="supported"):
            moepack.replace_moe_with_quantized_op(tiny_models.executorch_block(), **arguments)


def test_executorchs_block_returns_what_it_returned() -> None:
    block = tiny_models.executorch_block()
    x = torch.randn(1, 6, tiny_models.WIDTH)
    with torch.no_grad():
        expected = block(x)
        found = moepack.quantize_(block, "int8-g32").model(x)
    assert found.shape == expected.shape == (6, tiny_models.WIDTH)


def test_the_operators_are_registered_once() -> None:
    ops.load()
    ops.load()
    assert ops.is_active()
