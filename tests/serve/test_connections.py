"""Limits on connections, and on the log lines that clients can cause."""

from __future__ import annotations

import logging
import resource
import socket
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from benchmarks.servers import ServerProcess
from jetspec.serve.config import ServeConfig
from jetspec.serve.log import MAX_LINES, WINDOW_S, RateLimit
from tests.serve.live import Live, streaming, tiny_llm, wait_until


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 9\r\n\r\n"])
def test_idle_connections_are_evicted(folder: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """Those whose request was refused, too, although the rest of its body is awaited."""
    monkeypatch.setattr("jetspec.serve.run.max_connections", lambda config: 8)
    monkeypatch.setattr("jetspec.serve.middleware.LINGER_S", 60.0)
    with Live(tiny_llm(folder), ServeConfig(port=0)) as server, ExitStack() as stack:
        open_now = server.host.server_state.connections
        with streaming(server, max_tokens=200, ignore_eos=True) as response:
            lines = response.iter_lines()
            next(lines)
            for _ in range(100):
                stack.enter_context(socket.create_connection(server.listener.getsockname())).sendall(sent)
            for _ in range(3):
                assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
            assert [line for line in lines if line][-1] == "data: [DONE]", "an active connection is kept"
        wait_until(lambda: len(open_now) <= 8)


def test_server_survives_more_connections_than_files(folder: Path) -> None:
    """The log stays small, also with requests that are not HTTP."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        server = ServerProcess(str(folder))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with server, ExitStack() as stack:
        port = int(server.url.rpartition(":")[2])
        for _ in range(400):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        for _ in range(3 * MAX_LINES):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
                client.sendall(b"what is this?\r\n\r\n")
                assert client.recv(1000).startswith(b"HTTP/1.1 400")
        assert server.log.count("Invalid HTTP request") == MAX_LINES and len(server.log) < 20_000
        lines = [line for line in server.log.splitlines() if not line.startswith(("Serving", " "))]
        assert not any("Traceback" in line for line in lines if not line.startswith("{"))


def test_rate_limit_counts_suppressed_lines_per_level() -> None:
    limit, kept = RateLimit(), []
    for second in range(int(2 * WINDOW_S) + 1):
        for _ in range(10):
            record = logging.LogRecord("asyncio", logging.WARNING, "", 0, "out of files", None, None)
            record.created = float(second)
            kept += [record] if limit.filter(record) else []
    assert len(kept) == 3 * MAX_LINES
    missing = [getattr(record, "fields", {}).get("left_out") for record in kept]
    assert missing[MAX_LINES] == WINDOW_S * 10 - MAX_LINES and missing[0] is None
    record.levelno = logging.ERROR
    assert limit.filter(record)
