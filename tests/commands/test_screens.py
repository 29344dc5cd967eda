"""Screens of the commands over a fake LLM: texts, JSON keys, comparisons, conversations, and pictures of trees."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from jetspec.commands.chat import Chat
from jetspec.commands.compare import compare_sides
from jetspec.commands.screen import printable
from jetspec.commands.tree import BONUS, KEPT, round_text
from jetspec.commands.tree_html import page, place
from jetspec.models.hub import DEFAULT_MODEL
from jetspec.models.registry import heads_of, known_heads
from jetspec.types import RoundTrace, SamplingParams, Update
from tests.commands.cli import run
from tests.fake_llm import ANSWER, WORDS, FakeLLM

JSON_FIELDS = {"text", "token_ids", "finish_reason", "stats"}
STATS_FIELDS = {
    *("prompt_tokens", "cached_tokens", "completion_tokens", "rounds", "tokens_per_round", "accepted_lengths"),
    *("ngram_tokens", "prefill_s", "decode_s", "tokens_per_s"),
}


# -- generate


def test_generate_writes_text_and_statistics_apart(fake: type[FakeLLM]) -> None:
    result = run("generate", "Why?")
    assert result.stdout == ANSWER + "\n"
    assert "9 tokens · 3 rounds" in result.stderr
    assert result.exit_code == 0


def test_generate_json_is_one_object_with_the_promised_fields(fake: type[FakeLLM]) -> None:
    result = run("generate", "Why?", "--json", "--max-tokens", "4")
    value = json.loads(result.stdout)
    assert set(value) == JSON_FIELDS and set(value["stats"]) == STATS_FIELDS
    assert value["text"] == "The sky is blue" and value["token_ids"] == [0, 1, 2, 3]
    assert value["stats"]["accepted_lengths"] == [2, 0]


def test_prompt_comes_from_the_argument_or_the_pipe(fake: type[FakeLLM]) -> None:
    run("generate", "argument")
    run("generate", stdin="piped")
    run("generate", "--raw", "continued")
    run("generate", "Why?", "--system", "Be brief.")
    system = {"role": "system", "content": "Be brief."}
    said = [{"role": "user", "content": text} for text in ("argument", "piped", "Why?")]
    assert fake.asked == [[said[0]], [said[1]], "continued", [system, said[2]]]
    result = run("generate", "Why?", "--system", "Be brief.", "--raw")
    assert result.exit_code == 2 and "--system" in result.stderr


# -- compare


def test_compare_in_plain_text(fake: type[FakeLLM]) -> None:
    result = run("compare", "Why?", "How?")
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    lines = [line for line in result.stdout.splitlines() if line.startswith(("plain", "all"))]
    assert lines[0] == (
        "plain 10.0 tokens/s, speculative 30.0 tokens/s, 3.00 tokens per round, speedup 3.00x, identical: yes"
    )
    assert len(lines) == 3 and lines[2].startswith("all prompts: plain 10.0")


def test_compare_json(fake: type[FakeLLM]) -> None:
    value = json.loads(run("compare", "Why?", "--json").stdout)
    assert value["identical"] is True and value["speedup"] == pytest.approx(3.0)
    [result] = value["results"]
    assert set(result["plain"]) == set(result["speculative"]) == JSON_FIELDS
    assert result["plain"]["stats"]["rounds"] == 9 and result["speculative"]["stats"]["rounds"] == 3


def test_compare_samples_with_one_seed_and_names_the_setting(fake: type[FakeLLM]) -> None:
    """The warm-up samples too: its graphs are those of the setting."""
    filters = ("--temperature", "0.7", "--top-p", "0.8", "--top-k", "20")
    shown = run("compare", "Why?", "How?", *filters).stdout
    drawn = SamplingParams(0.7, top_p=0.8, top_k=20)
    assert {replace(p, seed=None, max_tokens=None, ignore_eos=False) for p in fake.sampled} == {drawn}
    [seed] = {p.seed for p in fake.sampled}
    assert seed is not None and [f"seed {seed}" in line for line in shown.splitlines() if "plain" in line] == [True] * 3
    fake.sampled.clear()
    value = json.loads(run("compare", "Why?", *filters, "--seed", "7", "--json").stdout)
    assert {p.seed for p in fake.sampled} == {value["seed"]} == {7} and value["setting"] == drawn.setting


def test_compare_samples_the_built_in_prompts_as_well(fake: type[FakeLLM]) -> None:
    value = json.loads(run("compare", "--json", "--max-tokens", "6").stdout)
    assert value["setting"] == "greedy" and value["seed"] is None
    sampled = value["sampled"]
    assert sampled["identical"] and len(sampled["results"]) == len(value["results"]) and sampled["seed"] is not None
    assert {p.temperature > 0 for p in fake.sampled} == {False, True}
    *_, line = run("compare").stdout.splitlines()
    assert sampled["setting"] in line and "3.00 tokens per round" in line and "identical: yes" in line


@pytest.mark.parametrize(
    ("dtype", "args", "status"),
    [(torch.float32, [], 1), (torch.bfloat16, [], 0), (torch.float32, ["--set", "sampling.temperature=1"], 0)],
)
def test_greedy_texts_must_be_equal_in_float32(
    fake: type[FakeLLM], dtype: torch.dtype, args: list[str], status: int
) -> None:
    fake.drifts, fake.dtype = True, dtype
    for command, said in ((["compare"], "identical: no, from token 3 on"), (["bench", "-r", "1"], "0 of 1")):
        result = run(*command, "Why?", *args)
        assert said in result.stdout and result.exit_code == status
        assert run(*command, "Why?", "--drafter", "none").exit_code == 2, "plain against plain"


@pytest.mark.parametrize(("width", "about"), [(30, ""), (100, ""), (100, " (temperature 1, seed 3)")])
def test_compare_live(width: int, about: str) -> None:
    """Rows fit the terminal, those of panels with two columns for an echoed ^C; two panels a row where they fit."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, height=20, color_system=None)
    plain, speculative = FakeLLM(drafter="none"), FakeLLM()
    results = compare_sides(
        lambda prompt: plain.stream(prompt, SamplingParams()),
        lambda prompt: speculative.stream(prompt, SamplingParams()),
        ["Why?", "How [not]?"],
        console,
        about,
    )
    assert [r.identical for r in results] == [True, True]
    screen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).replace("\r", "\n")
    assert max(map(len, screen.splitlines())) <= width
    assert max(len(line) for line in screen.splitlines() if line.startswith("│")) <= width - 2
    assert any(line.count("╭") == (2 if width == 100 else 1) for line in screen.splitlines())
    assert "identical: yes" in " ".join(screen.split()) and "How [not]?" in screen and about in screen


