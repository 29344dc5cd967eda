"""The command line over a fake LLM: what is printed where, exit statuses, and the pictures."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner, Result

import jetspec
from jetspec.commands.app import ModelOptions, SamplingOptions, app
from jetspec.commands.chat import Chat
from jetspec.commands.compare import compare
from jetspec.commands.screen import printable
from jetspec.commands.tree import BONUS, KEPT, round_text
from jetspec.commands.tree_html import DrawnRound, _place, page, write_page
from jetspec.config import BatchTree, TreeConfig
from jetspec.models.hub import DEFAULT_MODEL
from jetspec.types import RoundTrace, SamplingParams, Update
from tests.fake_llm import ANSWER, WORDS, FakeLLM
from tests.train.tiny_model import write_model

ROOT = Path(__file__).parent.parent
JSON_FIELDS = {"text", "token_ids", "finish_reason", "stats"}
STATS_FIELDS = {
    *("prompt_tokens", "cached_tokens", "completion_tokens", "rounds", "tokens_per_round", "accepted_lengths"),
    *("prefill_s", "decode_s", "tokens_per_s"),
}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """The LLM class that the commands load; a subclass, so that tests may change it."""
    kind = type("FreshFake", (FakeLLM,), {"asked": [], "trees": []})
    monkeypatch.setitem(sys.modules, "jetspec.engine.llm", SimpleNamespace(LLM=kind))
    return kind


def run(*args: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, list(args), input=stdin)


# -- start-up


@pytest.mark.parametrize("code", ["import jetspec", "import jetspec.commands.app"])
def test_importing_is_instant(code: str) -> None:
    """Nothing heavy is loaded before a command needs it."""
    check = f"import sys; {code}; print(*{{'torch', 'numpy', 'tokenizers', 'rich.live'}} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", check], text=True).split() == []


def test_loading_a_model_needs_no_algebra(tmp_path: Path) -> None:
    """torch brings sympy along, half a second of it, for what is asked of tensors without memory in an odd way."""
    code = f"import sys; from jetspec import LLM; LLM({str(write_model(tmp_path / 'tiny'))!r}, device='cpu')"
    assert (
        subprocess.check_output([sys.executable, "-c", f"{code}; print('sympy' in sys.modules)"], text=True)
        == "False\n"
    )


def test_version_and_help() -> None:
    assert run("--version").stdout == f"jetspec {version('jetspec')}\n"
    for command in ("generate", "compare", "chat", "tree", "info", "serve", "load"):
        assert command in run("--help").stdout
        assert "Examples:" in run(command, "--help").stdout
    for command in ("invent", "regenerate"):
        assert command in run("data", "--help").stdout
        assert "Examples:" in run("data", command, "--help").stdout


def test_sampling_defaults_are_the_librarys() -> None:
    assert SamplingOptions().params() == SamplingParams()
    asked = {f.name for f in fields(SamplingOptions)}
    assert asked == {f.name for f in fields(SamplingParams)} - {"ignore_eos", "logit_bias", "logprobs", "grammar"}


def test_default_model_is_the_librarys() -> None:
    assert ModelOptions().model == DEFAULT_MODEL


def test_public_names_resolve() -> None:
    assert [name for name in jetspec.__all__ if getattr(jetspec, name).__name__ != name] == []
    with pytest.raises(AttributeError):
        jetspec.nonsense  # noqa: B018


def test_readme_example_runs(fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jetspec, "LLM", fake, raising=False)
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(code, {})
    assert fake.asked[-1] == "Once upon a time"


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
    messages = [[{"role": "user", "content": text}] for text in ("argument", "piped")]
    assert fake.asked == [*messages, "continued"]


def test_empty_prompt_is_refused(fake: type[FakeLLM]) -> None:
    result = run("generate", stdin="  \n")
    assert (result.exit_code, result.stderr) == (2, "jetspec: error: the prompt is empty\n")


@pytest.mark.parametrize("command", ["generate", "compare", "tree"])
@pytest.mark.parametrize(
    ("prompt", "line"), [(" ", "the prompt is empty"), ("caf\udce9", "the prompt is not text in UTF-8")]
)
def test_what_is_no_prompt_is_refused_before_the_load(
    fake: type[FakeLLM], command: str, prompt: str, line: str
) -> None:
    result = run(command, prompt)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"jetspec: error: {line}\n")


def test_tree_options_change_only_what_they_name(fake: type[FakeLLM]) -> None:
    run("generate", "Why?")
    run("generate", "Why?", "--width", "3")
    run("generate", "Why?", "--shortlist", "0")
    run("generate", "Why?", "--shrink", "4:8,9:2:1")
    shrinking = TreeConfig(budget=16, batch_trees=(BatchTree(4, 8), BatchTree(9, 2, depth=1)))
    assert fake.trees == [TreeConfig(budget=16, width=3), TreeConfig(budget=16, shortlist=0), shrinking]


# -- errors


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--model", "missing"], "there is no model named 'missing'; see `jetspec info`"),
        (["--budget", "0"], "budget is 0; it must be between 1 and 1024"),
        (["--shrink", "8"], "shrink is '8'; write BATCH:BUDGET or BATCH:BUDGET:DEPTH, with commas between, or none"),
        (["--top-p", "0"], "top_p is 0.0; it must be above 0 and at most 1"),
        (["--stop", ""], "a stop string is empty"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(fake: type[FakeLLM], args: list[str], line: str) -> None:
    result = run("generate", "Why?", *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == f"jetspec: error: {line}"


@pytest.mark.parametrize(
    ("args", "start"),
    [
        (["generate", "Why?", "--budgit", "3"], "jetspec: error: No such option: --budgit"),
        (["generate", "Why?", "--budget", "few"], "jetspec: error: Invalid value for '--budget'"),
        (["generate", "Why?", "--drafter", "oracle"], "jetspec: error: Invalid value for '--drafter'"),
        (["frobnicate"], "jetspec: error: No such command 'frobnicate'"),
        (["--nope", "generate", "Why?"], "jetspec: error: No such option: --nope"),
        (["data", "--nope"], "jetspec: error: No such option: --nope"),
    ],
)
def test_words_that_are_not_understood_are_one_line(args: list[str], start: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith(start) and result.stderr.count("\n") == 1


def test_debug_shows_the_traceback(fake: type[FakeLLM]) -> None:
    result = run("--debug", "generate", "Why?", "--budget", "0")
    assert isinstance(result.exception, ValueError)


@pytest.mark.parametrize(
    ("failure", "status", "line"),
    [
        (OSError(28, "No space left on device"), 2, "jetspec: error: No space left on device"),
        (FileNotFoundError(2, "No such file", "x.gguf"), 2, "jetspec: error: No such file: x.gguf"),
        (MemoryError(), 2, "jetspec: error: out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), 2, "jetspec: error: CUDA out of memory"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_exit_statuses(fake: type[FakeLLM], failure: BaseException, status: int, line: str) -> None:
    fake.failure = failure
    result = run("generate", "Why?")
    assert result.exit_code == status
    assert line in result.stderr and "Traceback" not in result.stderr


def test_a_refused_prompt_leaves_stdout_empty(fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: FakeLLM, *args: Any, **kwargs: Any) -> Iterator[Update]:
        raise ValueError("the prompt is too long")
        yield

    monkeypatch.setattr(fake, "stream", refuse)
    result = run("generate", "Why?")
    assert (result.exit_code, result.stdout) == (2, "")


def run_process(args: str, **options: Any) -> subprocess.Popen[str]:
    """The real command in a process of its own, with the fake LLM."""
    code = f"""
        import sys, time
        from types import SimpleNamespace
        from tests.fake_llm import FakeLLM
        def slow(self, *args, **kwargs):
            for update in FakeLLM.stream(self, *args, **kwargs):
                yield update
                time.sleep(0.2)
        fake = type("Slow", (FakeLLM,), {{"stream": slow}})
        sys.modules["jetspec.engine.llm"] = SimpleNamespace(LLM=fake)
        sys.argv = ["jetspec", *{args.split()!r}]
        from jetspec.commands.app import main
        main()
    """
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.Popen(command, text=True, cwd=ROOT, env=buffered, stderr=subprocess.PIPE, **options)


def test_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        process = run_process("generate Why? --json", stdout=full)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert stderr.splitlines()[-1] == "jetspec: error: No space left on device"


@pytest.mark.parametrize("words", ["nope", "--nope"])
def test_an_error_that_cannot_be_told_still_has_its_status(words: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "jetspec", words], stderr=full, cwd=ROOT, timeout=60)
    assert done.returncode == 2


def test_what_is_said_aside_may_be_lost() -> None:
    """A full disk under a log ends no work."""
    code = "from jetspec.commands.screen import err; err().print('Serving'); print('went on')"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, cwd=ROOT, timeout=60)
    assert done.stdout == b"went on\n"


@pytest.mark.parametrize(("args", "stream", "status"), [("generate Why?", 1, 0), ("generate", 0, 2)])
def test_a_closed_stream_is_no_crash(args: str, stream: int, status: int) -> None:
    process = run_process(args, preexec_fn=lambda: os.close(stream))
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == status and "Traceback" not in stderr


@pytest.mark.parametrize("command", ["generate", "tree"])
def test_broken_pipe_is_quiet(command: str) -> None:
    process = run_process(f"{command} Why?", stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read().splitlines() == [f"Loading {DEFAULT_MODEL} ..."]


def test_interrupt_is_clean() -> None:
    process = run_process("generate Why?", stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stdout.endswith("\n") and "Traceback" not in stderr


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


@pytest.mark.parametrize(
    ("dtype", "args", "status"),
    [(torch.float32, [], 1), (torch.bfloat16, [], 0), (torch.float32, ["--temperature", "1"], 0)],
)
def test_compare_fails_where_a_difference_has_no_excuse(
    fake: type[FakeLLM], dtype: torch.dtype, args: list[str], status: int
) -> None:
    fake.drifts, fake.dtype = True, dtype
    result = run("compare", "Why?", *args)
    assert "identical: no, from token 3 on" in result.stdout
    assert result.exit_code == status


def test_compare_refuses_plain_against_plain(fake: type[FakeLLM]) -> None:
    assert run("compare", "Why?", "--drafter", "none").exit_code == 2


@pytest.mark.parametrize("width", [30, 100])
def test_compare_live(width: int) -> None:
    """Rows fit the terminal, those of panels with room for an echoed ^C; two panels a row where there is room."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, height=20, color_system=None)
    plain, speculative = FakeLLM(drafter="none"), FakeLLM()
    results = compare(
        lambda prompt: plain.stream(prompt, SamplingParams()),
        lambda prompt: speculative.stream(prompt, SamplingParams()),
        ["Why?", "How [not]?"],
        console,
    )
    assert [r.identical for r in results] == [True, True]
    screen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).replace("\r", "\n")
    assert max(map(len, screen.splitlines())) <= width
    assert max(len(line) for line in screen.splitlines() if line.startswith("│")) <= width - 2
    assert any(line.count("╭") == (2 if width == 100 else 1) for line in screen.splitlines())
    assert "identical: yes" in " ".join(screen.split()) and "How [not]?" in screen


