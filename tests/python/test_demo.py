"""The demo: its checks can fail, its numbers stay within limits, refusals come first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import moepack
from made_programs import checkpoint, exported
from moepack import demo
from moepack.checkpoint import load_model
from moepack.demo import checks
from moepack.errors import MoePackError, VerificationError
from moepack.evaluate import Perplexity
from moepack.runtime import Program
from moepack.tokenizer import Tokenizer


def test_token_check_finds_another_model() -> None:
    program, prompt = Program.load(exported("qwen3_moe")), [5, 6, 7]
    model = load_model(checkpoint("qwen3_moe"))
    moepack.quantize_(model)
    assert checks.token_check(model, program, prompt, 20).passed
    model.lm_head.weight.data.mul_(-1)
    check = checks.token_check(model, program, prompt, 20)
    assert not check.passed
    assert "of 20 tokens" in check.found


def test_layer_check_compares_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    y = torch.ones(3)

    def outputs(*_: object) -> dict[int, tuple[Tensor, Tensor]]:
        return {1: (y, y.clone()), 17: (y, torch.nextafter(y, 2 * y))}

    monkeypatch.setattr(checks, "layer_outputs", outputs)
    check = checks.layer_check(nn.Sequential(nn.Identity()), "0", tmp_path)
    assert not check.passed
    assert "[17]" in check.found


def test_failed_check_is_an_error_after_everything_was_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Perplexity(1.0, 0.0, 1, 1, 2, 2)
    result = demo.DemoResult(
        perplexity={"float": found},
        sizes=demo.Sizes(1, 1, 1, 1),
        sqnr_db={},
        speed=demo.Speed(1, 1, 1),
        sample=demo.Sample("a", "b"),
        checks=(checks.Check("same greedy tokens", False, "3 of 64"),),
        threads={},
        versions={},
        seconds=0.0,
    )
    monkeypatch.setattr(demo, "_run", lambda *_: result)
    shown = []

    class Watcher(demo.Audience):
        def show(self, value: object) -> None:
            shown.append(value)

    with pytest.raises(VerificationError, match="3 of 64"):
        demo.run(Watcher())
    assert shown == [result]
    assert torch.get_num_threads() == 1


def test_an_output_that_exists_is_refused_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    began = []
    monkeypatch.setattr(demo, "_run", lambda *_: began.append("run"))
    (tmp_path / "notes.txt").write_text("mine")
    for force, message in ((False, "exists"), (True, "is not replaced")):
        with pytest.raises(MoePackError, match=message):
            demo.run(out_dir=tmp_path, force=force)
    with pytest.raises(MoePackError, match="demo/model"):
        demo.run(out_dir=demo.MODEL / "out")
    assert not began


def test_model_that_ships_packs_within_the_limits() -> None:
    """On part of the held-out text; the whole demo measures all of it."""
    from moepack.evaluate import perplexity

    tokenizer = Tokenizer.load(demo.MODEL)
    ids = tokenizer.encode(demo.HELDOUT.read_text(encoding="utf-8"))[: 20 * 512]
    values = {}
    for scheme in ("float", "int4-g32", "int8-g32"):
        model = load_model(demo.MODEL)
        if scheme != "float":
            moepack.quantize_(model, scheme)
        values[scheme] = perplexity(model, ids, window=512).value
    assert values["int4-g32"] <= 1.015 * values["float"]
    assert values["int8-g32"] <= 1.002 * values["float"]


@pytest.mark.slow
def test_whole_demo(tmp_path: Path) -> None:
    steps = []

    class Watcher(demo.Audience):
        def begin(self, step: str) -> None:
            steps.append(step)

    found = demo.run(Watcher(), out_dir=tmp_path / "out").to_json()
    assert {"float", "int4-g32", "int8-g32", "pte"} == set(found["perplexity"])
    assert {"float", "packed", "pte"} <= set(found["bytes"])
    assert found["bytes"]["packed"] < found["bytes"]["float"]
    assert found["perplexity"]["pte"] == pytest.approx(found["perplexity"]["int4-g32"], rel=1e-3)
    assert len(found["sqnr_db"]) == 5
    assert all(value > 15 for value in found["sqnr_db"].values())
    assert found["tokens_per_second"]["prefill"] > found["tokens_per_second"]["decode"] > 0
    assert found["text"].startswith("In the beginning")
    assert all(found["checks"].values())
    assert (tmp_path / "out" / "model.pte").is_file()
    assert len(steps) > 5
