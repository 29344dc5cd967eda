"""`jetspec report`: a summary on stdout; the report as Markdown, as a page, and its plots, in a folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.document import Plot, to_html, to_markdown
from benchmarks.plots import has_matplotlib
from benchmarks.report import EXTRA, TITLE, ReportPlan, build_report
from benchmarks.runs import Inputs, read_inputs
from benchmarks.summary import SummaryForm, summary
from jetspec.commands.screen import err, working
from jetspec.files import write_whole

PLOTS = "plots"


def show(paths: Sequence[Path], form: SummaryForm) -> Inputs:
    """Read runs and records, and print what they hold."""
    inputs = read_inputs(paths)
    sys.stdout.write(summary(inputs, form))
    sys.stdout.flush()
    return inputs


def write_report(inputs: Inputs, folder: Path, paper: bool = True) -> None:
    """The report of what was read, into a folder."""
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
    err().print(f"{folder / 'report.html'}, report.md and {len(pictures)} plots", style="dim", markup=False)


def report_folder(path: Path) -> Path:
    """Where the report of a run or record goes unless said otherwise."""
    return (path if path.is_dir() else path.parent) / "report"