# -- chat


def test_chat_keeps_the_conversation_until_reset(fake: type[FakeLLM]) -> None:
    result = run("chat", stdin="Why?\n/stats\nHow?\n/reset\n/nonsense\n/help\nWho?\n/exit\nnever\n")
    assert result.exit_code == 0
    assert [[message["content"] for message in asked] for asked in fake.asked] == [
        ["Why?"],
        ["Why?", ANSWER, "How?"],
        ["Who?"],
    ]
    assert result.stdout.count(ANSWER) == 3
    assert "9 tokens · 3 rounds" in result.stdout and "There is no command /nonsense" in result.stdout


def test_chat_history_and_interrupt() -> None:
    """Ctrl-C ends the answer after the current round; what was said stays, and the chat goes on."""

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
    chat.answer("And?")
    first = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "".join(WORDS[:6])}]
    assert llm.asked[1] == [*first, {"role": "user", "content": "And?"}]
    assert chat.messages[-1]["content"] == ANSWER
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_chat_survives_a_question_that_cannot_be_asked(fake: type[FakeLLM]) -> None:
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
    html = page("a <prompt>", [DrawnRound(trace, "<i>text</i>")] * 2, vocabulary.__getitem__)
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
    boxes = _place(trace.parents, labels, set(trace.path))
    for i, one in enumerate(boxes):
        for other in boxes[:i]:
            apart_x = one.x + one.width <= other.x or other.x + other.width <= one.x
            assert apart_x or abs(one.y - other.y) >= 20
    assert {boxes[node].y for node in trace.path} == {boxes[0].y}