# -- bench


def test_bench_writes_one_table_and_one_record(fake: type[FakeLLM], tmp_path: Path) -> None:
    result = run("bench", "Why?", "How?", "--repeats", "2", "--out", str(tmp_path / "bench.json"))
    assert result.exit_code == 0
    assert "30.0 ± 0.0" in result.stdout and "3.00 ± 0.00" in result.stdout and "2 of 2" in result.stdout
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["identical"] and record["speedup"]["mean"] == pytest.approx(3.0)
    assert record["speculative"]["tokens_per_round"] == 3.0 and record["plain"]["tokens_per_round"] == 1.0
    assert {"command", "date", "hardware", "versions"} <= set(record) and record["max_tokens"] == 256


def test_bench_alternates_the_first_side(fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def stream(self: FakeLLM, prompt: Any, sampling: SamplingParams, *, trace: bool = False) -> Iterator[Update]:
        order.append(self.drafter)
        return FakeLLM.stream(self, prompt, sampling, trace=trace)

    monkeypatch.setattr(fake, "stream", stream)
    run("bench", "Why?", "--repeats", "3")
    assert order[2:] == ["none", "ngram", "ngram", "none", "none", "ngram"]  # after the warm-up


def test_bench_reads_prompts_of_a_file(fake: type[FakeLLM], tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"turns": [f"Question {n}?", "And?"]}) + "\n" for n in range(5)))
    value = json.loads(run("bench", "--data", str(data), "--limit", "3", "--repeats", "1", "--json").stdout)
    assert value["prompts"] == 3 and value["speedup"]["sd"] is None
    assert [asked[0]["content"] for asked in fake.asked[2:]] == [f"Question {n}?" for n in (0, 0, 1, 1, 2, 2)]
    data.write_text("\n")
    result = run("bench", "--data", str(data))
    assert result.exit_code == 2 and "no prompts" in result.stderr
    assert run("bench", "Why?", "--data", str(data)).exit_code == 2


