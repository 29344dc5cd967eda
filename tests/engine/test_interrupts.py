"""Ctrl-C at any time does not lose requests that go on."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from jetspec.config import EngineConfig
from jetspec.engine import detokenize, kv_cache, scheduler
from jetspec.engine import engine as engines
from jetspec.engine.engine import Engine
from jetspec.engine.llm import LLM
from jetspec.engine.runner import Runner
from jetspec.grammar.constraint import mask_tree
from jetspec.interrupt import uninterrupted
from jetspec.ops.transfer import Download
from jetspec.types import SamplingParams
from tests.engine.test_engine import GREEDY, PROMPTS, TRUTH
from tests.engine.tiny import make_engine, tiny_decoder, tiny_head
from tests.rerun import Rerun, replay_all
from tests.train.tiny_model import write_model


class Heard:
    """Collects updates across interrupted steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.text: dict[int, str] = defaultdict(str)
        self.done: dict[int, list[int]] = {}

    def follow(self, ids: list[int]) -> list[list[int]]:
        while not self.done.keys() >= set(ids):
            assert self.engine.has_work
            for update in self.engine.step():
                self.tokens[update.request_id] += update.token_ids
                self.text[update.request_id] += update.text
                if update.completion:
                    self.done[update.request_id] = update.completion.token_ids
                    assert self.text[update.request_id] == update.completion.text
        assert all(self.tokens[request_id] == self.done[request_id] for request_id in ids)
        return [self.done[request_id] for request_id in ids]


PLACES = [
    (Runner, "launch_prefill", "after"),
    (Rerun, "replay", "after"),  # the device is ahead of the host
    (Runner, "launch_round", "after"),
    (Download, "read", "before"),
    (Engine, "_append", "before"),
]


