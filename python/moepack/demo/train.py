"""Trains the demo model that ships in `moepack/demo/model` and saves it in Hugging Face format.

    python -m moepack.demo.train --corpus corpus --out model

`corpus` is what `moepack.demo.corpus` wrote. Needs torch, tokenizers and transformers; a GPU
unless you have hours. The seed fixes the tokenizer, the initial weights and the order of the
data; floating-point sums on a GPU are not ordered, so a second run does not give the same bytes.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moepack.demo.network import Network, Shape, fake_quantize

END = "<|endoftext|>"


@dataclass(frozen=True)
class Recipe:
    epochs: int = 30
    batch: int = 32
    rate: float = 3e-3
    warmup_steps: int = 200
    # Far above the usual 0.1: thirty passes over a small corpus overfit without it. Chosen on the
    # validation text; the model card has the trials.
    weight_decay: float = 2.0
    dropout: float = 0.1
    balance: float = 0.01
    clip: float = 1.0
    seed: int = 0


def train_tokenizer(texts: list[str], shape: Shape) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def batches(ids: Tensor, shape: Shape, recipe: Recipe) -> Iterator[Tensor]:
    """Batches of windows [batch, context + 1]; every epoch cuts the text at other places."""
    generator = torch.Generator().manual_seed(recipe.seed)
    for _ in range(recipe.epochs):
        start = int(torch.randint(shape.context, (1,), generator=generator))
        windows = ids[start:].unfold(0, shape.context + 1, shape.context)
        order = torch.randperm(len(windows), generator=generator)
        for first in range(0, len(order) - recipe.batch + 1, recipe.batch):
            yield windows[order[first : first + recipe.batch]]


def optimizer_for(network: Network, recipe: Recipe) -> torch.optim.AdamW:
    matrices = [p for p in network.parameters() if p.ndim > 1]
    vectors = [p for p in network.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.95), fused=True)


def rate_at(step: int, steps: int, recipe: Recipe) -> float:
    """Linear warmup, then half a cosine down to zero."""
    warmup = min(1.0, (step + 1) / recipe.warmup_steps)
    return recipe.rate * warmup * 0.5 * (1 + math.cos(math.pi * step / steps))


def train(network: Network, ids: Tensor, valid: Tensor, shape: Shape, recipe: Recipe) -> int:
    """Trains in place; returns the number of tokens seen."""
    device = network.cos.device
    optimizer = optimizer_for(network, recipe)
    steps = recipe.epochs * ((len(ids) // shape.context - 1) // recipe.batch)
    forward = torch.compile(network) if device.type == "cuda" else network
    seen, began = 0, time.time()
    for step, window in zip(range(steps), batches(ids, shape, recipe), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps, recipe)
        window = window.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            logits, balance = forward(window[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        (loss + recipe.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        seen += window[:, 1:].numel()
        if step % 500 == 0 or step == steps - 1:
            progress = {"step": step, "of": steps, "seconds": round(time.time() - began, 1)}
            progress |= {"loss": round(loss.item(), 4), "balance": round(balance.item(), 4)}
            print(json.dumps(progress | {"valid": perplexity(network, valid, shape)}), flush=True)
    return seen


@torch.no_grad()
def perplexity(network: Network, ids: Tensor, shape: Shape) -> float:
    """Per token, over windows of the full context that do not overlap (a shorter last one too)."""
    network.eval()
    total, count = 0.0, 0
    ids = ids.to(network.cos.device)
    for first in range(0, len(ids), shape.context):
        window = ids[first : first + shape.context]
        if len(window) > 1:
            logits, _ = network(window[None, :-1])
            total += functional.cross_entropy(logits[0], window[1:], reduction="sum").item()
            count += len(window) - 1
    network.train()
    return math.exp(total / count)


@torch.no_grad()
def quantized_perplexities(network: Network, ids: Tensor, shape: Shape) -> dict[str, float]:
    """Perplexity as is, and with only the experts rounded to groups of 32, weights alone."""
    experts = [p for name, p in network.named_parameters() if ".experts." in name]
    originals = [p.clone() for p in experts]
    result = {"float": perplexity(network, ids, shape)}
    for bits in (8, 4):
        for parameter, original in zip(experts, originals, strict=True):
            parameter.copy_(fake_quantize(original, bits))
        result[f"int{bits}"] = perplexity(network, ids, shape)
    for parameter, original in zip(experts, originals, strict=True):
        parameter.copy_(original)
    return result


def hugging_face_config(shape: Shape, end: int | None) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.expert_width,  # of dense layers: there are none
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        moe_intermediate_size=shape.expert_width,
        norm_topk_prob=True,
        max_position_embeddings=shape.context,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )


@torch.no_grad()
def save(network: Network, tokenizer: Tokenizer, shape: Shape, out: Path) -> None:
    """Writes the checkpoint, then loads it again and compares its logits with the network's."""
    network = network.cpu().eval()
    model = Qwen3MoeForCausalLM(hugging_face_config(shape, tokenizer.token_to_id(END)))
    weights = network.state_dict()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    model.to(torch.bfloat16).save_pretrained(out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=shape.context,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)
    loaded = Qwen3MoeForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.randint(shape.vocab, (1, shape.context), generator=torch.Generator().manual_seed(0))
    difference = (loaded(ids).logits - network(ids)[0]).abs().max().item()
    if difference > 1e-3:
        raise RuntimeError(f"transformers computes other logits: they differ by {difference}")


def run(corpus: Path, out: Path, shape: Shape, recipe: Recipe) -> None:
    torch.manual_seed(recipe.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    texts = [path.read_text() for path in sorted((corpus / "train").glob("*.txt"))]
    tokenizer = train_tokenizer(texts, shape)
    ids = torch.tensor(tokenizer.encode(END + END.join(texts)).ids)
    parts = {part: (corpus / f"{part}.txt").read_text() for part in ("valid", "heldout")}
    encoded = {part: torch.tensor(tokenizer.encode(text).ids) for part, text in parts.items()}
    network = Network(shape, recipe.dropout).to(device)
    report = {"recipe": asdict(recipe), "shape": asdict(shape), "train_tokens": len(ids)}
    report["parameters"] = sum(p.numel() for p in network.parameters())
    print(json.dumps(report), flush=True)
    began = time.time()
    seen = train(network, ids, encoded["valid"], shape, recipe)
    print(json.dumps({"tokens_seen": seen, "seconds": round(time.time() - began, 1)}), flush=True)
    with torch.no_grad():  # what is measured is what is saved
        for parameter in network.parameters():
            parameter.copy_(parameter.bfloat16())
    for part, tokens in encoded.items():
        measured = quantized_perplexities(network, tokens, shape)
        sizes = {"tokens": len(tokens), "bytes": len(parts[part].encode())}
        print(json.dumps({"part": part} | sizes | {"perplexity": measured}), flush=True)
    save(network, tokenizer, shape, out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder from demo.corpus")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    for name, value in asdict(Recipe()).items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(value), default=value, help=f"default {value}")
    args = vars(parser.parse_args())
    corpus, out = args.pop("corpus"), args.pop("out")
    run(corpus, out, Shape(), Recipe(**args))


if __name__ == "__main__":
    main()
