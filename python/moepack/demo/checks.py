"""The exported program against the eager packed model."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from moepack.exporter.lowering import write_program
from moepack.runtime import Generation, Program, executorch_runtime

_LAYER_TOKENS = (1, 17, 64)


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    found: str


def token_check(
    model: nn.Module, program: Program, prompt: Sequence[int], new_tokens: int
) -> Check:
    """Greedy tokens of the program and of the eager model, the same number of them."""
    eager = greedy_tokens(model, prompt, new_tokens, program.eos_ids)
    exported = list(Generation(program, prompt, max_new_tokens=new_tokens))
    equal = sum(a == b for a, b in zip(eager, exported, strict=False))
    return Check(
        "same greedy tokens",
        eager == exported,
        f"{equal} of {len(eager)} tokens are the same in the .pte and the eager packed model",
    )


def greedy_tokens(
    model: nn.Module, prompt: Sequence[int], new_tokens: int, eos_ids: frozenset[int]
) -> list[int]:
    """Without a cache: every step runs the whole sequence."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(new_tokens):
            token = int(
                model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()
            )
            if token in eos_ids:
                break
            ids.append(token)
    return ids[len(prompt) :]


def layer_check(model: nn.Module, path: str, scratch: Path) -> Check:
    """One packed block alone, exported and run: every bit as the eager operator gives it."""
    block = model.get_submodule(path)
    differing = [
        tokens
        for tokens, (eager, exported) in layer_outputs(block, scratch, _LAYER_TOKENS).items()
        if not torch.equal(eager, exported)
    ]
    found = (
        f"{path} alone: outputs differ for T in {differing}"
        if differing
        else f"{path} alone: bit-equal for T in {list(_LAYER_TOKENS)}"
    )
    return Check("one layer is bit-equal", not differing, found)


def layer_outputs(
    block: nn.Module, scratch: Path, token_counts: Sequence[int]
) -> dict[int, tuple[Tensor, Tensor]]:
    """(eager, exported) outputs of the block for each number of tokens, on made-up input."""
    width = int(block.get_buffer("gate_weight").shape[1])
    generator = torch.Generator().manual_seed(0)
    count = torch.export.Dim("tokens", min=1, max=max(token_counts))
    outputs = {}
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        path = Path(folder) / "layer.pte"
        write_program(block, (torch.zeros(2, width),), ({0: count},), {}, path)
        method = executorch_runtime().load_program(path).load_method("forward")
        for tokens in token_counts:
            x = torch.randn(tokens, width, generator=generator)
            with torch.inference_mode():
                outputs[tokens] = block(x), method.execute((x,))[0]
    return outputs
