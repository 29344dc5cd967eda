"""Pictures of reports and pages as SVG without other files, for light and dark screens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from benchmarks.cells import sum_columns
from benchmarks.estimate import Estimate
from benchmarks.results import Record, Result, Run
from benchmarks.tables import Field, at_best, by_budget, by_key, by_method, on_all_tasks, over_tasks
from jetspec.commands.eval_head import draw_reliability
from jetspec.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOTS = "plots"
"""Folder of pictures beside the page that shows them."""
TIMES = {"first_token_ms": "first token", "between_tokens_ms": "between tokens", "whole_ms": "whole answer"}
"""Latencies of a request, and their titles."""
INK = "#010203"
"""Placeholder for the text colour of the page, as in `plots.mplstyle`."""
COLOURS = (
    *("#3b82c4", "#d9822b", "#2f9e6e", "#b05cc6", "#c94f4f", "#8a8f2c", "#7d7d8a", "#17a2b8"),
    *("#a0643c", "#5a6acf", "#d46a9f", "#5f8f3e", "#b8860b", "#4b9f9f", "#9f6fd1"),
)
"""Readable on white and on near black."""
STYLE = Path(__file__).with_name("plots.mplstyle")
SVG_STYLE = (
    "<style>svg.plot{color:#1f2328;background:#fff}"
    "@media(prefers-color-scheme:dark){svg.plot{color:#e6edf3;background:#0d1117}}</style>"
)
SIZE = (8.0, 4.0)
GAP_LIMITS = (-10.0, 40.0)
"""Nats. Gaps beyond them are counted in the outer bars."""
Draw = Callable[["Axes"], None]


def has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw_svg(name: str, panels: Mapping[str, Draw], columns: int = 1, size: tuple[float, float] = SIZE) -> str:
    """Panels by title above one legend, with the text colour of the page, and ids that differ between pictures."""
    from matplotlib.figure import Figure
    from matplotlib.style import context

    buffer, handles = StringIO(), dict[str, Any]()
    with context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(-(-len(panels) // columns), columns, squeeze=False)
        for axes, (title, draw) in zip(grid.flat, panels.items(), strict=True):
            axes.set_title(title, loc="left")
            draw(axes)
            handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        if handles:
            figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
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


@dataclass
class Painter:
    """Draws pictures in which a method keeps its colour, and keeps their SVG by name."""

    pictures: dict[str, str] = field(default_factory=dict)
    colours: dict[str, str] = field(default_factory=dict)

    def colour(self, method: str) -> str:
        return self.colours.setdefault(method, COLOURS[len(self.colours) % len(COLOURS)])

    def plot(self, name: str, title: str, caption: str, draw: Draw) -> str:
        """Markdown of a picture and its caption."""
        name = re.sub(r"[^\w-]", "_", name)
        self.pictures[name] = draw_svg(name, {title: draw})
        return f"![{title}]({PLOTS}/{name}.svg)\n\n{caption}"

    def line(self, axes: Axes, series: Mapping[int, Estimate], label: str, colour: str = "") -> None:
        xs = sorted(series)
        means, spreads = [series[x].mean for x in xs], [series[x].sd or 0 for x in xs]
        axes.errorbar(xs, means, yerr=spreads, marker="o", capsize=2, color=colour or self.colour(label), label=label)


def mark_values(axes: Axes, values: Iterable[float]) -> None:
    """Logarithmic axis with ticks at the measured values."""
    values = sorted(values)
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()


def mark_one(axes: Axes) -> None:
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set_ylabel("speedup over plain")


# -- benchmarks


def setting_plots(painter: Painter, mark: str, where: str, cells: Sequence[Result]) -> list[str]:
    """All plots of one temperature and batch size."""
    return [
        *speedup_bars(painter, f"speedup_{mark}", where, cells),
        *against_budget(
            painter, f"rounds_{mark}", f"Tokens per round against budget, {where}", cells, "tokens_per_round"
        ),
        *against_budget(painter, f"speedup_budget_{mark}", f"Speedup against budget, {where}", cells, "speedup"),
        *draft_plots(painter, mark, where, cells),
    ]


def speedup_bars(painter: Painter, name: str, where: str, cells: Sequence[Result]) -> list[str]:
    drawn = [cell for cell in at_best(cells) if cell.speedup and not cell.is_plain]
    if not drawn:
        return []
    rows = [(cell.task, cell.label, cell.speedup.mean, cell.speedup.sd or 0) for cell in drawn if cell.speedup]
    frame = pd.DataFrame(rows, columns=["task", "label", "mean", "sd"])
    order = frame["task"].unique(), frame["label"].unique()
    means, spreads = (frame.pivot(index="task", columns="label", values=each).loc[order] for each in ("mean", "sd"))
    colours = [painter.colour(method) for method in by_method(drawn)]

    def draw(axes: Axes) -> None:
        means.plot.bar(ax=axes, yerr=spreads, color=colours, ecolor=INK, width=0.8, rot=0, legend=False, xlabel="")
        mark_one(axes)
        axes.grid(axis="x", visible=False)

    caption = "Each method at its best budget (the number beside its name). Whiskers: standard deviation over repeats."
    return [painter.plot(name, f"Speedup per task, {where}", caption, draw)]


def against_budget(painter: Painter, name: str, title: str, cells: Sequence[Result], value: Field) -> list[str]:
    """A line per method over budgets, each point a mean over tasks. Methods without a budget are level lines."""
    lines = series_of([cell for cell in cells if not cell.is_plain], value)
    budgets = {budget for series in lines.values() for budget in series if budget is not None}
    if len(budgets) < 2:
        return []

    def draw(axes: Axes) -> None:
        for method, series in lines.items():
            if None in series:
                axes.axhline(series[None].mean, color=painter.colour(method), linestyle=":", label=method)
            else:
                painter.line(axes, series, method)
        mark_values(axes, budgets)
        unit = "speedup over plain" if value == "speedup" else "tokens per round"
        axes.set(xlabel="budget (nodes of a tree)", ylabel=unit)

    bars = "standard deviation over repeats" if value == "speedup" else "standard error over questions"
    caption = f"Means over tasks. Bars: {bars}. Dotted: methods without a budget."
    return [painter.plot(name, title, caption, draw)]


def series_of(cells: Sequence[Result], value: Field, key: str = "budget") -> dict[str, dict[Any, Estimate]]:
    """Means over tasks by method and budget; none where a task has no value."""
    tasks = len({cell.task for cell in cells})
    found: dict[str, dict[Any, Estimate]] = {}
    for method, own in by_key("method" if key == "budget" else "label", cells).items():
        for place, group in by_key(key, own).items():
            if number := over_tasks(group, value, tasks):
                found.setdefault(method, {})[place] = number
    return found


def batch_plots(painter: Painter, name: str, where: str, cells: Sequence[Result]) -> list[str]:
    """Speedup over batch sizes: a plot per method that has several budgets; else one for all."""
    drawn = [cell for cell in cells if cell.speedup and not cell.is_plain]
    if len({cell.batch for cell in drawn}) < 2:
        return []
    several = {method: own for method, own in by_method(drawn).items() if len(by_budget(own)) > 1}
    caption = "Means over tasks; the number beside a method is its budget. Plain decoding has the same batch."

    def draw(own: Sequence[Result], axes: Axes) -> None:
        shades = Painter()
        for label, series in series_of(own, "speedup", "batch").items():
            shades.line(axes, series, label)
        mark_values(axes, {cell.batch for cell in own})
        mark_one(axes)
        axes.set_xlabel("batch (conversations decoded together)")

    return [
        painter.plot(f"{name}_{m}", f"Speedup against batch: {m}, {where}", caption, partial(draw, own))
        for m, own in (several or {"all methods": drawn}).items()
    ]


@dataclass(frozen=True)
class Drafts:
    """Lengths of a method's accepted drafts, and the two speed formulas of speculative decoding fitted to them: every
    draft token is accepted with probability `alpha` at any depth."""

    label: str
    colour: str
    accepted: Sequence[int]
    """Number of rounds that accepted 0, 1, 2, .. drafts."""
    speedup: float = 0.0
    """Measured; 0 where it is not known."""

    @property
    def depth(self) -> int:
        return len(self.accepted) - 1

    @property
    def alpha(self) -> float:
        """The most likely one: a round has seen a success per accepted draft, and a failure unless all were."""
        kept = sum(length * rounds for length, rounds in enumerate(self.accepted))
        tried = kept + sum(self.accepted[:-1])
        return kept / tried if tried else 0.0

    @property
    def reach_shares(self) -> list[float]:
        """Share of rounds that keep at least 1, 2, .. drafts."""
        at_least = list(accumulate(reversed(self.accepted)))[::-1]
        return [rounds / at_least[0] for rounds in at_least[1:]]

    @property
    def tokens_when_cut(self) -> list[float]:
        """Tokens per round had every draft been cut at depth 0, 1, ..: drafts beyond it are lost, all else stays."""
        return list(accumulate(self.reach_shares, initial=1.0))

    def tokens(self, length: int) -> float:
        """Equation 1: tokens of a round whose draft is a chain of `length` tokens."""
        return length + 1 if self.alpha >= 1 else (1 - self.alpha ** (length + 1)) / (1 - self.alpha)

    @property
    def cost(self) -> float:
        """Cost of drafting a token, in target passes, at which equation 2 gives the speedup. Negative: not known."""
        return (self.tokens(self.depth) / self.speedup - 1) / self.depth if self.speedup else -1.0


def draft_plots(painter: Painter, mark: str, where: str, cells: Sequence[Result]) -> list[str]:
    """Lengths of accepted drafts, and both speed formulas fitted to them, over methods that were asked all tasks."""
    whole = on_all_tasks(cells)
    asked, speeds, drawn = by_method(whole), series_of(cells, "speedup"), list[Drafts]()
    for method, group in by_method(at_best(whole)).items():
        if own := [cell for cell in group if any(cell.accepted[1:])]:
            speedup = speeds.get(method, {}).get(own[0].budget)
            accepted = sum_columns(cell.accepted for cell in own)
            drawn.append(Drafts(own[0].label, painter.colour(method), accepted, speedup.mean if speedup else 0.0))
    if not drawn:
        return []
    missing = [method for method in by_method(cells) if method not in asked]
    left_out = f" Left out, as asked some tasks only: {', '.join(missing)}." if missing else ""
    timed = [drafts for drafts in drawn if drafts.cost >= 0]

    def reached(axes: Axes) -> None:
        for d in drawn:
            axes.plot(range(1, d.depth + 1), d.reach_shares, "o-", color=d.colour, label=d.label)
        deepest = range(1, max(d.depth for d in drawn) + 1)
        axes.set(xlabel="depth", ylabel="share of rounds that get there", ylim=(0, 1), xticks=deepest)

    def equation_1(axes: Axes) -> None:
        for d in drawn:
            lengths = range(d.depth + 1)
            axes.plot(lengths, [d.tokens(n) for n in lengths], color=d.colour, linewidth=1.2)
            axes.plot(lengths, d.tokens_when_cut, "o", color=d.colour, label=f"{d.label} (α = {d.alpha:.2f})")
        axes.set(xlabel="draft length L", ylabel="tokens per round")

    def equation_2(axes: Axes) -> None:
        for d in timed:
            lengths, whole = range(1, 2 * d.depth + 1), d.depth * d.cost
            axes.plot(lengths, [d.tokens(n) / (n * d.cost + 1) for n in lengths], color=d.colour, linestyle="--")
            axes.plot(lengths, [d.tokens(n) / (whole + 1) for n in lengths], color=d.colour, linewidth=1.2)
            axes.plot([d.depth], [d.speedup], "o", markersize=6, color=d.colour, label=f"{d.label} (L·c = {whole:.2f})")
        mark_one(axes)
        axes.set_xlabel("draft length L")

    plots = [
        ("acceptance", "Acceptance per depth", f"Over all tasks, each method at its best budget.{left_out}", reached),
        ("equation1", "Equation 1: tokens per round", f"{EQUATION_1}{left_out}", equation_1),
        ("equation2", "Equation 2: speedup", EQUATION_2, equation_2),
    ]
    return [
        painter.plot(f"{name}_{mark}", f"{title}, {where}", caption, draw)
        for name, title, caption, draw in plots[: 3 if timed else 2]
    ]


EQUATION_1 = (
    "Lines: (1 - α^(L+1)) / (1 - α) with the α that fits a method's accepted lengths best. Points: its measured "
    "rounds, had their drafts been cut at depth L. Where points rise above their line, later drafts are accepted "
    "more often than earlier ones."
)
EQUATION_2 = (
    "Points: measured, at the greatest depth that was accepted. Dashed: (1 - α^(L+1)) / ((1 - α)(L·c + 1)), every "
    "draft token costing c target passes. Solid: the whole draft costing what it does at the point, as when one "
    "pass drafts all of it. α is fitted to accepted lengths, and c to the point: it holds all that a round costs "
    "beyond a plain step. Methods that would need a c below 0 are left out."
)


def gap_histogram(painter: Painter, heads: Iterable[Run]) -> list[str]:
    """Log-probability of the head's top path less that of the target."""
    gaps = {head.name: head.gaps for head in heads if head.gaps}
    if not gaps:
        return []

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
    return [painter.plot("rank1_gap", "Rank-1 gap", caption, draw)]


