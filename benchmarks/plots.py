"""Plots of a report as SVG without other files, for light and dark screens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cells import sum_columns
from benchmarks.document import Plot
from benchmarks.estimate import Estimate
from benchmarks.formulas import (
    expected_speedup,
    expected_tokens,
    fit_alpha,
    implied_cost,
    reach_shares,
    tokens_when_cut,
)
from benchmarks.recipe import PLAIN
from benchmarks.results import HeadRecord, Record, Result
from benchmarks.tables import Value, at_best, by_budget, by_method, on_all_tasks, over_tasks, rounds_of, speedup_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIMES = {"first_token_ms": "first token", "between_tokens_ms": "between tokens", "whole_ms": "whole answer"}
"""Latencies of a request, and their titles."""
INK = "#010203"
"""Placeholder for the text colour of the page."""
COLOURS = (
    *("#3b82c4", "#d9822b", "#2f9e6e", "#b05cc6", "#c94f4f", "#8a8f2c", "#7d7d8a", "#17a2b8"),
    *("#a0643c", "#5a6acf", "#d46a9f", "#5f8f3e", "#b8860b", "#4b9f9f", "#9f6fd1"),
)
"""Readable on white and on near black."""
RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "jetspec",
    "text.parse_math": False,  # a dollar in a name is a dollar
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "axes.titlesize": 12,
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick", "grid")},
    **{f"axes.{part}color": INK for part in ("edge", "label")},
}
SVG_STYLE = (
    "<style>svg.plot{color:#1f2328;background:#fff}"
    "@media(prefers-color-scheme:dark){svg.plot{color:#e6edf3;background:#0d1117}}</style>"
)
WIDTH, HEIGHT = 8.0, 4.0
GAP_LIMITS = (-10.0, 40.0)
"""Nats. Gaps beyond them are counted in the outer bars."""


def has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


@dataclass
class Painter:
    """Draws plots in which a method keeps its colour."""

    colour_of: dict[str, str] = field(default_factory=dict)

    def colour(self, method: str) -> str:
        return self.colour_of.setdefault(method, COLOURS[len(self.colour_of) % len(COLOURS)])

    def plot(self, name: str, title: str, caption: str, draw: Callable[[Axes], None], height: float = HEIGHT) -> Plot:
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        name = re.sub(r"[^\w-]", "_", name)
        with rc_context(RC):
            figure = Figure(figsize=(WIDTH, height), layout="constrained")
            axes = figure.subplots()
            axes.set_title(title, loc="left")
            draw(axes)
            figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
            return Plot(name, title, caption, to_svg(figure, name))


def to_svg(figure: Figure, name: str) -> str:
    """SVG with the text colour of the page, and ids that differ between plots of a page."""
    buffer = StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    used = set(re.findall(r"#([\w-]+)", svg))
    svg = re.sub(r' id="([\w.-]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    svg = re.sub(r"font: (\S+) [^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    svg = svg.replace(INK, "currentColor")
    return re.sub(r"<svg ([^>]*)>", rf'<svg class="plot" role="img" \1>{SVG_STYLE}', svg, count=1)


def setting_plots(painter: Painter, mark: str, where: str, cells: Sequence[Result]) -> list[Plot]:
    """All plots of one temperature and batch size."""
    rounds, speedup = f"Tokens per round against budget, {where}", f"Speedup against budget, {where}"
    drawn = (
        speedup_bars(painter, f"speedup_{mark}", where, cells),
        against_budget(painter, f"rounds_{mark}", rounds, cells, rounds_of, "tokens per round"),
        against_budget(painter, f"speedup_budget_{mark}", speedup, cells, speedup_of, "speedup over plain"),
        acceptance(painter, f"acceptance_{mark}", where, cells),
        equation_1(painter, f"equation1_{mark}", where, cells),
        equation_2(painter, f"equation2_{mark}", where, cells),
    )
    return [plot for plot in drawn if plot is not None]


def speedup_bars(painter: Painter, name: str, where: str, cells: Sequence[Result]) -> Plot | None:
    drawn = [cell for cell in at_best(cells) if cell.speedup and not cell.is_plain]
    if not drawn:
        return None
    tasks = list(dict.fromkeys(cell.task for cell in drawn))
    labels = {cell.method: cell.label for cell in drawn}
    width = min(0.2, 0.82 / len(labels))

    def draw(axes: Axes) -> None:
        for i, (method, label) in enumerate(labels.items()):
            own = {cell.task: cell.speedup for cell in drawn if cell.method == method and cell.speedup}
            places = [tasks.index(task) + (i - (len(labels) - 1) / 2) * width for task in own]
            heights, spreads = [s.mean for s in own.values()], [s.sd or 0 for s in own.values()]
            bars: Any = axes.bar(places, heights, width * 0.92, yerr=spreads, color=painter.colour(method), label=label)
            for whisker in bars.errorbar.lines[2]:
                whisker.set(color=INK, linewidth=1)
        axes.axhline(1, color=INK, linewidth=0.8)
        limits = (-0.6, len(tasks) - 0.4)
        axes.set(xticks=range(len(tasks)), xticklabels=tasks, xlim=limits, ylabel="speedup over plain")
        axes.grid(axis="x", visible=False)

    caption = "Each method at its best budget (the number beside its name). Whiskers: standard deviation over repeats."
    return painter.plot(name, f"Speedup per task, {where}", caption, draw)


def against_budget(
    painter: Painter,
    name: str,
    title: str,
    cells: Sequence[Result],
    value: Value,
    unit: str,
) -> Plot | None:
    """A line per method over budgets, each point a mean over tasks. Methods without a budget are level lines."""
    lines = {method: series for method, series in series_of(cells, value).items() if method != PLAIN}
    budgets = sorted({budget for series in lines.values() for budget in series if budget is not None})
    if len(budgets) < 2:
        return None

    def draw(axes: Axes) -> None:
        for method, series in lines.items():
            if None in series:
                axes.axhline(series[None].mean, color=painter.colour(method), linestyle=":", label=method)
            else:
                _line(axes, series, painter.colour(method), method)
        _powers(axes, budgets)
        axes.set(xlabel="budget (nodes of a tree)", ylabel=unit)

    bars = "standard error over questions" if value is rounds_of else "standard deviation over repeats"
    caption = f"Means over tasks. Bars: {bars}. Dotted: methods without a budget."
    return painter.plot(name, title, caption, draw)


def series_of(
    cells: Sequence[Result], value: Callable[[Result], Estimate | None]
) -> dict[str, dict[int | None, Estimate]]:
    """Means over tasks by method and budget; none where a task has no value."""
    mean = Estimate.independent if value is rounds_of else Estimate.average
    tasks = len({cell.task for cell in cells})
    found: dict[str, dict[int | None, Estimate]] = {}
    for method, own in by_method(cells).items():
        for budget, group in by_budget(own).items():
            number = over_tasks([value(cell) for cell in group], tasks, mean)
            if number is not None:
                found.setdefault(method, {})[budget] = number
    return found


def against_batch(painter: Painter | None, name: str, where: str, cells: Sequence[Result]) -> list[Plot]:
    """Speedup over batch sizes: a plot per method that has several budgets; else one for all."""
    drawn = [cell for cell in cells if cell.speedup and not cell.is_plain]
    if painter is None or len({cell.batch for cell in drawn}) < 2:
        return []
    several = {method: own for method, own in by_method(drawn).items() if len(by_budget(own)) > 1}
    parts = several or {"all methods": drawn}
    return [_batch_plot(painter, f"{name}_{m}", f"{m}, {where}", own) for m, own in parts.items()]


def _batch_plot(painter: Painter, name: str, where: str, cells: Sequence[Result]) -> Plot:
    def draw(axes: Axes) -> None:
        shades = Painter()
        tasks, batches = len({cell.task for cell in cells}), sorted({cell.batch for cell in cells})
        for label in dict.fromkeys(cell.label for cell in cells):
            own = [cell for cell in cells if cell.label == label]
            means = {b: over_tasks([cell.speedup for cell in own if cell.batch == b], tasks) for b in batches}
            _line(axes, {b: mean for b, mean in means.items() if mean}, shades.colour(label), label)
        axes.axhline(1, color=INK, linewidth=0.8)
        _powers(axes, batches)
        axes.set(xlabel="batch (conversations decoded together)", ylabel="speedup over plain")

    caption = "Means over tasks; the number beside a method is its budget. Plain decoding has the same batch."
    return painter.plot(name, f"Speedup against batch: {where}", caption, draw)


def acceptance(painter: Painter, name: str, where: str, cells: Sequence[Result]) -> Plot | None:
    """Share of rounds that accept at least so many drafts, per method."""
    histograms = merged_histograms(at_best(on_all_tasks(cells)))
    if not histograms:
        return None

    def draw(axes: Axes) -> None:
        for cell, accepted in histograms:
            shares = reach_shares(accepted)
            colour = painter.colour(cell.method)
            axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=4, color=colour, label=cell.label)
        depth = max(len(accepted) for _, accepted in histograms)
        axes.set(xlabel="depth", ylabel="share of rounds that get there", ylim=(0, 1), xticks=range(1, depth))

    caption = f"Over all tasks, each method at its best budget.{left_out(cells)}"
    return painter.plot(name, f"Acceptance per depth, {where}", caption, draw)


def left_out(cells: Sequence[Result]) -> str:
    """Caption: methods missing from a plot of all tasks."""
    whole = by_method(on_all_tasks(cells))
    names = [method for method in by_method(cells) if method not in whole]
    return f" Left out, as asked some tasks only: {', '.join(names)}." if names else ""


def merged_histograms(cells: Sequence[Result]) -> list[tuple[Result, list[int]]]:
    """Per method, one of its cells and the accepted lengths of all of them."""
    found = []
    for group in by_method(cells).values():
        if own := [cell for cell in group if any(cell.accepted[1:])]:
            found.append((own[0], sum_columns(cell.accepted for cell in own)))
    return found


def equation_1(painter: Painter, name: str, where: str, cells: Sequence[Result]) -> Plot | None:
    """Measured tokens per round against the formula with the one alpha that fits best."""
    histograms = merged_histograms(at_best(on_all_tasks(cells)))
    if not histograms:
        return None

    def draw(axes: Axes) -> None:
        for cell, accepted in histograms:
            alpha, colour = fit_alpha(accepted), painter.colour(cell.method)
            lengths = range(len(accepted))
            axes.plot(lengths, [expected_tokens(alpha, n) for n in lengths], color=colour, linewidth=1.2)
            label = f"{cell.label} (α = {alpha:.2f})"
            axes.plot(lengths, tokens_when_cut(accepted), "o", markersize=4, color=colour, label=label)
        axes.set(xlabel="draft length L", ylabel="tokens per round")

    caption = (
        "Lines: (1 - α^(L+1)) / (1 - α) with the α that fits a method's accepted lengths best. Points: its measured "
        "rounds, had their drafts been cut at depth L. Where points rise above their line, later drafts are accepted "
        f"more often than earlier ones.{left_out(cells)}"
    )
    return painter.plot(name, f"Equation 1: tokens per round, {where}", caption, draw)


def equation_2(painter: Painter, name: str, where: str, cells: Sequence[Result]) -> Plot | None:
    """Speedup of the formula for every draft length through the measured point, where its cost is at least 0."""
    speeds = series_of(cells, speedup_of)
    drawn = []
    for cell, accepted in merged_histograms(at_best(on_all_tasks(cells))):
        if cell.budget in speeds.get(cell.method, {}):
            alpha, depth, speedup = fit_alpha(accepted), len(accepted) - 1, speeds[cell.method][cell.budget].mean
            cost = implied_cost(expected_tokens(alpha, depth), speedup, depth)
            if cost >= 0:
                drawn.append((cell, alpha, depth, speedup, cost))
    if not drawn:
        return None

    def draw(axes: Axes) -> None:
        for cell, alpha, depth, speedup, cost in drawn:
            lengths, colour = range(1, 2 * depth + 1), painter.colour(cell.method)
            one_pass = [expected_tokens(alpha, n) / (depth * cost + 1) for n in lengths]
            axes.plot(lengths, [expected_speedup(alpha, n, cost) for n in lengths], color=colour, linestyle="--")
            axes.plot(lengths, one_pass, color=colour, linewidth=1.2)
            label = f"{cell.label} (L·c = {depth * cost:.2f})"
            axes.plot([depth], [speedup], "o", color=colour, label=label)
        axes.axhline(1, color=INK, linewidth=0.8)
        axes.set(xlabel="draft length L", ylabel="speedup over plain")

    caption = (
        "Points: measured, at the greatest depth that was accepted. Dashed: (1 - α^(L+1)) / ((1 - α)(L·c + 1)), every "
        "draft token costing c target passes. Solid: the whole draft costing what it does at the point, as when one "
        "pass drafts all of it. α is fitted to accepted lengths, and c to the point: it holds all that a round costs "
        "beyond a plain step. Methods that would need a c below 0 are left out."
    )
    return painter.plot(name, f"Equation 2: speedup, {where}", caption, draw)


def gap_histogram(painter: Painter, heads: Iterable[HeadRecord]) -> Plot | None:
    """Log-probability of the head's top path less that of the target."""
    gaps = {head.name: head.gaps for head in heads if head.gaps}
    if not gaps:
        return None

    def draw(axes: Axes) -> None:
        edges = [2.0 * i for i in range(int(GAP_LIMITS[0]) // 2, int(GAP_LIMITS[1]) // 2 + 1)]
        clipped = [[min(max(gap, edges[0]), edges[-1] - 1) for gap in values] for values in gaps.values()]
        weights = [[1 / len(values)] * len(values) for values in clipped]
        colours = [painter.colour(name) for name in gaps]
        axes.hist(clipped, bins=edges, weights=weights, color=colours, label=list(gaps))
        axes.set(xlabel="log q - log p of the top path, nats", ylabel="share of anchors")

    caption = (
        "q is the head's probability of its best path, p the target's. Gaps beyond "
        f"{GAP_LIMITS[0]:g} and {GAP_LIMITS[1]:g} are counted in the outer bars."
    )
    return painter.plot("rank1_gap", "Rank-1 gap", caption, draw)


def _line(axes: Axes, series: Mapping[Any, Estimate], colour: str, label: str) -> None:
    xs = sorted(series)
    means, spreads = [series[x].mean for x in xs], [series[x].sd or 0 for x in xs]
    axes.errorbar(xs, means, yerr=spreads, marker="o", markersize=4, capsize=2, color=colour, label=label)


def _powers(axes: Axes, values: Sequence[int]) -> None:
    """Logarithmic axis with ticks at the measured values."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()


# -- pages


def draw_lines(title: str, means: Mapping[str, Mapping[str, float]], path: Path) -> None:
    figure, axes = new_figure((6, 3.6))
    for name, mean in means.items():
        axes.plot(list(mean), list(mean.values()), marker="o", label=name)
    axes.set(title=title, xlabel="budget", ylabel="tokens per round")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save(figure, path, title)


def draw_latencies(timings: Sequence[Mapping[str, float]], path: Path) -> None:
    """Share of requests that took no longer than each time."""
    figure, plots = new_figure((9, 3), 1, len(TIMES), sharey=True)
    for axes, (key, title) in zip(plots, TIMES.items(), strict=True):
        values = sorted(times[key] for times in timings)
        axes.step(values, [(i + 1) / len(values) for i in range(len(values))], where="post")
        axes.set(title=title, xlabel="ms")
        axes.grid(alpha=0.3)
    plots[0].set_ylabel("share of requests")
    save(figure, path, "load")


def draw_rates(record: Record, path: Path) -> None:
    """Throughput and three latencies against the rate; solid is the median, dashed the 95th percentile."""
    from matplotlib import rcParams
    from matplotlib.ticker import LogLocator

    figure, ((speed, *row), others) = new_figure((9, 6.4), 2, 2)
    times = dict(zip(TIMES, [*row, *others], strict=True))
    ticks = set[float]()
    for server, color in zip(record["servers"], rcParams["axes.prop_cycle"].by_key()["color"], strict=False):
        rates = record["servers"][server].get("rates", {})
        found = {float(rate): values for rate, values in rates.items() if "seconds" in values}
        ticks |= found.keys()
        speed.plot(list(found), [r["tokens_per_s"] for r in found.values()], marker="o", color=color)
        for key, axes in times.items():
            for percentile, line in (("p50", "-"), ("p95", "--")):
                values = [r[key][percentile] for r in found.values()]
                axes.plot(list(found), values, line, marker="o", color=color, label=f"{server}, {percentile}")
    speed.set(title="throughput", ylabel="tokens/s")
    for key, axes in times.items():
        axes.set(title=TIMES[key], ylabel="ms", yscale="log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    for axes in (speed, *times.values()):
        axes.set_xscale("log")
        axes.set_xticks(sorted(ticks), [f"{rate:g}" for rate in sorted(ticks)], minor=False)
        axes.minorticks_off()
        axes.set_xlabel("requests/s")
        axes.grid(alpha=0.3)
    figure.legend(*times["first_token_ms"].get_legend_handles_labels(), loc="lower center", ncols=4, fontsize="small")
    save(figure, path, "rates", rect=(0, 0.04, 1, 1))


def new_figure(size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure of its own, laid out for SVG, and its axes."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    FigureCanvasSVG(figure)
    return figure, figure.subplots(rows, columns, **options)


def save(figure: Figure, path: Path, salt: str, **layout: Any) -> None:
    """Write a figure; the same data give the same file."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout(**layout)
    with rc_context({"svg.hashsalt": salt}):
        figure.savefig(path, metadata={"Date": None})
