"""Requests as bytes on a connection: pipelined, in small pieces, with an unread body."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPResponse
from pathlib import Path

import httpx
import pytest

from jetspec.serve.config import ServeConfig
from tests.serve.live import NAME, Gate, Live, tiny_llm

KEY = "only-key-0123456789"
HOST, JSON = "Host: localhost", "Content-Type: application/json"
END = b"0\r\n\r\n"
GOOD = json.dumps({"model": NAME, "prompt": "ab", "max_tokens": 2, "temperature": 0}).encode()


@pytest.fixture(scope="module")
def locked(folder: Path) -> Iterator[Live]:
    with Live(tiny_llm(folder), ServeConfig(port=0, keys=(KEY,), max_body=200_000)) as server:
        yield server


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need more than the usual time to send what the server discards."""
    monkeypatch.setattr("jetspec.serve.middleware.LINGER_S", 60.0)


def head(line: str, *headers: str) -> bytes:
    return "\r\n".join([f"{line} HTTP/1.1", HOST, *headers, "", ""]).encode()


def post(body: bytes, *headers: str) -> bytes:
    return head("POST /v1/completions", JSON, f"Content-Length: {len(body)}", *headers) + body


def chunked(body: bytes, size: int) -> bytes:
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + END


def connect(live: Live) -> socket.socket:
    return socket.create_connection(live.listener.getsockname(), timeout=60)


def talk(live: Live, *pieces: bytes) -> bytes:
    """Sends, and reads until the server closes."""
    with connect(live) as client:
        for piece in pieces:
            client.sendall(piece)
            time.sleep(0.05)
        received = b""
        while piece := client.recv(1 << 16):
            received += piece
        return received


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", received)]


def next_status(client: socket.socket) -> int:
    """Status of the next response, which is read to its end."""
    response = HTTPResponse(client)
    response.begin()
    response.read()
    return response.status


@pytest.mark.parametrize("cut", [1, 7, 300, 20_000, 1 << 20])
def test_pipelined_requests_are_answered_in_order(live: Live, cut: int) -> None:
    long = GOOD[:-1] + b" " * 30_000 + b"}"
    in_chunks = head("POST /v1/completions", JSON, "Transfer-Encoding: chunked") + chunked(GOOD, 16)
    body = [head("GET /health"), post(GOOD), head("GET /nothing"), post(long), in_chunks, post(b"{")]
    sent = b"".join(body) + head("GET /v1/models", "Connection: close") + b"what is this?"
    with connect(live) as client:
        for start in range(0, min(len(sent), 600), cut):
            client.sendall(sent[start : min(start + cut, 600)])
        for start in range(600, len(sent), max(cut, 1000)):
            client.sendall(sent[start : start + max(cut, 1000)])
        received = b""
        while piece := client.recv(1 << 16):
            received += piece
    assert statuses(received) == [200, 200, 404, 200, 200, 400, 200]


