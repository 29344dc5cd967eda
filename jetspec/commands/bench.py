"""`jetspec bench`: plain decoding against draft trees on a user's own prompts and model, repeated, as one table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Table

from jetspec.commands.compare import DEMO_PROMPTS, Comparison, Decode, both, is_exact, same_seed, speedup
from jetspec.commands.options import (
    AsChat,
    AsJson,
    Decoding,
    Given,
    Prompts,
    check_prompt,
    examples,
    load_llm,
    options,
    stream,
)
from jetspec.commands.screen import NEGATIVE, last, out, write_json
from jetspec.files import check_writable
from jetspec.types import Completion

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
    texts = tuple(map(check_prompt, prompts or ())) or (DEMO_PROMPTS if data is None else read_prompts(data, limit))
    llm = load_llm(settings.model, settings.engine, given.get("tree"))
    sampling = same_seed(settings.sampling)
    plain, fast = (partial(stream, each, sampling=sampling, chat=chat) for each in both(llm))
    result = measure(plain, fast, texts, repeats)
    record = {
        "model": llm.model_name,
        "drafter": llm.drafter,
        "tree": asdict(llm.tree),
        "dtype": str(llm.target.decoder.embedding.dtype).removeprefix("torch."),
        "max_tokens": sampling.token_limit,
        "temperature": sampling.temperature,
        **result.to_dict(),
    }
    write_json(record) if as_json else out().print(result.table(llm.drafter))
    if out_file is not None:
        from jetspec.record import write_record

        write_record(out_file, record)
    if not result.identical and is_exact(llm) and sampling.temperature == 0:
        raise typer.Exit(NEGATIVE)


def read_prompts(path: Path, limit: int) -> tuple[str, ...]:
    """First user messages of a file of prompts."""
    from jetspec.data.prompts import BadPrompt, PromptData

    found = []
    for prompt in islice(PromptData((path,)), limit):
        if isinstance(prompt, BadPrompt):
            raise ValueError(f"{prompt.where} {prompt.reason}")
        found.append(prompt.turns[0])
    if not found:
        raise ValueError(f"no prompts in {path}")
    return tuple(found)


@dataclass(frozen=True)
class Result:
    """All repeats: a comparison per prompt in each."""

    repeats: Sequence[Sequence[Comparison]]

    @property
    def identical(self) -> bool:
        """True if every text of every repeat is that of plain decoding."""
        return all(c.identical for repeat in self.repeats for c in repeat)

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompts": len(self.repeats[0]),
            "repeats": len(self.repeats),
            "identical": self.identical,
            "same_texts": sum(c.identical for c in self.repeats[0]),
            "speedup": _mean_sd([speedup(repeat) for repeat in self.repeats]),
            "plain": self._side(lambda c: c.plain),
            "speculative": self._side(lambda c: c.speculative),
        }

    def _side(self, side: Callable[[Comparison], Completion]) -> dict[str, Any]:
        """Speed over the repeats, and tokens per round."""
        stats = [[side(c).stats for c in repeat] for repeat in self.repeats]
        tokens = [sum(s.completion_tokens for s in repeat) for repeat in stats]
        seconds = [sum(s.decode_s for s in repeat) for repeat in stats]
        return {
            "tokens_per_s": _mean_sd([t / s if s else 0.0 for t, s in zip(tokens, seconds, strict=True)]),
            "tokens_per_round": sum(tokens) / max(sum(s.rounds for repeat in stats for s in repeat), 1),
            "completion_tokens": sum(tokens),
            "decode_s": sum(seconds),
        }

    def table(self, drafter: str) -> Table:
        values = self.to_dict()
        same = f"{values['same_texts']} of {values['prompts']}"
        table = Table("", box=SIMPLE, caption=f"prompts: {values['prompts']}, repeats: {values['repeats']}")
        for title in ("tokens/s", "tokens per round", "speedup", "same text"):
            table.add_column(title, justify="right")
        for name, key, *more in (
            ("plain", "plain", "", ""),
            (drafter, "speculative", _shown(values["speedup"], 2), same),
        ):
            side = values[key]
            table.add_row(name, _shown(side["tokens_per_s"], 1), f"{side['tokens_per_round']:.2f}", *more)
        return table


def measure(plain: Decode, fast: Decode, prompts: Sequence[str], repeats: int) -> Result:
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
    return Result(found)


def _mean_sd(values: Sequence[float]) -> dict[str, Any]:
    """Mean and sample standard deviation; of a single value none."""
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "sd": sd, "repeats": list(values)}


def _shown(value: dict[str, Any], digits: int) -> str:
    spread = "" if value["sd"] is None else f" ± {value['sd']:.{digits}f}"
    return f"{value['mean']:.{digits}f}{spread}"