def reliability_plots(painter: Painter, heads: Iterable[Run]) -> list[str]:
    """Probabilities of draft trees of sampled text against what the target chose, by head and sampling setting."""
    return [
        painter.plot(f"choices_{head.name}_{name}", f"{head.name}, {name}: predicted and chosen", CHOICES, draw)
        for head in heads
        for name, row in (head.record.get("sampled") or {}).items()
        for draw in (partial(draw_reliability, row["reliability"]),)
    ]


CHOICES = (
    "Share of nodes below accepted ones that the target chose, against their mean probability, by decile and depth. "
    "Points grow with the number of nodes; on the diagonal the probabilities hold."
)

# -- pages


def write_svg(path: Path, panels: Mapping[str, Draw], columns: int = 1, size: tuple[float, float] = SIZE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, draw_svg(path.stem, panels, columns, size) + "\n")


def draw_lines(title: str, means: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """A line per variant over budgets."""

    def draw(axes: Axes) -> None:
        for (label, mean), colour in zip(means.items(), COLOURS, strict=False):
            axes.plot(list(mean), list(mean.values()), "o-", color=colour, label=label)
        axes.set(xlabel="budget", ylabel="tokens per round")

    write_svg(path, {title: draw})


def draw_latencies(timings: Sequence[Mapping[str, float]], path: Path) -> None:
    """Share of requests that took no longer than each time."""

    def draw(key: str, axes: Axes) -> None:
        axes.ecdf([times[key] for times in timings], color=COLOURS[0])
        axes.set(xlabel="ms", ylabel="share of requests")

    panels = {title: partial(draw, key) for key, title in TIMES.items()}
    write_svg(path, panels, len(TIMES), (9, 3))


def draw_rates(record: Record, path: Path) -> None:
    """Throughput and three latencies against the rate; solid is the median, dashed the 95th percentile."""
    from matplotlib.ticker import LogLocator

    found = {
        server: {float(rate): values for rate, values in about.get("rates", {}).items() if "seconds" in values}
        for server, about in record["servers"].items()
    }

    def draw(value: Callable[[Record], float], unit: str, line: str, label: str, axes: Axes) -> None:
        for (server, rates), colour in zip(found.items(), COLOURS, strict=False):
            values = [value(at_rate) for at_rate in rates.values()]
            axes.plot(list(rates), values, f"o{line}", color=colour, label=label and f"{server}, {label}")
        mark_values(axes, {rate for rates in found.values() for rate in rates})
        axes.set(xlabel="requests/s", ylabel=unit)

    def draw_times(key: str, axes: Axes) -> None:
        axes.set_yscale("log", subs=())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        for percentile, line in (("p50", "-"), ("p95", "--")):
            draw(lambda at_rate, p=percentile: at_rate[key][p], "ms", line, percentile, axes)  # type: ignore[misc]

    times = {title: partial(draw_times, key) for key, title in TIMES.items()}
    speeds = {"throughput": partial(draw, lambda at_rate: at_rate["tokens_per_s"], "tokens/s", "-", "")}
    write_svg(path, {**speeds, **times}, 2, (9, 6.4))
