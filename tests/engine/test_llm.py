"""`LLM.complete` and `generate` return the same tokens."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

import jetspec.engine.llm as module
import jetspec.gc_control as gc_control
from jetspec.config import EngineConfig
from jetspec.engine.llm import LLM
from jetspec.models.decoder import DecoderConfig
from jetspec.models.head_format import save_head
from jetspec.models.heads import Choice
from jetspec.types import SamplingParams
from tests.engine.tiny import tiny_head
from tests.train.tiny_model import write_model

BATCH = 3
PROMPTS = [[i + 1, 2 * i + 5, 90] * (1 + i % 4) for i in range(20)]
SAMPLING = [SamplingParams(max_tokens=3 + i % 7, temperature=0.5 * (i % 2), seed=i) for i in range(20)]

Asked = tuple[int, list[int], SamplingParams]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_model(tmp_path_factory.mktemp("model") / "tiny")
    return LLM(folder, drafter="none", engine=EngineConfig(max_batch=BATCH), device="cpu")


def numbered() -> Iterator[Asked]:
    return zip(range(len(PROMPTS)), PROMPTS, SAMPLING, strict=True)


def test_completions_are_those_of_generate(llm: LLM) -> None:
    expected = [completion.token_ids for completion in llm.generate(PROMPTS, SAMPLING)]
    done = dict(llm.complete(numbered()))
    assert [done[i].token_ids for i in range(len(PROMPTS))] == expected
    assert {completion.text for completion in done.values()} == {""}


@pytest.mark.parametrize(("was_frozen", "many"), [(False, 3), (True, 3), (False, 5)])
def test_objects_are_frozen_while_a_large_batch_is_decoded(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, was_frozen: bool, many: int
) -> None:
    """From batches of `many` on; those frozen before stay frozen."""
    monkeypatch.setattr(gc_control, "MIN_BATCH", many)
    seen: list[int] = []
    work, number, frozen_before = llm.engine.work, count(), gc.get_freeze_count()

    def watched() -> None:
        if next(number) % 8 == 0:  # to count takes longer than the steps
            seen.append(gc.get_freeze_count())
        work()

    monkeypatch.setattr(llm.engine, "work", watched)
    try:
        (gc.freeze if was_frozen else gc.unfreeze)()
        results = llm.complete(numbered())
        next(results)
        results.close()  # type: ignore[attr-defined]
        assert bool(gc.get_freeze_count()) == was_frozen, "as it was before"
    finally:
        (gc.freeze if frozen_before else gc.unfreeze)()
    assert min(seen) > 10_000 if many < 5 else not any(seen), "all of torch"


def test_prompts_are_pulled_as_needed_and_dropped_on_exit(llm: LLM) -> None:
    pulled = 0

    def counted() -> Iterator[Asked]:
        nonlocal pulled
        for prompt in numbered():
            pulled += 1
            yield prompt

    results = llm.complete(counted())
    for finished, _ in enumerate(results, 1):
        assert pulled <= finished + BATCH
        if finished == 5:
            break
    results.close()  # type: ignore[attr-defined]
    assert not (llm.engine.has_work or llm.engine.requests)
    assert llm.engine.cache.pool.num_available == llm.engine.cache.pool.num_pages


def test_prompts_may_depend_on_completions(llm: LLM) -> None:
    answers: list[list[int]] = []

    def chain() -> Iterator[Asked | None]:
        for i in range(4):
            while len(answers) < i:
                yield None
            yield i, [7, *(answers[-1] if answers else [])], SAMPLING[0]

    for _, completion in llm.complete(chain()):
        answers.append(completion.token_ids)
    expected: list[int] = []
    for answer in answers:
        assert answer == llm.generate([[7, *expected]], SAMPLING[0])[0].token_ids
        expected = answer
    assert len(answers) == 4


def test_quiet_requests_stop_at_strings(llm: LLM) -> None:
    text = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=12))[0].text
    stop = SamplingParams(max_tokens=12, stop=(text[4:6],))
    ((_, quiet),) = llm.complete([(0, PROMPTS[0], stop)])
    loud = llm.generate([PROMPTS[0]], stop)[0]
    assert (quiet.token_ids, quiet.finish_reason) == (loud.token_ids, "stop")


Chosen = Callable[[Choice], list[bool]]


@pytest.fixture
def choice(monkeypatch: pytest.MonkeyPatch) -> Chosen:
    """A function that fixes the choice of a head. It returns the list of calls, which grows: with download or not."""

    def fix(made: Choice) -> list[bool]:
        calls: list[bool] = []

        def choose(model: Path, target: DecoderConfig, fetch: bool) -> Choice:
            calls.append(fetch)
            return made

        monkeypatch.setattr(module, "choose_head", choose)
        return calls

    return fix


def test_best_head_is_loaded_by_default(tmp_path: Path, choice: Chosen, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless another head or drafter is given. Only `auto` downloads."""
    model = write_model(tmp_path / "tiny")
    plain = LLM(model, drafter="none", device="cpu")
    for block in (4, 6):
        head = tiny_head(plain.target.decoder, block=block)
        head.head_config = replace(head.head_config, last_tap="raw")
        save_head(head, tmp_path / str(block))
    calls = choice(Choice("best", tmp_path / "4", "it is the best", ("there is a better one",)))
    own, auto = LLM(model, device="cpu"), LLM(model, "auto", device="cpu")
    assert calls == [False, True]
    assert capsys.readouterr().err.splitlines() == ["it is the best", "there is a better one"] * 2
    for each in (own, auto):
        assert each.drafter == "head" and each.head is not None and each.head.head_config.depth == 3
        assert each.head_name == each.with_drafter("none").head_name == "best"
    other = LLM(model, tmp_path / "6", device="cpu")
    assert other.head is not None and other.head.head_config.depth == 5 and other.head_name == str(tmp_path / "6")
    assert own.with_head(tmp_path / "6").head_name == str(tmp_path / "6")
    assert LLM(model, drafter="ngram", device="cpu").head_name is None
    assert calls == [False, True] and not capsys.readouterr().err
    assert own.generate(PROMPTS[:2])[1].token_ids == plain.generate(PROMPTS[:2])[1].token_ids


def test_without_a_head_drafts_are_ngrams(tmp_path: Path, choice: Chosen, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "tiny")
    choice(Choice(None, None, "no head", ("--head other",)))
    llm = LLM(model, device="cpu")
    printed = capsys.readouterr()
    assert llm.drafter == "ngram" and llm.head_name is None and printed.out == ""
    assert re.fullmatch(r"no head.*n-grams\n--head other\n", printed.err)
    with pytest.raises(ValueError, match="head"):
        LLM(model, drafter="head", device="cpu")
    assert "n-grams" not in capsys.readouterr().err


def test_llm_is_freed_without_the_garbage_collector(llm: LLM) -> None:
    """GPU memory must not wait for a garbage collection."""
    other = llm.with_drafter("none")
    other.generate(PROMPTS[:4], SAMPLING[:4])
    left = weakref.ref(other.engine)
    gc.disable()
    try:
        del other
        assert left() is None
    finally:
        gc.enable()
