"""A replacement is compared with what it replaces before the original goes.

The adapter: the neutral form of a block, in float, against the original's own code: every expert
forced through given ids, the router and what surrounds it with a stand-in for the experts. The
quantization: the kernel against the float form, expert by expert.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from moepack.errors import VerificationError
from moepack.families.spec import BlockSpec, Combination, ExpertsSpec, RouterSpec
from moepack.modules import PackedExperts, QuantizedMoEFFN, combine
from moepack.reference import float_mode
from moepack.schemes import scheme

ADAPTER_TOLERANCE = 1e-4
# A floor finds faults (3 dB and less), not roughness: sound weights give about 18 and 33 dB, and
# the worst expert of a tiny random model, on its two tokens, has been seen at 9.
SQNR_FLOOR_DB = {4: 6.0, 8: 15.0}

_ROUTER_TOKENS = 256
_TOKENS_PER_EXPERT = 2
_WINDOW_BYTES = 256 * 2**20
# Selections are compared where the margin, relative to the largest score, is above fp32's rounding.
_MARGIN = 1e-4
# Outputs below this come from experts that say nothing: some trainings leave weights of 1e-20.
_SILENT = 1e-30


@dataclass(frozen=True)
class AdapterCheck:
    """Largest relative error of `experts` experts; `tokens` router probes had a clear margin."""

    error: float
    experts: int
    tokens: int


@dataclass(frozen=True)
class QuantizationCheck:
    """Signal to quantization noise over all experts, and of the worst one."""

    sqnr_db: float
    worst_expert_db: float
    worst_expert: int
    tokens: int


def probes(tokens: int, dim: int, seed: int = 0) -> Tensor:
    """[T, D] fp32 with rows from faint to large, so that clamps and saturation engage."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** (1.5 * torch.rand(tokens, 1, generator=generator) - 0.75)
    return torch.randn(tokens, dim, generator=generator) * scale


@torch.no_grad()
def check_adapter(
    path: str, spec: BlockSpec, *, fused: bool = True, most_weights: int | None = None
) -> AdapterCheck:
    """Raises VerificationError where the neutral form is not what the original block computes.

    `most_weights`: of larger blocks, experts of about so many weights, the first and last among
    them.
    """
    error, checked = _experts_error(path, spec, most_weights)
    _refuse(path, "the experts", error)
    tokens = 0
    if spec.router is not None and fused:
        around, tokens = _around_experts_error(path, spec, spec.router)
        _refuse(path, "the router, the shared expert or their sum", around)
        error = max(error, around)
    return AdapterCheck(error, checked, tokens)


def _require_finite(path: str, what: str, expected: Tensor) -> None:
    """Nothing can be compared with an original that overflows; that is no fault of the reading."""
    if not bool(expected.isfinite().all()):
        raise VerificationError(
            f"{path or '(root)'}: the original block's own result ({what}) is not finite in "
            "float32 for ordinary inputs: its weights are too large to compute with. Mend them, or "
            f"leave the block out: exclude=[{path!r}]"
        )


