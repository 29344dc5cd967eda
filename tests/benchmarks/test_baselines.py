"""Baselines: transformers under the same rules, and servers with the same requests."""

from __future__ import annotations

import importlib.util
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.baselines import RoundCounter, open_method, prefill_end
from benchmarks.methods import Ask, Reply, UnequalConditions, split_time
from benchmarks.recipe import MethodConfig
from benchmarks.results import RUN_FILE
from jetspec.engine.llm import LLM
from jetspec.types import SamplingParams
from tests.benchmarks.tiny_bench import make_bench, results_of, write_questions
from tests.train.tiny_model import CONTEXT


class Server(ThreadingHTTPServer):
    """An OpenAI-compatible server in front of an LLM, as far as a benchmark asks one."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.llm, self.lock = llm.with_drafter("none"), threading.Lock()
        self.extra_tokens = [0, 0]  # per turn
        self.version: str | None = None
        self.broken: str | None = None
        self.says: bytes | None = None
        self.refuses: tuple[str, ...] = ()
        self.asked: list[dict[str, Any]] = []

    @property
    def says_other(self) -> bytes:
        """Answer of other weights."""
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"content": "other"}, "finish_reason": "stop"}]}]
        events += [{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}]
        return "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if not self.path.endswith("/models"):
            self._send(json.dumps({"version": self.server.version} if self.server.version else {}))
            return
        self._send(json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        if any(name in body for name in self.server.refuses):
            self.send_error(400, explain="no such field")
            return
        if self.server.broken and body["messages"][-1]["content"] == self.server.broken:
            self.send_error(500, explain="three is too much")
            return
        if self.server.says is not None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.server.says) + ("dies" in str(self.server.says))))
            self.end_headers()
            self.wfile.write(self.server.says)
            return
        sampling = SamplingParams(body["temperature"], max_tokens=body["max_tokens"], seed=body["seed"])
        with self.server.lock:
            done = self.server.llm.chat(body["messages"], sampling)
        middle = len(done.text) // 2
        deltas = [{"delta": {"content": part}} for part in (done.text[:middle], done.text[middle:])]
        usage = {"prompt_tokens": done.stats.prompt_tokens + self.server.extra_tokens[len(body["messages"]) // 2]}
        usage["completion_tokens"] = len(done.token_ids)
        events: list[dict[str, Any]] = [{"choices": [delta]} for delta in deltas]
        events += [{"choices": [{"delta": {}, "finish_reason": done.finish_reason}]}, {"choices": [], "usage": usage}]
        self._send("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    def _send(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(llm: LLM) -> Iterator[Server]:
    server = Server(llm)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_server_is_a_method_like_any_other(folder: Path, llm: LLM) -> None:
    with serving(llm) as server:
        bench = make_bench(folder, "served", llm, url=server.url, tasks=["sums", "talk"], batches=[1, 2], repeats=1)
        cells = results_of(bench)["cells"]
    own = {(c["task"], c["batch"]): c for c in cells if c["method"] == "plain"}
    served = [cell for cell in cells if cell["method"] == "server"]
    assert len(served) == 4 and all(body["model"] == "tiny" for body in server.asked)
    for cell in served:
        if cell["task"] == "sums":  # a second turn quotes the first answer as text, and random bytes are none
            assert cell["tokens"] == own["sums", cell["batch"]]["tokens"]
            assert cell["lossless"]["identical"] == cell["lossless"]["compared"] == 5
        assert cell["errors"] == []
        assert cell["tokens_per_round"]["mean"] is None and cell["accepted"] == [] and cell["budget"] is None
        assert cell["lossless"]["check"] == "greedy text" and cell["speedup"]["mean"] > 0
    assert any(len(body["messages"]) == 3 for body in server.asked), "the second turn brings the first answer along"


@pytest.mark.parametrize("refuses", [(), ("min_p",), ("model",)], ids=["nothing", "other fields", "everything"])
def test_a_server_is_told_to_draw_as_we_do(refuses: tuple[str, ...], folder: Path, llm: LLM, tmp_path: Path) -> None:
    """Servers choose settings that a request leaves open."""
    neutral = {"top_p": 1, "presence_penalty": 0, "frequency_penalty": 0}
    told = neutral if refuses == ("min_p",) else {**neutral, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    with serving(llm) as server:
        server.refuses = refuses
        bench = make_bench(folder, str(tmp_path / "run"), llm, methods=[f"server={server.url}"], limit=2, repeats=1)
        record = results_of(bench)
    kept = json.loads((tmp_path / "run" / RUN_FILE).read_text())["settings"]["server of server"]
    assert kept["sampling"] == told
    asked = [body for body in server.asked if body["max_tokens"] == 8]
    usual = {"model", "messages", "temperature", "max_tokens", "seed", "stream", "stream_options"}
    assert len(asked) == 2 and all({k: v for k, v in body.items() if k not in usual} == told for body in asked)
    note = "server was asked without top_k, min_p, repetition_penalty: what its server takes instead is not known"
    assert record["notes"] == ([note] if told == neutral else [])
    assert len(record["cells"][1]["errors"]) == (2 if refuses == ("model",) else 0)


def test_a_server_with_another_template_is_refused(folder: Path, llm: LLM) -> None:
    with serving(llm) as server, pytest.raises(UnequalConditions, match="another model or another chat template"):
        server.extra_tokens = [3, 0]
        make_bench(folder, "template", llm, methods=[f"server={server.url}"]).run()


@pytest.mark.parametrize("other", ["weights", "version", "name"])
def test_rows_of_another_server_at_the_same_address_are_not_mixed_in(folder: Path, llm: LLM, other: str) -> None:
    def run(name: str | None = None) -> dict[Any, Any]:
        method = {"name": "server", "url": server.url, "served_model": name}
        return make_bench(folder, f"swapped {other}", llm, methods=[method], limit=2, repeats=1).run()

    with serving(llm) as server:
        server.version = "1.0"
        before = run()
        assert run() == before
        if other == "weights":
            server.says = server.says_other
        if other == "version":
            server.version = "1.1"
        with pytest.raises(ValueError, match=r"another (server of|method) server; choose another --out"):
            run("other" if other == "name" else None)
    assert run() == before, "a server that is gone leaves its rows as they are"


def test_a_request_that_fails_is_a_row(folder: Path, llm: LLM) -> None:
    with serving(llm) as server:
        server.broken = "3 and 3 is"
        bench = make_bench(folder, "broken", llm, methods=[f"server={server.url}"], batches=[5])
        cell = next(cell for cell in results_of(bench)["cells"] if cell["method"] == "server")
    assert {error["id"] for error in cell["errors"]} == {"sums-3"} and cell["questions"] == 5
    assert all("500" in e["error"] and "three is too much" in e["error"] for e in cell["errors"])


NONSENSE = {
    "a page": b"<html>",
    "no object": b"data: [1]\n\n",
    "no JSON": b"data: {\n\n",
    "no choices": b'data: {"choices": 5}\n\n',
    "dies": b'data: {"choices": [{"delta": {"content": "it dies"}}]}\n\n',
    "not UTF-8": b"data: \xff\n\n",
    "half a character": b'data: {"error": "\\ud800"}\n\n',
    "tokens as text": b'data: {"choices": [{"finish_reason": "stop"}], "usage": {"completion_tokens": "5"}}\n\n',
}


@pytest.mark.parametrize("says", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_of_a_server_is_a_failed_answer(says: bytes, folder: Path, llm: LLM, tmp_path: Path) -> None:
    with serving(llm) as server:
        server.says = says
        options: dict[str, Any] = {"methods": [f"server={server.url}"], "limit": 2, "repeats": 1}
        bench = make_bench(folder, str(tmp_path / "run"), llm, **options)
        cell = next(cell for cell in results_of(bench)["cells"] if cell["method"] == "server")
    assert len(cell["errors"]) == 2 and cell["speedup"] is None and cell["tokens_per_s"]["mean"] is None


@pytest.mark.parametrize(
    ("answers", "end"),
    [
        ([(9, [2, 3, 4])], 2),
        ([(9, [2, 4, 5]), (9, [3, 4, 5])], 3),
        ([(9, [2, 3, 4]), (9, [6, 7, 8])], 3),
        ([(9, [8])], 1),
        ([(2, [8])], 8),
        ([(0, [])], 9),
    ],
    ids=["streamed", "together", "one after the other", "in one piece", "a word", "empty"],
)
def test_no_token_but_the_first_is_written_during_prefill(answers: Any, end: float) -> None:
    assert prefill_end(answers, began=1, ended=9) == end


@pytest.mark.parametrize(
    ("early", "decode"),
    [(0, 4), (2, 6), (3, 8), (4, 10), (6, 10)],
    ids=["none", "two", "half", "more than the prefill can pay", "all"],
)
def test_drafts_of_the_prefill_take_their_share_of_time(early: int, decode: float) -> None:
    """A text of seven tokens in ten seconds, of which six are prefill. The first token is free."""
    assert split_time(0, 6, 10, written=7, answers=1, early=early) == pytest.approx((10 - decode, decode))


@pytest.fixture(scope="module")
def opinionated(folder: Path, llm: LLM) -> Path:
    """The model with settings of its own, among them an end in the middle of what it says."""
    said = llm.chat([{"role": "user", "content": "1 and 1 is"}], SamplingParams(max_tokens=9, ignore_eos=True))
    copy = shutil.copytree(folder / "model", folder / "opinionated")
    own = {"repetition_penalty": 1.3, "eos_token_id": said.token_ids[-1], "assistant_confidence_threshold": 0.0}
    (copy / "generation_config.json").write_text(json.dumps(own))
    return copy


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("name", ["transformers", "transformers-assisted", "transformers-lookup"])
def test_a_models_own_settings_do_not_count(name: str, ignore_eos: bool, opinionated: Path) -> None:
    llm = LLM(opinionated, device="cpu")
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": "1 and 1 is"}])
    ask = Ask([], prompt, SamplingParams(max_tokens=40, ignore_eos=ignore_eos))
    assistant = str(opinionated) if name == "transformers-assisted" else None
    methods = MethodConfig("plain"), MethodConfig(name, assistant=assistant)
    plain, other = (
        open_method(llm, method, 1 if method.is_ours else None, 1, 128).decode([ask]).replies[0] for method in methods
    )
    assert isinstance(plain, Reply) and isinstance(other, Reply)
    assert (other.token_ids, other.finish) == (plain.token_ids, plain.finish)
    assert (plain.num_tokens, plain.finish) == ((40, "length") if ignore_eos else (9, "stop"))


def test_a_missing_package_is_named_before_measuring(
    folder: Path, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GGUF files need one more than folders do."""
    missing, find = {"accelerate"}, importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    bench = make_bench(folder, "packages", llm, methods=["transformers"], limit=1, repeats=1)
    assert not any(answer["error"] for row in bench.run().values() for answer in row["answers"])
    (tmp_path / "model.gguf").touch()
    bench = make_bench(folder, "gguf", llm, methods=["transformers"])
    with monkeypatch.context() as patch:
        patch.setattr(llm, "target", replace(llm.target, path=tmp_path / "model.gguf"))
        with pytest.raises(ValueError, match="transformers needs the package accelerate"):
            bench.run()
    missing.add("transformers")
    with pytest.raises(ValueError, match="transformers needs the package transformers"):
        bench.run()
    assert not (bench.folder / "rows.jsonl").exists()