def test_pipelined_bytes_are_bounded(locked: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the size limit of a request."""
    gate = Gate(locked, monkeypatch)
    gate.open.clear()
    with connect(locked) as client, pytest.raises(OSError):
        client.sendall(post(GOOD, f"Authorization: Bearer {KEY}"))
        for _ in range(1000):
            client.sendall(b"x" * 10_000)
            time.sleep(0.001)
    gate.open.set()
    locked.wait_for_rest()


@pytest.mark.parametrize("key", [KEY, "wrong"])
@pytest.mark.parametrize("size", [1, 6, 40])
def test_small_chunks_do_not_block_the_event_loop(locked: Live, key: str, size: int) -> None:
    start = head("POST /v1/completions", JSON, "Transfer-Encoding: chunked", f"Authorization: Bearer {key}")
    chunks = chunked(b" " * size, size).removesuffix(END) * (3_000_000 // size)
    with locked.callback_times() as times, connect(locked) as client:
        client.sendall(start)
        with suppress(OSError):
            client.sendall(chunks)
        assert next_status(client) == (400 if key == KEY else 401)
    assert max(times) < 0.5, "several times the usual CPU time"


@pytest.mark.parametrize(
    ("status", "key", "length"), [(401, "wrong", 10_000_000), (413, KEY, 10_000_000), (401, "wrong", 0), (200, KEY, 0)]
)
def test_unread_body_closes_the_connection_after_the_response(locked: Live, status: int, key: str, length: int) -> None:
    """The client, still sending, can read the response."""
    method = "POST /v1/completions" if length else "GET /v1/models"
    with connect(locked) as client:
        client.sendall(head(method, f"Content-Length: {length}", f"Authorization: Bearer {key}"))
        for _ in range(length // 1_000_000):
            client.sendall(b"x" * 1_000_000)
        assert next_status(client) == status
        if length:
            assert client.recv(1) == b""
        else:
            client.sendall(head("GET /health"))
            assert next_status(client) == 200


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/metrics", "/v1/models", "/static/app.js"])
def test_head_is_get_without_a_body(live: Live, path: str) -> None:
    got, body = httpx.get(live.url + path), httpx.head(live.url + path)
    assert got.status_code == body.status_code == 200 and body.content == b""
    assert got.headers["content-type"] == body.headers["content-type"]
    received = talk(live, head(f"HEAD {path}"), head("GET /health", "Connection: close"))
    assert statuses(received) == [200, 200] and received.endswith(b'\r\n\r\n{"status":"ok"}')


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("PUT", "/health", "GET, HEAD"), ("GET", "/v1/completions", "POST"), ("HEAD", "/v1/completions", "POST")],
)
def test_wrong_method_gets_the_allowed_ones(live: Live, method: str, path: str, allowed: str) -> None:
    response = httpx.request(method, live.url + path)
    assert (response.status_code, response.headers["Allow"]) == (405, allowed)


def test_body_with_two_lengths_is_refused(live: Live) -> None:
    """Request smuggling: a proxy may have used the other length."""
    both = head("POST /v1/completions", JSON, "Content-Length: 5", "Transfer-Encoding: chunked") + chunked(GOOD, 99)
    assert statuses(talk(live, both + head("GET /health"))) == [400]


def test_http_1_0_needs_no_host(live: Live) -> None:
    assert b"200 OK" in talk(live, b"GET /health HTTP/1.0\r\n\r\n")
    assert b"400 Bad Request" in talk(live, b"GET /health HTTP/1.0\r\nHost: evil.example\r\n\r\n")
    assert b"400 Bad Request" in talk(live, b"GET /health HTTP/1.1\r\n\r\n")


@pytest.mark.parametrize(
    ("status", "header"),
    [
        (200, "Content-Type: application/json; charset=utf-8"),
        (400, "Content-Type: text/plain"),
        (400, "Content-Type: application/x-www-form-urlencoded"),
        (400, "Content-Type: multipart/form-data; boundary=x"),
        (400, "Content-Type: application/jsonx"),
        (400, "Content-Type: "),
        (415, "Content-Encoding: gzip"),
        (415, "Content-Encoding: br"),
        (200, "Content-Encoding: identity"),
        (415, "Content-Type: application/json; charset=utf-16"),
        (415, 'Content-Type: application/json; charset="latin-1"'),
        (200, 'Content-Type: application/json; charset="UTF-8"'),
        (417, "Expect: 200-ok"),
        (200, "Expect: 100-Continue"),
    ],
)
def test_unsupported_headers_are_refused(live: Live, status: int, header: str) -> None:
    """A page of another site can send forms and plain text without a preflight request."""
    name, _, value = header.partition(": ")
    headers = {"Content-Type": "application/json", name: value}
    assert httpx.post(f"{live.url}/v1/completions", content=GOOD, headers=headers).status_code == status


def test_metrics_count_refusals_by_route(folder: Path) -> None:
    with Live(tiny_llm(folder), ServeConfig(port=0, keys=(KEY,), max_body=1000, read_timeout_s=1.5)) as server:
        mine = {"Authorization": f"Bearer {KEY}"}
        assert server.post().status_code == 401
        assert httpx.get(f"{server.url}/v1/models/made-up").status_code == 401
        assert httpx.get(f"{server.url}/made-up").status_code == 401
        large = httpx.post(f"{server.url}/v1/completions", content=b" " * 2000, headers=mine)
        assert large.status_code == 413
        late = head("POST /v1/chat/completions", "Content-Length: 9", f"Authorization: Bearer {KEY}")
        with connect(server) as client:
            client.sendall(late)
            assert next_status(client) == 408
        page = httpx.get(f"{server.url}/metrics", headers=mine).text
    counted = re.findall(r'jetspec:requests_total\{route="(.*?)",status="(\d+)"\} 1\.0', page)
    assert set(counted) == {
        ("/v1/completions", "401"),
        ("/v1/models/{name:path}", "401"),
        ("other", "401"),
        ("/v1/completions", "413"),
        ("/v1/chat/completions", "408"),
    }
