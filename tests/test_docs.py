"""Pages agree with the program: links resolve, commands, options and settings exist, every record is listed."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.__main__ import app as benchmarks
from jetspec.commands.app import PLUGINS, app
from jetspec_vllm.command import commands as vllm

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(RESULTS.glob("*.md")),
]
PROGRAMS = {"jetspec": app, "python -m benchmarks": benchmarks}


def code(page: Path) -> list[str]:
    """Lines of code that call a program, joined where they are continued, without comments and redirections."""
    blocks = re.findall(r"```\w*\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [re.split(r"\s+#\s|\s{3,}|\s>\s", line)[0] for line in lines if line.startswith(tuple(PROGRAMS))]


@cache
def settings(program: str, *words: str) -> str:
    return CliRunner().invoke(PROGRAMS[program], [*words, "--help-all"], env={"COLUMNS": "200"}).output


def check_command(line: str) -> None:
    program = next(name for name in PROGRAMS if line.startswith(name))
    words, path = shlex.split(line.removeprefix(program)), list[str]()
    command: Any = typer.main.get_command(PROGRAMS[program])
    while hasattr(command, "get_command") and words and (found := command.get_command(None, words[0])):
        path.append(words.pop(0))
        command = typer.main.get_command(vllm) if path == [*PLUGINS] else found
    assert not hasattr(command, "get_command") or command.invoke_without_command, f"{line}: no such command"
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    for word, value in zip(words, [*words[1:], ""], strict=False):
        assert not word.startswith("-") or word.split("=")[0] in known, f"{line}: no option {word}"
        if word == "--set":
            name = value.partition("=")[0]
            assert re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", settings(program, *path)), f"{line}: no {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_options_and_settings_exist(page: Path) -> None:
    for line in code(page):
        check_command(line)


@pytest.mark.parametrize("line", ["jetspec trane x.yaml", "jetspec generate --quik", "jetspec train x --set stepz=1"])
def test_a_wrong_line_is_noticed(line: str) -> None:
    with pytest.raises(AssertionError, match=r"trane|quik|stepz"):
        check_command(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


def test_every_page_and_every_record_is_listed() -> None:
    readme, index = ((folder / name).read_text() for folder, name in ((ROOT, "README.md"), (RESULTS, "index.md")))
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if f"](docs/{page.name})" not in readme]
    assert not [record.name for record in RESULTS.glob("*.json") if f"({record.name})" not in index]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