@pytest.mark.parametrize(("number", "traced"), [(1, True), (5, False)])
@pytest.mark.parametrize(("owner", "name", "when"), PLACES, ids=lambda value: getattr(value, "__name__", value))
def test_interrupted_step_keeps_other_requests(
    owner: type, name: str, when: str, number: int, traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request cancelled after Ctrl-C has no further updates; the others continue, and their pages are cached."""
    replay_all(monkeypatch)
    monkeypatch.setattr(Download, "__del__", lambda self: None)
    target = tiny_decoder()
    config = EngineConfig(page_size=4, max_batch=3, overlap_rounds=1, prefill_chunk=4)
    engine = make_engine(target, "head", tiny_head(target), config=config)
    heard, whole, times = Heard(engine), getattr(owner, name), itertools.count(1)

    def broken_off(self: Any, *args: Any) -> Any:
        breaks = next(times) == number
        if breaks and when == "before":
            raise KeyboardInterrupt
        result = whole(self, *args)
        if breaks:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, broken_off)
    ids = [engine.add(prompt, GREEDY, trace=traced) for prompt in PROMPTS]
    with pytest.raises(KeyboardInterrupt):
        heard.follow(ids)
    engine.cancel(ids[0])
    before = len(heard.tokens[ids[0]])
    assert heard.follow(ids[1:]) == TRUTH[GREEDY][1:]
    assert len(heard.tokens[ids[0]]) == before
    again = [engine.add([*PROMPTS[i], *TRUTH[GREEDY][i][:12]], replace(GREEDY, max_tokens=4)) for i in (1, 2)]
    assert heard.follow(again) == [TRUTH[GREEDY][i][12:16] for i in (1, 2)]


WATCHED = {module.__file__ for module in (engines, scheduler, kv_cache, detokenize)}
STRIDE = 211
"""One of this many executed lines is interrupted."""


class Press:
    """Raises SIGINT before the nth executed line of a step."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.step, self.number, self.place = engine._step, number, ""
        engine._step = self.watched_step  # type: ignore[method-assign]

    def watched_step(self) -> None:
        sys.settrace(self.enter if self.number > 0 else None)
        try:
            self.step()
        finally:
            sys.settrace(None)

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self.run_line if frame.f_code.co_filename in WATCHED else None

    def run_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.number -= event == "line"
        if event == "line" and self.number == 0:
            self.place = f"{frame.f_code.co_name}:{frame.f_lineno}"
            signal.raise_signal(signal.SIGINT)
        return self.run_line


def spell(tokens: Sequence[int]) -> str:
    return "".join(chr(0x4E00 + token) for token in tokens)


@pytest.mark.parametrize("replays", [False, True])
def test_interrupt_before_any_line_changes_nothing(replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, texts and updates equal those of an uninterrupted run, and all rows and pages are freed."""
    if replays:
        replay_all(monkeypatch)
        monkeypatch.setattr(Download, "__del__", lambda self: None)
    target = tiny_decoder()
    head, truth = tiny_head(target), TRUTH[GREEDY]
    end = truth[0][3]
    config = EngineConfig(page_size=4, max_batch=2, prefill_chunk=8, num_pages=40, overlap_rounds=int(replays))
    for broken in itertools.count():
        engine = make_engine(target, "head", head, config=config, decode=spell, eos_tokens=frozenset([end]))
        press, heard = Press(engine, 1 + broken * STRIDE), Heard(engine)
        ids = [engine.add(prompt, replace(GREEDY, max_tokens=6)) for prompt in PROMPTS[:3]]
        try:
            heard.follow(ids)
        except KeyboardInterrupt:
            found = heard.follow(ids)
        else:
            break
        assert found == [t[: t.index(end) + 1] if end in t[:6] else t[:6] for t in truth[:3]], press.place
        assert len(engine.cache.free_rows) == 2 and engine.cache.pool.num_available == 40, press.place
    assert broken > 8


def test_interrupt_keeps_updates_of_other_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first interrupt follows a step before its updates are read, the second one the end of the first stream."""
    llm = LLM(write_model(tmp_path / "model"), drafter="ngram", device="cpu")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [update.token_ids for update in llm.stream([1, 2, 3], params)]
    streams = [llm.stream(prompt, params) for prompt in ([9, 8], [1, 2, 3], [5])]
    heard = [next(stream).token_ids for stream in streams][1:2]
    work, cancel = llm.engine.work, llm.engine.cancel

    def press_behind() -> None:
        work()
        raise KeyboardInterrupt

    def press_within(request_id: int) -> None:
        signal.raise_signal(signal.SIGINT)
        cancel(request_id)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "work", press_behind)
        patch.setattr(llm.engine, "cancel", press_within)
        with pytest.raises(KeyboardInterrupt):
            list(streams[0])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine, "cancel", press_within)
        llm._drop([1, 3])  # the first of them is gone already
    heard += [update.token_ids for update in streams[1]]
    assert list(chain(*heard)) == list(chain(*expected)) and not llm.engine.requests


def test_interrupted_masking_restores_the_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting:
        """Counts the tokens that it has advanced past the text."""

        overlap_rounds = 0

        def allow(self, mask_W: Any) -> None:
            signal.raise_signal(signal.SIGINT)

        def advance(self, token: int) -> bool:
            self.overlap_rounds += 1
            return True

        def rollback(self, count: int) -> None:
            self.overlap_rounds -= count

    constraint: Any = Counting()
    with pytest.raises(KeyboardInterrupt):
        mask_tree(constraint, [1, 2, 3], [0, 0, 1], torch.zeros(3, 1))
    assert constraint.overlap_rounds == 0


def test_interrupts_are_delayed_in_critical_sections() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_signal_handlers_are_kept() -> None:
    """An ignored signal stays ignored, and other threads are not affected."""
    seen = []
    before = signal.signal(signal.SIGINT, lambda *press: seen.append(press))
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert not seen
        assert len(seen) == 1
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    inside = []

    def elsewhere() -> None:
        with uninterrupted():
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert inside == [before]
