"""API keys, origins, limits of a request, malformed bodies, the log, and the settings of the server."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import logging
import math
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jetspec.serve.config import ServeConfig, read_keys
from jetspec.serve.log import JsonFormatter, log
from jetspec.serve.middleware import Middleware
from jetspec.serve.run import listen, open_socket
from jetspec.types import Update
from tests.serve.live import NAME, Live, assert_error, tiny_llm, wait_until

KEYS = ("first-key-0123456789", "other-key-0123456789")
KEY = {"Authorization": f"Bearer {KEYS[0]}"}
ORIGIN, OTHER_ORIGIN = "https://example.org", "https://evil.example"
CLOSED = ("/ready", "/metrics", "/v1/models", f"/v1/models/{NAME}", "/openapi.json", "/v1/nothing")


@pytest.fixture(scope="module")
def locked(folder: Path) -> Iterator[Live]:
    config = ServeConfig(port=0, keys=KEYS, origins=(ORIGIN,), max_body=100_000)
    with Live(tiny_llm(folder), config) as server:
        yield server


@pytest.fixture(scope="module")
def hasty(folder: Path) -> Iterator[Live]:
    """A server with a short read timeout."""
    with Live(tiny_llm(folder), ServeConfig(port=0, read_timeout_s=1.5)) as server:
        yield server


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The log lines so far."""
    caplog.set_level(logging.INFO, log.name)
    log.propagate = True
    return lambda: [JsonFormatter().format(record) for record in caplog.records if record.name == log.name]


def post(live: Live, content: bytes, path: str = "completions", **headers: str) -> httpx.Response:
    given = {"Content-Type": "application/json", **KEY, **headers}
    return httpx.post(f"{live.url}/v1/{path}", content=content, headers=given, timeout=60)


# -- keys, host names, origins


def test_only_health_is_open_without_a_key(locked: Live) -> None:
    assert httpx.get(f"{locked.url}/health").json() == {"status": "ok"}
    for path in CLOSED:
        response = httpx.get(locked.url + path)
        assert response.status_code == 401 and response.headers["WWW-Authenticate"] == "Bearer"
    assert locked.post().status_code == locked.chat().status_code == 401


@pytest.mark.parametrize("key", [*KEYS, KEYS[0][:-1], "", "x" * 10_000, "\xe9" * 20])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "Basic", ""])
def test_only_a_whole_bearer_key_opens_routes(locked: Live, key: str, scheme: str) -> None:
    headers = {b"Authorization": f"{scheme} {key}".strip().encode("latin-1")}
    expected = 200 if key in KEYS and scheme.lower() == "bearer" else 401
    for path in CLOSED[:-1]:
        assert httpx.get(locked.url + path, headers=headers).status_code == expected


def test_origins_are_refused_unless_named(locked: Live, live: Live) -> None:
    for server, origin, status in ((locked, ORIGIN, 200), (locked, OTHER_ORIGIN, 400), (live, ORIGIN, 405)):
        allowed = ORIGIN if status == 200 else None
        response = httpx.get(f"{server.url}/v1/models", headers={"Origin": origin, **KEY})
        assert response.headers.get("access-control-allow-origin") == allowed
        preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        preflight["Access-Control-Request-Headers"] = "authorization, content-type, x-stainless-os"  # OpenAI's client
        response = httpx.options(f"{server.url}/v1/chat/completions", headers=preflight)
        assert response.status_code == status
        assert response.headers.get("access-control-allow-origin") == allowed
    assert httpx.options(f"{locked.url}/v1/chat/completions").status_code == 401


@pytest.mark.parametrize("origin", [ORIGIN, OTHER_ORIGIN])
@pytest.mark.parametrize("status", [401, 413, 429])
def test_allowed_origin_can_read_errors(
    locked: Live, monkeypatch: pytest.MonkeyPatch, status: int, origin: str
) -> None:
    """Without CORS headers a browser hides even the status from a page."""
    middleware = locked.host.config.app
    assert isinstance(middleware, Middleware)
    if status == 429:
        monkeypatch.setattr(middleware, "num_active", locked.config.max_requests)
    headers = {"Origin": origin, **({} if status == 401 else KEY)}
    response = httpx.post(f"{locked.url}/v1/completions", content=b" " * 200_000, headers=headers)
    assert response.status_code == status
    assert response.headers.get("access-control-allow-origin") == (ORIGIN if origin == ORIGIN else None)
    exposed = response.headers.get("access-control-expose-headers", "").split(", ")
    assert origin != ORIGIN or {"Retry-After", "X-Request-Id"} <= set(exposed)


def test_without_keys_only_local_host_names_are_served(live: Live) -> None:
    """DNS rebinding: a foreign page can resolve a name of its own to this machine."""
    for host, status in (("localhost:1", 200), ("127.0.0.1", 200), ("evil.example", 400), ("", 400)):
        assert httpx.get(f"{live.url}/health", headers={"Host": host}).status_code == status


