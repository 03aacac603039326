"""Tokenizer files beside the program, and the check that the model knows every token."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from moepack.errors import MoePackError, UnsupportedError
from moepack.json_text import read_object
from moepack.tokenizer import FILES, Tokenizer


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that begin and end a text; bos is None where the model has none."""

    bos_id: int | None
    eos_ids: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def copy_tokenizer(directory: Path, target: Path) -> Tokenizer | None:
    """Copies the tokenizer files; a tokenizer.json is made from other formats where that works.

    None when the directory holds no tokenizer at all. Raises MoePackError when it holds one that
    cannot be read.
    """
    present = [name for name in FILES if (directory / name).is_file()]
    if not any(name in present for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    if "tokenizer.json" in present:
        Tokenizer.load(directory)  # so that errors name the checkpoint's files, not the copies
    for name in present:
        shutil.copyfile(directory / name, target / name)
    if "tokenizer.json" not in present:
        _convert(directory, target)
    return Tokenizer.load(target)


def _convert(directory: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(directory, local_files_only=True).backend_tokenizer
    except Exception as error:
        raise MoePackError(
            f"{directory}: its tokenizer cannot be turned into tokenizer.json: {error}"
        ) from error
    backend.save(str(target / "tokenizer.json"))


def special_tokens(model: PreTrainedModel, directory: Path | None) -> SpecialTokens:
    """From the generation config, else the model's, else the tokenizer's own settings."""
    config = model.config.get_text_config(decoder=True)
    sources = [model.generation_config, config, _tokenizer_ids(directory)]
    bos = _first(sources, "bos_token_id")
    eos = _first(sources, "eos_token_id")
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
    return SpecialTokens(bos, eos_ids)


def check_vocabulary(tokenizer: Tokenizer | None, tokens: SpecialTokens, vocab_size: int) -> None:
    """Raises UnsupportedError: an id outside the embedding would stop the runtime at that token."""
    if tokenizer is not None and tokenizer.largest_id >= vocab_size:
        raise UnsupportedError(
            f"the tokenizer has token id {tokenizer.largest_id}, the model's vocabulary ends at "
            f"{vocab_size - 1}; they do not belong together"
        )
    for token in (*tokens.eos_ids, *([] if tokens.bos_id is None else [tokens.bos_id])):
        if not 0 <= token < vocab_size:
            raise UnsupportedError(
                f"the model's config names token id {token} as bos or eos, its vocabulary has "
                f"{vocab_size} tokens; correct config.json or generation_config.json"
            )


def _first(sources: list[Any], name: str) -> Any:
    for source in sources:
        value = source.get(name) if isinstance(source, dict) else getattr(source, name, None)
        if value is not None:
            return value
    return None


def _tokenizer_ids(directory: Path | None) -> dict[str, int | None]:
    if directory is None or not (directory / "tokenizer.json").is_file():
        return {}
    path = directory / "tokenizer_config.json"
    tokenizer = Tokenizer.load(directory)
    config = read_object(path) if path.is_file() else {}
    found: dict[str, int | None] = {}
    for name in ("bos_token", "eos_token"):
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        found[f"{name}_id"] = tokenizer.token_id(text) if isinstance(text, str) else None
    return found
