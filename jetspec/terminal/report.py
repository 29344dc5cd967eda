"""`jetspec report`: a summary on stdout; the report as Markdown, as a page, and its plots, in a folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jetspec.bench.document import Plot, to_html, to_markdown
from jetspec.bench.plots import has_matplotlib
from jetspec.bench.report import EXTRA, TITLE, ReportPlan, build_report
from jetspec.bench.runs import read_inputs
from jetspec.bench.summary import SummaryForm, summary
from jetspec.files import write_whole
from jetspec.terminal.screen import err, working

PLOTS = "plots"


def write_report(paths: Sequence[Path], folder: Path | None, form: SummaryForm, paper: bool) -> None:
    """Read runs and records, write the report into a folder: by default `report` in the first run."""
    inputs = read_inputs(paths)
    if folder is None:
        folder = (paths[0] if paths[0].is_dir() else paths[0].parent) / "report"
    plots = has_matplotlib()
    if not plots:
        err().print(EXTRA, markup=False)
    with working("Drawing"):
        blocks = build_report(ReportPlan(inputs, paper, plots))
    pictures = [block for block in blocks if isinstance(block, Plot)]
    (folder / PLOTS if pictures else folder).mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        write_whole(folder / PLOTS / f"{picture.name}.svg", picture.svg + "\n")
    write_whole(folder / "report.md", to_markdown(TITLE, blocks, PLOTS))
    write_whole(folder / "report.html", to_html(TITLE, blocks))
    if inputs.runs:
        sys.stdout.write(summary(inputs.runs, form))
    err().print(f"{folder / 'report.html'}, report.md and {len(pictures)} plots", style="dim", markup=False)
