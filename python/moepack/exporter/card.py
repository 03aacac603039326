"""README.md of an exported directory: what it is and how to run it."""

from __future__ import annotations

from moepack.manifest import PROGRAM, WEIGHTS, Manifest

_TEXT = """\
# {name}, packed by moepack

A Mixture-of-Experts language model whose experts are stored as `{scheme}`, as one ExecuTorch
program for CPUs. Made by moepack {moepack} with torch {torch} and executorch {executorch}.

| | |
|---|---|
| model class | {architecture} |
| experts | {scheme} |
| other linear layers | {linear} |
| embedding | {embedding} |
| longest sequence | {max_seq_len} tokens |
| logits | {logits} |
| program | {size} |

Run it:

    moepack run . --prompt "..."

Look into it, and check every byte against `manifest.json`:

    moepack inspect . --verify

The program `model.pte` has the method `forward(input_ids [1, T] int64, cache_position [T] int64)`,
T from 1 to {max_seq_len}, which returns logits and keeps its key/value cache as state. It needs
moepack's ExecuTorch kernel library in the process that loads it. Weights keep the licence of the
model they come from.
"""


def card(manifest: Manifest, name: str) -> str:
    return _TEXT.format(
        name=name,
        scheme=manifest.scheme,
        moepack=manifest.versions["moepack"],
        torch=manifest.versions["torch"],
        executorch=manifest.versions["executorch"],
        architecture=manifest.model.get("architecture"),
        linear=manifest.options["linear"],
        embedding=manifest.options["embedding"],
        logits=manifest.options["logits"],
        max_seq_len=manifest.options["max_seq_len"],
        size=_size(manifest),
    )


def _size(manifest: Manifest) -> str:
    megabytes = {name: f"{entry.bytes / 1e6:.1f} MB" for name, entry in manifest.files.items()}
    if WEIGHTS not in megabytes:
        return megabytes[PROGRAM]
    return f"{megabytes[PROGRAM]}, and its weights in `{WEIGHTS}`, {megabytes[WEIGHTS]}"
