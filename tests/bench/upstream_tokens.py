"""Greedy tokens of a program with ExecuTorch's own MoE operator, without and with the acceleration.

The model that ships with moepack is exported with upstream's operator and blobs and fed text that
it was not trained on, in windows, every next token given. At each position the difference of
upstream's two best logits, the margin, is held against what int8 activations can do to it: six
standard deviations of that difference, its gradient by each quantized activation times a rounding
error that is uniform within half a step. docs/reference/activation-error.md derives it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moepack
from moepack.acceleration import accelerate_upstream
from moepack.checkpoint import load_model
from moepack.demo import HELDOUT, MODEL
from moepack.exporter import export
from moepack.modules import QuantizedMoEFFN
from moepack.reference.arithmetic import ACTIVATION_GROUP
from moepack.runtime import Program
from moepack.tokenizer import Tokenizer

SCHEME = "int4-g32"
WINDOW = 128
DEVIATIONS = 6
MIN_SAME = 0.99
MAX_FLOAT_ERROR = 1e-3  # of logits: upstream against plain torch with the same weights


class UpstreamFFN(QuantizedMoEFFN):
    """A packed block of torchao's layout that calls ExecuTorch's own operator."""

    no_bias: Tensor

    def _routed(self, x: Tensor, router_x: Tensor | None) -> Tensor:
        experts = moepack.schemes.scheme(self.attributes.scheme)
        result: Tensor = torch.ops.llama.quantized_moe_ffn(
            x, self.gate_weight, self.no_bias, self.packed_w13, self.packed_w2,
            self.num_activated_experts, self.num_experts, self.hidden_dim, self.dim,
            experts.group, experts.bits, "softmax", 1.0,
        )  # fmt: skip
        return result


class FloatFFN(nn.Module):
    """The same block in float, with a place where the error of each quantized activation enters."""

    def __init__(self, packed: QuantizedMoEFFN) -> None:
        super().__init__()
        experts = range(packed.num_experts)
        self.w13 = torch.stack([packed.w13(e) for e in experts])
        self.w2 = torch.stack([packed.w2(e) for e in experts])
        self.gate_weight, self.top_k = packed.gate_weight, packed.num_activated_experts
        self.places: list[tuple[Tensor, Tensor]] = []  # an error to be added, the values there

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits, ids = (x @ self.gate_weight.T).topk(self.top_k)
        weights = logits.softmax(-1)
        x = self._place(x)
        hidden = torch.zeros(*ids.shape, self.w2.shape[2])
        for expert, token, slot in _uses(ids):
            gate, up = (x[token] @ self.w13[expert].T).chunk(2, dim=-1)
            hidden = hidden.index_put((token, slot), F.silu(gate) * up)
        hidden = self._place(hidden)
        y = torch.zeros_like(x)
        for expert, token, slot in _uses(ids):
            output = hidden[token, slot] @ self.w2[expert].T
            y = y.index_add(0, token, weights[token, slot, None] * output)
        return y.view(hidden_states.shape)

    def _place(self, values: Tensor) -> Tensor:
        error = torch.zeros_like(values, requires_grad=True)
        self.places.append((error, values.detach()))
        return values + error


def _uses(ids: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        yield expert, token, slot


def replaced(model: nn.Module, new: type[FloatFFN]) -> list[FloatFFN]:
    """Puts float blocks in the place of the packed ones; returns them."""
    found = [(p, m) for p, m in model.named_modules() if isinstance(m, QuantizedMoEFFN)]
    blocks = []
    for path, packed in found:
        parent, _, name = path.rpartition(".")
        blocks.append(new(packed))
        setattr(model.get_submodule(parent), name, blocks[-1])
    return blocks


def to_upstream(model: nn.Module) -> None:
    """The packed blocks of a model call upstream's operator, in place."""
    for module in model.modules():
        if isinstance(module, QuantizedMoEFFN):
            how = module.routing
            # Over all experts and divided by the sum, or over the selected: the same weights.
            is_softmax = how.score_func == "softmax" or (
                how.score_func == "softmax_all" and how.norm_topk
            )
            if not is_softmax or how.route_scale != 1.0 or module.expert_bias is not None:
                raise SystemExit(f"upstream's operator does not route like {how}")
            module.__class__ = UpstreamFFN
            module.register_buffer("no_bias", torch.empty(0))


