"""Two servers at two rates: a whole record; servers that die are reported."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import Result

from benchmarks import serve
from benchmarks.load import GIVEN_UP, PERCENTILES
from benchmarks.plots import TIMES, draw_rates
from benchmarks.serve import Phase, Rates, backlog, check_alive, warm_up_phases
from benchmarks.servers import Timing
from jetspec.serve.config import ServeConfig
from tests.benchmarks.tiny_bench import invoke
from tests.serve.live import Live, tiny_llm
from tests.train.tiny_model import write_model

RATES = ("4", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("rates") / "tiny")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients in threads, which start at once."""
    monkeypatch.setattr(serve, "ProcessPoolExecutor", lambda count, mp_context: ThreadPoolExecutor(count))


def measure(model: Path, folder: Path, *words: object) -> tuple[dict[str, Any], Result]:
    """The record, and the command's result."""
    out = folder / "made" / "rates.json"
    shape = ["--model", model, "--device", "cpu", "--rates", ",".join(RATES), "--seconds", "1", "--max-batch", "2"]
    done = invoke("serve", "rates", *shape, "--max-tokens", "16", "--clients", "1", "--out", out, *words)
    return json.loads(out.read_text()), done


def test_both_servers_at_every_rate(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real client processes."""
    monkeypatch.setattr(serve, "BURST_S", 0.5)
    monkeypatch.setattr(serve, "PASSES", 1)
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps({"turns": [f"question {i}"]}) + "\n" for i in range(6)))
    record, done = measure(model, tmp_path, "--data", data, "--server-option", "--budget 4")
    assert done.exit_code == 0 and record["problems"] == []
    assert (record["data"], record["prompts"], record["dtype"]) == ("questions.jsonl", 6, "float32")
    spec, plain = record["servers"]["speculative"], record["servers"]["plain"]
    assert (spec["drafter"], spec["budget"], plain["drafter"]) == ("ngram", 4, "none")
    for server in (spec, plain):
        assert tuple(server["rates"]) == RATES
        for rate, found in server["rates"].items():
            assert found["requests"] == int(rate) and found["failed"] == found["given_up"] == 0
            assert all(list(found[time]) == [f"p{p}" for p in PERCENTILES] for time in TIMES)
            assert min(found["tokens_per_s"], found["requests_per_s"], found["drain_s"]) > 0
            assert found["begun_at_the_end"] + found["waiting_at_the_end"] < found["requests"]
            assert 0 < found["client_busy"] < 1
    assert all(found["tokens_per_round"] == 1 for found in plain["rates"].values())
    assert record["texts"] == {rate: {"compared": int(rate), "different": 0} for rate in RATES}


@pytest.mark.usefixtures("threads")
def test_a_server_that_dies_or_does_not_start_is_reported(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier measurements are kept, and later requests fail at once."""
    monkeypatch.setattr(serve, "SERVERS", {"speculative": (), "broken": ("--no-such-option",)})
    monkeypatch.setattr(serve, "BURST_S", 0.1)
    send = Rates.send

    def deadly(self: Rates, phase: Phase, server: Any, senders: Any, max_wait_s: float) -> Any:
        if phase is self.phases[1]:
            threading.Timer(0.3, server.process.kill).start()
        return send(self, phase, server, senders, max_wait_s)

    monkeypatch.setattr(Rates, "send", deadly)
    record, done = measure(model, tmp_path)
    rates = record["servers"]["speculative"]["rates"]
    assert done.exit_code == 1 and tuple(rates) == RATES and record["servers"]["broken"] == {}
    assert rates["4"]["failed"] == 0 < rates["8"]["failed"]
    *_, died, unstarted = record["problems"]
    assert "died with status -9" in died and unstarted.startswith("broken: ") and "--no-such-option" in unstarted
    draw_rates(record, tmp_path / "rates.svg")


def test_a_server_that_does_not_answer_is_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal or two is not yet a reason to leave a server."""
    process: Any = SimpleNamespace(poll=lambda: None)
    with Live(tiny_llm(model), ServeConfig(port=0)) as live:
        server: Any = SimpleNamespace(process=process, url=live.url, log="its log")
        check_alive(server, [Timing(0.0, error="400: too long")])
        monkeypatch.setattr(live.llm.engine, "step", None)
        live.post()
        check_alive(server, [Timing(0.0, error="500: failed"), Timing(0.0)])
        for error, said in (("500: failed", "engine failed"), (GIVEN_UP, "does not answer")):
            with pytest.raises(RuntimeError, match=rf"{said}\nits log"):
                check_alive(server, [Timing(0.0, error=error)])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("dtype", "problems"), [("float32", 1), ("bfloat16", 0)])
def test_texts_that_differ_are_counted(model: Path, tmp_path: Path, dtype: Any, problems: int) -> None:
    """They are a failure where nothing is rounded. Requests that one server did not answer do not count."""
    run = Rates(tmp_path / "x.json", str(model), "cpu", dtype)
    run.texts = {"speculative": {"1": ["a", "b", None]}, "plain": {}}
    run.compare("1")
    assert run.record["texts"] == {}
    run.texts["plain"]["1"] = ["a", "c", "d"]
    run.compare("1")
    assert run.record["texts"] == {"1": {"compared": 2, "different": 1}} and len(run.problems) == problems


def test_both_servers_get_the_same_prompts(tmp_path: Path) -> None:
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps({"turns": [f"question {i}"]}) + "\n" for i in range(400)))
    first, second = (Rates(tmp_path / "x", device="cpu", data=data, rates="1,4", seconds=30) for _ in range(2))
    assert first.phases == second.phases and [len(phase.chats) for phase in first.phases] == [30, 120]
    asked = [chat[0]["content"] for phase in (first.warm_up[-1], *first.phases) for chat in phase.chats]
    assert len(set(asked)) == len(asked)


def test_the_warm_up_has_every_size_of_batch() -> None:
    phases = list(warm_up_phases(iter([[{"role": "user", "content": str(i)}] for i in range(99)]), 5, 2.0))
    assert [len(phase.chats) for phase in phases if phase.rate is None] == [1, 2, 3, 4, 5] * serve.PASSES


def test_backlog_when_the_last_request_arrives() -> None:
    timings = [
        Timing(0.0, [1.0, 2.0], ended=3.0),  # long done
        Timing(1.0, [2.0, 12.0], ended=12.0),  # begun
        Timing(2.0, [11.0, 12.0], ended=13.0),  # without a token
        Timing(3.0, [4.0], error=GIVEN_UP),  # begun
        Timing(4.0, error=GIVEN_UP),  # without a token
        Timing(5.0, error="500: broken"),
        Timing(10.0, [11.0], ended=14.0),  # the last itself
    ]
    assert backlog(timings) == {"begun_at_the_end": 2, "waiting_at_the_end": 2, "given_up": 2, "drain_s": 4.0}
    assert backlog([Timing(0.0, error="500: broken")])["drain_s"] is None