# -- chat


def asked_of(fake: type[FakeLLM]) -> list[list[str]]:
    return [[message["content"] for message in messages] for messages in fake.asked]


def test_chat_keeps_the_conversation_until_reset(fake: type[FakeLLM]) -> None:
    result = run("chat", stdin="Why?\n/stats\nHow?\n/reset\n/nonsense\n/help\nWho?\n/quit\nnever\n")
    assert result.exit_code == 0
    assert asked_of(fake) == [["Why?"], ["Why?", ANSWER, "How?"], ["Who?"]]
    assert result.stdout.count(ANSWER) == 3
    assert "9 tokens · 3 rounds" in result.stdout and "There is no command /nonsense" in result.stdout


def test_chat_has_a_system_message_that_survives_reset(fake: type[FakeLLM]) -> None:
    run("chat", "--system", "Be brief.", stdin="Why?\n/reset\n/system Rhyme.\nHow?\n/system\n")
    assert asked_of(fake) == [["Be brief.", "Why?"], ["Rhyme.", "How?"]]
    assert [messages[0]["role"] for messages in fake.asked] == ["system", "system"]


def test_chat_takes_messages_of_several_lines(fake: type[FakeLLM]) -> None:
    run("chat", stdin='"""Sort\n\n/these\nlines."""\n"""\n/not a command\n"""\n"""one"""\n')
    assert [messages[-1]["content"] for messages in fake.asked] == ["Sort\n\n/these\nlines.", "/not a command", "one"]


def test_chat_answers_again_with_other_settings(fake: type[FakeLLM]) -> None:
    result = run("chat", stdin="/retry\nWhy?\n/set temperature=0.7\n/set seed=3\n/retry\n/set nonsense=1\n/set\n")
    assert asked_of(fake) == [["Why?"], ["Why?"]]
    assert fake.sampled == [SamplingParams(), SamplingParams(temperature=0.7, seed=3)]
    assert "nonsense" in result.stdout and "temperature=0.7" in result.stdout


def test_chat_saves_and_loads_a_conversation(fake: type[FakeLLM], tmp_path: Path) -> None:
    file, other = tmp_path / "chat.json", tmp_path / "other.json"
    other.write_text('{"messages": [{"role": "wizard", "content": "hm"}]}')
    run("chat", "--system", "Be brief.", stdin=f"Why?\n/save {file}\n")
    result = run("chat", stdin=f"/load {other}\n/load {tmp_path / 'no'}\n/load\n/load {file}\nHow?\n")
    assert asked_of(fake)[-1] == ["Be brief.", "Why?", ANSWER, "How?"]
    assert result.exit_code == 0 and "wizard" not in str(fake.asked)
    assert json.loads(file.read_text())["messages"][-1] == {"role": "assistant", "content": ANSWER}


