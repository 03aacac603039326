"""Replacing MoE blocks by packed ones, and turning packed models back into float modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from numbers import Real
from typing import Literal

import torch
from torch import Tensor, nn

from moepack import packing, placement, quantizer, verification
from moepack.dequantized import dequantize_
from moepack.errors import BadWeights, NoMoEBlock, UnsupportedError
from moepack.families import BlockSpec, FoundBlock, find_blocks
from moepack.modules import PackedExperts, QuantizedMoEFFN
from moepack.placement import PackedTensors, stacked_biases
from moepack.planner import BlockPlan, plan_blocks, require_matches
from moepack.quantizer import QuantizedMatrix
from moepack.schemes import Scheme
from moepack.transform_report import BlockReport, Report

__all__ = ["BlockReport", "Report", "dequantize_", "quantize_", "replace_moe_with_quantized_op"]

Progress = Callable[[str, int, int], None]  # what is being done, how many are done, of how many


def quantize_(
    model: nn.Module,
    scheme: str | Scheme = "int4-g32",
    *,
    exclude: str | Sequence[str] = (),
    recipe: Mapping[str, str] | None = None,
    router: Literal["auto", "outside"] = "auto",
    layout: str = "moepack",
    rule: quantizer.Rule = "search",
    verify: bool = True,
    sqnr_floor: float | Mapping[str, float] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Packs the experts of every MoE block, in place. Use the model in `Report.model`.

    `scheme`, `exclude`, `recipe`, `router`, `layout` as in `moepack.plan`. `sqnr_floor` in dB, for
    all blocks or by path pattern; one that matches no block is an UnsupportedError.
    `progress(what, done, total)` is called before each block.

    All blocks are read and checked first: structure (UnsupportedError, NoMoEBlock), finite weights
    (BadWeights), the adapter against the original (VerificationError). If that fails the model has
    not been touched. Then block after block is packed, compared once more and its original dropped.
    A block that falls below the SQNR floor, overflows when packed, or routes in the operator other
    than the router that was read (VerificationError) stays in float, the ones before it stay
    packed. A model that is packed already is left alone, and the report says so.
    """
    _check_floor(sqnr_floor)
    found = find_blocks(model)
    decided = plan_blocks(
        model, found, scheme, exclude=exclude, recipe=recipe, router=router, layout=layout
    )
    if isinstance(sqnr_floor, Mapping):
        require_matches(sqnr_floor, found)
    report = Report(model, decided)
    if not _anything_to_do(report):
        return report
    work = [
        _Work(block, decision)
        for block, decision in zip(found, decided.blocks, strict=True)
        if decision.action == "replace"
    ]
    found.clear()  # `work` alone keeps the originals now, and lets go of them one by one
    _check_all(work, verify, progress)
    packed: dict[int, _Packed] = {}

    def replace_block(item: _Work) -> None:
        if item.block.experts_of not in packed:
            packed[item.block.experts_of] = _pack(item.spec, item.plan, rule, threads)
        tensors = packed[item.block.experts_of].tensors
        new = placement.build(item.spec, item.plan, item.block.module, tensors)
        block = _verified(item, new, rule, verify, sqnr_floor)
        report.blocks.append(replace(block, scale_error=packed[item.block.experts_of].scale_error))
        report.model = placement.put(report.model, item.block, item.spec, new)

    total = len(work)
    while work:
        _tell(progress, f"packing {work[0].plan.path or '(root)'}", total - len(work), total)
        replace_block(
            work.pop(0)
        )  # nothing here refers to the original afterwards: its memory is free
    return report


def _check_floor(sqnr_floor: float | Mapping[str, float] | None) -> None:
    named = sqnr_floor if isinstance(sqnr_floor, Mapping) else {"": sqnr_floor}
    for pattern, floor in named.items():
        if floor is None and not pattern:
            continue
        if not isinstance(floor, Real) or isinstance(floor, bool) or math.isnan(floor):
            where = f"sqnr_floor[{pattern!r}]" if pattern else "sqnr_floor"
            raise UnsupportedError(
                f"{where} is {floor!r}; supported: a number of dB, or numbers by path pattern"
            )


@dataclass
class _Work:
    block: FoundBlock
    plan: BlockPlan
    adapter: verification.AdapterCheck | None = None

    @property
    def spec(self) -> BlockSpec:
        assert self.block.spec is not None
        return self.block.spec


@dataclass(frozen=True)
class _Packed:
    tensors: PackedTensors
    scale_error: float


def _tell(progress: Progress | None, what: str, done: int, total: int) -> None:
    if progress is not None:
        progress(what, done, total)


def _anything_to_do(report: Report) -> bool:
    decided = report.plan
    if decided.refused:
        reasons = "; ".join(
            f"{b.path or '(root)'} ({b.block_class}): {b.why}" for b in decided.refused
        )
        raise UnsupportedError(
            f"{len(decided.refused)} MoE blocks cannot be packed: {reasons}. To leave them as they "
            f"are, name them: exclude=[{decided.refused[0].path!r}, ...]"
        )
    if not decided.blocks and decided.already_packed:
        report.note = f"nothing to do: {decided.already_packed} MoE blocks are packed already"
    elif not decided.blocks:
        raise NoMoEBlock(
            f"{type(report.model).__name__} holds no MoE block: no module has a child `experts` "
            "(Hugging Face) or `cond_ffn` (ExecuTorch's MOEFeedForward)"
        )
    return bool(decided.replaced)


