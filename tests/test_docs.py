"""What the pages say of the program is so: links lead somewhere, commands and options exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from jetspec.commands.app import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> list[str]:
    """Lines of code that call the program, joined where they are continued, without what a shell leaves out."""
    blocks = re.findall(r"```\w*\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [re.split(r"\s+#\s|\s{3,}|\s>\s", line)[0] for line in lines if line.startswith("jetspec ")]


def check_command(line: str) -> None:
    command: Any = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    while words and words[0] in getattr(command, "commands", ()):
        command = command.commands[words.pop(0)]
    assert not hasattr(command, "commands") or command.invoke_without_command, f"{line}: no such command"
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    for word in words:
        assert not word.startswith("-") or word.split("=")[0] in known, f"{line}: no option {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_options_exist(page: Path) -> None:
    for line in commands(page):
        check_command(line)


def test_a_command_that_does_not_exist_is_noticed() -> None:
    assert len(commands(ROOT / "README.md")) > 5
    for wrong in ("jetspec trane x.yaml", "jetspec bench --quik"):
        with pytest.raises(AssertionError, match=r"no (such command|option)"):
            check_command(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)|src=\"([^\"]+)\"", page.read_text(encoding="utf-8"))
    for link in (markdown or html for markdown, html in links):
        assert "://" in link or (page.parent / link).exists(), link


def test_every_record_and_every_page_is_named_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in (*(ROOT / "docs" / "results").glob("*.json"), *(ROOT / "docs").glob("*.md")):
        assert f"]({path.relative_to(ROOT)})" in text, path.name