def test_configured_local_address_is_a_local_host_name(folder: Path) -> None:
    with Live(tiny_llm(folder), ServeConfig(host="127.0.0.2", port=0)) as server:
        url = server.url.replace("127.0.0.1", "127.0.0.2")
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/health", headers={"Host": "evil.example"}).status_code == 400


# -- size and time of a request


def test_large_requests_are_refused(locked: Live) -> None:
    assert post(locked, b" " * 200_000).status_code == 413
    content = (b" " * 1000 for _ in range(10_000))  # ten megabytes without Content-Length
    assert httpx.post(f"{locked.url}/v1/completions", content=content, headers=KEY).status_code == 413
    assert httpx.get(f"{locked.url}/health", headers={"X-Large": "x" * 100_000}).status_code == 400


def test_incomplete_body_times_out(hasty: Live) -> None:
    connection = http.client.HTTPConnection(hasty.url.removeprefix("http://"), timeout=60)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", "100")
    connection.endheaders(b"{")
    assert connection.getresponse().status == 408


@pytest.mark.parametrize("drip", [b"", b"x"])
def test_connection_without_a_request_times_out(hasty: Live, drip: bytes) -> None:
    """Single bytes do not restart the timeout."""
    with socket.create_connection(hasty.listener.getsockname()) as client:
        client.sendall(drip and b"GET /health HTTP/1.1\r\nX-Slow: ")
        client.settimeout(0.1)

        def is_closed() -> bool:
            try:
                client.sendall(drip)
                return not client.recv(1 << 16)
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        wait_until(is_closed)


