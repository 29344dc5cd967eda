"""`jetspec eval-head`: how many tokens a round commits with a head, per task and budget, as a table or JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.table import Table

from jetspec.commands.generate import write_json
from jetspec.commands.screen import err, out
from jetspec.config import TreeConfig
from jetspec.data.answers import Answerer, Decoded, decode, fingerprint
from jetspec.data.corpus import Document
from jetspec.data.prompts import read_questions
from jetspec.engine.engine import check_drafter
from jetspec.files import check_writable
from jetspec.record import shown_head, write_record
from jetspec.train.evaluate import NEAR_NATS, HeadScore, make_trees, score_head

if TYPE_CHECKING:
    from jetspec.engine.llm import LLM

PerTask = Mapping[str, Mapping[str, float]]
"""Task -> budget -> a number."""


@dataclass(frozen=True)
class EvalPlan:
    """What to measure."""

    head: str | None
    """Its name in the results."""
    tasks: Mapping[str, Path]
    """Files of questions."""
    limit: int
    max_tokens: int
    budgets: tuple[str, ...]
    tree: TreeConfig
    """For everything but the budget."""
    real: bool
    """Whether to decode, too."""
    out: Path | None
    """Where the record goes. The target's answers are kept beside it."""

    def __post_init__(self) -> None:
        self.trees(reach=1)
        if self.out is not None:
            check_writable(self.out)

    def trees(self, reach: int) -> dict[str, TreeConfig]:
        return make_trees(self.budgets, self.tree, reach)


def eval_head(llm: LLM, plan: EvalPlan, as_json: bool) -> None:
    """Let the target answer, score the head on the answers, decode them again; then show what came out."""
    if llm.head is None:
        raise ValueError("there is no head to evaluate; give one with --head")
    check_drafter("head", llm.head, plan.tree)
    documents = _answers(llm, plan)
    scores = {}
    for task, answers in documents.items():
        _say(f"{task}: scoring {len(answers)} answers")
        scores[task] = score_head(
            llm.target.decoder, llm.head, answers, plan.budgets, plan.tree, progress=err().is_terminal
        )
    real = _decode(llm, plan, documents) if plan.real else {}
    results = _results(llm, plan, scores, real)
    write_json(results) if as_json else _show(results, HeadScore.join(list(scores.values())))
    if plan.out is not None:
        write_record(plan.out, results)


def _answers(llm: LLM, plan: EvalPlan) -> dict[str, list[Document]]:
    tasks = {task: read_questions(path, plan.limit) for task, path in plan.tasks.items()}
    plain, target = llm.with_drafter("none"), llm.target
    answerer = Answerer(
        llm=plain,
        tokenizer=llm.tokenizer,
        fingerprint=fingerprint(target.decoder),
        max_prompt_tokens=plain.max_prompt_tokens,
        vocab_size=target.decoder.config.vocab_size,
        max_tokens=plan.max_tokens,
        progress=err().is_terminal,
    )
    cache = plan.out.parent / "answers" if plan.out else None
    for questions in tasks.values():
        answerer.check(questions)
    documents = {}
    for task, questions in tasks.items():
        _say(f"{task}: the target's answers to {len(questions)} questions")
        documents[task] = answerer.answers(task, questions, cache)
        if left := sum(len(q.turns) for q in questions) - len(documents[task]):
            _say(f"{task}: later turns left out, as their conversations outgrow the context: {left}")
    return documents


def _decode(llm: LLM, plan: EvalPlan, documents: Mapping[str, Sequence[Document]]) -> dict[str, dict[str, Decoded]]:
    """Task -> budget -> what decoding gave; one engine at a time."""
    assert llm.head is not None
    real: dict[str, dict[str, Decoded]] = {task: {} for task in documents}
    for name, tree in plan.trees(llm.head.head_config.draft_depth(plan.tree.depth)).items():
        fast = llm.with_drafter("head", tree)
        for task, answers in documents.items():
            _say(f"{task}: decoding with {_label(name)}")
            real[task][name] = decode(fast, answers, plan.max_tokens, err().is_terminal)
    return real


def _results(
    llm: LLM, plan: EvalPlan, scores: Mapping[str, HeadScore], real: Mapping[str, Mapping[str, Decoded]]
) -> dict[str, Any]:
    assert llm.head is not None
    forced = {task: score.tokens_per_round for task, score in scores.items()}
    return {
        "model": llm.model_name,
        "head": plan.head and shown_head(plan.head),
        "dtype": str(llm.target.decoder.embedding.dtype).removeprefix("torch."),
        "batch": llm.config.max_batch,
        "limit": plan.limit,
        "max_tokens": plan.max_tokens,
        "tree": {**asdict(plan.tree), "budget": None, "depth": llm.head.head_config.draft_depth(plan.tree.depth)},
        "tokens_per_round": forced,
        "mean": _mean(forced),
        "real": {task: {name: asdict(d) for name, d in row.items()} for task, row in real.items()},
        "details": {task: score.to_dict() for task, score in scores.items()},
    }


def _mean(values: PerTask) -> dict[str, float]:
    """Over the tasks, each counting the same."""
    return {name: statistics.fmean(row[name] for row in values.values()) for name in next(iter(values.values()))}


def _show(results: Mapping[str, Any], overall: HeadScore) -> None:
    console = out()
    console.print(_table("tokens per round", results["tokens_per_round"], "{:.2f}"))
    if results["real"]:
        for title, key, form in (
            ("decoding: tokens per round", "tokens_per_round", "{:.2f}"),
            ("decoding: tokens/s", "tokens_per_s", "{:.0f}"),
            ("decoding: the same text as plain", "same_frac", "{:.1%}"),
        ):
            values = {task: {name: d[key] for name, d in row.items()} for task, row in results["real"].items()}
            console.print(_table(title, values, form))
    top = overall.top_path()
    console.print(
        f"right along the top path {_percent(top['hit_on_path'])}, below a sibling of it "
        f"{_percent(top['hit_below_sibling'])}; top path within {NEAR_NATS:g} nats of the target at "
        f"{_percent(top['near_frac'])} of the anchors"
    )


def _table(title: str, values: PerTask, form: str) -> Table:
    mean = _mean(values)
    table = Table(title=title, title_justify="left", box=SIMPLE, show_footer=len(values) > 1)
    table.add_column("task", footer="mean")
    for name, value in mean.items():
        table.add_column(_label(name), footer=form.format(value), justify="right")
    for task, row in values.items():
        table.add_row(task, *(form.format(row[name]) for name in mean))
    return table


def _label(budget: str) -> str:
    return budget if budget == "chain" else f"tree {budget}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _say(what: str) -> None:
    err().print(what, style="dim", markup=False)
