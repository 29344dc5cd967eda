"""Two servers at two rates: a whole record, a plot and a page from it; servers that die are reported."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import check_rates, plot_rates
from benchmarks.check_rates import Course, Run, behind, check_alive, warm_up_courses
from benchmarks.command_load import TIMES
from benchmarks.load import GIVEN_UP, PERCENTILES, Timing
from benchmarks.pages import marks
from jetspec.serve.config import ServeConfig
from tests.serve.live import Live, tiny_llm
from tests.train.tiny_model import write_model

RATES = ("4", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("rates") / "tiny")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "docs" / "page.md"
    path.parent.mkdir()
    begin, end = marks("rates")
    path.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    return path


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients in threads, which start at once."""
    monkeypatch.setattr(check_rates, "ProcessPoolExecutor", lambda count, mp_context: ThreadPoolExecutor(count))


def check(model: Path, folder: Path, *words: str) -> tuple[dict[str, Any], int]:
    """The record and the exit status."""
    out = folder / "made" / "rates.json"
    shape = ["--model", str(model), "--device", "cpu", "--rates", ",".join(RATES), "--seconds", "1", "--max-batch", "2"]
    with pytest.raises(SystemExit) as ended:
        check_rates.main([*shape, "--max-tokens", "16", "--clients", "1", "--out", str(out), *words])
    assert isinstance(ended.value.code, int)
    return json.loads(out.read_text()), ended.value.code


def test_both_servers_at_every_rate(
    model: Path, tmp_path: Path, page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real client processes. The record holds everything, and the page and its plot come from it alone."""
    monkeypatch.setattr(check_rates, "BURST_S", 0.5)
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps({"turns": [f"question {i}"]}) + "\n" for i in range(6)))
    plots = page.parent / "plots"
    words = ["--data", str(data), "--page", str(page), "--plots", str(plots), "--server-option", "--budget 4"]
    record, status = check(model, tmp_path, *words)
    assert status == 0 and record["problems"] == []
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
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" requests/s:")[0] for line in lines if "requests/s:" in line] == [
        f"{server}, {rate}" for server in record["servers"] for rate in RATES
    ]
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "12 requests that both servers answered, 0 got another text" in " ".join(text.split())
    assert "](plots/rates.svg)" in text and (plots / "rates.svg").read_text().startswith("<?xml")


@pytest.mark.usefixtures("threads")
def test_a_server_that_dies_is_reported(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured before stays, and nobody waits for the rest."""
    monkeypatch.setattr(check_rates, "SERVERS", {"speculative": ()})
    monkeypatch.setattr(check_rates, "BURST_S", 0.1)
    send = Run.send

    def deadly(self: Run, course: Course, server: Any, clients: Any, patience_s: float) -> Any:
        if course is self.courses[1]:
            threading.Timer(0.3, server.process.kill).start()
        return send(self, course, server, clients, patience_s)

    monkeypatch.setattr(Run, "send", deadly)
    record, status = check(model, tmp_path)
    rates = record["servers"]["speculative"]["rates"]
    assert status == 1 and tuple(rates) == RATES
    assert rates["4"]["failed"] == 0 < rates["8"]["failed"]
    assert "died with status -9" in record["problems"][-1]
    plot_rates.draw(record, tmp_path / "rates.svg")


@pytest.mark.usefixtures("threads")
def test_a_server_that_does_not_start_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_rates, "SERVERS", {"plain": ("--drafter", "none")})
    record, status = check(tmp_path / "nowhere", tmp_path)
    assert status == 1 and record["servers"]["plain"] == {}
    (problem,) = record["problems"]
    assert problem.startswith("plain: ") and "jetspec: error" in problem and problem in capsys.readouterr().out


def test_servers_that_will_not_answer_any_more(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_texts_that_differ_are_counted(model: Path, tmp_path: Path, dtype: str, problems: int) -> None:
    """They are a failure where nothing is rounded. Requests that one server did not answer do not count."""
    parser_words = ["--model", str(model), "--device", "cpu", "--dtype", dtype, "--out", str(tmp_path / "x.json")]
    run = made(parser_words)
    run.texts = {"speculative": {"1": ["a", "b", None]}, "plain": {}}
    run.compare("1")
    assert run.record["texts"] == {}
    run.texts["plain"]["1"] = ["a", "c", "d"]
    run.compare("1")
    assert run.record["texts"] == {"1": {"compared": 2, "different": 1}} and len(run.problems) == problems


def made(words: list[str]) -> Run:
    """A run that was not started."""
    kept: list[Run] = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Run, "measure", lambda run: kept.append(run))
        check_rates.main(words)
    return kept[0]


