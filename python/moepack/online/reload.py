"""New weights for a model that is packed already, into the tensors that it has.

The float structure is built again on the meta device and filled as while loading. What a complete
layer becomes is copied into the model's own tensors, whose addresses stay: compiled graphs and
in-memory ExportedPrograms see the new weights (a .pte owns its own and does not).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moepack import packing, placement
from moepack.errors import BadWeights, MoePackError, UnsupportedError
from moepack.modules import PackedExperts, QuantizedMoEFFN
from moepack.online.blocks import OnlineBlock
from moepack.online.filling import Filled, Filling, shortened
from moepack.online.loading import Settings, meta_model, online_blocks
from moepack.online.serving import model_lock
from moepack.online.sources import open_source
from moepack.placement import put
from moepack.planner import FLOAT, plan

_BLOBS = ("packed_w13", "packed_w2")


class Change(NamedTuple):
    """A new value for one of the model's tensors, or for an expert's part of it."""

    name: str
    target: Tensor
    value: Tensor


@dataclass
class Reloaded:
    """Which layers have new weights, and how many tensors were written."""

    layers: list[str] = field(default_factory=list)
    tensors: int = 0


def reload_weights(
    model: nn.Module,
    source: str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    partial: bool = False,
    *,
    settings: Settings | None = None,
) -> Reloaded:
    """Replaces the weights of a packed Hugging Face model in place, layer by layer.

    `source`: a checkpoint directory, a state_dict, or (name, tensor) one by one, under the
    checkpoint's names, in any order, in as many pieces as there are tensors; memory of the pieces
    may be reused by the caller. FP8 and MXFP4 are taken as while loading. A directory or state_dict
    may also be that of a model packed alike: its blobs are verified and copied.

    A layer is checked when it is complete and then copied under its lock; the model's lock is held
    from the first copy to the end (`moepack.serving`). A layer that is incomplete, misshapen or not
    finite keeps its old weights; at the end BadWeights names all of them. What no checkpoint holds
    is untouched. `partial=True`: only what came is replaced, and missing names are no error.

    `settings` are for their methods, floor and threads: schemes and routers are the model's.
    """
    twin = _twin(model)
    blocks = _blocks_as_packed(model, twin, settings or Settings())
    opened = open_source(source)
    is_packed = any(name.endswith(_BLOBS) for name in opened.names or ())
    if is_packed:
        _require_layout(model)
        for block in blocks:
            put(twin, block.found, block.spec, block.empty())
        blocks.clear()
    live = model.state_dict()
    done = Reloaded()
    with ExitStack() as held:

        def apply(filled: Filled) -> None:
            changes = _changes(filled, live)
            if not done.layers:
                held.enter_context(model_lock(model).writing())
            with _modules_locked(model, changes):
                for change in changes:
                    change.target.copy_(change.value)
            done.layers.append(filled.group.name)
            done.tensors += len(changes)

        filling = Filling(twin, blocks, apply, opened.names, keeps_going=True, partial=partial)
        if is_packed and not partial:
            filling.require_buffers_of(PackedExperts)
        blocks.clear()
        for stored in opened:
            filling.add(stored)
        filling.end()
    _report(filling)
    return done


def _twin(model: Any) -> nn.Module:
    if not hasattr(model, "base_model_prefix") or not hasattr(model, "config"):
        raise UnsupportedError(
            f"{type(model).__name__} is no transformers model: without its config the float layers "
            "that a checkpoint describes are not known. Quantize the new weights and use "
            "load_state_dict"
        )
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return meta_model(model.config, dtype, type(model))


def _blocks_as_packed(model: nn.Module, twin: nn.Module, settings: Settings) -> list[OnlineBlock]:
    """The twin's blocks with the schemes and routers that the model's packed modules have."""
    packed = {p: m for p, m in model.named_modules() if isinstance(m, PackedExperts)}
    if not packed:
        raise UnsupportedError(
            f"{type(model).__name__} holds no module packed by moepack; use load_state_dict"
        )
    is_fused = any(isinstance(m, QuantizedMoEFFN) for m in packed.values())
    recipe: dict[str, str] = {}
    for block in plan(twin).blocks:
        inside = [m for p, m in packed.items() if p == block.path or p.startswith(f"{block.path}.")]
        recipe[block.path] = inside[0].scheme if inside else FLOAT
    chosen = Settings(
        recipe=recipe,
        router="auto" if is_fused else "outside",
        layout=next(iter(packed.values())).attributes.layout,
        sqnr_floor=settings.sqnr_floor,
        threads=settings.threads,
        methods=settings.methods,
    )
    return online_blocks(twin, chosen)[0]


def _require_layout(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, PackedExperts) and module.attributes.layout != "moepack":
            raise UnsupportedError(
                f"{path}: packed weights are taken in the layout 'moepack', this module has "
                f"{module.attributes.layout!r}; reload the float checkpoint"
            )


def _changes(filled: Filled, live: Mapping[str, Tensor]) -> list[Change]:
    """All of a group; checked, nothing is written yet."""
    found: list[Change] = []
    for name, value in filled.tensors.items():
        _require(name, live, value)
        if name.endswith(_BLOBS):
            _require_alike(name, live[name], value)
        found.append(Change(name, live[name], value))
    for block, new in filled.packed:
        module = placement.placed(block.found.module, block.spec, new)
        for path, value in module.state_dict().items():
            if value.device.type == "meta" or _is_unknown(value):
                continue
            name = f"{block.path}.{path}".removeprefix(".")
            _require(name, live, value, finite=False)
            if name.endswith(_BLOBS):
                found += [Change(name, live[name][e], value[e]) for e in sorted(block.done)]
            else:
                found.append(Change(name, live[name], value))
    return found


def _require_alike(name: str, old: Tensor, new: Tensor) -> None:
    """Raises PackedFormatError or BadWeights unless blobs are sound and of matrices like these."""
    for expert, (was, blob) in enumerate(zip(old, new, strict=True)):
        packing.verify(blob)
        here, there = (replace(packing.read_header(b), exponent=0, crc32=0) for b in (was, blob))
        if here != there:
            raise BadWeights(f"{name} expert {expert} is packed as {there}, the model's as {here}")


def _require(name: str, live: Mapping[str, Tensor], value: Tensor, finite: bool = True) -> None:
    if name not in live:
        raise BadWeights(f"{name}: the model has no such tensor; was it packed otherwise?")
    if value.shape != live[name].shape:
        raise BadWeights(f"{name} is {list(value.shape)}, the model's is {list(live[name].shape)}")
    if finite and value.is_floating_point() and value.numel():
        low, high = torch.aminmax(value)
        if not (low.isfinite() and high.isfinite()):
            at = (~value.isfinite()).nonzero()[0].tolist()
            raise BadWeights(f"{name}: the value at {at} is not finite")


def _is_unknown(value: Tensor) -> bool:
    """Made from what did not come: NaN throughout, where all that came is finite."""
    return value.is_floating_point() and value.numel() > 0 and bool(value.isnan().all())


@contextmanager
def _modules_locked(model: nn.Module, changes: list[Change]) -> Iterator[None]:
    owners = dict.fromkeys(change.name.rpartition(".")[0] for change in changes)
    with ExitStack() as held:
        for module in map(model.get_submodule, owners):
            if isinstance(module, PackedExperts):
                held.enter_context(module.lock.writing())
        yield


def _report(filling: Filling) -> None:
    problems = [f"{name}: {', '.join(why)}" for name, why in filling.unfinished().items()]
    if filling.unexpected:
        problems.append(f"names that the model does not have: {shortened(filling.unexpected)}")
    if any(name.endswith(_BLOBS) for name in filling.unexpected):
        problems.append(
            "tensors of a packed model are taken from a directory or a state_dict, not one by one"
        )
    if problems:
        raise BadWeights(
            f"{len(problems)} parts kept their old weights: " + "; ".join(problems)
        ) from _first_error(filling)


def _first_error(filling: Filling) -> MoePackError | None:
    return next((g.error for g in filling.groups.values() if g.error is not None), None)