def test_assisted_generation_with_the_target_itself_as_assistant(folder: Path, llm: LLM) -> None:
    method = {"name": "transformers-assisted", "assistant": str(folder / "model")}
    cells = results_of(make_bench(folder, "assisted", llm, methods=[method], limit=2, repeats=1))["cells"]
    assisted = cells[1]
    assert assisted["lossless"]["identical"] == 2 and assisted["tokens"] == cells[0]["tokens"]
    assert assisted["tokens_per_round"]["mean"] > 1.5


def test_a_long_prompt_does_not_shorten_the_answers_beside_it(folder: Path, llm: LLM) -> None:
    """In a batch of transformers all prompts are padded to the longest, which may nearly fill the context."""
    frame = len(llm.tokenizer.encode_chat([{"role": "user", "content": ""}]))
    write_questions(folder, "near", [["short"], ["x" * (CONTEXT - frame - 5)], ["also short"], ["y" * (CONTEXT // 2)]])
    options: dict[str, Any] = {"tasks": ["near"], "batches": [1, 4], "max_tokens": 24, "repeats": 1}
    bench = make_bench(folder, "near", llm, methods=["transformers"], **options)
    rows = bench.run()
    cells = results_of(bench, rows)["cells"]
    assert all(cell["errors"] == [] for cell in cells)
    assert all(cell["lossless"]["identical"] == 4 for cell in cells if cell["method"] == "transformers")
    lengths = [sum(a["tokens"]) for row in rows.values() for a in row["answers"] if a["id"] == "near-1"]
    assert all(length <= 5 for length in lengths) and max(cell["tokens"] for cell in cells) > 4 * 5


def test_rounds_beyond_the_end_of_the_text_do_not_count() -> None:
    counter = RoundCounter()
    for size in (7, 3, 1, 4):  # the prompt, then three rounds
        counter.put(torch.zeros(size))
    assert counter.accepted(8) == [2, 0, 3]
    assert counter.accepted(6) == [2, 0, 1]
    assert counter.accepted(3) == [2]
