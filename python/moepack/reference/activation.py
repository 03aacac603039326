"""The activations between the two GEMMs, operation by operation as docs/reference/op.md states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.errors import UnsupportedError
from moepack.reference.arithmetic import exp, fma, fp32

_TANH_POLYNOMIAL = (
    float.fromhex("-0x1.75e17ap-8"),
    float.fromhex("0x1.522686p-6"),
    float.fromhex("-0x1.b83c56p-5"),
    float.fromhex("0x1.110726p-3"),
    float.fromhex("-0x1.555532p-2"),
)
_GELU_CUBE = float.fromhex("0x1.6e4e26p-5")
_GELU_SCALE = float.fromhex("0x1.988454p+0")


@dataclass(frozen=True)
class Activation:
    """h from the gate and up columns, both [T, F]; up is empty for experts without a gate."""

    name: str
    alpha: float
    limit: float
    gate_softcap: float
    up_softcap: float
    limit_after_act: bool

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.name in ("relu", "relu2"):
            positive = gate.clamp(min=0.0)
            return positive if self.name == "relu" else positive * positive
        if self.limit:
            gate = gate if self.limit_after_act else gate.clamp(max=self._limit)
            up = up.clamp(-self._limit, self._limit)
        activated = self._activated(gate)
        if self.limit and self.limit_after_act:
            activated = activated.clamp(max=self._limit)
        if self.name == "swiglu_oai":
            up = up + fp32(1.0)
        return activated * _softcap(up, self.up_softcap)

    @property
    def _limit(self) -> float:
        return float(fp32(self.limit))

    def _activated(self, gate: Tensor) -> Tensor:
        if self.name == "silu":
            return _softcap(gate, self.gate_softcap) / _one_plus_exp_of_negative(gate)
        if self.name == "gelu_tanh":
            cube = (fp32(_GELU_CUBE) * gate) * (gate * gate)
            return gate / _one_plus_exp_of_negative(fp32(_GELU_SCALE) * (gate + cube))
        if self.name == "swiglu_oai":
            return gate / _one_plus_exp_of_negative(fp32(self.alpha) * gate)
        raise UnsupportedError(
            f"activation {self.name!r}; supported: silu, gelu_tanh, swiglu_oai, relu, relu2"
        )


def _one_plus_exp_of_negative(x: Tensor) -> Tensor:
    return fp32(1.0) + exp(-x)


def _softcap(x: Tensor, cap: float) -> Tensor:
    return x if cap == 0.0 else fp32(cap) * tanh(x / fp32(cap))


def tanh(x: Tensor) -> Tensor:
    """A polynomial near zero, where the formula through exp cancels; that formula elsewhere."""
    square = x * x
    p = fp32(_TANH_POLYNOMIAL[0]).expand_as(x)
    for coefficient in _TANH_POLYNOMIAL[1:]:
        p = fma(p, square, fp32(coefficient))
    near = fma(p, square * x, x)
    magnitude = x.abs()
    far = fp32(1.0) - fp32(2.0) / (fp32(1.0) + exp(magnitude + magnitude))
    return torch.where(magnitude < 0.625, near, torch.where(x < 0, -far, far))
