"""The command group: start-up without torch, help, errors, exit statuses, and commands of an earlier release."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer

import jetspec
from jetspec.commands import app as module
from jetspec.commands.app import GONE, app
from jetspec.models.hub import DEFAULT_MODEL
from jetspec.types import Update
from tests.commands.cli import all_commands, run
from tests.fake_llm import FakeLLM
from tests.train.tiny_model import write_model

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


# -- start-up


WRONG = [
    (["heads", "./nothere"], "./nothere"),
    (["generate", "Why?", "--budgit", "3"], "--budgit"),
    (["generate", "Why?", "--budget", "0"], "budget"),
    (["generate", "Why?", "--set", "sampling.top_p=2"], "top_p"),
    (["generate", "Why?", "--model", "./nothere"], "./nothere"),
    (["serve", "--port", "99999"], "port"),
    (["train", "nothere"], "nothere"),
    (["train", "debug", "--set", "steps=0"], "steps"),
    (["data", "regenerate", "--data", "/nothere", "--out", "x"], "/nothere"),
    (["eval-head", "--data-dir", "/nothere"], "/nothere"),
    (["profile", "--shape", "nothere"], "nothere"),
    (["info", "./nothere"], "./nothere"),
    (["bench", "--data", "/nothere"], "/nothere"),
]


def test_words_are_checked_before_torch_is_imported() -> None:
    """In one process, one line of stderr and one with status and heavy modules per command."""
    right = [["--help"], ["train"], ["heads"]]
    code = f"""
        import sys
        from jetspec.commands.app import main
        for words in {[*(words for words, _ in WRONG), *right]!r}:
            sys.argv = ["jetspec", *words]
            try:
                main()
            except SystemExit as end:
                print(end.code, *{{"torch", "numpy", "tokenizers", "rich.live"}} & set(sys.modules), file=sys.stderr)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    lines = iter(subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stderr.splitlines())
    for (words, named), error in zip(WRONG, lines, strict=False):
        assert named in error and next(lines) == "2", words
    *others, heads = lines
    assert others == ["0", "0"] and heads.startswith("0") and "torch" not in heads


def test_loading_a_model_does_not_import_sympy(tmp_path: Path) -> None:
    code = f"import sys; from jetspec import LLM; LLM({str(write_model(tmp_path / 'tiny'))!r}, device='cpu')"
    command = [sys.executable, "-c", f"{code}; print('sympy' in sys.modules)"]
    assert subprocess.check_output(command, text=True) == "False\n"


def test_public_names_resolve() -> None:
    assert all(callable(getattr(jetspec, name)) for name in jetspec.__all__)
    with pytest.raises(AttributeError):
        jetspec.nonsense  # noqa: B018


def test_readme_example_runs(fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jetspec, "LLM", fake, raising=False)
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(code[0], {})
    assert fake.asked


# -- help


@pytest.mark.parametrize("name", [name for name, _ in all_commands(typer.main.get_command(app)) if name])
def test_every_command_has_help(name: str) -> None:
    words = name.split()
    if words[0] in ("vllm", *GONE):
        return
    for asked in ([*words, "--help"], ["help", *words]):
        result = run(*asked)
        assert result.exit_code == 0 and " ".join(words) in result.stdout
    assert words[-1] in run(*words[:-1], "--help").stdout


def test_version_names_the_package_and_what_it_computes_with() -> None:
    assert run("--version").stdout == f"jetspec {version('jetspec')}\n"
    lines = run("version").stdout.splitlines()
    assert lines[0] == f"jetspec {version('jetspec')}" and f"torch {version('torch')}" in lines


@pytest.mark.parametrize("place", [0, 1])
def test_verbose_prints_settings_on_stderr(fake: type[FakeLLM], place: int) -> None:
    words = ["generate", "Why?", "--budget", "8"]
    words.insert(place, "--verbose")
    result = run(*words)
    assert "tree.budget = 8" in result.stderr and "tree.budget" not in result.stdout


