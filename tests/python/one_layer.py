"""A language model of one large packed block, exported in the shapes that programs come in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

import moepack
from made_programs import made_model, scratch
from moepack.exporter.lowering import write_program
from moepack.modules import QuantizedMoEFFN

VOCAB, CONTEXT = 320, 64
# No token ends the text.
CONSTANTS = {"get_max_seq_len": CONTEXT, "get_vocab_size": VOCAB, "get_eos_ids": [VOCAB]}
BYTES = 57_000_000  # of its packed experts, at least
PROMPT = [5, 300, 7]


class OneLayer(nn.Module):
    """A language model of one packed block, whose next token depends on the last and its place."""

    def __init__(self, block: QuantizedMoEFFN) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.block = block
        self.embedding = nn.Parameter(torch.randn(VOCAB, block.dim, generator=generator))
        self.places = nn.Parameter(torch.randn(CONTEXT, block.dim, generator=generator))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding[ids[0]] + self.places[positions]
        logits: Tensor = (self.block(x) @ self.embedding.T)[None, -1:]
        return logits

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            with torch.inference_mode():
                logits = self(torch.tensor([ids[-1:]]), torch.tensor([len(ids) - 1]))
            ids.append(int(logits[0, -1].argmax()))
        return ids[len(prompt) :]


@cache
def one_layer() -> OneLayer:
    """32 packed experts, four different ones."""
    model = made_model("mixtral", hidden_size=512, intermediate_size=2048)
    moepack.quantize_(model)
    (block,) = (module for module in model.modules() if isinstance(module, QuantizedMoEFFN))
    gate = torch.randn(32, 512, generator=torch.Generator().manual_seed(1))
    packed = (block.packed_w13.repeat(8, 1), block.packed_w2.repeat(8, 1))
    return OneLayer(
        QuantizedMoEFFN(gate, None, None, *packed, None, None, block.routing, block.attributes)
    )


@cache
def one_layer_program(tokens: int, apart: bool) -> tuple[str | Path, ...]:
    """The arguments that name a program which takes up to `tokens` at once."""
    folder = scratch() / f"one_layer_{tokens}_{apart}"
    folder.mkdir()
    program, weights = folder / "model.pte", folder / "weights.ptd"
    example = (torch.zeros(1, min(tokens, 2), dtype=torch.long), torch.arange(min(tokens, 2)))
    count = torch.export.Dim("tokens", min=1, max=tokens) if tokens > 1 else None
    shapes = ({1: count}, {0: count}) if count else None
    write_program(one_layer(), example, shapes, CONSTANTS, program, weights if apart else None)
    return (program, "--weights", weights) if apart else (program,)


def damaged(path: Path, target: Path) -> Path:
    """A copy with one bit changed in the payload of the second blob."""
    data = bytearray(path.read_bytes())
    second = data.index(b"MOEP", data.index(b"MOEP") + 4)
    data[second + 64 + 100] ^= 1
    target.write_bytes(data)
    return target
