"""A checkpoint directory becomes a packed one, expert by expert, without a model in memory.

Every packed block is a file of its own, made in place; a run that was interrupted goes on after
the files that are finished. All other tensors are copied byte for byte, under their names.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moepack import packing
from moepack.errors import MoePackError, NoMoEBlock
from moepack.json_text import read_object
from moepack.manifest import METHOD_NAME
from moepack.modules import PackedExperts
from moepack.online.adapter import check_classes
from moepack.online.blocks import OnlineBlock
from moepack.online.completeness import require_float, require_places
from moepack.online.converted import Converted, described
from moepack.online.files import Finishing, MappedFile, copy_tensors
from moepack.online.filling import Filled, Filling
from moepack.online.loading import Progress, Settings, described_model, online_blocks
from moepack.online.mapping import NameMapping
from moepack.online.memory import PeakMemory, available_bytes
from moepack.online.sources import SafetensorsDirectory
from moepack.online.stacks import FileStack
from moepack.online.stored import Decoder, StoredTensor
from moepack.safetensors_file import read_entries
from moepack.staging import put_in_place, require_output, writing
from moepack.tokenizer import FILES as TOKENIZER_FILES

INDEX = "model.safetensors.index.json"
_STATE = "moepack-progress.json"
_COPIED = ("generation_config.json", *TOKENIZER_FILES)
_FLOAT_COPIES = 4  # an expert's matrices as read, in room, in fp32, and while they are searched
_SCALE_COPIES = 2  # the scale of each value, as read and in room, where they may be kept


def quantize_checkpoint(
    directory: str | Path,
    out: str | Path,
    settings: Settings | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Packs the experts of a checkpoint directory into the new directory `out`.

    Peak anonymous memory is a few experts. `out` appears when it is complete; until then the work
    lies beside it, and the same call goes on with it. Raises MoePackError if `out` exists and
    `force` is false, and without the disk or memory for it, with the numbers; else as `load`.
    """
    source, target = Path(directory), Path(out)
    require_output(target, force, [source])
    began = time.perf_counter()
    with PeakMemory() as memory, torch.no_grad():
        work = _Work(source, target, settings or Settings())
        try:
            done = work.run(progress)
            work.put_in_place(force)
        except BaseException as error:
            if not work.remove_if_useless() and isinstance(error, MoePackError):
                error.args = (
                    f"{error}; blocks that are finished lie in {work.stage}, where the same "
                    "command goes on: remove it if you do not",
                )
            raise
    done.peak_anonymous_bytes = memory.peak - memory.before
    done.seconds = time.perf_counter() - began
    return done


