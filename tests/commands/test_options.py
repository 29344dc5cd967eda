"""Options: made from the config dataclasses, few of them visible, all of them settable, old ones accepted."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest
import typer

from jetspec.aliases import RENAMED
from jetspec.commands.app import app
from jetspec.commands.options import Decoding, all_settings, read_options
from jetspec.config import BatchTree, EngineConfig, TreeConfig
from jetspec.profile.config import SHAPES
from jetspec.types import SamplingParams
from tests.commands.cli import all_commands, run
from tests.fake_llm import FakeLLM

MAX_VISIBLE = 150
OF_PLUGINS = 5
"""Visible options of `jetspec vllm serve`."""


def visible_options(command: Any) -> list[str]:
    context = typer.Context(command)
    return [
        param.opts[0]
        for param in command.get_params(context)
        if param.param_type_name == "option" and not param.hidden and "--help" not in param.opts
    ]


def test_few_options_are_visible() -> None:
    counts = {words: len(visible_options(command)) for words, command in all_commands(typer.main.get_command(app))}
    assert sum(counts.values()) + OF_PLUGINS <= MAX_VISIBLE, counts


COMMANDS_WITH_SETTINGS = ("generate", "serve", "train", "eval-head", "data regenerate", "data synthesize", "profile op")


@pytest.mark.parametrize("words", COMMANDS_WITH_SETTINGS)
def test_help_all_describes_every_setting(words: str) -> None:
    result = run(*words.split(), "--help-all")
    assert result.exit_code == 0
    _, _, listing = result.stdout.partition("All settings")
    entries = listing.split("\n\n")[1:]
    assert len(entries) > 5
    for entry in entries:
        name, *help = entry.strip().splitlines()
        assert help, f"{name} has no docstring"


def test_every_setting_of_decoding_is_listed_once() -> None:
    paths = [setting.path for setting in all_settings(Decoding())]
    assert len(paths) == len(set(paths))
    for section, config in (("tree", TreeConfig), ("engine", EngineConfig), ("sampling", SamplingParams)):
        names = {field.name for field in fields(config)} - {"grammar"}
        assert {f"{section}.{name}" for name in names} <= set(paths)
    assert "sampling.grammar.compiled" not in paths


def test_named_shapes_are_those_of_the_profiler() -> None:
    from jetspec.profile import shapes

    assert set(SHAPES) == set(shapes.SHAPES)


# -- values


def test_tree_options_change_only_the_named_fields(fake: type[FakeLLM]) -> None:
    run("generate", "Why?")
    run("generate", "Why?", "--width", "3")
    run("generate", "Why?", "--set", "tree.shortlist=0")
    run("generate", "Why?", "--set", "tree.batch_trees=4:8,9:2:1")
    batch_trees = TreeConfig(budget=16, batch_trees=(BatchTree(4, 8), BatchTree(9, 2, depth=1)))
    assert fake.trees == [TreeConfig(budget=16, width=3), TreeConfig(budget=16, shortlist=0), batch_trees]


def test_flags_and_set_reach_their_sections(fake: type[FakeLLM]) -> None:
    run("generate", "Why?", "--temperature", "0.5", "--stop", "a", "--stop", "b", "--set", "engine.max_len=64")
    run("generate", "Why?", "--set", "sampling.logit_bias={5: -1}", "--set", "model.dtype=float32")
    assert fake.sampled[0] == SamplingParams(temperature=0.5, stop=("a", "b"))
    assert fake.sampled[1] == SamplingParams(logit_bias={5: -1.0})
    assert [made["engine"] for made in fake.made] == [EngineConfig(max_len=64), EngineConfig()]
    assert [made["dtype"] for made in fake.made] == ["auto", "float32"]


def test_hidden_flags_work(fake: type[FakeLLM]) -> None:
    run("generate", "Why?", "--presence-penalty", "0.5", "--frequency-penalty", "1")
    assert fake.sampled == [SamplingParams(presence_penalty=0.5, frequency_penalty=1.0)]
    assert "--presence-penalty" not in (shown := run("generate", "--help-all").stdout)
    assert "sampling.presence_penalty" in shown


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--set", "tree.budgit=3"], "tree.budget"),
        (["--set", "tree.budget=few"], "tree.budget"),
        (["--set", "tree=3"], "tree"),
        (["--set", "sampling=3"], "sampling"),
        (["--set", "nothing.at=all"], "nothing"),
        (["--set", "tree.budget"], "tree.budget"),
        (["--set", "tree.budget=0"], "budget"),
        (["--set", "sampling.grammar={kind: regex, source: a, compiled: 1}"], "compiled"),
        (["--budget", "8", "--set", "tree.budget=9"], "tree.budget"),
    ],
)
def test_wrong_settings_are_one_line(fake: type[FakeLLM], words: list[str], named: str) -> None:
    result = run("generate", "Why?", *words)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and named in result.stderr
    assert not fake.made


def test_keys_of_a_server_are_read_from_a_file_only() -> None:
    for override in ("server.keys=[0123456789abcdef]", "server={keys: [0123456789abcdef]}"):
        result = run("serve", "--set", override)
        assert result.exit_code == 2 and "server.keys" in result.stderr


def test_given_holds_what_the_command_line_names() -> None:
    settings, given = read_options(Decoding(), {"tree": {"width": 4}}, ["tree.depth=2", "sampling.stop=[x]"])
    assert given == {"model": {}, "tree": {"width": 4, "depth": 2}, "engine": {}, "sampling": {"stop": ("x",)}}
    assert settings == replace(Decoding(), tree=TreeConfig(width=4, depth=2), sampling=SamplingParams(stop=("x",)))


# -- options of an earlier release


def test_every_old_flag_names_a_setting() -> None:
    commands = [words.split() for words, command in all_commands(typer.main.get_command(app)) if takes_all(command)]
    known = "".join(run(*words, "--help-all").stdout for words in commands)
    for section in (section for section in RENAMED if section.split(" ")[0] == "flag"):
        for path in RENAMED[section].values():
            assert re.search(rf"^  {re.escape(path.removeprefix('--set '))}[= ]", known, re.MULTILINE), path


def takes_all(command: Any) -> bool:
    return any(param.name == "help_all" for param in command.params)


@pytest.mark.parametrize("flag", ["--depth", "--shortlist", "--likely", "--heat", "--shrink"])
def test_old_flags_work_with_one_warning(fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    monkeypatch.setattr("jetspec.aliases._warned", set())
    path = RENAMED["flag"][flag].removeprefix("--set tree.")
    value = {"--heat": "0.5", "--shrink": "4:8"}.get(flag, "9")
    old = run("generate", "Why?", flag, value)
    run("generate", "Why?", "--set", f"tree.{path}={value}")
    assert old.exit_code == 0 and fake.trees[0] == fake.trees[1]
    warnings = [line for line in old.stderr.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1 and flag in warnings[0] and path in warnings[0]


def test_old_flags_of_one_command_do_not_reach_another() -> None:
    assert run("serve", "--max-tokens", "0").exit_code == 2  # the longest answer of a server, at least 1
    assert run("generate", "Why?", "--max-queue", "3").exit_code == 2
