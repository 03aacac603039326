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

{how_to_run}

Look into it, and check every byte against `manifest.json`:

    moepack inspect . --verify

The program `model.pte` has the method `forward(input_ids [1, T] int64, cache_position [T] int64)`,
T from 1 to {max_seq_len}, which returns logits and keeps its key/value cache as state. It needs
{library} in the process that loads it. Weights keep the licence of the
model they come from.
"""
_RUN = """\
Run it:

    moepack run . --prompt "..."\
"""
_UPSTREAM = """\
Its experts are calls of ExecuTorch's own `llama::quantized_moe_ffn`. In Python
`moepack.accelerate_upstream()` runs them on moepack's kernel, and
`moepack convert . --layout moepack -o OUT` makes a directory that `moepack run` takes.\
"""


def card(manifest: Manifest, name: str) -> str:
    upstream = manifest.options.get("upstream", False)
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
        how_to_run=_UPSTREAM if upstream else _RUN,
        library="ExecuTorch's `custom_ops`" if upstream else "moepack's ExecuTorch kernel library",
    )


def renewed_card(manifest: Manifest, old: str) -> str:
    """The card of a program that was changed, under the name that the old one has."""
    title = old.partition("\n")[0]
    return card(manifest, title.removeprefix("# ").removesuffix(", packed by moepack"))


def _size(manifest: Manifest) -> str:
    megabytes = {name: f"{entry.bytes / 1e6:.1f} MB" for name, entry in manifest.files.items()}
    if WEIGHTS not in megabytes:
        return megabytes[PROGRAM]
    return f"{megabytes[PROGRAM]}, and its weights in `{WEIGHTS}`, {megabytes[WEIGHTS]}"
