"""`jetspec bench`: plain decoding against draft trees on a user's own prompts and model, repeated, as one table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from jetspec.commands.compare import DEMO_PROMPTS, Comparison, Decode, both_sides, check_identical, speedup, totals
from jetspec.commands.options import AsChat, AsJson, Decoding, Given, Prompts, check_prompt, examples, load_llm, options
from jetspec.commands.screen import last, number_table, out, total, write_json
from jetspec.files import check_writable
from jetspec.types import Completion, RoundStats

OLD_OPTIONS = {
    *("--methods", "--tasks", "--data-dir", "--url", "--budgets", "--batch", "--skip", "--quick", "--output"),
    *("--report", "--fresh", "--retry-failed"),
}
"""Options of the benchmarks that `jetspec bench` ran in an earlier release."""

app = typer.Typer(add_completion=False)


class BenchCommand(typer.core.TyperCommand):
    """Refuses the words of an earlier release, with the command that takes them now."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any(word.partition("=")[0] in OLD_OPTIONS or word.endswith((".yaml", ".yml")) for word in args):
            raise ValueError("benchmarks of methods and tasks are now `python -m benchmarks run RECIPE`, from a clone")
        return super().parse_args(ctx, args)


@app.command(
    "bench",
    cls=BenchCommand,
    epilog=examples(
        "jetspec bench",
        'jetspec bench "Count to fifty." "Write a limerick." --model Qwen/Qwen3-0.6B --drafter ngram',
        "jetspec bench --data prompts.jsonl --limit 20 --repeats 5 --out bench.json",
    ),
)
@options(
    *("--model=model.name", "model.head", "model.drafter", "model.device", "tree.budget"),
    "sampling.max_tokens",
)
def bench(
    settings: Decoding,
    given: Given,
    prompts: Prompts = None,
    data: Annotated[
        Path | None, typer.Option(help="Prompts from a .jsonl file, as `jetspec data regenerate` reads them.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most prompts of --data.")] = 20,
    repeats: Annotated[int, typer.Option("--repeats", "-r", min=1, help="Times that every prompt is decoded.")] = 3,
    chat: AsChat = True,
    out_file: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write a record.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure plain decoding against draft trees, on your prompts and your model.

    Speed as mean ± standard deviation over the repeats, tokens per round, and whether the texts are the same. The two
    alternate, so that both see the machine alike. Exit status 1: texts differ, greedy in float32.
    """
    if data is not None and prompts:
        raise typer.BadParameter("give prompts or --data, not both", param_hint="--data")
    if out_file is not None:
        check_writable(out_file)
    if data is None:
        texts = tuple(map(check_prompt, prompts or ())) or DEMO_PROMPTS
    else:
        from jetspec.data.prompts import read_questions

        texts = tuple(question.turns[0] for question in read_questions(data, limit))
    llm = load_llm(settings.model, settings.engine, given.get("tree"))
    from jetspec.record import shown_head, write_record

    results = measure(*both_sides(llm, chat)(settings.sampling), texts, repeats)
    record = {
        "model": llm.model_name,
        "drafter": llm.drafter,
        "head": llm.head_name and shown_head(llm.head_name),
        "tree": asdict(llm.tree),
        "dtype": str(llm.target.decoder.embedding.dtype).removeprefix("torch."),
        "max_tokens": settings.sampling.token_limit,
        "temperature": settings.sampling.temperature,
        "setting": settings.sampling.setting,
        **summary(results),
    }
    write_json(record) if as_json else out().print(_table(record))
    if out_file is not None:
        write_record(out_file, record)
    check_identical(record["identical"], llm, settings.sampling)


def summary(repeats: Sequence[Sequence[Comparison]]) -> dict[str, Any]:
    """Results of all repeats, each with a comparison per prompt."""
    plain, speculative = zip(*map(totals, repeats), strict=True)
    return {
        "prompts": len(repeats[0]),
        "repeats": len(repeats),
        "identical": all(c.identical for repeat in repeats for c in repeat),
        "same_texts": sum(c.identical for c in repeats[0]),
        "speedup": _mean_sd([speedup(repeat) for repeat in repeats]),
        "plain": _side(plain),
        "speculative": _side(speculative),
    }


def _table(record: dict[str, Any]) -> Table:
    def row(name: str, key: str, *more: str) -> tuple[str, ...]:
        side = record[key]
        return name, _shown(side["tokens_per_s"], 1), f"{side['tokens_per_round']:.2f}", *more

    same = f"{record['same_texts']} of {record['prompts']}"
    rows = row("plain", "plain"), row(record["drafter"], "speculative", _shown(record["speedup"], 2), same)
    heads = ("", "tokens/s", "tokens per round", "speedup", "same text")
    caption = f"{record['setting']}, prompts: {record['prompts']}, repeats: {record['repeats']}"
    return number_table(heads, rows, caption=caption)


def measure(plain: Decode, fast: Decode, prompts: Sequence[str], repeats: int) -> list[list[Comparison]]:
    """Decodes every prompt both ways in every repeat; the side that begins alternates."""
    from jetspec.progress import progress_bar

    found: list[list[Comparison]] = []
    with progress_bar(total=2 * repeats * len(prompts), desc="measuring", unit="answer", leave=False) as bar:
        for repeat in range(repeats):
            results = []
            for prompt in prompts:
                sides: dict[bool, Completion] = {}
                for is_fast in (False, True) if repeat % 2 == 0 else (True, False):
                    sides[is_fast] = last((fast if is_fast else plain)(prompt))
                    bar.update()
                results.append(Comparison(prompt, sides[False], sides[True]))
            found.append(results)
    return found


def _side(repeats: Sequence[RoundStats]) -> dict[str, Any]:
    """Speed over the repeats, and tokens per round."""
    every = total(repeats)
    return {
        "tokens_per_s": _mean_sd([stats.tokens_per_s for stats in repeats]),
        "tokens_per_round": every.tokens_per_round,
        "completion_tokens": every.completion_tokens,
        "decode_s": every.decode_s,
    }


def _mean_sd(values: Sequence[float]) -> dict[str, Any]:
    """Mean and sample standard deviation; of a single value none."""
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "sd": sd, "repeats": list(values)}


def _shown(value: dict[str, Any], digits: int) -> str:
    spread = "" if value["sd"] is None else f" ± {value['sd']:.{digits}f}"
    return f"{value['mean']:.{digits}f}{spread}"
