"""Baselines: transformers under the same rules, and servers with the same requests."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.methods import Ask, Reply, UnequalConditions, open_method, prefill_end, split_time
from benchmarks.recipe import MethodConfig
from benchmarks.results import RUN_FILE
from jetspec.engine.llm import LLM
from jetspec.types import SamplingParams
from tests.benchmarks.tiny_bench import make_bench, results_of, write_questions
from tests.train.tiny_model import CONTEXT


class Server:
    """An OpenAI-compatible server in front of an LLM, as far as a benchmark asks one."""

    url = "http://served/v1"

    def __init__(self, llm: LLM) -> None:
        self.llm = llm.with_drafter("none")
        self.extra_tokens = [0, 0]  # per turn
        self.version: str | None = None
        self.broken: str | None = None
        self.says: bytes | None = None
        self.refuses: tuple[str, ...] = ()
        self.is_gone = False
        self.asked: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.is_gone:
            raise httpx.ConnectError("gone")
        if request.method == "GET":
            is_list = request.url.path.endswith("/models")
            return httpx.Response(200, json={"data": [{"id": "tiny"}]} if is_list else {"version": self.version})
        body = json.loads(request.content)
        self.asked.append(body)
        if any(name in body for name in self.refuses):
            return httpx.Response(400, text="no such field")
        if self.broken and body["messages"][-1]["content"] == self.broken:
            return httpx.Response(500, text="three is too much")
        return httpx.Response(200, content=self.says or self.answer(body))

    def answer(self, body: dict[str, Any]) -> bytes:
        sampling = SamplingParams(body["temperature"], max_tokens=body["max_tokens"], seed=body["seed"])
        done = self.llm.chat(body["messages"], sampling)
        middle = len(done.text) // 2
        read = done.stats.prompt_tokens + self.extra_tokens[len(body["messages"]) // 2]
        pieces = [done.text[:middle], done.text[middle:]]
        return stream_of(pieces, done.finish_reason, read, len(done.token_ids))


def stream_of(pieces: list[str], finish: str, read: int, written: int) -> bytes:
    usage = {"prompt_tokens": read, "completion_tokens": written}
    choices: list[dict[str, Any]] = [{"delta": {"content": piece}} for piece in pieces]
    events: list[dict[str, Any]] = [{"choices": [each]} for each in (*choices, {"delta": {}, "finish_reason": finish})]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in (*events, {"choices": [], "usage": usage})).encode()


@pytest.fixture
def server(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server that answers every request of this process."""
    made = Server(llm)

    async def answer(_: object, request: httpx.Request) -> httpx.Response:
        return made(request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", answer)
    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", lambda _, request: made(request))
    return made


def test_a_server_is_a_method_like_any_other(folder: Path, llm: LLM, server: Server) -> None:
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
def test_a_server_is_told_to_draw_as_we_do(
    refuses: tuple[str, ...], folder: Path, llm: LLM, tmp_path: Path, server: Server
) -> None:
    """Servers choose settings that a request leaves open."""
    neutral = {"top_p": 1, "presence_penalty": 0, "frequency_penalty": 0}
    told = neutral if refuses == ("min_p",) else {**neutral, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
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


def test_a_server_with_another_template_is_refused(folder: Path, llm: LLM, server: Server) -> None:
    server.extra_tokens = [3, 0]
    with pytest.raises(UnequalConditions, match="another model or another chat template"):
        make_bench(folder, "template", llm, methods=[f"server={server.url}"]).run()


@pytest.mark.parametrize("other", ["weights", "version", "name"])
def test_rows_of_another_server_at_the_same_address_are_not_mixed_in(
    folder: Path, llm: LLM, other: str, server: Server
) -> None:
    def run(name: str | None = None) -> dict[Any, Any]:
        method = {"name": "server", "url": server.url, "served_model": name}
        return make_bench(folder, f"swapped {other}", llm, methods=[method], limit=2, repeats=1).run()

    server.version = "1.0"
    before = run()
    assert run() == before
    if other == "weights":
        server.says = stream_of(["other"], "stop", 1, 2)
    if other == "version":
        server.version = "1.1"
    with pytest.raises(ValueError, match=r"another (server of|method) server; choose another --out"):
        run("other" if other == "name" else None)
    server.is_gone = True
    assert run() == before, "a server that is gone leaves its rows as they are"


NONSENSE = {
    "a page": b"<html>",
    "no choices": b'data: {"choices": 5}\n\n',
    "dies": b'data: {"choices": [{"delta": {"content": "it dies"}}]}\n\n',
    "not UTF-8": b"data: \xff\n\n",
    "half a character": b'data: {"error": "\\ud800"}\n\n',
    "tokens as text": b'data: {"choices": [{"finish_reason": "stop"}], "usage": {"completion_tokens": "5"}}\n\n',
}


@pytest.mark.parametrize("says", [None, *NONSENSE.values()], ids=["status 500", *NONSENSE])
def test_a_request_that_fails_is_a_failed_answer(
    says: bytes | None, folder: Path, llm: LLM, tmp_path: Path, server: Server
) -> None:
    server.says, server.broken = says, None if says else "1 and 1 is"
    options: dict[str, Any] = {"methods": [f"server={server.url}"], "limit": 2, "repeats": 1, "batches": [2]}
    bench = make_bench(folder, str(tmp_path / "run"), llm, **options)
    cell = next(cell for cell in results_of(bench)["cells"] if cell["method"] == "server")
    assert {error["id"] for error in cell["errors"]} == {"sums-1", *(["sums-0"] if says else [])}
    assert cell["questions"] == 2 and cell["speedup"] is None
    assert says or cell["errors"][0]["error"] == "500: three is too much"


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
    plain, assisted = results_of(make_bench(folder, "assisted", llm, methods=[method], limit=2, repeats=1))["cells"]
    assert assisted["lossless"]["identical"] == 2 and assisted["tokens"] == plain["tokens"]
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