@dataclass
class Tokens:
    """Counts of positions; logits in nats."""

    positions: int = 0
    same: int = 0
    clear: int = 0  # margin above the bound
    clear_same: int = 0
    largest_difference: float = 0.0
    mean_bound: float = 0.0

    def passed(self) -> bool:
        return self.clear_same == self.clear > 0 and self.same >= MIN_SAME * self.positions


def compare(folder: Path, windows: int) -> Tokens:
    """Exports, runs and compares; `windows` of WINDOW tokens."""
    import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401

    packed = load_model(MODEL)
    moepack.quantize_(packed, SCHEME, layout="torchao")
    plain = copy.deepcopy(packed)
    to_upstream(packed)
    out = folder / "upstream"
    export(packed, out, linear="float", embedding="float", logits="all", tokenizer_dir=MODEL)
    ids = Tokenizer.load(MODEL).encode(HELDOUT.read_text(encoding="utf-8"))
    pieces = [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(windows)]
    theirs = _logits(out, pieces)
    with accelerate_upstream():
        ours = _logits(out, pieces)
    blocks = replaced(plain, FloatFFN)
    found = Tokens()
    for piece, logits, accelerated in zip(pieces, theirs, ours, strict=True):
        _add(found, logits, accelerated, _deviations(plain, blocks, piece, logits))
    return found


def _logits(program: Path, pieces: list[list[int]]) -> list[Tensor]:
    loaded = Program.load(program)
    return [loaded.logits(piece).clone() for piece in pieces]


def _add(found: Tokens, logits: Tensor, accelerated: Tensor, deviations: Tensor) -> None:
    best = logits.topk(2).values
    bound = DEVIATIONS * deviations
    same = logits.argmax(-1) == accelerated.argmax(-1)
    clear = best[:, 0] - best[:, 1] > bound
    count = found.positions + len(same)
    found.mean_bound = (found.mean_bound * found.positions + float(bound.sum())) / count
    found.positions = count
    found.same += int(same.sum())
    found.clear += int(clear.sum())
    found.clear_same += int((same & clear).sum())
    largest = float((logits - accelerated).abs().max())
    found.largest_difference = max(found.largest_difference, largest)


def _deviations(
    model: nn.Module, blocks: list[FloatFFN], piece: list[int], logits: Tensor
) -> Tensor:
    """Of the difference of the two best logits at each position, by quantized activations."""
    for block in blocks:
        block.places.clear()
    exact = model(input_ids=torch.tensor([piece]), use_cache=False).logits[0]
    error = float((exact.detach() - logits).abs().max())
    if error > MAX_FLOAT_ERROR:
        raise SystemExit(f"upstream's logits differ from plain torch by {error}: other weights?")
    places = [place for block in blocks for place in block.places]
    variances = [_step(values).square() / 12 for _, values in places]
    best = logits.topk(2).indices
    found = []
    for position, (first, second) in enumerate(best.tolist()):
        difference = exact[position, first] - exact[position, second]
        gradients = torch.autograd.grad(difference, [e for e, _ in places], retain_graph=True)
        parts = zip(gradients, variances, strict=True)
        found.append(float(sum((g.square() * v).sum() for g, v in parts)) ** 0.5)
    return torch.tensor(found)


def _step(values: Tensor) -> Tensor:
    """Each activation group's scale, amax / 127, at every element."""
    width = values.shape[-1]
    padded = F.pad(values, (0, -width % ACTIVATION_GROUP))
    steps = padded.unflatten(-1, (-1, ACTIVATION_GROUP)).abs().amax(-1) / 127
    return steps.repeat_interleave(ACTIVATION_GROUP, dim=-1)[..., :width]
