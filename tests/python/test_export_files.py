"""Files of ExecuTorch's LLM export: what is refused before it begins, and how they are written."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from moepack.errors import BadWeights, MoePackError
from moepack.integrations.executorch import ExpertOptions, quantized_experts
from moepack.integrations.export_files import require_files, save_program


class Program:
    """Stands for ExecuTorch's; `fails` after it has written a part."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def write_to_file(self, file: Any) -> None:
        file.write(b"program")
        if self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")

    def write_tensor_data_to_file(self, outdir: str) -> None:
        Path(outdir, "weights.ptd").write_bytes(b"weights")


def configuration(folder: Path) -> Any:
    from executorch.extension.llm.export.config.llm_config import LlmConfig

    config = LlmConfig()
    config.base.checkpoint, config.base.params = str(folder / "model.pth"), None
    torch.save({"model": {"a": torch.ones(2)}}, folder / "model.pth")
    config.export.output_name = str(folder / "out.pte")
    return config


def test_files_appear_complete_or_stay_as_they_were(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    path = tmp_path / "out.pte"
    assert save_program(Program(), str(path), str(data)) == str(path)
    assert path.read_bytes() == b"program"
    assert (data / "weights.ptd").read_bytes() == b"weights"
    path.write_bytes(b"before")
    with pytest.raises(MoePackError, match=r"out\.pte: cannot be written: No space left"):
        save_program(Program(fails=True), str(path), str(data))
    assert path.read_bytes() == b"before"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["data", "out.pte", "weights.ptd"]
    save_program(Program(), "model", str(data))
    assert (data / "model.pte").read_bytes() == b"program"


def test_a_link_leads_to_what_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "out.pte"
    link.symlink_to(tmp_path / "there/model.pte")
    save_program(Program(), str(link), str(tmp_path))
    assert link.is_symlink()
    assert (tmp_path / "there/model.pte").read_bytes() == b"program"


def test_what_is_there_is_accepted(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    config.base.metadata = '{"get_bos_id": 0}'
    assert require_files(config) == ["a"]
    config.export.output_name, config.export.output_dir = "name", str(tmp_path)
    require_files(config)


@pytest.mark.parametrize(
    "name", ["no/such/folder/out.pte", "folder.pte", "model.pth/out.pte", "pipe.pte"]
)
def test_outputs_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    import os

    config = configuration(tmp_path)
    (tmp_path / "folder.pte").mkdir()
    os.mkfifo(tmp_path / "pipe.pte")
    config.export.output_name = str(tmp_path / name)
    with pytest.raises(MoePackError, match=f"{name}: cannot be written"):
        require_files(config)


@pytest.mark.parametrize(
    ("metadata", "message"), [("{bad", "is no JSON"), ("[1]", "expected a JSON object")]
)
def test_metadata_that_is_wrong(metadata: str, message: str, tmp_path: Path) -> None:
    config = configuration(tmp_path)
    config.base.metadata = metadata
    with pytest.raises(MoePackError, match=message):
        require_files(config)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_params_that_are_damaged_are_named(text: str, tmp_path: Path) -> None:
    config = configuration(tmp_path)
    config.base.params = str(tmp_path / "params.json")
    with pytest.raises(MoePackError, match=r"params\.json: cannot be read"):
        require_files(config)
    (tmp_path / "params.json").write_text(text, encoding="utf-8")
    with pytest.raises(MoePackError, match=r"params\.json: (cannot be read|expected)"):
        require_files(config)


@pytest.mark.parametrize("held", [{}, {"model": {}}])
def test_a_checkpoint_without_weights_is_no_model(held: dict[str, Any], tmp_path: Path) -> None:
    config = configuration(tmp_path)
    torch.save(held, tmp_path / "model.pth")
    with pytest.raises(BadWeights, match=r"model\.pth: holds no weights"):
        require_files(config)


def test_a_checkpoint_that_cannot_be_read(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    path = tmp_path / "model.pth"
    whole = path.read_bytes()
    for data in (b"", b"text", whole[:100], whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(data)
        with pytest.raises(MoePackError, match=r"model\.pth: missing, cut short"):
            require_files(config)
    path.unlink()
    with pytest.raises(MoePackError, match=r"model\.pth: missing"):
        require_files(config)
    torch.save([1, 2], path)
    with pytest.raises(MoePackError, match=r"model\.pth: cannot be loaded"):
        require_files(config)


def test_the_export_checks_first_and_names_what_does_not_fit(tmp_path: Path) -> None:
    from executorch.examples.models.llama import export_llama_lib

    config = configuration(tmp_path)
    wrong = {"tok_embeddings.weight": torch.ones(3, 3)}
    torch.save(wrong, tmp_path / "model.pth")
    with quantized_experts(ExpertOptions()):
        with pytest.raises(MoePackError, match=r"size mismatch for tok_embeddings\.weight"):
            export_llama_lib._load_llama_model(config)
        torch.save({}, tmp_path / "model.pth")
        with pytest.raises(BadWeights, match="holds no weights"):
            export_llama_lib._load_llama_model(config)
