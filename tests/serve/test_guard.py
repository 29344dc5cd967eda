"""Who may ask, how much, and what nobody gets to see."""

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
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from jetspec.serve.config import ServeConfig, read_keys
from jetspec.serve.log import JsonFormatter
from jetspec.serve.middleware import Middleware
from jetspec.serve.run import listen, open_socket
from jetspec.types import Update
from tests.serve.live import NAME, Live, tiny_llm, wait_until

KEYS = ("first-key-0123456789", "other-key-0123456789")
ORIGIN = "https://example.org"
CLOSED = ("/ready", "/metrics", "/v1/models", f"/v1/models/{NAME}", "/openapi.json", "/v1/nothing")


@pytest.fixture(scope="module")
def locked(folder: Path) -> Iterator[Live]:
    config = ServeConfig(port=0, keys=KEYS, origins=(ORIGIN,), max_body=100_000, read_timeout_s=1.0)
    with Live(tiny_llm(folder), config) as server:
        yield server


def test_only_health_is_open_without_a_key(locked: Live) -> None:
    assert httpx.get(f"{locked.url}/health").json() == {"status": "ok"}
    for path in CLOSED:
        response = httpx.get(locked.url + path)
        assert response.status_code == 401 and response.headers["WWW-Authenticate"] == "Bearer"
    assert locked.post().status_code == locked.chat().status_code == 401


@pytest.mark.parametrize("key", [*KEYS, *(key[:-1] for key in KEYS), "", "x" * 10_000, "\xe9" * 20])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "Basic", ""])
def test_a_key_opens_every_route_and_nothing_else_does(locked: Live, key: str, scheme: str) -> None:
    headers = {b"Authorization": f"{scheme} {key}".strip().encode("latin-1")}
    expected = 200 if key in KEYS and scheme.lower() == "bearer" else 401
    for path in CLOSED[:-1]:
        assert httpx.get(locked.url + path, headers=headers).status_code == expected


def test_the_openai_client_reports_a_wrong_key(locked: Live) -> None:
    import openai

    with pytest.raises(openai.AuthenticationError):
        locked.client("wrong-key-0123456789").models.list()
    assert locked.client(KEYS[1]).models.list().data


def post(live: Live, content: bytes, **headers: str) -> httpx.Response:
    given = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[0]}", **headers}
    return httpx.post(f"{live.url}/v1/completions", content=content, headers=given)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe{}",
        b'{"model": "\xff", "prompt": "a"}',
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "a", "n": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "prompt": ' + b"[" * 40_000 + b"]" * 40_000 + b"}",
        b'{"a":' * 15_000 + b"1" + b"}" * 15_000,
        b'{"\\ud800": 1, "model": "tiny", "prompt": "a"}',
        b'{"model": "\\ud800", "prompt": "a"}',
    ],
)
def test_malformed_bodies_are_wrong_requests(locked: Live, content: bytes) -> None:
    response = post(locked, content)
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(response.content) < 1000 and "Traceback" not in response.text and "jetspec/" not in response.text


def test_a_body_of_another_type_is_refused(locked: Live) -> None:
    """A page of another site can send forms and plain text without asking; JSON it cannot."""
    good = json.dumps({"model": NAME, "prompt": "a"}).encode()
    assert post(locked, good).status_code == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert post(locked, good, **{"Content-Type": kind}).status_code == 400


def test_large_bodies_are_refused_before_they_are_read(locked: Live) -> None:
    assert post(locked, b" " * 200_000).status_code == 413
    response = httpx.post(
        f"{locked.url}/v1/completions",
        content=(b" " * 1000 for _ in range(10_000)),  # ten megabytes of unknown length
        headers={"Authorization": f"Bearer {KEYS[0]}"},
    )
    assert response.status_code == 413
    assert httpx.get(f"{locked.url}/health", headers={"X-Large": "x" * 100_000}).status_code == 400


def test_a_client_that_does_not_finish_its_request_is_cut_off(locked: Live) -> None:
    connection = http.client.HTTPConnection(locked.url.removeprefix("http://"), timeout=10)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Authorization", f"Bearer {KEYS[0]}")
    connection.putheader("Content-Length", "100")
    connection.endheaders(b"{")
    assert connection.getresponse().status == 408


