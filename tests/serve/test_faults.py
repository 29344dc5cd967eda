"""Failures stay contained: disconnects, slow readers, a full queue, an engine failure, shutdown."""

from __future__ import annotations

import json
import logging
import re
import select
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from benchmarks.serve import check
from benchmarks.servers import ServerProcess
from jetspec.serve.config import ServeConfig
from jetspec.types import SamplingParams, Update
from tests.serve.live import NAME, Gate, Live, streaming, tiny_llm, wait_until

LONG = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def fresh(folder: Path) -> Iterator[Live]:
    with Live(tiny_llm(folder, max_batch=4), ServeConfig(port=0, max_queue=4, drain_s=5)) as server:
        yield server


def raw_request(live: Live, client: socket.socket | None = None, **body: Any) -> socket.socket:
    """Sends a request on a bare socket."""
    content = json.dumps({"model": NAME, "prompt": "ab", "stream": True, **LONG, **body}).encode()
    client = client or socket.create_connection(live.listener.getsockname())
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return client


@pytest.mark.parametrize("more", [b"", b"\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000])
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_pages_within_a_round(fresh: Live, stream: bool, more: bytes) -> None:
    """Also after pipelined requests."""
    gate = Gate(fresh)
    client = raw_request(fresh, stream=stream, n=2)
    wait_until(lambda: gate.rounds > 3)
    for start in range(0, len(more), 1000):
        client.sendall(more[start : start + 1000])
        time.sleep(0.002)
    assert fresh.pages_in_use
    gate.open.clear()
    client.close()
    wait_until(lambda: fresh.server.worker.num_open == 0)
    before = gate.rounds
    gate.open.set()
    wait_until(lambda: fresh.pages_in_use == 0)
    assert gate.rounds <= before + 1
    assert fresh.post(temperature=0).status_code == 200


def test_full_queue_gives_retry_after(fresh: Live) -> None:
    gate = Gate(fresh)
    gate.open.clear()
    clients = [raw_request(fresh, n=4), raw_request(fresh, n=3)]
    wait_until(lambda: fresh.server.worker.num_open == 7)
    assert httpx.get(f"{fresh.url}/ready").status_code == 200
    response = fresh.post(n=2)
    assert response.status_code == 429 and 1 <= int(response.headers["Retry-After"]) <= 60
    with pytest.raises(openai.RateLimitError):
        fresh.client().completions.create(model=NAME, prompt="ab", n=2)
    clients.append(raw_request(fresh))
    wait_until(lambda: fresh.server.worker.num_open == 8)
    assert httpx.get(f"{fresh.url}/ready").json() == {"status": "busy"}
    assert httpx.get(f"{fresh.url}/health").status_code == 200
    gate.open.set()
    for client in clients:
        client.close()
    fresh.wait_for_rest()
    assert fresh.post(n=8, max_tokens=2).status_code == 200
    assert fresh.post(n=9, max_tokens=2).status_code == 400


def small_reader(live: Live, **body: Any) -> socket.socket:
    """A request on a socket with small buffers on both sides, so that unread bytes stay in the server."""
    live.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(live.listener.getsockname())
    return raw_request(live, client, **body)


def is_closed(client: socket.socket) -> bool:
    """The server has closed the connection."""
    poll = select.poll()
    poll.register(client, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_never_reads_is_disconnected(folder: Path, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    caplog.set_level(logging.INFO, "jetspec.serve")
    logging.getLogger("jetspec.serve").propagate = True
    live = Live(tiny_llm(folder), ServeConfig(port=0, write_timeout_s=0.5))
    with live as server, small_reader(server, prompt=["ab"] * 16, stream=stream, logprobs=20) as client:
        wait_until(lambda: server.server.worker.num_open)
        server.wait_for_rest()
        wait_until(lambda: is_closed(client))
    lines: list[dict[str, Any]] = [getattr(record, "fields", {}) for record in caplog.records]
    (fields,) = [line for line in lines if line.get("route") == "/v1/completions"]
    assert fields["completion_tokens"] > 0 and fields["rounds"] > 0 and fields["sampling"] == "greedy"
    assert fields.get("cut_off", False) == stream, "a whole response is in the system's buffer when the request ends"


def test_slow_reader_is_not_disconnected_before_the_timeout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the timeout is the test's own."""
    now, ticks = 0.0, 0

    def monotonic() -> float:
        nonlocal ticks
        ticks += 1
        return now

    def advance(seconds: float) -> None:
        """Lets the server see what was read before and what was not after the time has passed."""
        nonlocal now
        for later in (now, now + seconds):
            now, seen = later, ticks
            wait_until(lambda seen=seen: ticks > seen + 1)  # type: ignore[misc]

    monkeypatch.setattr("jetspec.serve.run.time", SimpleNamespace(monotonic=monotonic))
    live = Live(tiny_llm(folder), ServeConfig(port=0, write_timeout_s=10))
    with live as server, small_reader(server, prompt=["ab"] * 4, logprobs=20) as client:
        server.wait_for_rest()
        for _ in range(5):
            for _ in range(40):
                client.recv(1000)
            advance(6)
            assert not is_closed(client)
        advance(6)
        wait_until(lambda: is_closed(client))


def test_unread_responses_take_no_place_in_the_queue(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept up to a bound; the oldest are dropped."""
    monkeypatch.setattr("jetspec.serve.worker.MAX_UNREAD", most := 50_000)
    with Live(tiny_llm(folder, max_batch=8), ServeConfig(port=0, max_queue=0)) as server:
        worker, clients = server.server.worker, []
        for _ in range(3):
            clients.append(small_reader(server, n=8, logprobs=20))
            wait_until(lambda: worker.num_open == 8)
            server.wait_for_rest()
            assert httpx.get(f"{server.url}/ready").json() == {"status": "ready"}
            assert server.post(max_tokens=2).status_code == 200
            assert sum(handle.num_unread for handle in worker._unread) <= most
        received = []
        for client in clients:
            data = b""
            client.settimeout(60)
            while not data.endswith(b"0\r\n\r\n"):
                data += client.recv(1 << 16)
            received.append(data)
            client.close()
        assert b"read_too_slowly" in received[0] and b"[DONE]" not in received[0], "the oldest was dropped"
        assert b"[DONE]" in received[-1], "the latest was kept"
        wait_until(lambda: not worker._unread)


def test_unsent_bytes_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest response that is not read is dropped first."""
    monkeypatch.setattr("jetspec.serve.connection.MAX_UNSENT", 600_000)
    with Live(tiny_llm(folder), ServeConfig(port=0)) as server:
        large = small_reader(server, n=8, stream=False, logprobs=20)
        server.wait_for_rest()
        small = [small_reader(server, n=2, stream=False, logprobs=20) for _ in range(2)]
        wait_until(lambda: is_closed(large))
        server.wait_for_rest()
        assert not any(map(is_closed, small))
        for client in (large, *small):
            client.close()


def test_engine_failure_while_adding_fails_all_requests(fresh: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the request that could not be added nor the next one hangs."""
    add = fresh.llm.engine.add

    def once(*args: Any, **options: Any) -> int:
        add(*args, **options)
        raise RuntimeError("not added")

    def broken(request_id: int) -> None:
        raise RuntimeError("not cancelled")

    monkeypatch.setattr(fresh.llm.engine, "add", once)
    monkeypatch.setattr(fresh.llm.engine, "cancel", broken)
    assert fresh.post().status_code == 500
    wait_until(lambda: fresh.server.worker.failure)
    assert fresh.post().status_code == 500
    assert fresh.server.worker._thread.is_alive(), "it must refuse later requests"


def test_engine_failure_fails_all_requests(fresh: Live) -> None:
    gate = Gate(fresh)
    with ThreadPoolExecutor(4) as pool:
        whole = [pool.submit(fresh.post, **LONG) for _ in range(2)]
        with streaming(fresh, **LONG) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            wait_until(lambda: fresh.server.worker.num_open == 3)

            def broken() -> list[Update]:
                raise RuntimeError("secret detail at 0x1234")

            gate.step = broken
            last = [line for line in lines if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "engine_failed" and "secret" not in last
        for answer in whole:
            assert answer.result().status_code == 500 and "secret" not in answer.result().text
    health = httpx.get(f"{fresh.url}/health")
    assert (health.status_code, health.json()) == (503, {"status": "failed"})
    assert httpx.get(f"{fresh.url}/ready").json() == {"status": "failed"}
    assert fresh.post().status_code == 500
    with pytest.raises(openai.InternalServerError):
        fresh.client().completions.create(model=NAME, prompt="ab")


def test_request_that_cannot_start_fails_alone(fresh: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    add, added = fresh.llm.engine.add, []

    def picky(tokens: Any, *args: Any, **options: Any) -> int:
        added.append(tokens)
        if len(added) == 2:
            raise KeyError("secret")
        return add(tokens, *args, **options)

    monkeypatch.setattr(fresh.llm.engine, "add", picky)
    response = fresh.post(n=3)
    assert response.status_code == 500 and "secret" not in response.text
    fresh.wait_for_rest()
    assert fresh.post().status_code == 200
    assert httpx.get(f"{fresh.url}/health").status_code == 200


def test_shutdown_lets_requests_finish(folder: Path, alone: Any) -> None:
    expected = alone.generate("ab", SamplingParams(max_tokens=200, ignore_eos=True))[0].text
    with Live(tiny_llm(folder), ServeConfig(port=0)) as server, streaming(server, **LONG) as response:
        lines = response.iter_lines()
        first = next(lines)
        server.host.should_exit = True
        wait_until(lambda: server.server.worker.is_stopping)
        received = [
            json.loads(line[6:])["choices"][0]["text"] for line in [first, *lines] if line.startswith("data: {")
        ]
        assert "".join(received) == expected
    with pytest.raises(httpx.ConnectError):
        server.post()


@pytest.mark.parametrize(("drain_s", "signals"), [(0.5, 1), (0, 1), (60, 2)])
def test_shutdown_aborts_requests_after_drain_or_second_signal(folder: Path, drain_s: float, signals: int) -> None:
    with Live(tiny_llm(folder), ServeConfig(port=0, drain_s=drain_s)) as server:
        gate = Gate(server)
        with streaming(server, **LONG) as response:
            lines = response.iter_lines()
            next(lines)
            gate.open.clear()
            for _ in range(signals):
                server.host.handle_exit(signal.SIGINT, None)
            last = [line for line in lines if line][-1]
            gate.open.set()
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"


def test_sigterm_under_load(folder: Path) -> None:
    """Every admitted request gets its whole response, later ones are refused; the exit status is 0."""
    with ServerProcess(str(folder), "--max-batch", "4") as server:
        body = {"model": server.model, "prompt": "ab", **LONG, "max_tokens": 100}

        def ask() -> str | None:
            try:
                answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
                return None  # closed before the server has read any of it
            assert answer.status_code in (200, 503), answer.text
            return answer.json()["choices"][0]["text"] if answer.status_code == 200 else None

        alone = ask()
        with ThreadPoolExecutor(12) as pool:
            answers = [pool.submit(ask) for _ in range(12)]
            wait_until(
                lambda: (
                    "num_requests_running" in (page := httpx.get(f"{server.url}/metrics").text)
                    and 'vllm:num_requests_running{model_name="tiny"} 4.0' in page
                )
            )
            server.process.send_signal(signal.SIGTERM)
            texts = [answer.result() for answer in answers]
        assert texts.count(alone) >= 4 and set(texts) <= {alone, None}
        assert server.process.wait(20) == 0
        statuses = re.findall(r'"route": "/v1/completions", "status": (\d+)', server.log)
        assert set(statuses) <= {"200", "503"} and statuses.count("200") == 1 + texts.count(alone)
        assert '"level": "error"' not in server.log


def test_many_streams_at_once(folder: Path) -> None:
    """A short run of `python -m benchmarks serve check`."""
    results = check(str(folder), streams=32, seconds=1.5, num_requests=12)
    assert results["problems"] == {}
    assert results["answers"] > 0