def test_chat_counts_an_answer_that_was_stopped() -> None:
    """Ctrl-C ends the answer after the current round. Its text stays, and so do its statistics."""

    class Interrupted(FakeLLM):
        asked: ClassVar[list[Any]] = []

        def stream(self, prompt: Any, sampling: SamplingParams, *, trace: bool = False) -> Iterator[Update]:
            for update in super().stream(prompt, sampling, trace=trace):
                if len(self.asked) == 1 and update.token_ids[0] == 3:
                    os.kill(os.getpid(), signal.SIGINT)
                yield update

    llm = Interrupted()
    chat = Chat(llm, SamplingParams())  # type: ignore[arg-type]
    chat.answer("Why?")
    assert [stats.accepted_lengths for stats in chat.answers] == [[2, 2]]
    assert "6 tokens · 2 rounds" in chat.do_stats("")
    chat.answer("And?")
    first = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "".join(WORDS[:6])}]
    assert llm.asked[1] == [*first, {"role": "user", "content": "And?"}]
    assert chat.messages[-1]["content"] == ANSWER and len(chat.answers) == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_chat_survives_a_message_that_the_engine_refuses(fake: type[FakeLLM]) -> None:
    fake.failure = ValueError("the prompt is too long")
    result = run("chat", stdin="Why?\n")
    assert result.exit_code == 0 and "too long" in result.stdout


# -- pictures


@st.composite
def traces(draw: st.DrawFn) -> RoundTrace:
    """Any tree, and any path down from its root."""
    size = draw(st.integers(1, 24))
    parents = [0, *(draw(st.integers(0, node - 1)) for node in range(1, size))]
    scores = [0.0] * size
    for node in range(1, size):
        scores[node] = scores[parents[node]] - draw(st.floats(0, 9))
    path = [draw(st.integers(0, size - 1))]
    while path[0]:
        path.insert(0, parents[path[0]])
    return RoundTrace(list(range(size)), parents, scores, path, bonus=size)


NASTY = st.sampled_from([" the", "\\n", "<b>&amp;", "</svg><script>", '"', "]]>", "日本", "[bold]", "\ufffd"])


@settings(max_examples=60)
@given(traces(), st.lists(NASTY, min_size=25, max_size=25))
def test_terminal_drawing_shows_every_node_once(trace: RoundTrace, vocabulary: list[str]) -> None:
    headline, *lines = round_text(trace, 1, vocabulary.__getitem__).plain.split("\n")
    assert len(lines) == len(trace.tokens) + 1
    assert sum(f"{KEPT} " in line for line in lines) == len(trace.path)
    assert sum(f"{BONUS} " in line for line in lines) == 1
    assert f"{len(trace.path) - 1} accepted + 1" in headline
    assert all(printable(line) == line for line in lines)


@settings(max_examples=60)
@given(traces(), st.lists(NASTY, min_size=25, max_size=25))
def test_page_is_well_formed_and_self_contained(trace: RoundTrace, vocabulary: list[str]) -> None:
    html = page("a <prompt>", [(trace, "<i>text</i>")] * 2, vocabulary.__getitem__)
    pictures = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(pictures) == 2
    for picture in pictures:
        kinds = [group.get("class") for group in ElementTree.fromstring(picture).iter("g")]
        assert kinds.count("kept") == len(trace.path) and kinds.count("bonus") == 1
        assert len(kinds) == len(trace.tokens) + 1
    assert not re.search(r"<script|<i>|https?:|src=|@import|url\(", html)


@settings(max_examples=60)
@given(traces(), st.data())
def test_boxes_do_not_overlap(trace: RoundTrace, data: st.DataObject) -> None:
    labels = data.draw(st.lists(st.text("ab", max_size=12), min_size=len(trace.tokens), max_size=len(trace.tokens)))
    boxes = place(trace.parents, labels, set(trace.path))
    for i, one in enumerate(boxes):
        for other in boxes[:i]:
            apart_x = one.x + one.width <= other.x or other.x + other.width <= one.x
            assert apart_x or abs(one.y - other.y) >= 20
    assert {boxes[node].y for node in trace.path} == {boxes[0].y}


