"""The load tool: arrivals as planned, every request accounted for, times in order."""

from __future__ import annotations

import asyncio
import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.load import GIVEN_UP, Load, percentiles, send_load, summarize, times_of
from benchmarks.servers import Timing
from jetspec.serve.config import ServeConfig
from tests.benchmarks.tiny_bench import invoke
from tests.serve.live import Live, tiny_llm
from tests.train.tiny_model import write_model

CHATS = [[{"role": "user", "content": text}] for text in ("ab", "cd", "ef")]


def plan(url: str = "http://127.0.0.1:1", requests: int = 12, rate: float | None = None) -> Load:
    return Load(url, requests, 4, rate, 10, 0.0, None, None, 0)


def test_arrivals_are_a_poisson_process() -> None:
    times = plan(requests=20_000, rate=5.0).arrivals()
    gaps = [later - sooner for sooner, later in pairwise(times)]
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.03), "gaps vary as much as they last"
    assert plan(requests=9, rate=5.0).arrivals() == plan(requests=9, rate=5.0).arrivals()
    assert plan().arrivals() == [0.0] * 12


def test_summaries_add_up() -> None:
    usage = {"completion_tokens": 5, "jetspec": {"rounds": 2}}
    timings = [Timing(float(i), [i + 0.1, i + 0.5], i + 0.6, usage=usage) for i in range(10)]
    summary = summarize([*timings, Timing(0.0, error="429: full")])
    assert (summary["requests"], summary["failed"], summary["errors"]) == (11, 1, {"429: full": 1})
    assert summary["tokens_per_s"] == pytest.approx(50 / 9.6)
    assert summary["tokens_per_round"] == 2.5
    assert summary["first_token_ms"]["p50"] == pytest.approx(100)
    assert summary["between_tokens_ms"]["p99"] == pytest.approx(100)
    assert summary["whole_ms"]["p95"] == pytest.approx(600)
    assert percentiles([1, 2, 3])["p50"] == 2
    assert summarize([Timing(0.0, error="x")])["failed"] == 1


@pytest.mark.parametrize("rate", [None, 50.0])
def test_a_server_under_load(tmp_path: Path, rate: float | None) -> None:
    """Every request is answered or counted as failed, the record holds them all, and there is a plot."""
    out = tmp_path / "load.json"
    with Live(tiny_llm(write_model(tmp_path / "tiny"), max_batch=2), ServeConfig(port=0, max_queue=1)) as live:
        words = ["load", "--url", live.url, "--requests", "12", "--concurrency", "3", "-n", "8", "--json"]
        words += ["--out", str(out)]
        ran = invoke(*words, *([] if rate is None else ["--rate", rate]))
        assert ran.exit_code == 0, ran.output
        crowded = asyncio.run(send_load(Load(live.url, 12, 12, None, 60, 0.0, 1, None, 0), CHATS, None))
        live.wait_for_rest()
    printed, record = json.loads(ran.stdout), json.loads(out.read_text())
    assert printed["failed"] == 0 and record["first_token_ms"] == printed["first_token_ms"]
    assert len(record["timings"]) == 12 and record["load"]["rate"] == rate
    for timing in record["timings"]:
        assert 0 < timing["first_token_ms"] <= timing["whole_ms"]
        assert 1 <= timing["tokens"] <= 8 and timing["rounds"] <= timing["tokens"]
    assert out.with_suffix(".svg").read_text().startswith("<svg ")
    assert {timing.error for timing in crowded} <= {None, "429: the queue is full; try again later"}
    counts = [times_of(timing) for timing in crowded if timing.error is None]
    assert all(found["rounds"] == found["tokens"] for found in counts), "budget 1 is plain"


def test_late_requests_are_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with Live(tiny_llm(write_model(tmp_path / "tiny")), ServeConfig(port=0)) as live:
        monkeypatch.setattr(live.llm.engine, "step", list)  # nothing ever becomes visible
        timings = asyncio.run(send_load(plan(live.url, requests=3, rate=50.0), CHATS, None, max_wait_s=0.2))
        live.wait_for_rest()
    assert [timing.error for timing in timings] == [GIVEN_UP] * 3
