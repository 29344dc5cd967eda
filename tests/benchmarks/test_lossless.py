"""Comparison with plain texts: ties, mistakes, and the exit status of the command."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import Result as Done

from benchmarks import lossless
from benchmarks.lossless import (
    READINGS,
    FreshPass,
    Gap,
    Judge,
    drawn,
    gap_by_all,
    pair_noise,
    readings,
    round_more,
)
from benchmarks.methods import Reply
from benchmarks.run_record import Results
from jetspec.engine.drafter import NoDrafter
from jetspec.engine.engine import Engine
from jetspec.engine.llm import LLM
from jetspec.ops.select import force, uses_kernel
from jetspec.types import Request
from tests.benchmarks.tiny_bench import invoke, make_bench, meddle, results_of, write_questions
from tests.train.tiny_model import CONTEXT


def slip(reply: Reply) -> Reply:
    """A wrong third token."""
    ids = [*reply.token_ids]
    ids[2] = (ids[2] + 1) % 100
    return replace(reply, token_ids=ids)


def run_command(folder: Path, name: str, *words: str) -> Done:
    usual = ["--model", str(folder / "model"), "--data-dir", str(folder / "eval"), "--device", "cpu", "-n", "12"]
    return invoke("run", *usual, "--methods", "ngram", "--out", folder / name, *words)


def test_the_noise_of_a_draw_is_that_of_the_engine(folder: Path, llm: LLM) -> None:
    """The drawn token is the best of the logits that gaps are taken from: so its gap to itself is 0."""
    bench = make_bench(folder, "drawn", llm, temperatures=[0.8], repeats=1)
    results = Results(bench, bench.run())
    fresh = results.lossless.fresh
    rows = [row for (cell, _, _), row in results.rows.items() if cell.method == "ngram"]
    prompts = {prompt.id: prompt for prompt in bench.questions["sums"]}
    for answer in (answer for row in rows for answer in row["answers"]):
        prompt = llm.tokenizer.encode_chat([{"role": "user", "content": prompts[answer["id"]].turns[0]}])
        tokens = answer["turn_tokens"][0]
        judge = drawn(fresh.logits, bench.config.sampling(0.8, 0, answer["id"], 0))
        for place, token in enumerate(tokens):
            assert int(judge([*prompt, *tokens[:place]]).argmax()) == token


def test_a_greedy_answer_is_compared_once_and_a_divergence_is_judged_once(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[Any] = []

    def look(a: int, b: int, tokens: Sequence[int], judges: Sequence[Judge], limit: float) -> Gap:
        looked_at.append((a, b, tokens))
        return gap_by_all(a, b, tokens, judges[:1], limit)

    monkeypatch.setattr(lossless, "gap_by_all", look)
    meddle(monkeypatch, slip)
    options: dict[str, Any] = {"budgets": [4, 6], "temperatures": [0, 1], "repeats": 3, "max_tokens": 4}
    cells = results_of(make_bench(folder, "slips", llm, **options))["cells"]
    for greedy, seeded in ([c["lossless"] for c in cells if c["lossless"] and c["budget"] == n] for n in (4, 6)):
        assert (greedy["compared"], seeded["compared"]) == (5, 15), "draws of another repeat are other answers"
        assert greedy["identical"] == greedy["ties"] == 0 and len(greedy["different"]) == 5
        assert all(found["repeats"] == [0, 1, 2] and found["position"] == 2 for found in greedy["different"])
    assert len(looked_at) == 5 + 15, "once for both budgets"


# -- ties


def test_pieces_of_a_text_are_the_whole_in_float32_and_nearly_so_in_16_bits(folder: Path, llm: LLM) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 200, (60,), generator=generator).tolist()
    texts = [(tokens[:20], tokens[20:])]
    exact = FreshPass(llm.target.decoder, None, 64)
    for size in (1, 7, 100):
        parts_TV = exact.logits(tokens, 40, size)
        torch.testing.assert_close(parts_TV, exact.logits(tokens, 40), atol=1e-4, rtol=0)
    assert pair_noise(exact, texts, 8).widest_tie < 1e-4
    rounded = FreshPass(LLM(folder / "model", device="cpu", dtype="bfloat16").target.decoder, None, 64)
    assert 1e-3 < pair_noise(rounded, texts, 8).widest_tie < 1


class Moved:
    """A target whose pieces move logits: those of tokens that are far behind by more."""

    def __init__(self, near: float, far: float, rivals: int) -> None:
        self.at_once = torch.tensor([[4.0] + [3.9] * rivals + [-5.0] * 3])
        self.off = torch.tensor([[0.0] + [near] * rivals + [-far] * 3])

    def logits(self, tokens: Sequence[int], last: int = 1, size: int | None = None) -> Tensor:
        moved = 0 if size is None else self.off if size > 1 else self.off / 2
        return (self.at_once + moved).expand(last, -1)


def test_likely_tokens_are_judged_by_their_own_noise() -> None:
    """And by that of all where hardly anything may be."""
    text = [([1, 2], [3] * 40)]
    noise = pair_noise(Moved(0.25, 1.0, rivals=2), text, 8)  # type: ignore[arg-type]
    assert (noise.steps, noise.trees, noise.drawn, noise.positions) == (0.125, 0.25, 1.25, 40)
    assert (noise.tie_at(0), noise.tie_at(1)) == (0.25, 1.25)
    assert pair_noise(Moved(0.25, 1.0, rivals=1), text, 8).widest_tie == 1.25  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gaps", "judged"),
    [
        ((0.5, 9.0, 9.0), (0.5, 0.0, True)),
        ((3.0, 2.0, 0.25, 0.5, 2.0), (0.25, 1.75, True)),
        ((9.0, 2.5, 2.0, 1.5, 1.25), (1.25, 1.25, True)),
        ((9.0, 2.25, 2.0, 1.5, 1.5), (1.5, 0.75, False)),
        ((9.0, 9.5, math.inf, 8.5, 9.0), (8.5, 1.0, False)),
        ((math.inf,) * 5, (math.inf, 0.0, False)),
    ],
)
def test_a_gap_that_is_wide_in_every_reading_and_moves_little_is_a_mistake(
    gaps: tuple[float, ...], judged: tuple[float, float, bool]
) -> None:
    """A target of two minds about its next token: by so much in each reading."""
    read: list[float] = []

    def reading(gap: float) -> Judge:
        return lambda tokens: read.append(gap) or torch.tensor([[gap, 0.0, -9.0]])  # type: ignore[func-returns-value]

    found = gap_by_all(0, 1, [], list(map(reading, gaps)), limit=1.0)
    assert (found.gap, found.least, found.moved, found.tie) == (gaps[0], *judged)
    assert tuple(read) == (gaps if gaps[0] > 1 else gaps[:1]), "a tie is read no further"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_more_errs_as_much_as_two_roundings(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(400, 500, dtype=torch.float64, generator=draw).clamp(-4, 4).to(dtype)
    x[x.abs() < 2**-10] = 0
    moved = round_more(x, draw)
    unit = torch.finfo(dtype).eps * 2.0 ** x.double().abs().log2().floor()
    steps = ((moved.double() - x.double()) / unit)[x != 0]
    assert set(steps.tolist()) == {-1.0, 0.0, 1.0} and not moved[x == 0].any()
    assert float(steps.mean()) == pytest.approx(0, abs=0.01)
    assert float(steps.square().mean()) == pytest.approx(2 / 12, rel=0.02)


def test_readings_are_by_plain_torch_and_leave_the_target_as_it_was(folder: Path, llm: LLM) -> None:
    """Each rounds otherwise, and the same each time."""
    seen = set[bool]()
    rounded = LLM(folder / "model", device="cpu", dtype="bfloat16").target.decoder
    rounded.layers[1].register_forward_pre_hook(lambda *_: seen.add(uses_kernel(torch.zeros(1))))
    fresh, tokens = FreshPass(rounded, None, 64), list(range(40))
    before, (first, *others) = fresh.logits(tokens), readings(fresh)
    with force("triton"):
        seen.clear()
        found = [judge(tokens) for judge in others]
    assert seen == {False} and len({tuple(logits[0].tolist()) for logits in found}) == len(others) == READINGS
    assert torch.equal(found[0], others[0](tokens))
    assert torch.equal(first(tokens), before) and torch.equal(fresh.logits(tokens), before)
    exact = readings(FreshPass(llm.target.decoder, None, 64))
    for judge in exact:
        torch.testing.assert_close(judge(tokens), exact[0](tokens), atol=1e-4, rtol=0)


def wrong_in_rounds_with_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    append = Engine._append

    def wrong(self: Engine, request: Request, tokens: list[int]) -> list[int]:
        is_late = not isinstance(self.drafter, NoDrafter) and len(request.tokens) > request.prompt_len + 3
        return append(self, request, [(token + 1) % 100 for token in tokens] if is_late else tokens)

    monkeypatch.setattr(Engine, "_append", wrong)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_writes_wrong_tokens_is_status_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Its own noise, however large, is no excuse."""
    wrong_in_rounds_with_drafts(monkeypatch)
    done = run_command(folder, f"wrong {dtype}", "--tasks", "sums", "--dtype", dtype, "-r", "1", "-t", "0,1")
    assert done.exit_code == 1 and "no tie" in done.stderr, done.output