class _Work:
    def __init__(self, source: Path, target: Path, settings: Settings) -> None:
        self.source, self.target, self.settings = source, target, settings
        self.stage = target.parent / f".{target.name}.unfinished"
        self.config, self.model = described_model(source, torch.float32)
        self.tensors = SafetensorsDirectory(source)
        if getattr(self.config, "quantization_config", None) is None:
            require_float(source)
        self.files: dict[str, MappedFile] = {}
        self.blocks, _ = online_blocks(self.model, settings, self._allocate)
        if not self.blocks:
            raise NoMoEBlock(f"{source}: nothing to quantize: every MoE block is excluded")
        self.empty = {block.path: block.empty() for block in self.blocks}
        self.prefix = {b.path: f"{b.packed_path}.".removeprefix(".") for b in self.blocks}
        self.consumed = _consumed(self.model, self.blocks, self.tensors)

    def run(self, progress: Progress | None) -> Converted:
        done = Converted(self.target)
        Filling(self.model, (), lambda filled: None, self.tensors.names).check_names()
        require_places(self.source, self.model, self.tensors.names)
        done.adapter_checks = check_classes(self.blocks)
        self._begin()
        self._require_room()
        todo = [block for block in self.blocks if not self._file_of(block).is_file()]
        done.resumed = len(self.blocks) - len(todo)
        packed: set[str] = set()

        def apply(filled: Filled) -> None:
            for block, new in filled.packed:
                self._write(block, new, finishing)
                packed.add(block.path)
                if progress is not None:
                    progress(f"packing {block.where}", done.resumed + len(packed), total)

        total = len(self.blocks)
        wanted = frozenset().union(*(self.consumed[block.path] for block in todo))
        filling = Filling(self.model, todo, apply, wanted, only_blocks=True)
        with Finishing() as finishing:
            for stored in self._some(wanted):
                filling.add(stored)
            filling.end()
            filling.require_everything()
        done.bytes_copied = self._copy_the_rest(progress)
        self._describe()
        for block in self.blocks:
            size = self._file_of(block).stat().st_size
            done.bytes_packed += size
            done.blocks.append(described(block, size, is_new=block.path in packed))
        return done

    def remove_if_useless(self) -> bool:
        """Removes the unfinished work unless a file of it is finished; is it gone?"""
        if not any(self.stage.glob("*.safetensors")):
            shutil.rmtree(self.stage, ignore_errors=True)
        return not self.stage.exists()

    def put_in_place(self, force: bool) -> None:
        require_output(self.target, force, [self.source])
        (self.stage / _STATE).unlink()
        put_in_place(self.stage, self.target)

    def _begin(self) -> None:
        """Goes on with unfinished work if it is this one, else begins anew."""
        state = {
            "files": {
                f.name: [f.stat().st_size, f.stat().st_mtime_ns]
                for f in sorted(self.source.glob("*.safetensors"))
            },
            "blocks": {
                b.path: [b.decision.scheme, b.decision.router, b.decision.layout]
                for b in self.blocks
            },
        }
        file = self.stage / _STATE
        with suppress(MoePackError):  # there is none, or it was cut short
            if read_object(file) == state:
                return
        shutil.rmtree(self.stage, ignore_errors=True)
        with writing(self.target):
            self.stage.mkdir(parents=True)
            _write_json(file, state)

    def _require_room(self) -> None:
        packed = sum(
            b.numel() * b.element_size() for m in self.empty.values() for b in m.buffers(False)
        )
        inside = frozenset().union(*self.consumed.values())
        copied = 0
        for file in self.source.glob("*.safetensors"):
            for name, entry in read_entries(file)[0].items():
                first, last = entry["data_offsets"]
                copied += 0 if name in inside else last - first
        there = sum(f.stat().st_size for f in self.stage.iterdir())
        need, free = packed + copied - there, shutil.disk_usage(self.stage).free
        if need > free:
            raise MoePackError(
                f"{self.target}: {need:,} more bytes of disk are needed ({packed:,} of packed "
                f"experts, {copied:,} copied), {free:,} are free"
            )
        expert = max(
            (b.spec.experts.model_dim * b.spec.experts.inner_dim * 3 * 4 for b in self.blocks),
            default=0,
        )
        copies = _FLOAT_COPIES + _SCALE_COPIES * any(b.method.may_keep for b in self.blocks)
        memory, available = copies * self.settings.workers * expert, available_bytes()
        if 0 < available < memory:
            raise MoePackError(
                f"about {memory:,} bytes of memory are needed for {self.settings.workers} experts "
                f"at a time, {available:,} are available; use fewer threads"
            )

    def _some(self, names: frozenset[str]) -> Iterator[StoredTensor]:
        return (self.tensors.tensor(name) for name in self.tensors.sorted_names() if name in names)

    def _file_of(self, block: OnlineBlock) -> Path:
        return self.stage / f"experts-{self.blocks.index(block):05d}.safetensors"

    def _allocate(self, path: str, name: str, shape: tuple[int, int]) -> FileStack:
        if path not in self.files:
            block = next(b for b in self.blocks if b.path == path)
            shapes = {
                n: (b.dtype, tuple(b.shape)) for n, b in _own_buffers(self.empty[path]).items()
            }
            prefix = self.prefix[path]
            self.files[path] = MappedFile(
                self._file_of(block), {f"{prefix}{n}": shape for n, shape in shapes.items()}
            )
        return FileStack(self.files[path], f"{self.prefix[path]}{name}")

    def _write(self, block: OnlineBlock, new: PackedExperts, finishing: Finishing) -> None:
        file = self.files.pop(block.path)
        prefix = self.prefix[block.path]
        for name, buffer in _own_buffers(new).items():
            if name not in ("packed_w13", "packed_w2"):
                file.tensors[f"{prefix}{name}"].copy_(buffer.nan_to_num(0.0))
        if block.decision.layout == "moepack":
            packing.verify(new.packed_w13[0])
        finishing.finish(file)

    def _copy_the_rest(self, progress: Progress | None) -> int:
        inside = frozenset().union(*self.consumed.values())
        files = sorted(self.source.glob("*.safetensors"))
        total = 0
        for number, file in enumerate(files):
            entries, _ = read_entries(file)
            names = [name for name in entries if name not in inside]
            target = self.stage / f"rest-{number:05d}.safetensors"
            if names and not target.is_file():
                copy_tensors(file, names, target)
            total += target.stat().st_size if names else 0
            if progress is not None:
                progress(f"copying {file.name}", number + 1, len(files))
        return total

    def _describe(self) -> None:
        home: dict[str, str] = {}
        total = 0
        for file in sorted(self.stage.glob("*.safetensors")):
            for name, entry in read_entries(file)[0].items():
                home[name] = file.name
                total += entry["data_offsets"][1] - entry["data_offsets"][0]
        index = {"metadata": {"total_size": total}, "weight_map": home}
        _write_json(self.stage / INDEX, index)
        config = read_object(self.source / "config.json")
        config["quantization_config"] = {
            "quant_method": METHOD_NAME,
            "scheme": self.blocks[0].decision.scheme,
            "modules": [[b.path, b.decision.scheme] for b in self.blocks],
            "exclude": list(self.settings.exclude),
            "router": self.settings.router,
            "layout": self.settings.layout,
        }
        for pattern, scheme in (self.settings.recipe or {}).items():
            config["quantization_config"]["modules"].append([pattern, scheme])
        _write_json(self.stage / "config.json", config)
        for name in _COPIED:
            if (self.source / name).is_file():
                shutil.copyfile(self.source / name, self.stage / name)


def _consumed(
    model: nn.Module, blocks: list[OnlineBlock], tensors: SafetensorsDirectory
) -> dict[str, frozenset[str]]:
    """The stored names of which each block is made, scales included."""
    assert tensors.names is not None
    mapping, decoder = NameMapping(model), Decoder(tensors.names)
    homes = {
        f"{path}.{name}".removeprefix("."): block.path
        for block in blocks
        for name in block.needs
        for path in block.found.paths
    }
    found: dict[str, set[str]] = {block.path: set() for block in blocks}
    for name in tensors.sorted_names():
        target = mapping.target(decoder.logical_name(name))
        if target is not None and target.name in homes:
            found[homes[target.name]].add(name)
    return {path: frozenset(names) for path, names in found.items()}


def _own_buffers(module: PackedExperts) -> dict[str, Tensor]:
    return dict(module.named_buffers(recurse=False))


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
