"""ExecuTorch's LLM export with packed experts: arguments, checks, programs that generate text."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moepack
from moepack import export_llm
from moepack.errors import BadWeights, MoePackError, NoMoEBlock, UnsupportedError
from moepack.inspection import inspect
from moepack.integrations.executorch import ExpertOptions, quantized_experts
from moepack.modules import QuantizedMoEFFN
from moepack.program_file import open_program

TOKENIZER = Path(moepack.__file__).parent / "demo/model/tokenizer.json"
PARAMS: dict[str, Any] = {
    "dim": 64,
    "n_layers": 1,
    "n_heads": 2,
    "vocab_size": 2048,
    "hidden_dim": 64,
    "moe": True,
    "num_experts": 4,
    "num_activated_experts": 2,
}
BLOCK = "layers.0.block_sparse_moe"
GENERATE = """
import sys
import executorch.extension.llm.custom_ops.custom_ops, executorch.kernels.quantized
from moepack import ops
ops.load_executorch()
from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner
program, tokenizer, *data = sys.argv[1:]
stats = []
config = GenerationConfig(max_new_tokens=8, temperature=0.0, echo=False)
# Random weights write bytes that are no UTF-8; with a callback for text the runner raises then.
TextLLMRunner(program, tokenizer, *data).generate("the king", config, None, stats.append)
print("", f"count={stats[-1].num_generated_tokens}", sep=chr(10))
"""


def made_checkpoint(
    folder: Path,
    change: Callable[[dict[str, Tensor]], object] = lambda weights: None,
    **params: Any,
) -> tuple[Path, Path]:
    """Random weights under the names of ExecuTorch's llama, and the params file."""
    from executorch.examples.models.llama.llama_transformer import construct_transformer
    from executorch.examples.models.llama.model_args import ModelArgs

    found = {**PARAMS, **params}
    torch.manual_seed(0)
    weights = construct_transformer(ModelArgs(**found)).state_dict()
    change(weights)
    torch.save(weights, folder / "model.pth")
    (folder / "params.json").write_text(json.dumps(found), encoding="utf-8")
    return folder / "model.pth", folder / "params.json"


def configuration(checkpoint: Path | None, params: Path, quantized: bool = True) -> Any:
    from executorch.extension.llm.export.config.llm_config import LlmConfig

    config = LlmConfig()
    config.base.checkpoint = None if checkpoint is None else str(checkpoint)
    config.base.params = str(params)
    config.model.use_moe_quantized_op = quantized
    config.quantization.group_size = None
    return config


def prepared(config: Any, options: ExpertOptions | None = None) -> nn.Module:
    """The model after upstream's source transforms, before torch.export."""
    from executorch.examples.models.llama import export_llama_lib

    with quantized_experts(options or ExpertOptions()):
        model: nn.Module = export_llama_lib._prepare_for_llama_export(config).model
    return model