def test_rounding_differences_are_status_0(folder: Path) -> None:
    write_questions(folder, "many", [[f"{i} times"] for i in range(12)])
    words = ("--tasks", "many", "--dtype", "bfloat16", "-r", "1", "-t", "0", "-n", "48", "--batch", "4")
    done = run_command(folder, "rounded", *words)
    assert done.exit_code == 0, done.output
    record = json.loads((folder / "rounded" / "results.json").read_text())
    checked = [cell for cell in record["cells"] if cell["lossless"]]
    assert sum(cell["lossless"]["ties"] for cell in checked) > 0, "a test without ties tests nothing"
    for cell in checked:
        limit = record["noise"]["drawn" if cell["temperature"] else "widest_tie"]
        assert all(d["tie"] and d["least"] <= max(limit, d["moved"]) for d in cell["lossless"]["different"])


def test_failing_where_plain_decoding_does_not_is_status_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(reply: Reply) -> Reply | str:
        return "out of luck" if next(luck) == 1 else reply

    luck = count()
    meddle(monkeypatch, fail)
    done = run_command(folder, "failing", "--tasks", "sums", "-r", "1")
    assert done.exit_code == 1 and "1 answer failed" in done.stderr and "out of luck (1)" in done.stderr
    header, _, *lines = done.stdout.splitlines()
    assert header.endswith(" failed |") and [line.split()[-2] for line in lines] == ["-", "1"]


def test_texts_without_comparison_are_not_lossless(folder: Path) -> None:
    write_questions(folder, "long", [["x" * CONTEXT]])
    done = run_command(folder, "nothing", "--tasks", "long", "-r", "1")
    assert done.exit_code == 1 and "no answer on long that could be compared" in done.stderr
