"""A benchmark becomes part of the docs: its record, its report, and what it found at a glance on a page.

    python -m benchmarks.bench_page runs/bench/smollm2 --out docs/results/bench_smollm2 --page README.md

The record and the report go to the folder; the page gets a table between the marks of the folder's name. With a folder
that is in the docs already, report and table are written anew.
"""

from __future__ import annotations

import argparse
import os
import shutil
from datetime import datetime
from pathlib import Path

from benchmarks.command_report import write_report
from benchmarks.document import markdown_table
from benchmarks.pages import put_between
from benchmarks.runs import RESULTS_FILE, Run, commits_of, read_inputs
from benchmarks.tables import glance_table, groups_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder that `jetspec bench` wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder of the docs for record and report")
    parser.add_argument("--page", type=Path, required=True, help="page with the marks")
    args = parser.parse_args()
    inputs = read_inputs([args.run])
    (run,) = inputs.runs
    page = put_between(args.page.read_text(encoding="utf-8"), args.out.name, at_a_glance(run, args.out, args.page))
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / RESULTS_FILE).exists() or not (args.out / RESULTS_FILE).samefile(args.run / RESULTS_FILE):
        shutil.copyfile(args.run / RESULTS_FILE, args.out / RESULTS_FILE)
    write_report(inputs, args.out)
    args.page.write_text(page, encoding="utf-8")


def at_a_glance(run: Run, folder: Path, page: Path) -> str:
    """A table per temperature and batch size, and the way to the rest."""
    link = os.path.relpath(folder / "report.md", page.parent)
    began, ended = (datetime.fromisoformat(date) for date in (run.record["runs"][0]["date"], run.record["date"]))
    parts = [
        f"{run.setting} Commit {commits_of(run.record)}, from {began:%Y-%m-%d %H:%M:%S} to {ended:%Y-%m-%d %H:%M:%S}"
        f" UTC. All of it: [{link}]({link})."
    ]
    for where, cells in groups_of(run.cells):
        table = glance_table(cells, run.widest_tie)
        parts += [f"{where[0].upper()}{where[1:]}:", markdown_table(table), table.caption]
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
