"""The commands as a user calls them: output, JSON, errors of one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from made_programs import CONTEXT, checkpoint, copied, exported
from moepack import bench, cli

COMMANDS = {
    *("plan", "quantize", "export", "export-llm", "run", "eval", "bench", "inspect", "doctor"),
    *("demo", "convert"),
}


SMALL_BENCH = ("bench", "--shape", "64,48,4,2", "--tokens", "1", "--rounds", "1")
LONG = "p" * 5000


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `moepack arguments`, run in this process."""
    kept = sys.argv
    sys.argv = ["moepack", *map(str, arguments)]
    try:
        cli.main()
        code: Any = 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = kept
    return code, *capsys.readouterr()


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    code, out, err = call(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_commands_are_these() -> None:
    names = {c.name or c.callback.__name__ for c in cli.app.registered_commands if c.callback}
    assert names == COMMANDS


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of(capsys, "plan", checkpoint("deepseek_v3"), "--scheme", "int8-g32")
    assert [(b["path"], b["scheme"]) for b in found["blocks"]] == [
        ("model.layers.1.mlp", "int8-g32")
    ]
    code, out, _ = call(capsys, "plan", checkpoint("deepseek_v3"))
    assert code == 0
    assert "model.layers.1.mlp" in out


def test_plans_that_cannot_be_carried_out_exit_with_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = json.loads((checkpoint("qwen3_moe") / "config.json").read_text(encoding="utf-8"))
    for changes, expected in (
        ({"num_experts_per_tok": 99}, "99 activated experts per token"),
        ({"decoder_sparse_step": 99}, "no MoE block found"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
        code, out, _ = call(capsys, "plan", tmp_path)
        assert code == 1
        assert expected in " ".join(out.split())
        assert call(capsys, "plan", tmp_path, "--json")[0] == 1


@pytest.mark.parametrize(("scheme", "floor_db"), [("mxfp4", 10), ("fp8-b128", 25)])
def test_floating_point_schemes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, scheme: str, floor_db: float
) -> None:
    source, packed, out = checkpoint("mixtral"), tmp_path / "packed", tmp_path / "program"
    chosen = ("--scheme", scheme)
    (block,) = json_of(capsys, "plan", source, *chosen)["blocks"]
    assert block["scheme"] == scheme
    (block,) = json_of(capsys, "quantize", source, "-o", packed, *chosen)["blocks"]
    assert block["worst_weight_db"] > floor_db
    kept_float = ("--linear", "float", "--embedding", "float", "--logits", "all")
    done = json_of(capsys, "export", source, "-o", out, *chosen, *kept_float)
    assert min(done["sqnr_db"].values()) > floor_db
    text = tmp_path / "text.txt"
    text.write_text("each expert knew its own part. " * 20, encoding="utf-8")
    values = []
    for made in (packed, out):
        found = json_of(capsys, "inspect", made, "--verify")
        assert found["problems"] == []
        assert scheme in json.dumps(found["packed"])
        values.append(json_of(capsys, "eval", made, "--text", text, "--window", "32")["value"])
    assert values[0] == pytest.approx(values[1], rel=2e-3)


def test_convert_there_and_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    packed, there, back = (tmp_path / name for name in ("packed", "there", "back"))
    json_of(capsys, "quantize", checkpoint("mixtral"), "-o", packed, "--threads", "1")
    found = json_of(capsys, "convert", packed, "-o", there, "--layout", "torchao")
    assert found["changed_scales"] == 0
    assert found["scales"] > 0
    code, out, _ = call(capsys, "convert", there, "-o", back, "--layout", "moepack")
    assert code == 0
    assert "experts in the layout moepack; all codes kept, all" in " ".join(out.split())
    code, _, err = call(capsys, "convert", back, "-o", there, "--layout", "moepack")
    assert code == 1
    assert "already" in err
    code, _, err = call(capsys, "convert", back, "-o", tmp_path / "x", "--layout", "gguf")
    assert code == 1
    assert "supported: moepack, torchao" in err


def test_quantize_then_evaluate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "packed"
    done = json_of(capsys, "quantize", checkpoint("mixtral"), "-o", out)
    assert [block["path"] for block in done["blocks"]] == ["model.layers.0.mlp"]
    text = tmp_path / "text.txt"
    text.write_text("each expert knew its own part. " * 20, encoding="utf-8")
    values = [
        json_of(capsys, "eval", model, "--text", text, "--window", "32")["value"]
        for model in (out, exported("mixtral"), checkpoint("mixtral"))
    ]
    assert values[0] == pytest.approx(values[1], rel=2e-3)
    assert values[0] != values[2]


@pytest.mark.parametrize("value", [float("nan"), 1e6])
def test_infinite_perplexity_is_valid_json_and_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, value: float
) -> None:
    damaged = copied(checkpoint("mixtral"), tmp_path / "model")
    tensors = load_file(damaged / "model.safetensors")
    tensors["lm_head.weight"] *= value
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    text = tmp_path / "text.txt"
    text.write_text("each expert knew its own part. ", encoding="utf-8")
    code, out, err = call(capsys, "eval", damaged, "--text", text, "--json")
    assert code == 1
    assert "perplexity is" in err
    assert json.loads(out, parse_constant=pytest.fail)["value"] is None


def test_run_streams_text(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("run", exported(), "--prompt", "the experts", "--max-new-tokens", "5")
    code, out, err = call(capsys, *arguments)
    assert code == 0
    assert "5 new" in err
    found = json_of(capsys, *arguments)
    assert found["text"] + "\n" == out
    assert found["stop"] == "length"
    assert found["tokens_per_second"]["decode"] > 0


def test_run_says_when_the_context_is_full(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = call(capsys, "run", exported(), "--prompt", "the", "--threads", "1")
    assert "context is full" in err
    code, _, err = call(capsys, "run", exported(), "--prompt", "the " * 2 * CONTEXT)
    assert code == 1
    assert "context ends at 64" in err


@pytest.mark.parametrize("mode", [[], ["--raw"]])
def test_prompts_that_are_no_unicode(capsys: pytest.CaptureFixture[str], mode: list[str]) -> None:
    code, _, err = call(capsys, "run", exported(), "--prompt", "the \udce9", *mode)
    assert code == 1
    assert err.startswith("moepack: the text is no valid Unicode: character 4")


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    number: signal.Signals,
    expected: int,
) -> None:
    from moepack import exporter

    stages: list[Path] = []

    def end(*_: Any) -> None:
        stages.extend(tmp_path.rglob("*.tmp"))
        os.kill(os.getpid(), number)

    monkeypatch.setattr(exporter, "open_source", end)
    before = signal.getsignal(number)
    code, _, err = call(capsys, "export", checkpoint("mixtral"), "-o", tmp_path / "new" / "out")
    assert (code, len(stages)) == (expected, 1)
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) is before


def test_inspect_and_its_exit_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert json_of(capsys, "inspect", exported(), "--verify")["problems"] == []
    out = copied(exported(), tmp_path / "out")
    (out / "config.json").write_text("{}", encoding="utf-8")
    code, printed, _ = call(capsys, "inspect", out)
    assert code == 1
    assert "config.json" in printed


def test_bench_prints_a_table_and_writes_its_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_READ_BYTES", 4 << 20)
    monkeypatch.setattr(bench, "_MIN_LAYER_BYTES", 1 << 20)
    code, out, err = call(capsys, *SMALL_BENCH, "--json", tmp_path / "found.json")
    assert code == 0, err
    assert "of the limit" in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["tokens"] for row in found["rows"]] == [1]


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "doctor", "--json")
    found = json.loads(out)
    assert code == (0 if found["healthy"] else 1)
    assert found["isa_in_use"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["plan", "/no/such/place"], "/no/such/place: no such directory"),
        (["inspect", "/no/such/place"], "no such file"),
        (["run", "/no/such/place", "--prompt", "x"], "/no/such/place"),
        (["eval", "/no/such/place", "--text", "x"], "/no/such/place"),
        (["quantize", "/no/such/place", "-o", "/no/such/out", "--threads", "0"], "1 to 1024"),
        (["eval", "/no/such/place", "--text", "x", "--threads", "99999999"], "1 to 1024"),
        (["bench", "--threads", "99999999"], "1 to 1024"),
        (["bench", "--rounds", "0"], "rounds is 0"),
        (["bench", "--tokens", "1,999999999999"], "none above 65536"),
        (["bench", "--shape", "1000000,1000000,128,8"], "this machine has"),
        (["demo", "--json", "/no/such/place/a.json"], "/no/such/place/a.json: cannot be written"),
        (["bench", "--json", "/no/such/place/a.json"], "a.json: cannot be written"),
        (["bench", "--plot", "/no/such/place/a.png"], "/no/such/place/a.png: cannot be written"),
        (["bench", "--plot", "a.docx"], "a.docx: no kind of picture"),
        (["run", "/no/such/place", "--prompt", "x", "--threads", "99999999"], "1 to 1024"),
        (["run", "/no/such/place", "--prompt", "x", "--seed", "99999999999999999999"], "seed is"),
        (["run", "/no/such/place", "--prompt", "x", "--temperature", "nan"], "temperature is nan"),
        (["export", "/no/such/place", "-o", "/no/such/out", "--linear", "int3"], "8da4w, float"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    code, out, err = call(capsys, *arguments)
    assert code == 1
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("moepack: ")]
    assert len(lines) == 1
    assert expected in lines[0]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["plan", LONG], "File name too long"),
        (["inspect", LONG], "File name too long"),
        (["run", LONG, "--prompt", "x"], "File name too long"),
        (["eval", LONG, "--text", "x"], "File name too long"),
        (["quantize", LONG, "-o", "out"], "File name too long"),
        (["export", LONG, "-o", "out"], "File name too long"),
        (["quantize", "loop", "-o", "out"], "loop: "),
        (["export", "loop", "-o", "out"], "loop: "),
        (["inspect", "loop"], "loop: "),
        (["quantize", "model", "-o", "/proc/x"], "/proc/x: "),
        (["inspect", "/proc/self/mem"], "/proc/self/mem: cannot be read: "),
        ([*SMALL_BENCH, "--json", "/dev/full"], "/dev/full: cannot be written: No space left"),
    ],
    ids=lambda value: " ".join(value)[:24] if isinstance(value, list) else "",
)
def test_what_the_system_refuses_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    expected: str,
) -> None:
    monkeypatch.setattr(bench, "_READ_BYTES", 4 << 20)
    monkeypatch.setattr(bench, "_MIN_LAYER_BYTES", 1 << 20)
    (tmp_path / "model").symlink_to(checkpoint("mixtral"))
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capsys, *arguments)
    assert code == 1
    (line,) = [line for line in err.splitlines() if line.startswith("moepack: ")]
    assert expected in line
    assert "unexpected" not in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loop", "model"]