# -- errors


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["generate", "Why?", "--budget", "few"], "--budget"),
        (["generate", "Why?", "--drafter", "oracle"], "--drafter"),
        (["generate", "Why?", "--stop", ""], "stop"),
        (["generate", " "], "prompt"),
        (["compare", "caf\udce9"], "UTF-8"),
        (["generat"], "'generate'"),
        (["help", "generat"], "'generate'"),
        (["--nope", "generate", "Why?"], "--nope"),
        (["data", "--nope"], "--nope"),
    ],
)
def test_usage_errors_are_one_line(args: list[str], named: str) -> None:
    result = run(*args)
    assert result.exit_code == 2 and result.stdout == ""
    assert named in result.stderr and result.stderr.startswith("jetspec: error: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["--debug", "generate", "Why?"], ["generate", "Why?", "--debug"]])
def test_debug_shows_the_traceback(fake: type[FakeLLM], words: list[str]) -> None:
    assert isinstance(run(*words, "--budget", "0").exception, ValueError)


@pytest.mark.parametrize(
    ("failure", "status", "named"),
    [
        (OSError(28, "No space left on device"), 2, "No space left on device"),
        (FileNotFoundError(2, "No such file", "x.gguf"), 2, "x.gguf"),
        (MemoryError(), 2, "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), 2, "CUDA out of memory"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_exit_statuses(fake: type[FakeLLM], failure: BaseException, status: int, named: str) -> None:
    fake.failure = failure
    result = run("generate", "Why?")
    assert result.exit_code == status
    assert named in result.stderr and "Traceback" not in result.stderr


def test_a_prompt_that_the_engine_refuses_leaves_stdout_empty(
    fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: FakeLLM, *args: Any, **kwargs: Any) -> Iterator[Update]:
        raise ValueError("the prompt is too long")
        yield

    monkeypatch.setattr(fake, "stream", refuse)
    result = run("generate", "Why?")
    assert (result.exit_code, result.stdout) == (2, "")


# -- commands that left, and commands of plugins


@pytest.mark.parametrize(
    ("args", "now"),
    [
        (["report", "runs/a", "--out", "x"], "report"),
        (["grade", "runs/a"], "grade"),
        (["load", "--url", "http://x"], "load"),
        (["bench", "recipe.yaml"], "run"),
        (["bench", "--methods", "plain"], "run"),
        (["bench", "--quick"], "run"),
    ],
)
def test_commands_that_left_name_their_new_place(args: list[str], now: str) -> None:
    result = run(*args)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert f"python -m benchmarks {now}" in result.stderr


def test_a_renamed_command_works_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetspec.aliases._warned", set())
    result = run("data", "invent", "--help")
    assert result.exit_code == 0 and "--count" in result.stdout
    assert result.stderr.count("\n") == 1 and "synthesize" in result.stderr


def test_a_missing_plugin_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "entry_points", lambda **_: [])
    result = run("vllm", "serve", "model", "--head", "x")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "pip install -e ./jetspec_vllm" in result.stderr and "pip install jetspec-vllm" in result.stderr
    assert "vllm" in run("--help").stdout


def test_a_plugin_gets_its_words_and_its_errors_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    commands, seen = typer.Typer(), []

    @commands.callback()
    def group() -> None: ...

    @commands.command(context_settings={"ignore_unknown_options": True})
    def serve(words: list[str]) -> None:
        seen.extend(words)
        raise ValueError("no port is free")

    found = SimpleNamespace(load=lambda: commands)
    monkeypatch.setattr(module, "entry_points", lambda **asked: [found] if asked["name"] == "vllm" else [])
    result = run("vllm", "serve", "owner/model", "--port", "9000")
    assert seen == ["owner/model", "--port", "9000"]
    assert result.exit_code == 2 and "no port is free" in result.stderr and result.stderr.count("\n") == 1
    assert run("vllm", "--help").exit_code == 0


# -- processes: full disks, closed streams, interrupts


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


SERVING = "from jetspec.commands.screen import err; err().print('Serving'); print('went on')"


@pytest.mark.parametrize(
    ("words", "status", "stdout"),
    [(["-m", "jetspec", "nope"], 2, b""), (["-m", "jetspec", "--nope"], 2, b""), (["-c", SERVING], 0, b"went on\n")],
)
def test_a_full_disk_under_stderr_changes_nothing_else(words: list[str], status: int, stdout: bytes) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, stderr=full, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout) == (status, stdout)


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