def test_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "tree.html"
    file.write_text("before")
    trace = RoundTrace([0], [0], [0.0], [0], bonus=99)
    with pytest.raises(IndexError):
        write_page(file, "Why?", [DrawnRound(trace, "")], WORDS.__getitem__)
    assert [f.read_text() for f in tmp_path.iterdir()] == ["before"]
    write_page(file, "Why?", [DrawnRound(replace(trace, bonus=1), "")], WORDS.__getitem__)
    assert file.read_text().startswith("<!doctype html>") and len(list(tmp_path.iterdir())) == 1


def test_tree_draws_rounds_and_writes_the_page(fake: type[FakeLLM], tmp_path: Path) -> None:
    result = run("tree", "Why?", "--rounds", "2", "--html", str(tmp_path / "tree.html"))
    assert result.exit_code == 0
    assert "round 2: 4 nodes, 2 accepted + 1" in result.stdout and "round 3" not in result.stdout
    assert (tmp_path / "tree.html").read_text().count("<svg") == 2
    assert run("tree", "Why?", "--html", str(tmp_path / "no" / "tree.html")).exit_code == 2


@given(st.text())
def test_printable_keeps_text_and_drops_control_characters(text: str) -> None:
    clean = printable(text)
    assert all(c in "\n\t" or c.isprintable() or ord(c) > 0x9F for c in clean)
    assert [c for c in text if c in clean] == list(clean)


