"""The plot and the table of a server under load, from the record of benchmarks.check_rates, for docs/serving.md.

    python -m benchmarks.plot_rates --record docs/results/serve_rates_h200.json --page docs/serving.md \\
        --plots docs/plots

They go between two marks in the page, so that no number in it is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator

from benchmarks.command_load import TIMES
from benchmarks.document import Table, markdown_table
from benchmarks.load import PERCENTILES
from benchmarks.pages import put_between
from jetspec.files import read_text, write_whole

matplotlib.rcParams["svg.hashsalt"] = "rates"  # the same record, the same file
SHOWN = {"p50": "-", "p95": "--"}
"""Percentiles in the plot, and how their lines are drawn."""
LINE = 120
"""Characters of a line on the page."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--page", type=Path, required=True, help="page with the two marks")
    parser.add_argument("--plots", type=Path, required=True, help="folder for the picture")
    args = parser.parse_args()
    fill_page(args.record, args.page, args.plots)


def fill_page(path: Path, page: Path, plots: Path) -> None:
    record = json.loads(read_text(path))
    picture = plots / f"{path.stem}.svg"
    plots.mkdir(parents=True, exist_ok=True)
    draw(record, picture)
    link = os.path.relpath(picture, page.parent)
    parts = (describe(record), f"![Throughput and latency against the rate]({link})", table(record))
    write_whole(page, put_between(read_text(page), "rates", "\n\n".join(parts)))


NEAR_TIES = " (16-bit floats: where two tokens nearly tie, the two may choose differently, and go on differently)"


def describe(record: Mapping[str, Any]) -> str:
    """What was run, and whether both servers wrote the same."""
    hardware, texts = record["hardware"], record["texts"].values()
    where = hardware.get("gpu", hardware["cpu"]) if record["device"] == "cuda" else hardware["cpu"]
    compared, different = (sum(found[what] for found in texts) for what in ("compared", "different"))
    text = (
        f"{record['model']} in {record['dtype']} on {where}, {record['seconds']:g} s of Poisson arrivals per rate, "
        f"greedy answers of at most {record['max_tokens']} tokens, {record['max_batch']} of them written together. Of "
        f"{compared:,} requests that both servers answered, {different:,} got another text"
        f"{NEAR_TIES if different and record['dtype'] != 'float32' else ''}. Times are in milliseconds, "
        f"{', '.join(f'p{p}' for p in PERCENTILES)}; waiting are those without a token when the last request came."
    )
    return textwrap.fill(text, LINE)


def points(record: Mapping[str, Any], server: str) -> dict[float, dict[str, Any]]:
    """The rates at which anything was answered."""
    rates = record["servers"][server].get("rates", {})
    return {float(rate): found for rate, found in rates.items() if "seconds" in found}


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Tokens per second and the three times against the rate; solid is the median, dashed the 95th percentile."""
    figure, ((speed, *row), others) = plt.subplots(2, 2, figsize=(9, 6.4))
    times = dict(zip(TIMES, [*row, *others], strict=True))
    for server, color in zip(record["servers"], plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False):
        found = points(record, server)
        speed.plot(list(found), [r["tokens_per_s"] for r in found.values()], marker="o", color=color)
        for key, axes in times.items():
            for percentile, line in SHOWN.items():
                values = [r[key][percentile] for r in found.values()]
                axes.plot(list(found), values, line, marker="o", color=color, label=f"{server}, {percentile}")
    speed.set(title="throughput", ylabel="tokens/s")
    for key, axes in times.items():
        axes.set(title=TIMES[key], ylabel="ms", yscale="log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    ticks = sorted({rate for server in record["servers"] for rate in points(record, server)})
    for axes in (speed, *times.values()):
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks], minor=False)
        axes.minorticks_off()
        axes.set_xlabel("requests/s")
        axes.grid(alpha=0.3)
    figure.legend(*times["first_token_ms"].get_legend_handles_labels(), loc="lower center", ncols=4, fontsize="small")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def table(record: Mapping[str, Any]) -> str:
    """Two rows per rate, so that servers stand below each other."""
    rows = []
    found = {server: points(record, server) for server in record["servers"]}
    for rate in sorted({rate for rates in found.values() for rate in rates}):
        for server, rates in found.items():
            if rate in rates:
                rows.append((f"{rate:g}", server, *cells(rates[rate])))
    times = tuple(TIMES.values())
    return markdown_table(
        Table(
            ("requests/s", "server", "tokens/s", "tokens per round", *times, "waiting", "failed"),
            tuple(rows),
            first_number=2,
        )
    )


def cells(rate: Mapping[str, Any]) -> tuple[str, ...]:
    times = (" / ".join(f"{value:,.{int(value < 100)}f}" for value in rate[key].values()) for key in TIMES)
    per_round = f"{rate['tokens_per_round']:.2f}" if rate["tokens_per_round"] else "–"
    return f"{rate['tokens_per_s']:,.0f}", per_round, *times, str(rate["waiting_at_the_end"]), str(rate["failed"])


if __name__ == "__main__":
    main()