@pytest.mark.parametrize("drip", [b"", b"x"])
def test_a_client_that_does_not_begin_its_request_is_cut_off(locked: Live, drip: bytes) -> None:
    """Each open connection costs a file descriptor, and no key is needed for one. Single bytes do not help."""
    with socket.create_connection(locked.listener.getsockname()) as client:
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


def test_an_answer_may_take_longer_than_a_request(locked: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    step = locked.llm.engine.step

    def slow_step() -> list[Update]:
        time.sleep(0.4)
        return step()

    monkeypatch.setattr(locked.llm.engine, "step", slow_step)
    body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 4, "jetspec": {"budget": 1}, "ignore_eos": True})
    began = time.monotonic()
    assert post(locked, body.encode()).json()["usage"]["completion_tokens"] == 4
    assert time.monotonic() - began > locked.config.read_timeout_s


def test_other_origins_are_off_unless_named(locked: Live, live: Live) -> None:
    def allowed(server: Live, origin: str) -> str | None:
        headers = {"Origin": origin, "Authorization": f"Bearer {KEYS[0]}"}
        return httpx.get(f"{server.url}/v1/models", headers=headers).headers.get("access-control-allow-origin")

    assert allowed(locked, ORIGIN) == ORIGIN
    assert allowed(locked, "https://evil.example") is None
    assert allowed(live, ORIGIN) is None
    for server, origin, status in ((locked, ORIGIN, 200), (locked, "https://evil.example", 400), (live, ORIGIN, 405)):
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        asked["Access-Control-Request-Headers"] = "authorization, content-type, x-stainless-os"  # as OpenAI's client
        response = httpx.options(f"{server.url}/v1/chat/completions", headers=asked)
        assert response.status_code == status
        assert response.headers.get("access-control-allow-origin") == (ORIGIN if status == 200 else None)
    assert httpx.options(f"{locked.url}/v1/chat/completions").status_code == 401


def test_other_origins_may_read_why_they_are_refused(folder: Path) -> None:
    """A browser shows a page nothing of an answer without this header, not even its status."""
    config = ServeConfig(port=0, keys=KEYS, origins=(ORIGIN,), max_body=1000, max_requests=1)
    with Live(tiny_llm(folder), config) as server:

        def refused(status: int, **headers: str) -> None:
            response = httpx.post(f"{server.url}/v1/completions", content=b" " * 2000, headers=headers)
            assert response.status_code == status
            named = headers["Origin"] == ORIGIN
            assert response.headers.get("access-control-allow-origin") == (ORIGIN if named else None)
            shown = response.headers.get("access-control-expose-headers", "").split(", ")
            assert not named or {"Retry-After", "X-Request-Id"} <= set(shown)

        for origin in (ORIGIN, "https://evil.example"):
            refused(401, Origin=origin)
            refused(413, Origin=origin, Authorization=f"Bearer {KEYS[0]}")
            guard = server.host.config.app
            assert isinstance(guard, Middleware)
            guard.num_active += 1
            refused(429, Origin=origin, Authorization=f"Bearer {KEYS[0]}")
            guard.num_active -= 1


def test_without_keys_only_local_names_are_answered(live: Live) -> None:
    """A foreign page may resolve its own name to this machine; it then asks with that name."""
    for host, status in (("localhost:1", 200), ("127.0.0.1", 200), ("evil.example", 400), ("", 400)):
        assert httpx.get(f"{live.url}/health", headers={"Host": host}).status_code == status


def test_a_local_address_is_a_local_name(folder: Path) -> None:
    with Live(tiny_llm(folder), ServeConfig(host="127.0.0.2", port=0)) as server:
        url = server.url.replace("127.0.0.1", "127.0.0.2")
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/health", headers={"Host": "evil.example"}).status_code == 400


def test_of_two_that_take_a_port_at_once_one_is_told() -> None:
    with open_socket(ServeConfig(port=0)) as first:
        config = ServeConfig(port=first.getsockname()[1])
        with open_socket(config) as second:
            listen(first, config)
            with pytest.raises(ValueError, match="Address already in use; --port 0"):
                listen(second, config)
        with pytest.raises(ValueError, match="Address already in use; --port 0"):
            open_socket(config)