def _check_all(work: Sequence[_Work], verify: bool, progress: Progress | None) -> None:
    for item in work:
        _check_device(item.plan.path, item.spec)
    for done, item in enumerate(work):
        _tell(progress, f"checking {item.plan.path or '(root)'}", done, len(work))
        _check_finite(item.plan.path, item.spec)
        if verify:
            item.adapter = verification.check_adapter(
                item.plan.path, item.spec, fused=item.plan.router == "fused"
            )


def _check_device(path: str, spec: BlockSpec) -> None:
    tensors = [spec.experts.w13(0), spec.experts.w2(0)]
    if spec.router is not None:
        tensors.append(spec.router.gate_weight)
    for tensor in tensors:
        if tensor.device.type == "meta":
            raise BadWeights(
                f"{path or '(root)'}: its weights are on the meta device, without values; load the "
                "checkpoint first, then quantize"
            )
        if tensor.device.type != "cpu":
            raise UnsupportedError(
                f"{path or '(root)'}: its weights are on {tensor.device}; move the model to the CPU"
            )


def _check_finite(path: str, spec: BlockSpec) -> None:
    where = path or "(root)"
    for expert in range(spec.experts.num_experts):
        for name in ("w13", "w2", "bias13", "bias2"):
            values = getattr(spec.experts, name)(expert)
            if values is not None and not _is_finite(values):
                raise BadWeights(f"{where} expert {expert} {name}: {_first_bad(values)}")
    if spec.router is not None:
        for name in ("gate_weight", "gate_bias", "expert_bias"):
            values = getattr(spec.router, name)
            if values is not None and not _is_finite(values):
                raise BadWeights(f"{where} router {name}: {_first_bad(values)}")


def _is_finite(values: Tensor) -> bool:
    # NaN and both infinities show in the extremes: one pass, 20 times faster than isfinite on bf16.
    return all(extreme.isfinite() for extreme in torch.aminmax(values))


def _first_bad(values: Tensor) -> str:
    row, *col = (~values.isfinite()).nonzero()[0].tolist()
    value = values[row][col[0]].item() if col else values[row].item()
    at = f"row {row}" + (f", column {col[0]}" if col else "")
    return f"{at} is {value}; weights have to be finite"


def _pack(
    spec: BlockSpec, decision: BlockPlan, rule: quantizer.Rule, threads: int | None
) -> _Packed:
    experts = spec.packed_experts(decision.router == "fused")
    scale_error = 0.0

    def quantized(name: str, read: Callable[[int], Tensor]) -> Iterator[QuantizedMatrix]:
        where = [
            f"{decision.path or '(root)'} expert {e} {name}" for e in range(experts.num_experts)
        ]
        if experts.given is not None:
            return (quantizer.from_torchao(experts.given(name, e), w) for e, w in enumerate(where))
        reads = (partial(read, e) for e in range(experts.num_experts))
        pairs = zip(where, reads, strict=True)
        return quantizer.quantize_experts(pairs, decision.scheme, rule, threads)

    def packed(name: str, read: Callable[[int], Tensor], row_order: packing.RowOrder) -> Tensor:
        def noting() -> Iterator[QuantizedMatrix]:
            nonlocal scale_error
            for matrix in quantized(name, read):
                scale_error = max(scale_error, matrix.scale_error)
                yield matrix

        return packing.pack_experts(noting(), row_order, experts.num_experts, decision.layout)

    w13 = packed("w13", experts.w13, experts.attributes.row_order13)
    w2 = packed("w2", experts.w2, "plain")
    return _Packed(PackedTensors(w13, w2, *stacked_biases(experts)), scale_error)


def _verified(
    item: _Work,
    new: PackedExperts,
    rule: quantizer.Rule,
    verify: bool,
    sqnr_floor: float | Mapping[str, float] | None,
) -> BlockReport:
    decision = item.plan
    size = sum(b.numel() * b.element_size() for b in (new.packed_w13, new.packed_w2))
    size += sum(4 * b.numel() for b in (new.bias13, new.bias2) if b is not None)
    kept = item.spec.experts.given_scheme
    base = (
        decision.path,
        decision.also_at,
        decision.scheme,
        "torchao's codes" if kept else rule,
        decision.router,
    )
    if not verify or item.adapter is None:
        return BlockReport(*base, decision.bytes_before, size)
    check = verification.check_quantized(decision.path, item.spec, new)
    verification.check_floor(
        decision.path, check, decision.scheme, _floor_for(decision, sqnr_floor)
    )
    sampled = f"all {item.adapter.experts} experts, {check.tokens} tokens"
    if decision.router == "fused":
        sampled += f"; router: {item.adapter.tokens} tokens"
    return BlockReport(
        *base,
        decision.bytes_before,
        size,
        item.adapter.error,
        check.sqnr_db,
        check.worst_expert_db,
        sampled,
    )


def _floor_for(decision: BlockPlan, sqnr_floor: float | Mapping[str, float] | None) -> float | None:
    if not isinstance(sqnr_floor, Mapping):
        return sqnr_floor
    paths = (decision.path, *decision.also_at)
    matching = (v for p, v in sqnr_floor.items() if any(fnmatchcase(path, p) for path in paths))
    return next(matching, None)


def replace_moe_with_quantized_op(
    model: nn.Module, *, group_size: int = 32, weight_nbit: int = 4
) -> nn.Module:
    """The call of ExecuTorch's own transform, with moepack's operator. Returns the root.

    Differences: a model without an MoE block is an error, a root that is itself the block is
    replaced, every block is verified, and score_func "softmax_all" and Hugging Face blocks work. As
    there, the replacements keep the shape of their input.
    """
    report = quantize_(model, f"int{weight_nbit}-g{group_size}")
    for module in report.model.modules():
        if isinstance(module, QuantizedMoEFFN):
            module.returns = "shaped"
    return report.model