def remove(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: weights.pop(name)


def test_experts_are_packed_and_compute_the_same(tmp_path: Path) -> None:
    files = made_checkpoint(tmp_path)
    original = prepared(configuration(*files, quantized=False)).get_submodule(BLOCK)
    packed = prepared(configuration(*files), ExpertOptions("int8-g32")).get_submodule(BLOCK)
    assert isinstance(packed, QuantizedMoEFFN)
    x = torch.randn(1, 5, 64)
    with torch.no_grad():
        expected, found = original(x), packed(x)[0]
    assert 20 * torch.log10(expected.norm() / (found - expected).norm()) > 30


@pytest.mark.parametrize(
    ("options", "own_group", "expected"),
    [
        (ExpertOptions(), None, "int4-g32"),
        (ExpertOptions(), 64, "int4-g64"),
        (ExpertOptions(group_size=64), 32, "int4-g64"),
        (ExpertOptions("int8-g64"), 32, "int8-g64"),
        (ExpertOptions("int8-g64", group_size=64), None, "int8-g64"),
    ],
)
def test_the_scheme(
    tmp_path: Path, options: ExpertOptions, own_group: int | None, expected: str
) -> None:
    config = configuration(*made_checkpoint(tmp_path))
    config.quantization.group_size = own_group
    block: Any = prepared(config, replace(options, sqnr_floor=3.0)).get_submodule(BLOCK)
    assert block.scheme == expected


def test_upstreams_layout(tmp_path: Path) -> None:
    files = made_checkpoint(tmp_path)
    original = prepared(configuration(*files, quantized=False)).get_submodule(BLOCK)
    options = ExpertOptions("int8-g32", layout="torchao")
    packed: Any = prepared(configuration(*files), options).get_submodule(BLOCK)
    assert type(packed).__module__ == "executorch.examples.models.llama.source_transformation.moe"
    x = torch.randn(1, 5, 64)
    with torch.no_grad():
        expected, found = original(x), packed(x)[0]
    assert 20 * torch.log10(expected.norm() / (found - expected).norm()) > 30
    assert not hasattr(torch.ops.torchao, "_pack_8bit_act_4bit_weight")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ExpertOptions("mxfp4", layout="torchao"), "'mxfp4' in torchao's layout; supported"),
        (ExpertOptions("int4-g128", layout="torchao"), "layout 'torchao': .*not divisible"),
        (ExpertOptions(group_size=0), "int4-g0"),
    ],
)
def test_schemes_that_do_not_fit(tmp_path: Path, options: ExpertOptions, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        prepared(configuration(*made_checkpoint(tmp_path)), options)


@pytest.mark.parametrize("layout", ["moepack", "torchao"])
def test_weights_that_are_missing_or_left_over(tmp_path: Path, layout: str) -> None:
    options = ExpertOptions(layout=layout)
    w2 = f"{BLOCK}.cond_ffn.w2"
    files = made_checkpoint(tmp_path, remove(w2))
    with pytest.raises(BadWeights, match=f"model.pth: lacks {w2}"):
        prepared(configuration(*files), options)

    def rename(weights: dict[str, Tensor]) -> None:
        weights["layers.0.feed_forward.experts.0.w1"] = torch.zeros(1)

    files = made_checkpoint(tmp_path, rename)
    with pytest.raises(BadWeights, match=r"experts\.0\.w1 would not be used"):
        prepared(configuration(*files), options)

    def spoil(weights: dict[str, Tensor]) -> None:
        weights[w2][1, 2, 3] = torch.nan

    files = made_checkpoint(tmp_path, spoil)
    with pytest.raises(BadWeights, match=r"(?i)nan"):
        prepared(configuration(*files), options)


def test_an_expert_bias_is_a_weight_too(tmp_path: Path) -> None:
    params = {"moe_use_expert_bias": True, "moe_score_func": "sigmoid"}
    files = made_checkpoint(tmp_path, remove(f"{BLOCK}.expert_bias"), **params)
    with pytest.raises(BadWeights, match=f"lacks {BLOCK}.expert_bias"):
        prepared(configuration(*files))
    files = made_checkpoint(tmp_path, moe_use_expert_bias=True)
    assert isinstance(prepared(configuration(*files)).get_submodule(BLOCK), QuantizedMoEFFN)
    with pytest.raises(UnsupportedError, match=f"{BLOCK}: expert biases"):
        prepared(configuration(*files), ExpertOptions(layout="torchao"))


@pytest.mark.parametrize("layout", ["moepack", "torchao"])
def test_a_model_without_experts(tmp_path: Path, layout: str) -> None:
    files = made_checkpoint(tmp_path, moe=False)
    with pytest.raises(NoMoEBlock):
        prepared(configuration(*files), ExpertOptions(layout=layout))


def test_random_weights_need_no_checkpoint(tmp_path: Path) -> None:
    _, params = made_checkpoint(tmp_path)
    # Upstream would pack whatever lay in memory: that can be NaN, or the same twice.
    block: Any = prepared(configuration(None, params)).get_submodule(BLOCK)
    with torch.no_grad():
        assert bool(block(torch.randn(1, 3, 64)).isfinite().all())


def test_the_hook_is_undone_whatever_happens(tmp_path: Path) -> None:
    from executorch.examples.models.llama import export_llama_lib
    from executorch.examples.models.llama.source_transformation import moe

    def hooked() -> tuple[object, object]:
        return moe.replace_moe_with_quantized_op, export_llama_lib._load_llama_model

    before = hooked()
    with quantized_experts(ExpertOptions()):
        assert hooked()[0] is not before[0]
        assert hooked()[1] is not before[1]
    assert hooked() == before
    files = made_checkpoint(tmp_path, remove(f"{BLOCK}.cond_ffn.w1"))
    with pytest.raises(BadWeights):
        prepared(configuration(*files))
    assert hooked() == before


def test_options_without_the_switch_are_an_error(tmp_path: Path) -> None:
    config = configuration(*made_checkpoint(tmp_path), quantized=False)
    with pytest.raises(UnsupportedError, match="use_moe_quantized_op is not set"):
        prepared(config, ExpertOptions("int4-g64"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["moepack.schema=int4-g32"], "moepack.schema=int4-g32: unknown; supported: scheme, group"),
        (["--moe_sheme", "int4-g32"], "--moe_sheme: unknown"),
        (["--moe_scheme"], "--moe_scheme needs a value"),
        (["moepack.group_size=many"], "group_size is 'many'; expected int"),
        (["moepack.layout=other"], "layout 'other'; supported: moepack, torchao"),
        (["moepack.scheme=int3-g32", "moepack.group_size=1"], "int3-g32"),
        (["moepack.scheme=int4-g32", "--moe_group_size=64"], "contradict"),
        (["--config", "/no/such/file.yaml"], "/no/such/file.yaml: there is no such file"),
        (["--config"], "there is no such file"),
        (["+moepack.schema=int4-g32"], "schema=int4-g32: unknown"),
        (["moepack.layout=torchao", "moepack.sqnr_floor=3"], "upstream's transform measures no"),
        (["--checkpoint", "x", "model.use_kv_cache=True"], "--checkpoint beside model.use_kv_cach"),
        (["model.bogus=1"], "Could not override 'model.bogus'.* Key 'bogus'"),
        (["model.use_kv_cache=maybe"], "Error merging override .*'maybe' is not a valid bool"),
    ],
)
def test_arguments_that_are_wrong(arguments: list[str], message: str) -> None:
    before = list(sys.argv)
    with pytest.raises(MoePackError, match=message.replace("(", r"\(")):
        export_llm.export_llm(arguments)
    assert sys.argv == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {use_kv_cache: [", "while parsing.*c.yaml.*line 1"),
        ("model: 1\nmodel: 2", "while constructing a mapping.*c.yaml.*duplicate key model"),
        ("moepack: int4-g32", "c.yaml: moepack is 'int4-g32'; expected its keys"),
        ("moepack: [scheme]", "c.yaml: moepack is .'scheme'.; expected its keys"),
        ("moepack: {schema: int4-g32}", "c.yaml: 'schema': unknown; supported: scheme"),
        ("moepack: {scheme: 'int5-g${moepack.group_size}', group_size: 64}", "int5-g64"),
        ("moepack: {scheme: null, group_size: many}", "group_size is 'many'; expected int"),
    ],
)
def test_configuration_files_that_are_wrong(text: str, message: str, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(text, encoding="utf-8")
    with pytest.raises(MoePackError, match=message) as caught:
        export_llm.export_llm(["--config", str(config)])
    assert "\n" not in str(caught.value)
    other = config.rename(tmp_path / "c.txt")
    with pytest.raises(MoePackError, match=r"c\.txt: Hydra reads files that are named"):
        export_llm.export_llm(["--config", str(other)])


def run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def generated(program: Path, *data: Path) -> int:
    """How many tokens TextLLMRunner makes after the first."""
    (count,) = re.findall(r"count=(\d+)", run("-c", GENERATE, program, TOKENIZER, *data))
    return int(count)


def flags(checkpoint: Path, params: Path, folder: Path, *more: str) -> list[str]:
    return [
        *("--checkpoint", str(checkpoint), "--params", str(params), "--output-dir", str(folder)),
        *("--max_seq_length", "64", "--max_context_length", "64", "--output_name", "model"),
        *("--metadata", '{"get_bos_id": 0, "get_eos_ids": [0]}'),
        *("--use_moe_quantized_op", "--use_kv_cache", *more),
    ]


@pytest.mark.slow
def test_flags_with_quantized_layers_and_sdpa(tmp_path: Path) -> None:
    more = ["-X", "-qmode", "8da4w", "-G", "32", "-E", "8,0", "--use_sdpa_with_kv_cache"]
    run("-m", "moepack.cli", "export-llm", *flags(*made_checkpoint(tmp_path), tmp_path, *more))
    program = tmp_path / "model.pte"
    assert "moepack::quantized_moe_ffn.out" in operators(program)
    assert "llama::custom_sdpa.out" in operators(program)
    assert alignments(program) == {0}
    assert generated(program) == 7


def operators(program: Path) -> frozenset[str]:
    return frozenset(open_program(program).operators())


def alignments(program: Path) -> set[int]:
    """Of moepack's constants in the file, modulo 64."""
    calls = [c for m in open_program(program).methods for c in m.calls]
    ours = [call for call in calls if call.operator.startswith("moepack::")]
    assert ours
    return {constant.offset % 64 for call in ours for constant in call.constants}


@pytest.mark.slow
def test_a_file_with_a_section_and_weights_of_their_own(tmp_path: Path) -> None:
    checkpoint, params = made_checkpoint(tmp_path)
    config = tmp_path / "llm.yaml"
    config.write_text(
        f"""
base: {{checkpoint: {checkpoint}, params: {params}}}
model: {{use_moe_quantized_op: true, use_kv_cache: true}}
export: {{max_seq_length: 64, max_context_length: 64, output_name: {tmp_path}/model.pte,
         foundation_weights_file: weights}}
backend: {{xnnpack: {{enabled: true}}}}
moepack: {{scheme: int8-g64}}
""",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", "moepack.export_llm", f"--config={config}", "moepack.sqnr_floor=9"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "int8-g64" in done.stderr
    assert generated(tmp_path / "model.pte", tmp_path / "weights.ptd") == 7
    packed = inspect(tmp_path / "weights.ptd", verify=True)
    assert [(stack.scheme, stack.experts) for stack in packed.packed] == [("int8-g64", 4)] * 2
    assert packed.problems == []
    assert inspect(tmp_path / "model.pte").missing  # the file of weights has another name
    shutil.copyfile(tmp_path / "weights.ptd", tmp_path / "model.ptd")
    assert len(inspect(tmp_path / "model.pte", verify=True).packed) == 2


@pytest.mark.slow
def test_a_program_with_upstreams_operator(tmp_path: Path) -> None:
    more = ["--moe_layout", "torchao"]
    run("-m", "moepack.export_llm", *flags(*made_checkpoint(tmp_path), tmp_path, *more))
    assert "llama::quantized_moe_ffn.out" in operators(tmp_path / "model.pte")
    assert generated(tmp_path / "model.pte") == 7


def test_both_commands_end_with_one_line(tmp_path: Path) -> None:
    checkpoint, params = made_checkpoint(tmp_path)
    checkpoint.write_bytes(b"no checkpoint")
    for command in (["moepack.export_llm"], ["moepack.cli", "export-llm"]):
        done = subprocess.run(
            [sys.executable, "-m", *command, *flags(checkpoint, params, tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith(f"moepack: {checkpoint}: missing, cut short")


def test_help_names_both_kinds_of_arguments() -> None:
    out = run("-m", "moepack.cli", "export-llm", "--help")
    assert "moepack.scheme=NAME" in out
    assert "--use_moe_quantized_op" in out