# -- info


def test_info(monkeypatch: pytest.MonkeyPatch) -> None:
    described = {"model": {"kind": "model", "layers": 30}, "head": {"kind": "head", "tap_layers": [1, 8], "edge": None}}
    problems: list[str] = []
    module = SimpleNamespace(describe=described.__getitem__, fits=lambda model, head: problems)
    monkeypatch.delitem(sys.modules, "jetspec.commands.info", raising=False)
    monkeypatch.setitem(sys.modules, "jetspec.models.describe", module)
    assert json.loads(run("info", "model", "--json").stdout) == described["model"]
    result = run("info", "model", "--head", "head")
    assert result.exit_code == 0
    assert "tap layers: 1, 8\n" in result.stdout and result.stdout.endswith("fits: yes\n")
    problems.append("the head taps layer 40, the model has 30")
    result = run("info", "model", "--head", "head", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["problems"] == problems


# -- for real


@pytest.mark.model
def test_default_model_decodes_alike_both_ways() -> None:
    result = run("compare", "Say it three times: one two three four five six seven.", "--max-tokens", "24", "--json")
    assert result.exit_code == 0
    value = json.loads(result.stdout)
    [comparison] = value["results"]
    assert value["drafter"] == "head" and comparison["identical"]
    assert comparison["speculative"]["stats"]["rounds"] < comparison["plain"]["stats"]["rounds"]
