"""export: the program against the eager model, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import moepack
import tiny_models
from made_programs import (
    CONTEXT,
    FAMILIES,
    VOCAB,
    checkpoint,
    exported,
    made_model,
    made_tokenizer,
    write_checkpoint,
)
from moepack.checkpoint import load_model
from moepack.demo.checks import greedy_tokens, layer_outputs
from moepack.errors import MoePackError, NoMoEBlock, UnsupportedError
from moepack.exporter import export, lowering
from moepack.exporter.decoder import cached_decoder
from moepack.exporter.experts import router_paths
from moepack.exporter.linears import Int8Embedding, quantize_embedding
from moepack.manifest import PROGRAM, WEIGHTS, Manifest, content_differences
from moepack.modules import QuantizedMoEFFN
from moepack.program_file import open_program
from moepack.runtime import Generation, Program
from moepack.weights_file import open_weights

PROMPT = list(range(3, 20))


def packed_model(family: str, scheme: str = "int4-g32") -> Any:
    model = load_model(checkpoint(family))
    moepack.quantize_(model, scheme)
    return model


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative, over all logits: a last bit of attention may flip an int8 code of an activation,
    which moves one token's logits a little; a wrong position or mask moves them all."""
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_program_continues_a_prompt_as_the_eager_packed_model_does(family: str) -> None:
    program = Program.load(exported(family))
    eager = greedy_tokens(packed_model(family), PROMPT, 30, program.eos_ids)
    assert list(Generation(program, PROMPT, max_new_tokens=30)) == eager