def test_both_servers_get_the_same_prompts_and_no_rate_those_of_another(tmp_path: Path) -> None:
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps({"turns": [f"question {i}"]}) + "\n" for i in range(400)))
    words = ["--data", str(data), "--rates", "1,4", "--seconds", "30", "--device", "cpu", "--out", str(tmp_path / "x")]
    first, second = made(words), made(words)
    assert first.courses == second.courses and [len(course.chats) for course in first.courses] == [30, 120]
    asked = [chat[0]["content"] for course in (first.warm_up[-1], *first.courses) for chat in course.chats]
    assert len(set(asked)) == len(asked)


def test_the_warm_up_has_every_size_of_batch() -> None:
    courses = list(warm_up_courses(iter([[{"role": "user", "content": str(i)}] for i in range(99)]), 5, 2.0))
    assert [len(course.chats) for course in courses if course.rate is None] == [1, 2, 3, 4, 5] * check_rates.PASSES


def test_who_waits_when_the_last_request_comes() -> None:
    timings = [
        Timing(0.0, [1.0, 2.0], ended=3.0),  # long done
        Timing(1.0, [2.0, 12.0], ended=12.0),  # begun
        Timing(2.0, [11.0, 12.0], ended=13.0),  # without a token
        Timing(3.0, [4.0], error=GIVEN_UP),  # begun
        Timing(4.0, error=GIVEN_UP),  # without a token
        Timing(5.0, error="500: broken"),
        Timing(10.0, [11.0], ended=14.0),  # the last itself
    ]
    assert behind(timings) == {"begun_at_the_end": 2, "waiting_at_the_end": 2, "given_up": 2, "drain_s": 4.0}
    assert behind([Timing(0.0, error="500: broken")])["drain_s"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rates", "1,-2"], "--rates"),
        (["--rates", "fast"], "--rates"),
        (["--seconds", "0"], "seconds"),
        (["--dtype", "int3"], "unknown dtype"),
        (["--device", "tpu"], "unknown device"),
        (["--data", "/nowhere.jsonl"], "nowhere.jsonl"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_wrong_use(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check_rates.main([*words, "--out", str(tmp_path / "x.json")])
    assert ended.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]


def test_a_page_from_a_record(tmp_path: Path, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of the record, two rows per rate, none where nothing was answered; again gives the same page."""
    times = {name: {"p50": 1.25, "p95": 150.0, "p99": 2000.0} for name in TIMES}
    answered = {"seconds": 1.0, "tokens_per_s": 1234.5, "tokens_per_round": 2.5, "waiting_at_the_end": 3, "failed": 0}
    nothing = {"failed": 2, "waiting_at_the_end": 0}
    record = {
        "model": "some-model",
        "device": "cuda",
        "dtype": "bfloat16",
        "seconds": 20.0,
        "max_tokens": 256,
        "max_batch": 32,
        "hardware": {"cpu": "some CPU", "gpu": "some GPU"},
        "servers": {
            "speculative": {"rates": {"1": {**answered, **times}, "16": {**answered, **times}}},
            "plain": {"rates": {"1": {**answered, **times, "tokens_per_round": 1.0}, "16": nothing}},
        },
        "texts": {"1": {"compared": 20, "different": 3}, "16": {"compared": 300, "different": 4}},
    }
    path, plots = tmp_path / "record.json", page.parent / "plots"
    path.write_text(json.dumps(record))
    words = ["plot", "--record", str(path), "--page", str(page), "--plots", str(plots)]
    monkeypatch.setattr(sys, "argv", words)
    plot_rates.main()
    text = page.read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    shown = "1.2 / 150 / 2,000"
    assert rows[2] == ["1", "speculative", "1,234", "2.50", shown, shown, shown, "3", "0"]
    assert [row[:2] for row in rows[2:]] == [["1", "speculative"], ["1", "plain"], ["16", "speculative"]]
    said = " ".join(text.split())
    assert "some-model in bfloat16 on some GPU" in said and "320 requests" in said and "7 got another text" in said
    picture = (plots / "record.svg").read_bytes()
    plot_rates.main()
    assert page.read_text() == text and (plots / "record.svg").read_bytes() == picture
