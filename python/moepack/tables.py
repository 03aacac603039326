"""Results as a person wants to see them: rich tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import singledispatch

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from moepack.bench import BenchResult
from moepack.demo import DemoResult, Sample, Sizes
from moepack.doctor import Diagnosis
from moepack.evaluate import Perplexity
from moepack.exporter import ExportResult
from moepack.inspection import Inspection
from moepack.planner import BlockPlan, Plan
from moepack.runtime import GenerationStats
from moepack.transform import Report


@singledispatch
def renderable(value: object) -> RenderableType:
    """What rich prints for a result; plain text for values without a form of their own."""
    return Text(str(value))


@renderable.register
def _(value: Plan) -> RenderableType:
    table = _table("Plan", ["block", "class", "E", "K", "D", "F"], right=range(2, 6))
    for title in ("scheme", "router"):
        table.add_column(title)
    for title in ("bytes", "packed"):
        table.add_column(title, justify="right")
    table.add_column("remark")
    for block in value.blocks:
        table.add_row(*_plan_row(block))
    total = f"experts: {_bytes(value.bytes_before)} -> {_bytes(value.bytes_after)}"
    if not value.blocks:
        total = "no MoE block found"
        if value.already_packed:
            total = f"{value.already_packed} MoE blocks, all packed already"
    return Group(table, Text(total)) if value.blocks else Text(total)


def _plan_row(block: BlockPlan) -> tuple[str, ...]:
    top_k = "?" if block.num_activated_experts is None else str(block.num_activated_experts)
    sizes = (str(block.num_experts), top_k, str(block.model_dim), str(block.inner_dim))
    name = " = ".join(path or "(root)" for path in (block.path, *block.also_at))
    if block.action != "replace":
        return (
            name,
            block.block_class,
            *sizes,
            "-",
            "-",
            "-",
            "-",
            f"{block.action}d: {block.why}",
        )
    saved = (_bytes(block.bytes_before), _bytes(block.bytes_after))
    return (name, block.block_class, *sizes, block.scheme, block.router, *saved, block.why)


@renderable.register
def _(value: BenchResult) -> RenderableType:
    d, f, e, k = value.shape
    titles = ["tokens", "ms", "best ms", "GB/s", "GMAC/s", "of the limit"]
    title = f"{value.scheme} on {value.isa}, threads: {value.threads}, D={d} F={f} E={e} K={k}"
    table = _table(title, titles, right=range(6))
    for row in value.rows:
        table.add_row(
            str(row.tokens),
            f"{row.ms:.3f}",
            f"{row.best_ms:.3f}",
            f"{row.gb_per_s:.1f}",
            f"{row.gmac_per_s:.1f}",
            f"{row.fraction_of_limit:.0%}",
        )
    limits = value.limits
    notes = [
        f"limits in the same run: memory {limits.read_huge_gb_per_s:.1f} GB/s on huge pages, "
        f"{limits.read_4k_gb_per_s:.1f} on 4 KiB; int4 {limits.int4_gmac_per_s:.0f} GMAC/s"
    ]
    if found := value.overhead:
        notes += [
            f"one token: {found.ffn_us:.0f} us, of which the router takes {found.router_share:.1%}",
            f"a call besides its experts: eager torch {found.call_us:.1f} us, at most "
            f"{found.call_share:.1%} ({found.call_alone_us:.1f} us in a row); ExecuTorch "
            f"{found.executorch_us:.1f} us, at most {found.executorch_share:.1%}",
        ]
    return Group(table, *map(Text, notes))


@renderable.register
def _(value: Report) -> RenderableType:
    titles = ["block", "scheme", "router", "bytes", "packed", "SQNR", "worst expert", "adapter"]
    table = _table("Replaced blocks", titles, right=range(3, 8))
    for block in value.blocks:
        table.add_row(
            block.path or "(root)",
            block.scheme,
            block.router,
            _bytes(block.bytes_before),
            _bytes(block.bytes_after),
            _decibel(block.sqnr_db),
            _decibel(block.worst_expert_db),
            "-" if block.adapter_error is None else f"{block.adapter_error:.1e}",
        )
    return Group(table, Text(value.note)) if value.note else table


@renderable.register
def _(value: ExportResult) -> RenderableType:
    table = _table(f"Exported to {value.directory}", ["file", "bytes"], right=[1])
    for name, entry in value.manifest.files.items():
        table.add_row(name, _bytes(entry.bytes))
    o = value.manifest.options
    remark = (
        f"experts {value.manifest.scheme}, linear {o['linear']}, embedding {o['embedding']}, "
        f"logits {o['logits']}, up to {o['max_seq_len']} tokens"
    )
    parts: list[RenderableType] = [table, Text(remark)]
    if "tokenizer.json" not in value.manifest.files:
        parts.append(Text("no tokenizer was found: `moepack run` will need one beside model.pte"))
    return Group(*parts)


@renderable.register
def _(value: Inspection) -> RenderableType:
    facts = _table(value.path, ["", ""])
    facts.add_row("kind", value.kind)
    facts.add_row("size", _bytes(value.bytes))
    for method in value.methods:
        if method["instructions"] or method["delegates"]:
            facts.add_row(
                f"method {method['name']}",
                f"{method['instructions']} kernel calls, {method['delegates']} delegates, "
                f"{_bytes(method['planned_bytes'])} of planned memory",
            )
    if value.manifest is not None:
        facts.add_row("scheme", value.manifest["scheme"])
        facts.add_row("model", value.manifest["model"]["architecture"])
        made = value.manifest["versions"]
        facts.add_row("made by", ", ".join(f"{name} {version}" for name, version in made.items()))
    if value.operators:
        facts.add_row("operators", ", ".join(value.operators))
        facts.add_row("backends", ", ".join(value.delegates) or "-")
        facts.add_row("missing here", ", ".join(value.missing) or "nothing")
    facts.add_row("checksums", _verdict(value))
    parts: list[RenderableType] = [facts]
    if value.packed:
        parts.append(_packed_table(value))
    parts += [Text(f"problem: {problem}", style="red") for problem in value.problems]
    return Group(*parts)


def _verdict(value: Inspection) -> str:
    if not value.verified:
        return "not verified (--verify reads every byte)"
    return "see the problems below" if value.problems else "all right"


def _packed_table(value: Inspection) -> Table:
    titles = ["packed experts", "scheme", "E", "rows", "cols", "bytes"]
    table = _table("", titles, right=range(2, 6))
    for stack in value.packed:
        shape = ("-" if size is None else str(size) for size in (stack.rows, stack.cols))
        sizes = (str(stack.experts), *shape, _bytes(stack.bytes))
        table.add_row(stack.where, stack.scheme, *sizes)
    return table


@renderable.register
def _(value: Diagnosis) -> RenderableType:
    versions = _table("Versions", ["package", "version"])
    for name, version in value.versions.items():
        versions.add_row(name, version)
    isas = _table("Instruction sets, best first", ["name", "this CPU", "used"])
    for isa in value.isas:
        used = value.isa_reason if isa["name"] == value.isa_in_use else ""
        isas.add_row(isa["name"], "yes" if isa["supported"] else "no", used)
    checks = _table("Checks", ["what", "", "found"])
    for check in value.checks:
        mark = Text("ok", style="green") if check.ok else Text("wrong", style="red")
        checks.add_row(check.name, mark, check.found + (f" -> {check.fix}" if check.fix else ""))
    threads = ", ".join(f"{name} {count}" for name, count in value.threads.items())
    machine = f"{value.cpu['machine']}, {value.cpu['system']}; threads: {threads}"
    return Group(versions, isas, checks, Text(machine))


@renderable.register
def _(value: Perplexity) -> RenderableType:
    return Text(
        f"perplexity {value.value:.4f} per token ({value.nats_per_token:.4f} nats) over "
        f"{value.tokens} tokens, {value.windows} windows of {value.window}, stride {value.stride}"
    )


@renderable.register
def _(value: GenerationStats) -> RenderableType:
    reasons = {
        "eos": "the model ended the text",
        "length": "the asked number of tokens is reached",
        "context": "the context is full: export with a larger --max-seq-len for more",
    }
    return Text(
        f"{value.prompt_tokens} prompt tokens at {value.prefill_rate:.0f}/s, "
        f"{value.new_tokens} new at {value.decode_rate:.0f}/s; "
        f"{reasons.get(value.stop, 'stopped')}",
        style="dim",
    )


@renderable.register
def _(value: Sizes) -> RenderableType:
    table = _table("Bytes in total", ["", "bytes", "of float"], right=[1, 2])
    rows = {
        "checkpoint file (bf16)": value.checkpoint,
        "float model (fp32)": value.float,
        "experts packed, the rest fp32": value.packed,
        "model.pte, the rest fp32": value.pte,
    }
    for name, size in rows.items():
        table.add_row(name, _bytes(size), f"{size / value.float:.0%}")
    return table


@renderable.register
def _(value: Sample) -> RenderableType:
    text = Text(value.prompt, style="bold") + Text(value.text, style="not bold")
    return Panel(text, title="Text written by model.pte through ExecuTorch")


@renderable.register
def _(value: DemoResult) -> RenderableType:
    base = value.perplexity["float"]
    text = f"{base.tokens} held-out tokens, windows of {base.window}, stride {base.stride}"
    quality = _table("Perplexity per token", ["model", "perplexity", "of float"], right=[1, 2])
    for name, found in value.perplexity.items():
        quality.add_row(name, f"{found.value:.4f}", f"{found.value / base.value:.4f}")
    speed = _table("Tokens per second of model.pte", ["", "tokens/s"], right=[1])
    speed.add_row(f"prefill, {value.speed.prompt_tokens} tokens", f"{value.speed.prefill:,.0f}")
    speed.add_row("decode", f"{value.speed.decode:,.0f}")
    checks = _table("Checks", ["what", "", "found"])
    for check in value.checks:
        mark = Text("ok", style="green") if check.passed else Text("wrong", style="red")
        checks.add_row(check.name, mark, check.found)
    return Group(speed, quality, Text(text), checks, Text(f"{value.seconds:.0f} seconds in all"))


def _table(title: str, columns: Sequence[str], right: Iterable[int] = ()) -> Table:
    table = Table(title=title or None, title_justify="left", show_header=any(columns))
    aligned_right = set(right)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index in aligned_right else "left")
    return table


def _bytes(count: int) -> str:
    return f"{count:,}"


def _decibel(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} dB"