def test_tree_draws_rounds_and_writes_the_page(fake: type[FakeLLM], tmp_path: Path) -> None:
    result = run("tree", "Why?", "--rounds", "2", "--html", str(tmp_path / "tree.html"))
    assert result.exit_code == 0
    assert "round 2: 4 nodes, 2 accepted + 1" in result.stdout and "round 3" not in result.stdout
    html = (tmp_path / "tree.html").read_text()
    assert html.startswith("<!doctype html>") and html.count("<svg") == 2
    assert run("tree", "Why?", "--html", str(tmp_path / "no" / "tree.html")).exit_code == 2


@given(st.text())
def test_printable_drops_control_characters_alone(text: str) -> None:
    clean = printable(text)
    assert all(c in "\n\t" or c.isprintable() or ord(c) > 0x9F for c in clean)
    assert [c for c in text if c in clean] == list(clean)


# -- info


def test_info(monkeypatch: pytest.MonkeyPatch) -> None:
    described = {"model": {"kind": "model", "layers": 30}, "head": {"kind": "head", "tap_layers": [1, 8], "edge": None}}
    problems: list[str] = []
    module = SimpleNamespace(describe=described.__getitem__, fits=lambda model, head: problems)
    monkeypatch.setattr("jetspec.commands.info.check_name", lambda name: None)
    monkeypatch.setitem(sys.modules, "jetspec.models.describe", module)
    assert json.loads(run("info", "model", "--json").stdout) == described["model"]
    result = run("info", "model", "--head", "head")
    assert result.exit_code == 0
    assert "tap layers: 1, 8\n" in result.stdout and result.stdout.endswith("fits: yes\n")
    problems.append("the head taps layer 40, the model has 30")
    result = run("info", "model", "--head", "head", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["problems"] == problems


# -- heads


@pytest.mark.parametrize("target", [None, "Qwen/Qwen3-8B", "other/Qwen3-8B-GGUF", "maker/unknown"])
def test_heads_are_listed_without_a_network(target: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on its line, with its files; the best first if a target is given."""
    monkeypatch.setattr("jetspec.models.hub.local_file", lambda name, file: None)
    rows = known_heads() if target is None else heads_of(target)
    words = ("heads",) if target is None else ("heads", target)
    told = json.loads(run(*words, "--json").stdout)["heads"]
    assert [row["name"] for row in told] == [head.name for head in rows]
    assert [row["name"] for row in told if row["on_this_machine"]] == [DEFAULT_MODEL] * (target is None)
    result = run(*words)
    assert result.exit_code == 0
    _, *lines = result.stdout.splitlines() or [""]
    assert [line.split("\t")[1] for line in lines] == [head.name for head in rows]
    sizes = {head.name: head.size_gb for head in rows if head.size_gb and head.name != DEFAULT_MODEL}
    assert all(line.endswith(f"{sizes[name]} GB") for line in lines if (name := line.split("\t")[1]) in sizes)
    assert (str(target) in result.stderr) == (not rows)


def test_table_of_heads_names_every_head_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=240, color_system=None)
    monkeypatch.setattr("jetspec.commands.heads.out", lambda: console)
    assert run("heads").exit_code == 0
    assert all(head.name in console.file.getvalue() for head in known_heads())  # type: ignore[attr-defined]


def test_head_auto_is_a_name(fake: type[FakeLLM]) -> None:
    run("generate", "Why?", "--head", "auto")
    run("generate", "Why?")
    assert [made["head"] for made in fake.made] == ["auto", None]


# -- for real


@pytest.mark.model
@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.7", "--top-p", "0.8", "--top-k", "20"]])
def test_default_model_decodes_alike_both_ways(sampling: list[str]) -> None:
    prompt = "Say it three times: one two three four five six seven."
    result = run("compare", prompt, "--max-tokens", "24", *sampling, "--json")
    assert result.exit_code == 0
    value = json.loads(result.stdout)
    [comparison] = value["results"]
    assert value["drafter"] == "head" and comparison["identical"]
    assert comparison["speculative"]["stats"]["rounds"] < comparison["plain"]["stats"]["rounds"]
