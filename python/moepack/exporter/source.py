"""The model to export: a local Hugging Face checkpoint directory, or a model in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from moepack.errors import MoePackError

# Copied beside the program: what a tokenizer is rebuilt from, and the model's own description.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
DESCRIPTION_FILES = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class Source:
    model: PreTrainedModel
    directory: Path | None

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).vocab_size)


def load_model(directory: Path) -> PreTrainedModel:
    """The checkpoint in fp32, from safetensors only, without running code that it carries.

    Raises MoePackError with the directory and the reason.
    """
    if not directory.is_dir():
        raise MoePackError(f"{directory}: no such directory; expected a Hugging Face checkpoint")
    if not (directory / "config.json").is_file():
        raise MoePackError(f"{directory}: no config.json; expected a Hugging Face checkpoint")
    if not any(directory.glob("*.safetensors")):
        raise MoePackError(f"{directory}: no *.safetensors file; convert the checkpoint first")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
    except Exception as error:  # transformers and safetensors raise what they like
        raise MoePackError(f"{directory}: cannot be loaded: {_first_line(error)}") from error
    return model.eval()


def open_source(model_or_dir: PreTrainedModel | str | Path, tokenizer_dir: Path | None) -> Source:
    """Raises MoePackError when the directory is no checkpoint, TypeError for another object."""
    if isinstance(model_or_dir, PreTrainedModel):
        return Source(model_or_dir, tokenizer_dir)
    if isinstance(model_or_dir, (str, Path)):
        directory = Path(model_or_dir)
        return Source(load_model(directory), tokenizer_dir or directory)
    raise TypeError(
        f"export takes a checkpoint directory or a transformers model, "
        f"not {type(model_or_dir).__name__}"
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