@pytest.mark.parametrize("family", FAMILIES)
def test_token_count_is_dynamic_from_one_to_the_context(family: str) -> None:
    program, model = Program.load(exported(family)), packed_model(family)
    ids = torch.randint(3, VOCAB, (CONTEXT,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(input_ids=ids[None], use_cache=False).logits[0]
    assert difference(program.logits(ids), expected) < 0.01
    parts = [program.logits(ids[:17])]
    parts += [program.logits(ids[i : i + 1], i) for i in range(17, 24)]
    parts.append(program.logits(ids[24:], 24))
    assert difference(torch.cat(parts), expected) < 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_cache_of_the_wrapper_changes_nothing(family: str) -> None:
    model = made_model(family)
    ids = torch.arange(5, 17)[None]
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits
        with cached_decoder(model, CONTEXT, last_logits_only=False) as decoder:
            pieces = [decoder(ids[:, :7], torch.arange(7))]
            pieces += [decoder(ids[:, i : i + 1], torch.tensor([i])) for i in range(7, 12)]
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-5, atol=1e-5)


def test_model_has_its_own_settings_back_after_the_export() -> None:
    model = made_model("mixtral").train()
    model.config.output_router_logits = True
    before = model.config._attn_implementation
    with cached_decoder(model, CONTEXT, last_logits_only=True):
        assert model.config._attn_implementation != before
    assert model.config._attn_implementation == before
    assert model.config.output_router_logits
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("scheme", ["int4-g32", "mxfp4", "fp8-b128"])
def test_one_layer_alone_is_bit_equal_to_the_eager_operator(scheme: str, tmp_path: Path) -> None:
    model = packed_model("qwen3_moe", scheme)
    blocks = [m for m in model.modules() if isinstance(m, QuantizedMoEFFN)]
    for tokens, (eager, run) in layer_outputs(blocks[0], tmp_path, (1, 5, 40)).items():
        assert torch.equal(eager, run), tokens


def test_default_export_of_sizes_that_fit_no_group(tmp_path: Path) -> None:
    sizes = {"hidden_size": 72, "moe_intermediate_size": 44, "head_dim": 12, "vocab_size": 321}
    model = made_model("qwen3_moe", **sizes, tie_word_embeddings=True)
    source = write_checkpoint(model, tmp_path / "model")
    out = tmp_path / "out"
    result = export(source, out)
    layers = result.manifest.layers
    assert layers["model.embed_tokens"] == "int8"
    assert layers["lm_head"] == "8da8w"
    assert layers["model.layers.0.self_attn.o_proj"] == "8da8w"
    program = Program.load(out, verify=True)
    assert not program.all_logits
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    # 4-bit experts of random weights, and a router whose margins are small: some way below 1.
    assert difference(program.logits(PROMPT)[-1], expected) < 0.6


def test_directory_is_complete_and_says_what_it_holds() -> None:
    out = exported("qwen3_moe")
    manifest = Manifest.read(out)
    assert content_differences(out, manifest.files) == []
    assert set(manifest.files) | {"manifest.json", "README.md"} == {p.name for p in out.iterdir()}
    assert {"model.pte", "tokenizer.json", "tokenizer_config.json"} <= set(manifest.files)
    assert manifest.scheme == "int4-g32"
    assert set(manifest.sqnr_db) == {"model.layers.0.mlp", "model.layers.1.mlp"}
    assert all(value is not None and value > 10 for value in manifest.sqnr_db.values())
    assert manifest.versions["moepack"] == moepack.__version__
    assert manifest.tokens == {"bos_id": 1, "eos_ids": [2]}
    readme = (out / "README.md").read_text(encoding="utf-8")
    assert "int4-g32" in readme
    assert "moepack run" in readme


def test_cache_is_written_in_place_and_weights_are_aligned() -> None:
    method = open_program(exported("qwen3_moe") / "model.pte").methods[0]
    assert "aten::index_put_" in method.operators
    assert not {"aten::copy_", "aten::index_put.out"} & set(method.operators)
    for call in method.calls:
        if call.operator.startswith("moepack::"):
            assert [constant.offset % 64 for constant in call.constants] == [0, 0, 0]


def test_executorch_text_runner_runs_the_program() -> None:
    from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

    out = exported("qwen3_moe")
    Program.load(out)  # registers the kernels
    runner = TextLLMRunner(str(out / "model.pte"), str(out / "tokenizer.json"))
    counts: list[int] = []
    config = GenerationConfig(max_new_tokens=4, temperature=0.0, echo=False)
    # Without a callback for text: the runner raises on a token that is no UTF-8 alone.
    runner.generate("experts", config, None, lambda s: counts.append(s.num_generated_tokens))
    assert counts == [3]  # after the first, which the prompt's pass gives


def test_interrupted_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lowering, "write_program", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export(checkpoint("qwen3_moe"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_existing_output_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(MoePackError, match=r"exists.*--force"):
        export(tmp_path / "no such checkpoint", tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"linear": "int3"}, "8da4w, float"),
        ({"embedding": "int4"}, "int8, float"),
        ({"logits": "none"}, "last, all"),
        ({"max_seq_len": 1}, "at least 2"),
        ({"scheme": "int5-g7"}, "int4-g32"),
        ({"max_seq_len": CONTEXT + 1}, f"context ends at {CONTEXT}"),
    ],
)
def test_options_are_refused_by_name(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        export(checkpoint("qwen3_moe"), tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(made_model("qwen3_moe", vocab_size=280), tmp_path / "model")
    largest = max(made_tokenizer().get_vocab().values())
    with pytest.raises(UnsupportedError, match=f"token id {largest}.*279"):
        export(source, tmp_path / "out")


def test_end_of_text_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3_moe"), source)
    settings = source / "generation_config.json"
    content = json.loads(settings.read_text(encoding="utf-8"))
    settings.write_text(json.dumps({**content, "eos_token_id": [2, 5000]}), encoding="utf-8")
    with pytest.raises(UnsupportedError, match="5000"):
        export(source, tmp_path / "out")


def test_model_without_experts_is_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    with pytest.raises(NoMoEBlock):
        export(LlamaForCausalLM(config), tmp_path / "out")


# Windows of 8 tokens, which prompt and continuation pass.
CACHES = [
    "gpt_oss",
    "qwen3_next",
    pytest.param("gemma4_text", marks=pytest.mark.slow),
    pytest.param("deepseek_v32", marks=pytest.mark.slow),
    pytest.param("lfm2_moe", marks=pytest.mark.slow),
    pytest.param("nemotron_h", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("family", CACHES)
def test_tokens_are_those_of_generate_past_the_window(family: str, tmp_path: Path) -> None:
    model: Any = moepack.quantize_(tiny_models.build(family), "int8-g32").model
    ids = tiny_models.tokens(17)
    settings = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        expected = model.generate(ids, **settings)[0, 17:].tolist()
    export(model, tmp_path / "out", max_seq_len=40, linear="float", embedding="float")
    program = Program.load(tmp_path / "out")
    program.eos_ids = frozenset()
    for _ in range(2):  # the second text finds what the first left in the cache
        assert list(Generation(program, ids[0].tolist(), max_new_tokens=20)) == expected
    sizes = program.manifest.methods["forward"]["T"] if program.manifest else None
    one_by_one = family not in ("gpt_oss", "gemma4_text", "deepseek_v32")
    assert sizes == {"min": 1, "max": 1 if one_by_one else 40}
    assert program.tokens_per_call == (1 if one_by_one else 40)


def test_int8_embedding_is_within_half_a_step(tmp_path: Path) -> None:
    embedding = torch.nn.Embedding(9, 12)
    embedding.weight.data[3] = 0
    model = torch.nn.Sequential(embedding)
    assert [layer.path for layer in quantize_embedding(model)] == ["0"]
    packed = model[0]
    assert isinstance(packed, Int8Embedding)
    ids = torch.arange(9)
    error = (packed(ids) - embedding.weight).abs()
    assert (error <= packed.scales / 2 * (1 + 1e-6)).all()
    assert packed(torch.tensor([3])).abs().max() == 0


def test_int8_embedding_of_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = torch.nn.Embedding(9, 12)
    whole = Int8Embedding(embedding)
    monkeypatch.setattr("moepack.exporter.linears._ROWS", 4)
    in_parts = Int8Embedding(embedding)
    assert torch.equal(whole.weight, in_parts.weight)
    assert torch.equal(whole.scales, in_parts.scales)
    assert torch.equal(in_parts.scales[:, 0], embedding.weight.abs().amax(1) / 127)


def test_routers_that_stay_outside_keep_their_precision() -> None:
    model = made_model("qwen3_moe")
    assert router_paths(model) == frozenset()
    moepack.quantize_(model, router="outside")
    assert router_paths(model) == {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate"}


@pytest.mark.slow
def test_router_outside_runs_as_the_eager_model_does(tmp_path: Path) -> None:
    model = load_model(checkpoint("qwen3_moe"))
    moepack.quantize_(model, router="outside")
    export(model, tmp_path / "out", linear="float", embedding="float")
    program = Program.load(tmp_path / "out")
    eager = greedy_tokens(model, PROMPT, 12, program.eos_ids)
    assert list(Generation(program, PROMPT, max_new_tokens=12)) == eager


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_default_options_of_every_family(family: str, tmp_path: Path) -> None:
    export(checkpoint(family), tmp_path / "out")
    program = Program.load(tmp_path / "out")
    assert len(list(Generation(program, PROMPT, max_new_tokens=8))) <= 8


def test_source_is_never_replaced(tmp_path: Path) -> None:
    source = shutil.copytree(checkpoint("mixtral"), tmp_path / "model")
    before = sorted(tmp_path.rglob("*"))
    for out in (source, source / "out", tmp_path):
        with pytest.raises(MoePackError, match="the source"):
            export(source, out, force=True)
        with pytest.raises(MoePackError, match="the source"):
            export(made_model("mixtral"), out, tokenizer_dir=source, force=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "text"),
    [("tokenizer.json", "{"), ("tokenizer_config.json", "{"), ("tokenizer_config.json", "[]")],
)
def test_tokenizer_errors_name_the_file_of_the_checkpoint(
    tmp_path: Path, name: str, text: str
) -> None:
    source = shutil.copytree(checkpoint("mixtral"), tmp_path / "model")
    (source / name).write_text(text, encoding="utf-8")
    with pytest.raises(MoePackError) as caught:
        export(source, tmp_path / "out")
    assert str(caught.value).startswith(f"{source / name}: ")
    assert list(tmp_path.iterdir()) == [source]


def test_nothing_to_pack_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoMoEBlock, match="nothing to pack"):
        export(checkpoint("mixtral"), tmp_path / "out", exclude=["*"])
    assert list(tmp_path.iterdir()) == []


def test_experts_left_in_float_are_refused_before_any_work(tmp_path: Path) -> None:
    where = "model.layers.1.mlp"
    with pytest.raises(UnsupportedError, match=rf"^{where}: .*stay in float.*recipe=.*{where}"):
        export(checkpoint("qwen3_moe"), tmp_path / "out", exclude=["*.layers.1.*"])
    with pytest.raises(UnsupportedError, match=f"^{where}: "):
        export(checkpoint("qwen3_moe"), tmp_path / "out", recipe={where: "float"})
    model = made_model("qwen3_moe")
    moepack.quantize_(model, exclude=where)
    with pytest.raises(UnsupportedError, match=f"^{where}: "):
        export(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_weights_apart_are_the_same_program(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options: dict[str, Any] = {"linear": "float", "embedding": "float", "logits": "all"}
    export(checkpoint("qwen3_moe"), out, weights_file=True, **options)
    one_file = exported("qwen3_moe")
    moved = (one_file / PROGRAM).stat().st_size - (out / PROGRAM).stat().st_size
    assert moved > 0.9 * (out / WEIGHTS).stat().st_size  # names and paddings are the rest
    ids = torch.arange(3, 20)
    apart, together = Program.load(out, verify=True), Program.load(one_file)
    assert torch.equal(apart.logits(ids), together.logits(ids))
    assert WEIGHTS in (out / "README.md").read_text(encoding="utf-8")
    weights = open_weights(out / WEIGHTS)
    packed = [stored for stored in weights.stored.values() if stored.shape and stored.shape[0] == 8]
    assert packed
    assert all(stored.segment.offset % 64 == 0 for stored in weights.stored.values())
    export(checkpoint("qwen3_moe"), out, force=True, **options)  # replaces that file, too
    assert not (out / WEIGHTS).exists()