def test_a_long_path_is_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = call(capsys, "plan", LONG)
    assert err == f"moepack: {LONG[:200]}...: File name too long\n"


def test_errors_without_a_path_stay_unexpected(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import moepack.doctor

    def fail() -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(moepack.doctor, "diagnose", fail)
    _, _, err = call(capsys, "doctor")
    assert err.startswith("moepack: unexpected OSError: [Errno 5] Input/output error (MOEPACK_D")


def test_unexpected_errors_are_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import moepack.doctor

    def fail() -> None:
        raise ZeroDivisionError("first line\nsecond line")

    monkeypatch.setattr(moepack.doctor, "diagnose", fail)
    code, _, err = call(capsys, "doctor")
    assert code == 1
    assert err.startswith("moepack: unexpected ZeroDivisionError: first line (MOEPACK_DEBUG=1")
    monkeypatch.setenv("MOEPACK_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        call(capsys, "doctor")


def test_command_in_its_own_process(tmp_path: Path) -> None:
    """The installed script's way: exit code, nothing but the message on stderr."""
    environment = {k: v for k, v in os.environ.items() if k != "MOEPACK_DEBUG"}
    command = [sys.executable, "-m", "moepack.cli", "run", str(tmp_path), "--prompt", "x"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_importing_the_command_line_loads_no_torch() -> None:
    code = "import sys, moepack.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.slow
def test_export(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = json_of(capsys, "export", checkpoint("olmoe"), "-o", out)
    assert done["options"]["linear"] == "8da4w"
    assert (out / "model.pte").is_file()
    code, _, err = call(capsys, "export", checkpoint("olmoe"), "-o", out)
    assert code == 1
    assert "--force" in err
