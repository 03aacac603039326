"""A roofline chart of a BenchResult. Needs matplotlib: pip install "moepack[plot]"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moepack.bench import BenchResult
from moepack.errors import MoePackError
from moepack.staging import require_file


def require_writable(path: Path) -> None:
    """Raises MoePackError where `save` could not write, before minutes of measuring."""
    figure = _figure()
    kinds = sorted(figure.canvas.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise MoePackError(f"{path}: no kind of picture by its name; supported: {', '.join(kinds)}")
    require_file(path)


def save(result: BenchResult, path: Path) -> None:
    """Speed over multiply-accumulates per byte of weights, under memory's and arithmetic's roof."""
    figure = _figure()
    axes = figure.add_subplot()
    intensities = [row.macs_per_byte for row in result.rows]
    span = (min(intensities) / 2, max(*intensities, _ridge(result)) * 2)
    roof = [(x, min(x * result.limits.read_huge_gb_per_s, result.limits.int4_gmac_per_s))
            for x in (span[0], _ridge(result), span[1])]  # fmt: skip
    axes.plot(*zip(*roof, strict=True), color="black", linewidth=1, label="limit of this machine")
    axes.plot(intensities, [row.gmac_per_s for row in result.rows], "o-", label=result.isa)
    for row in result.rows:
        axes.annotate(
            f"T={row.tokens}\n{row.fraction_of_limit:.0%}",
            (row.macs_per_byte, row.gmac_per_s),
            textcoords="offset points",
            xytext=(6, -16),
            fontsize=8,
        )
    d, f, e, k = result.shape
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="multiply-accumulates per byte of weights",
        ylabel="GMAC/s",
        title=f"{result.scheme}, D={d} F={f} E={e} K={k}, threads: {result.threads}",
    )
    axes.legend(loc="lower right")
    axes.grid(visible=True, which="both", linewidth=0.3)
    figure.savefig(path)


def _ridge(result: BenchResult) -> float:
    return result.limits.int4_gmac_per_s / result.limits.read_huge_gb_per_s


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MoePackError('a chart needs matplotlib: pip install "moepack[plot]"') from error
    return Figure(figsize=(7, 4.5), layout="constrained")