def test_read_timeout_does_not_apply_to_the_response(hasty: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    step, times = hasty.llm.engine.step, list[float]()

    def slow_step() -> list[Update]:
        if not times:
            time.sleep(hasty.config.read_timeout_s + 0.5)
        times.append(time.monotonic())
        return step()

    monkeypatch.setattr(hasty.llm.engine, "step", slow_step)
    assert hasty.post(max_tokens=4, ignore_eos=True).json()["usage"]["completion_tokens"] == 4


# -- bodies

MODEL, PROMPT = b'{"model": "tiny", ', b'"prompt": "a"'
PARTS = b'"messages": [{"role": "user", "content": [%s]}]}'
SIZE = 3_800_000


def many(entry: bytes) -> bytes:
    """Entries that fill a body."""
    return b",".join([entry] * (SIZE // (len(entry) + 1)))


def fields(count: int) -> bytes:
    return b",".join(b'"x%d": 0' % i for i in range(count))


HUGE: list[tuple[str, Callable[[], bytes]]] = [
    ("completions", lambda: b'"prompt": [%s]}' % many(b'""')),
    ("completions", lambda: b'"prompt": [%s]}' % many(b"1")),
    ("completions", lambda: PROMPT + b', "stop": [%s]}' % many(b"1")),
    ("completions", lambda: PROMPT + b', "logit_bias": {%s}}' % fields(SIZE // 14)),
    ("chat/completions", lambda: PARTS % many(b"1")),
    ("chat/completions", lambda: PARTS % many(b'{"type":"text","text":""}')),
    ("chat/completions", lambda: b'"messages": [%s]}' % many(b"1")),
    ("chat/completions", lambda: b'"messages": [%s]}' % many(b'{"role":"user","content":"x"}')),
    ("chat/completions", lambda: b'"messages": [{"role": "user", "content": "x"}], "tools": [%s]}' % many(b"1")),
    ("chat/completions", lambda: b'"messages": [], %s}' % fields(SIZE // 14)),
]


@pytest.mark.parametrize("number", range(len(HUGE)))
def test_huge_body_does_not_block_the_event_loop(live: Live, number: int) -> None:
    """Each is wrong in a million places or right in too many."""
    path, make = HUGE[number]
    body = MODEL + make()
    with live.callback_times() as times:
        response = post(live, body, path)
    assert response.status_code == 400 and len(response.content) < 1000
    assert max(times) < 2, "several times the usual CPU time"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"\xff\xfe{}", None),
        (b"[" * 100_000, None),
        (b'{"model": "\xff"}', None),
        (b'{"model": NaN}', None),
        (b'{"n": ' + b"9" * 5000 + b"}", None),
        (b'{"a":' * 15_000 + b"1" + b"}" * 15_000, None),
        (MODEL + b'"prompt": ' + b"[" * 40_000 + b"]" * 40_000 + b"}", None),
        (MODEL + PROMPT + b', "temperature": 1e999}', "temperature"),
        (b'{"model": "\\ud800", "prompt": "a"}', "model"),
        (MODEL + PROMPT + b', "\\ud800": 1}', None),
        (MODEL + PROMPT + b', "prompt": "b"}', "prompt"),
        (MODEL + PROMPT + b', "logit_bias": {"1": -100, "1": 100}}', "1"),
        (MODEL + PROMPT + b', "logit_bias": {"1": -100, "01": 100}}', "logit_bias.01"),
        (MODEL + b'"prompt": [true, 1]}', "prompt.0"),
        (MODEL + b'"prompt": ["a", 1]}', "prompt.1"),
        (MODEL + b'"prompt": [[1], [-2]]}', "prompt.1.0"),
        (MODEL + b'"prompt": []}', "prompt"),
        (MODEL + b'"prompt": [%s]}' % b",".join([b'"a"'] * 17), "prompt"),
        (MODEL + b'"prompt": [%s]}' % b",".join([b"[1]"] * 17), "prompt"),
    ],
)
def test_malformed_body_is_refused_by_its_field(live: Live, body: bytes, param: str | None) -> None:
    assert_error(post(live, body), 400, param)


# -- request ids and the log


def test_request_ids_are_returned_or_made(live: Live) -> None:
    def request_id(given: str) -> str:
        return str(httpx.get(f"{live.url}/health", headers={"X-Request-Id": given}).headers["x-request-id"])

    assert request_id("mine-1.2_3") == "mine-1.2_3"
    assert all(re.fullmatch("[0-9a-f]{32}", request_id(wrong)) for wrong in ("x" * 65, "a b", ""))
    assert request_id("") != request_id("")


@pytest.mark.parametrize("log_text", [False, True])
def test_log_has_counts_and_texts_only_on_request(
    folder: Path, logged: Callable[[], list[str]], log_text: bool
) -> None:
    with Live(tiny_llm(folder), ServeConfig(port=0, log_text=log_text)) as server:
        answer = server.post(prompt="sesame", user="ali", max_tokens=5).json()
    (line,) = [json.loads(text) for text in logged() if "/v1/completions" in text]
    assert line["event"] == "request" and line["user"] == "ali" and line["status"] == 200
    assert line["completion_tokens"] == answer["usage"]["completion_tokens"] and line["answers"] == "1 of 1"
    assert ("sesame" in "".join(logged())) == log_text
    assert not any("\n" in text for text in logged())


def test_log_has_the_cause_of_a_refusal_and_the_number_of_the_key(
    locked: Live, logged: Callable[[], list[str]]
) -> None:
    """It has no hash of a key, against which keys could be tried."""
    wrong = json.dumps({"model": NAME, "prompt": "a", "bogus": "secret"}).encode()
    assert post(locked, wrong, **{"X-Request-Id": "wrong"}).status_code == 400
    assert post(locked, b"{}", Authorization="Bearer none", **{"X-Request-Id": "locked"}).status_code == 401
    httpx.get(f"{locked.url}/v1/models", headers={"Authorization": f"Bearer {KEYS[1]}", "X-Request-Id": "mine"})

    def line(id: str) -> dict[str, Any]:
        return next((line for line in map(json.loads, logged()) if line["id"] == id), {})

    wait_until(lambda: all(map(line, ("wrong", "locked", "mine"))))
    assert (line("wrong")["code"], line("wrong")["param"]) == ("unsupported_parameter", "bogus")
    assert line("locked")["code"] == "invalid_api_key" and "param" not in line("locked")
    assert line("mine")["tenant"] == "key 2"
    digest = hashlib.sha256(KEYS[1].encode()).hexdigest()
    assert not any(KEYS[1] in text or digest[:8] in text for text in logged())


# -- settings and the socket


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("drain_s", value) for value in (-1.0, math.nan, math.inf)),
        *(("origins", (f"https://{value}",)) for value in ("", "example.org/", "Example.org", "*.example.org")),
        ("origins", ("example.org",)),
        ("origins", ("*",)),
        ("port", 1 << 16),
        ("max_body", 0),
        ("write_timeout_s", 0.0),
    ],
)
def test_wrong_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match="origin" if name == "origins" else name):
        ServeConfig(**{name: value})
    ServeConfig(drain_s=0, origins=(ORIGIN, "http://[::1]:80", "http://a-b_c.localhost:3000"))


def test_key_files_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n".join(KEYS) + "\n\n")
    assert read_keys(file) == KEYS
    for bad in ("", "short", "with space in the key", "ключ-ключ-ключ-ключ"):
        file.write_text(bad)
        with pytest.raises(ValueError):
            read_keys(file)


def test_taken_port_is_refused() -> None:
    with open_socket(ServeConfig(port=0)) as first:
        port = first.getsockname()[1]
        with open_socket(ServeConfig(port=port)) as second:
            listen(first, ServeConfig(port=port))
            with pytest.raises(ValueError, match=str(port)):
                listen(second, ServeConfig(port=port))
        with pytest.raises(ValueError, match=str(port)):
            open_socket(ServeConfig(port=port))


def test_connections_have_no_delay() -> None:
    """With Nagle's algorithm the second part of a response would wait some 40 ms."""

    async def has_no_delay() -> bool:
        with open_socket(ServeConfig(port=0)) as listener:
            server = await asyncio.start_server(lambda reader, writer: accepted.set_result(writer), sock=listener)
            accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
            async with server:
                _, writer = await asyncio.open_connection(*listener.getsockname())
                peer = (await accepted).get_extra_info("socket")
                writer.close()
                return bool(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    assert asyncio.run(has_no_delay())
