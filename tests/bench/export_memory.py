"""What exporting a model of packed experts takes: anonymous memory, next to the size of its weights.

    python tests/bench/export_memory.py [--gib 2.5] [--weights-file] [--folder DIR] [--json FILE]

Makes a layer whose largest tensor (w13 of all experts) has so many GiB in a safetensors file, exports it as two methods
(prefill and decode), maps the program and runs it. Every token is routed to the last expert; its result is compared, bit
for bit, with the eager operator on the whole layer and on that expert alone. Needs three times the size of the layer on
the disk of DIR (default: the system's folder for temporary files), and nothing of it in anonymous memory.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from moepack import ops, packing
from moepack.attributes import ExpertAttributes, RoutingAttributes
from moepack.exporter.lowering import Method, write_methods
from moepack.modules import QuantizedMoEFFN
from moepack.online.files import MappedFile
from moepack.online.memory import PeakMemory
from moepack.quantizer import QuantizedMatrix
from moepack.runtime import executorch_runtime
from moepack.schemes import scheme

D, F = 2048, 1024
SCHEME = scheme("int4-g32")
DISTINCT = 8  # different experts, again and again; the last one is like no other
PREFILL_TOKENS = 16
ROUTING = RoutingAttributes(1, "softmax")
EXPERTS = ExpertAttributes(F, SCHEME.name)


def made_blob(rows: int, cols: int, row_order: packing.RowOrder, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (rows, cols), generator=generator, dtype=torch.int8)
    scales = torch.rand(rows, SCHEME.groups(cols), generator=generator) + 0.5
    scales /= SCHEME.code_max * cols**0.5
    return packing.pack(QuantizedMatrix(SCHEME, codes, scales.to(torch.float16), 0), row_order)


def made_layer(experts: int, file: Path) -> QuantizedMoEFFN:
    """A layer whose packed tensors are mapped from `file`, which is written first."""
    w13 = [made_blob(2 * F, D, "gate_up", 2 * i) for i in range(DISTINCT + 1)]
    w2 = [made_blob(D, F, "plain", 2 * i + 1) for i in range(DISTINCT + 1)]
    shapes = {
        name: (torch.uint8, (experts, blobs[0].numel()))
        for name, blobs in (("w13", w13), ("w2", w2))
    }
    writing = MappedFile(file, shapes)
    for name, blobs in (("w13", w13), ("w2", w2)):
        stack = writing.tensors[name]
        for e in range(experts):
            stack[e] = blobs[e % DISTINCT if e < experts - 1 else DISTINCT]
        del stack
    writing.finish()
    with safe_open(file, framework="pt") as opened:
        packed13, packed2 = opened.get_tensor("w13"), opened.get_tensor("w2")
    gate = torch.randn(experts, D, generator=torch.Generator().manual_seed(0))
    return QuantizedMoEFFN(gate, None, None, packed13, packed2, None, None, ROUTING, EXPERTS).eval()


def methods(layer: QuantizedMoEFFN) -> dict[str, Method]:
    return {
        "prefill": Method(layer, (torch.zeros(PREFILL_TOKENS, D),)),
        "decode": Method(layer, (torch.zeros(1, D),)),
    }


def check(layer: QuantizedMoEFFN, program: Any) -> None:
    """Raises SystemExit unless program, eager layer and last expert alone give the same bits."""
    generator = torch.Generator().manual_seed(1)
    for name, tokens in (("prefill", PREFILL_TOKENS), ("decode", 1)):
        # Far along the last expert's row of the gate: no other comes near.
        x = layer.gate_weight[-1] + 0.1 * torch.randn(tokens, D, generator=generator)
        alone = ops.quantized_experts(
            x,
            torch.zeros(tokens, 1, dtype=torch.int64),
            torch.ones(tokens, 1),
            layer.packed_w13[-1:].clone(),
            layer.packed_w2[-1:].clone(),
            None,
            None,
            F,
            SCHEME.name,
        )
        found = program.load_method(name).execute((x,))[0]
        for other, expected in (("the eager layer", layer(x)), ("the last expert alone", alone)):
            if not torch.equal(found, expected):
                raise SystemExit(f"{name}: the program's result is not that of {other}")


@torch.no_grad()
def measure(gib: float, weights_file: bool, folder: Path) -> dict[str, Any]:
    """Numbers of bytes, and `export_ratio`: peak anonymous memory while exporting / packed size."""
    blob_bytes = packing.packed_bytes(SCHEME, 2 * F, D, "gate_up")
    experts = max(2, math.ceil(gib * 2**30 / blob_bytes))
    path, weights = folder / "layer.pte", folder / "layer.ptd" if weights_file else None
    # What the first export imports and compiles is the same for every model: it is not counted.
    small = made_layer(2, folder / "small.safetensors")
    write_methods(methods(small), {}, folder / "small.pte")
    runtime = executorch_runtime()

    layer = made_layer(experts, folder / "layer.safetensors")
    packed = layer.packed_w13.nbytes + layer.packed_w2.nbytes
    start = time.perf_counter()
    with PeakMemory() as exporting:
        write_methods(methods(layer), {}, path, weights)
    seconds = time.perf_counter() - start
    with PeakMemory() as running:
        program = runtime.load_program(path, data_path=weights)
        check(layer, program)
    written = path.stat().st_size + (weights.stat().st_size if weights else 0)
    if written > 1.02 * (packed + layer.gate_weight.nbytes) + 2**20:
        raise SystemExit(f"{written:,} bytes written for {packed:,}: weights are stored twice")
    return {
        "experts": experts,
        "largest_tensor_bytes": layer.packed_w13.nbytes,
        "packed_bytes": packed,
        "written_bytes": written,
        "export_seconds": round(seconds, 1),
        "anonymous_bytes_before": exporting.before,
        "export_anonymous_bytes": exporting.peak - exporting.before,
        "export_ratio": round((exporting.peak - exporting.before) / packed, 4),
        "run_anonymous_bytes": running.peak - running.before,
        "run_ratio": round((running.peak - running.before) / packed, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=2.5)
    parser.add_argument("--weights-file", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        result = measure(arguments.gib, arguments.weights_file, Path(folder))
    print(
        f"{result['packed_bytes'] / 2**30:.2f} GiB packed, largest tensor "
        f"{result['largest_tensor_bytes'] / 2**30:.2f} GiB, {result['experts']} experts: "
        f"the last one's result is right to the bit\n"
        f"exporting: {result['export_anonymous_bytes'] / 2**20:.0f} MiB of anonymous memory, "
        f"{result['export_ratio']:.3f} of the packed size; {result['export_seconds']} s\n"
        f"loading and running: {result['run_anonymous_bytes'] / 2**20:.0f} MiB, "
        f"{result['run_ratio']:.3f} of the packed size"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
