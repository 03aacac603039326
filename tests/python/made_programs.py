"""Tiny random checkpoints with a real tokenizer, and programs exported from them, made once."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from moepack.exporter import export

VOCAB = 320
CONTEXT = 64
# Random experts of width 32 are rougher than trained ones: what the floor is for does not apply.

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "Mixtral",
        {
            "num_hidden_layers": 1,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "num_local_experts": 4,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "olmoe": (
        "Olmoe",
        {
            "num_hidden_layers": 1,
            "num_key_value_heads": 4,
            "intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
}
_TEXT = (
    "In the beginning there were experts, and each expert knew its own part of every text that "
    "was read. A router asked the few that knew most; their answers were weighed and added up. "
)


@functools.cache
def scratch() -> Path:
    """A folder for this process."""
    folder = Path(tempfile.mkdtemp(prefix="moepack-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def made_model(family: str, **overrides: Any) -> Any:
    """A model whose experts and attention matter in the output, unlike fresh initial weights."""
    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **sizes, **overrides})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = noise * parameter.shape[-1] ** -0.5
    return model


def made_tokenizer() -> Tokenizer:
    """Byte-level BPE, so that one character can be several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return tokenizer


def write_checkpoint(model: Any, directory: Path, **tokenizer_config: Any) -> Path:
    model.save_pretrained(directory)
    made_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **tokenizer_config,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


@functools.cache
def checkpoint(family: str) -> Path:
    return write_checkpoint(made_model(family), scratch() / "checkpoints" / family)


def exported(family: str = "qwen3_moe") -> Path:
    """Float but for the experts, all logits: what can be compared with the eager packed model."""
    return _exported(family)


@functools.cache
def _exported(family: str) -> Path:
    out = scratch() / "exported" / family
    export(
        checkpoint(family),
        out,
        linear="float",
        embedding="float",
        logits="all",
    )
    return out


def copied(directory: Path, target: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(directory, target)
    return target
