import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from moepack import _core, bench
from moepack.bench import overhead
from moepack.bench.layers import Layers
from moepack.errors import UnsupportedError, VerificationError
from moepack.report import renderable
from moepack.runtime import thread_count
from moepack.schemes import scheme

SHAPE = (64, 48, 4, 2)


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_READ_BYTES", 4 << 20)
    monkeypatch.setattr(bench, "_MIN_LAYER_BYTES", 1 << 20)


def test_a_run_reports_what_it_measured() -> None:
    done: list[float] = []
    result = bench.bench(SHAPE, (1, 5), "int8-g64", threads=1, rounds=2, progress=done.append)
    assert done == [0.5, 1.0]
    assert result.shape == SHAPE
    assert result.scheme == "int8-g64"
    assert result.threads == 1
    one, five = result.rows
    assert (one.tokens, five.tokens) == (1, 5)
    macs = 3 * 2 * 64 * 48
    assert one.gmac_per_s == pytest.approx(macs / one.ms / 1e6)
    assert five.gmac_per_s == pytest.approx(5 * macs / five.ms / 1e6)
    limit = max(
        1e3 * macs / one.macs_per_byte / result.limits.read_huge_gb_per_s / 1e9,
        1e3 * macs / result.limits.int4_gmac_per_s / 1e9,
    )
    assert one.fraction_of_limit == pytest.approx(limit / one.ms)
    assert result.to_json()["rows"][0]["fraction_of_limit"] == one.fraction_of_limit


@pytest.mark.parametrize("name", ["mxfp4", "fp8-b128"])
def test_floating_point_schemes(name: str) -> None:
    result = bench.bench(SHAPE, (1, 2), name, threads=1, rounds=1)
    assert result.scheme == name
    assert [row.tokens for row in result.rows] == [1, 2]
    assert all(row.ms > 0 and row.fraction_of_limit > 0 for row in result.rows)


def test_an_instruction_set_can_be_asked_for() -> None:
    assert bench.bench(SHAPE, (1,), isa="scalar", rounds=1).isa == "scalar"
    with pytest.raises(UnsupportedError, match="this CPU runs"):
        bench.bench(SHAPE, (1,), isa="neon64", rounds=1)


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Layers.call
    count = 0

    def wrong(self: Layers, *inputs: object) -> object:
        nonlocal count
        count += 1
        return call(self, *inputs) + count  # type: ignore[arg-type]

    monkeypatch.setattr(Layers, "call", wrong)
    with pytest.raises(VerificationError, match="differs from the scalar kernel"):
        bench.bench(SHAPE, (1,), rounds=1)


def test_what_is_timed_is_what_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    check = Layers.check

    def noted(self: Layers, isa: str | None) -> None:
        check(self, isa)
        checked.append(_core.active_isa())

    monkeypatch.setattr(Layers, "check", noted)
    found = bench.bench(SHAPE, (1,), isa="scalar", rounds=1)
    assert checked == [found.isa] == ["scalar"]


def test_what_a_call_costs_besides_its_experts() -> None:
    threads = thread_count()
    found = bench.bench(SHAPE, (1,), threads=1, rounds=3, with_overhead=True)
    assert thread_count() == threads
    cost, measured = found.overhead, found.to_json()["overhead"]
    assert cost is not None
    assert all(measured[f"{name}_us"] > 0 for name in ("call", "call_alone", "experts", "ffn"))
    assert measured["call_share"] == cost.call_us / cost.ffn_us
    assert measured["executorch_share"] == cost.executorch_us / cost.experts_us
    assert measured["router_share"] == 1 - cost.experts_us / cost.ffn_us
    shown = io.StringIO()
    Console(file=shown, width=140).print(renderable(found))
    assert "a call besides its experts: eager torch" in shown.getvalue()


def test_a_program_that_differs_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layers = Layers(SHAPE, scheme("int4-g32"), 0)
    _, ids, weights, _ = layers.inputs(1, 0)
    outputs = iter([torch.zeros(1, 64), torch.ones(1, 64)])
    monkeypatch.setattr(overhead._Chain, "forward", lambda self, x: x + next(outputs))
    with pytest.raises(VerificationError, match="1 operators in a program differ"):
        overhead._program(layers, ids, weights, 1, tmp_path)


@pytest.mark.parametrize("text", ["", "1,2", "a,b,c,d", "64,48,2,4", "0,1,1,1", "huge"])
def test_shapes_that_are_none(text: str) -> None:
    with pytest.raises(UnsupportedError, match="shape"):
        bench.parse_shape(text)


def test_shapes_and_tokens() -> None:
    assert bench.parse_shape("qwen3-30b-a3b") == (2048, 768, 128, 8)
    assert bench.parse_shape("64,48,4,2") == SHAPE
    assert bench.parse_tokens("1,16") == (1, 16)
    assert bench.parse_tokens("65536") == (65536,)
    for text in ("1,-2", "", "65537", "1,99999999999999999999"):
        with pytest.raises(UnsupportedError, match=r"tokens .*none above 65536"):
            bench.parse_tokens(text)


def test_a_layer_beyond_the_memory_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"1000000,1000000,128,8: .* this machine has"):
        bench.bench((1_000_000, 1_000_000, 128, 8), (1,), rounds=1)


def test_the_chart_is_written(tmp_path: Path) -> None:
    from moepack.bench import chart

    chart.save(bench.bench(SHAPE, (1, 4), rounds=1), tmp_path / "roof.png")
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")