def test_requests_have_names(live: Live) -> None:
    def name(given: str) -> str:
        return str(httpx.get(f"{live.url}/health", headers={"X-Request-Id": given}).headers["x-request-id"])

    assert name("mine-1.2_3") == "mine-1.2_3"
    assert re.fullmatch("[0-9a-f]{32}", name("x" * 65)) and re.fullmatch("[0-9a-f]{32}", name("a b"))
    assert name("") != name("")


@pytest.mark.parametrize("log_text", [False, True])
def test_the_log_has_facts_and_texts_only_if_asked(
    folder: Path, caplog: pytest.LogCaptureFixture, log_text: bool
) -> None:
    caplog.set_level(logging.INFO, "jetspec.serve")
    logging.getLogger("jetspec.serve").propagate = True
    with Live(tiny_llm(folder), ServeConfig(port=0, log_text=log_text)) as server:
        answer = server.post(prompt="sesame", user="ali", max_tokens=5).json()
    lines = [JsonFormatter().format(record) for record in caplog.records if record.name == "jetspec.serve"]
    (line,) = [json.loads(text) for text in lines if "/v1/completions" in text]
    assert line["event"] == "request" and line["user"] == "ali" and line["status"] == 200
    assert line["completion_tokens"] == answer["usage"]["completion_tokens"] and line["answers"] == "1 of 1"
    assert ("sesame" in "".join(lines)) == log_text
    assert "\n" not in lines[0]


def test_the_log_says_why_a_request_was_refused(locked: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jetspec.serve")
    logging.getLogger("jetspec.serve").propagate = True
    wrong = json.dumps({"model": NAME, "prompt": "a", "bogus": "secret"}).encode()
    assert post(locked, wrong, **{"X-Request-Id": "wrong"}).status_code == 400
    assert post(locked, b"{}", Authorization="Bearer none", **{"X-Request-Id": "locked"}).status_code == 401

    def facts(id: str) -> dict[str, object]:
        found = [getattr(record, "fields", {}) for record in caplog.records]
        return next((line for line in found if line.get("id") == id and "status" in line), {})

    wait_until(lambda: facts("wrong") and facts("locked"))
    assert (facts("wrong")["code"], facts("wrong")["param"]) == ("unsupported_parameter", "bogus")
    assert facts("locked")["code"] == "invalid_api_key" and "param" not in facts("locked")


def test_the_log_names_a_key_by_its_number(locked: Live, caplog: pytest.LogCaptureFixture) -> None:
    """Who reads the log must not be able to try out keys against a hash of one."""
    caplog.set_level(logging.INFO, "jetspec.serve")
    logging.getLogger("jetspec.serve").propagate = True
    httpx.get(f"{locked.url}/v1/models", headers={"Authorization": f"Bearer {KEYS[1]}", "X-Request-Id": "mine"})
    wait_until(lambda: any("mine" in JsonFormatter().format(record) for record in caplog.records))
    (line,) = [text for text in map(JsonFormatter().format, caplog.records) if '"mine"' in text]
    assert json.loads(line)["tenant"] == "key 2"
    digest = hashlib.sha256(KEYS[1].encode()).hexdigest()
    assert KEYS[1] not in line and digest[:8] not in line


@pytest.mark.parametrize("drain_s", [-1.0, math.nan, math.inf])
def test_a_time_to_drain_is_at_least_nothing(drain_s: float) -> None:
    with pytest.raises(ValueError, match=r"drain_s"):
        ServeConfig(drain_s=drain_s)
    assert ServeConfig(drain_s=0).drain_s == 0


def test_key_files_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n".join(KEYS) + "\n\n")
    assert read_keys(file) == KEYS
    for bad in ("", "short", "with space in the key", "ключ-ключ-ключ-ключ"):
        file.write_text(bad)
        with pytest.raises(ValueError):
            read_keys(file)


def test_nothing_waits_for_an_acknowledgement() -> None:
    """The second part of an answer would, some 40 ms, if the system were to collect small ones."""

    async def delays() -> int:
        with open_socket(ServeConfig(port=0)) as listener:
            server = await asyncio.start_server(lambda reader, writer: accepted.set_result(writer), sock=listener)
            accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
            async with server:
                _, writer = await asyncio.open_connection(*listener.getsockname())
                peer = (await accepted).get_extra_info("socket")
                writer.close()
                return int(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    assert asyncio.run(delays())
