"""Greedy tokens of a program with ExecuTorch's own MoE operator, without and with the acceleration.

The model that ships with moepack is exported with upstream's operator and blobs and fed text that
it was not trained on, in windows, every next token given. At each position the difference of
upstream's two best logits, the margin, is held against what int8 activations can do to it: the
largest part of it that is lost in runs in float whose activations have random errors, twice as
large as those of int8. docs/reference/activation-error.md derives it.
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
from moepack.threads import one_thread_each
from moepack.tokenizer import Tokenizer

SCHEMES = ("int4-g32", "int8-g32")
WINDOW = 128
BATCH = 8  # windows of a run
ERROR_FACTOR = 2.0
RUNS = 256  # with factor 2: a change that can happen is missed less than once in a million
SEED = 0
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
    """The same block in float; errors of `error` half steps at most on what int8 would round."""

    def __init__(self, packed: QuantizedMoEFFN, generator: torch.Generator) -> None:
        super().__init__()
        experts = range(packed.num_experts)
        self.w13 = torch.stack([packed.w13(e) for e in experts])
        self.w2 = torch.stack([packed.w2(e) for e in experts])
        self.gate_weight, self.top_k = packed.gate_weight, packed.num_activated_experts
        self.generator = generator
        self.error = 0.0

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits, ids = (x @ self.gate_weight.T).topk(self.top_k)
        weights = logits.softmax(-1)
        uses = list(_uses(ids))
        x = self._with_errors(x)
        hidden = torch.zeros(*ids.shape, self.w2.shape[2])
        for expert, token, slot in uses:
            gate, up = (x[token] @ self.w13[expert].T).chunk(2, dim=-1)
            hidden[token, slot] = F.silu(gate) * up
        hidden = self._with_errors(hidden)
        y = torch.zeros_like(x)
        for expert, token, slot in uses:
            output = hidden[token, slot] @ self.w2[expert].T
            y.index_add_(0, token, weights[token, slot, None] * output)
        return y.view(hidden_states.shape)

    def _with_errors(self, values: Tensor) -> Tensor:
        uniform = 2 * torch.rand(values.shape, generator=self.generator) - 1
        return values + self.error * uniform * _half_step(values)


def _uses(ids: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        yield expert, token, slot


def _half_step(values: Tensor) -> Tensor:
    """Half of each activation group's scale, amax / 127, at every element."""
    width = values.shape[-1]
    padded = F.pad(values, (0, -width % ACTIVATION_GROUP))
    amax = padded.unflatten(-1, (-1, ACTIVATION_GROUP)).abs().amax(-1)
    return (amax / 254).repeat_interleave(ACTIVATION_GROUP, dim=-1)[..., :width]


class FloatModel:
    """A packed model in float, in place, with errors on the activations of its experts."""

    def __init__(self, packed: nn.Module) -> None:
        self._model = packed
        self._generator = torch.Generator().manual_seed(SEED)
        self._blocks: list[FloatFFN] = []
        for path, module in list(packed.named_modules()):
            if isinstance(module, QuantizedMoEFFN):
                parent, _, name = path.rpartition(".")
                self._blocks.append(FloatFFN(module, self._generator))
                setattr(packed.get_submodule(parent), name, self._blocks[-1])

    @torch.no_grad()
    def logits(self, ids: Tensor, error: float) -> Tensor:
        """Of windows [B, T] of tokens: [B, T, V]; `error` is in half steps of int8."""
        for block in self._blocks:
            block.error = error
        result: Tensor = self._model(input_ids=ids, use_cache=False).logits
        return result


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


@dataclass(frozen=True)
class Tokens:
    """Counts of positions; logits in nats."""

    positions: int
    same: int
    clear: int  # margin above the bound
    clear_same: int
    largest_difference: float
    mean_bound: float

    def passed(self) -> bool:
        return self.clear_same == self.clear > 0 and self.same >= MIN_SAME * self.positions


def compare(folder: Path, windows: int, scheme: str) -> Tokens:
    """Exports, runs and compares; `windows` of WINDOW tokens."""
    import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401

    packed = load_model(MODEL)
    moepack.quantize_(packed, scheme, layout="torchao")
    plain = FloatModel(copy.deepcopy(packed))
    to_upstream(packed)
    out = folder / "upstream"
    export(packed, out, linear="float", embedding="float", logits="all", tokenizer_dir=MODEL)
    ids = Tokenizer.load(MODEL).encode(HELDOUT.read_text(encoding="utf-8"))
    if len(ids) < windows * WINDOW:
        raise SystemExit(f"{windows} windows of {WINDOW} tokens: the text has {len(ids)} tokens")
    pieces = torch.tensor(ids[: windows * WINDOW]).view(windows, WINDOW)
    theirs = _logits(out, pieces)
    with accelerate_upstream():
        ours = _logits(out, pieces)
    batches = zip(*(values.split(BATCH) for values in (pieces, theirs)), strict=True)
    with one_thread_each():
        bound = torch.cat([largest_loss(plain, ids, logits) for ids, logits in batches])
    return _counts(theirs, ours, bound)


def _logits(program: Path, pieces: Tensor) -> Tensor:
    loaded = Program.load(program)
    return torch.stack([loaded.logits(piece).clone() for piece in pieces.tolist()])


def largest_loss(model: FloatModel, ids: Tensor, logits: Tensor) -> Tensor:
    """The most that the lead of upstream's token falls by in runs with errors: [B, T], in nats.

    ids [B, T]; upstream's logits [B, T, V].
    """
    error = float((model.logits(ids, 0.0) - logits).abs().max())
    if error > MAX_FLOAT_ERROR:
        raise SystemExit(f"upstream's logits differ from plain torch by {error}: other weights?")
    token = logits.argmax(-1, keepdim=True)
    least = lead(logits, token)
    for _ in range(RUNS):
        least = torch.minimum(least, lead(model.logits(ids, ERROR_FACTOR), token))
    return lead(logits, token) - least


def lead(logits: Tensor, token: Tensor) -> Tensor:
    """Of a token [..., 1] over the best other one: [...], negative where another is ahead."""
    others = logits.scatter(-1, token, float("-inf"))
    return logits.gather(-1, token).squeeze(-1) - others.amax(-1)


def _counts(theirs: Tensor, ours: Tensor, bound: Tensor) -> Tokens:
    token = theirs.argmax(-1, keepdim=True)
    same = token.squeeze(-1) == ours.argmax(-1)
    clear = lead(theirs, token) > bound
    return Tokens(
        positions=same.numel(),
        same=int(same.sum()),
        clear=int(clear.sum()),
        clear_same=int((same & clear).sum()),
        largest_difference=float((theirs - ours).abs().max()),
        mean_bound=float(bound.mean()),
    )
