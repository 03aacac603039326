"""The model to export: a checkpoint directory, or a model in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from moepack.checkpoint import load_model


@dataclass(frozen=True)
class Source:
    """`directory` holds the tokenizer, where there is one."""

    model: PreTrainedModel
    directory: Path | None

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).vocab_size)


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