def _refuse(path: str, what: str, error: float) -> None:
    if not error <= ADAPTER_TOLERANCE:
        raise VerificationError(
            f"{path or '(root)'}: moepack's reading of {what} differs from the original by "
            f"{error:.2g} (relative; allowed {ADAPTER_TOLERANCE:g}). The block computes something "
            "that moepack does not know: use router='outside' if only routing differs, or exclude"
        )


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest over rows of |found - expected| / |expected|; NaN if a number is not finite."""
    if found.shape[0] == 0:
        return 0.0
    norm = expected.double().norm(dim=-1)  # fp64: squares of faint weights underflow in fp32
    error = (found.double() - expected.double()).norm(dim=-1)
    return float((error / norm.clamp(min=torch.finfo(norm.dtype).tiny)).max())


def _experts_error(path: str, spec: BlockSpec, most_weights: int | None) -> tuple[float, int]:
    """The largest error, and of how many experts."""
    experts = spec.experts
    errors, checked = [], 0
    for first, last in _expert_windows(experts, most_weights):
        count = last - first
        checked += count
        x = probes(max(2, count), experts.model_dim, seed=first)
        token = torch.arange(x.shape[0])
        ids = torch.stack([token % count, (token + 1) % count], dim=1)
        weights = 0.2 + torch.rand(ids.shape, generator=torch.Generator().manual_seed(first))
        expected = spec.oracle.experts(first, last)(x, ids, weights)
        _require_finite(path, f"experts {first} to {last - 1}", expected)
        found = _float_experts(experts, x, ids + first, weights, experts.output_norm)
        errors.append(relative_error(found, expected))
    return _largest(errors), checked


def _expert_windows(experts: ExpertsSpec, most_weights: int | None) -> list[tuple[int, int]]:
    """Ranges of experts of which the float weights fit a window; if not all, spread evenly."""
    weights_each = 3 * experts.model_dim * experts.inner_dim
    size = max(1, min(experts.num_experts, _WINDOW_BYTES // (4 * weights_each)))
    starts = range(0, experts.num_experts, size)
    windows = [(first, min(first + size, experts.num_experts)) for first in starts]
    most = len(windows) if most_weights is None else max(2, most_weights // (size * weights_each))
    if most >= len(windows):
        return windows
    return [windows[i * (len(windows) - 1) // (most - 1)] for i in range(most)]


def _largest(errors: list[float]) -> float:
    return math.nan if any(math.isnan(e) for e in errors) else max(errors)


def _float_experts(
    experts: ExpertsSpec, x: Tensor, ids: Tensor, weights: Tensor, norm: nn.Module | None = None
) -> Tensor:
    return float_mode.experts(x, ids, weights, experts.reader, experts.attributes, norm)


def _around_experts_error(path: str, spec: BlockSpec, router: RouterSpec) -> tuple[float, int]:
    """The original with a stand-in for its experts, against what we read around them."""
    dim = spec.experts.model_dim
    generator = torch.Generator().manual_seed(1)
    slope = torch.randn(spec.experts.num_experts, 1, generator=generator)
    offset = torch.randn(spec.experts.num_experts, dim, generator=generator)

    def stand_in(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return ((x[:, None] * slope[ids] + offset[ids]) * weights[..., None]).sum(1)

    x = probes(_ROUTER_TOKENS, dim)
    original = spec.oracle.block(stand_in)
    expected = _output(path, original, x, spec.combination)
    _require_finite(path, "its router, shared expert or their sum", expected)
    routing, is_decided = route_decided(x, router)
    weights = routing.weights.float()
    if router.output_scale is not None:
        weights = weights * router.output_scale.float()[routing.ids]
    shared, gate = (
        original.get_submodule(name) if name else None
        for name in (spec.combination.shared, spec.combination.shared_gate)
    )
    found = combine(x, stand_in(x, routing.ids, weights), shared, gate)
    return relative_error(found[is_decided], expected[is_decided]), int(is_decided.sum())


def _output(path: str, original: nn.Module, x: Tensor, combination: Combination) -> Tensor:
    """What the original makes of x [T, D], as [T, D]; its form has to be the one that was read."""
    if combination.in_place:
        result = original(x)
        shape: tuple[int, ...] = x.shape
    else:
        result = original(x[None])
        shape = x.shape if combination.returns == "flat" else (1, *x.shape)
    if not isinstance(result, Tensor) or result.shape != shape:
        kind = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise VerificationError(f"{path or '(root)'}: returns {kind}; expected {list(shape)}")
    return result.reshape(x.shape)


def route_decided(x: Tensor, router: RouterSpec) -> tuple[float_mode.Routing, Tensor]:
    """Routing in fp64, and for which tokens rounding in fp32 cannot change the selection."""
    router_x = x if router.before is None else router.before(x)
    routing = float_mode.route(
        router_x.double(),
        router.gate_weight,
        router.gate_bias,
        router.expert_bias,
        router.attributes,
    )
    return routing, routing.margin > _MARGIN * routing.largest


@torch.no_grad()
def check_quantized(path: str, spec: BlockSpec, module: PackedExperts) -> QuantizationCheck:
    """The kernel against the float form: every expert, then, if the router is fused, routing."""
    experts = spec.packed_experts(isinstance(module, QuantizedMoEFFN))
    x = probes(experts.num_experts * _TOKENS_PER_EXPERT, experts.model_dim)
    ids = torch.arange(x.shape[0])[:, None] % experts.num_experts
    ones = torch.ones(ids.shape)
    expected = _float_experts(experts, x, ids, ones)
    _require_finite(path, "its experts", expected)
    found = module.experts(x, ids, ones)
    if not bool(found.isfinite().all()):
        raise VerificationError(
            f"{path or '(root)'}: packed experts overflow float32 where the original's result is "
            f"still finite: weights this large cannot be packed; leave it out: exclude=[{path!r}]"
        )
    noise = torch.where(torch.maximum(found.abs(), expected.abs()) < _SILENT, 0.0, found - expected)
    by_expert = [
        t.double().square().sum(-1).view(-1, experts.num_experts).sum(0) for t in (expected, noise)
    ]
    each = [_decibels(s, n) for s, n in zip(*(t.tolist() for t in by_expert), strict=True)]
    worst = min(range(len(each)), key=lambda e: each[e])
    if isinstance(module, QuantizedMoEFFN) and spec.router is not None:
        _check_fused_routing(path, module, spec.router, x)
    total = _decibels(float(by_expert[0].sum()), float(by_expert[1].sum()))
    return QuantizationCheck(total, each[worst], worst, x.shape[0])


def _decibels(signal: float, noise: float) -> float:
    if math.isnan(noise):
        return -math.inf
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf


def _check_fused_routing(path: str, module: QuantizedMoEFFN, router: RouterSpec, x: Tensor) -> None:
    """The fused operator against the experts' one with ids and weights of the float router."""
    routing, is_decided = route_decided(x, replace(router, before=None))
    outside = module.experts(x, routing.ids, routing.weights.float())
    unrounded = copy.copy(module)  # shares the buffers
    unrounded.routing = replace(module.routing, router_dtype="float32")
    error = relative_error(unrounded.routed(x)[is_decided], outside[is_decided])
    _refuse(path, "routing inside the operator", error)


def check_floor(
    path: str, check: QuantizationCheck, scheme_name: str, floor_db: float | None
) -> None:
    """Raises VerificationError if the total or the worst expert's SQNR is below the floor."""
    floor = SQNR_FLOOR_DB[scheme(scheme_name).bits] if floor_db is None else floor_db
    if check.sqnr_db < floor or check.worst_expert_db < floor:
        raise VerificationError(
            f"{path or '(root)'}: {scheme_name} leaves {check.sqnr_db:.1f} dB SQNR, worst expert "
            f"{check.worst_expert} {check.worst_expert_db:.1f} dB; the floor is {floor:g} dB. "
            f"Use a finer scheme for this block, or lower the floor: sqnr_floor={{{path!r}: ...}}"
        )
