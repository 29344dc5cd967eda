"""The command that starts vLLM, and what is refused. None of it needs vLLM."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from jetspec.cli import app
from jetspec.config import TreeConfig
from jetspec.integrations.vllm.command import serve_command
from jetspec.integrations.vllm.compat import check_hook, check_version
from jetspec.integrations.vllm.options import refusals, tree_config
from jetspec.models.draft_head import make_head
from jetspec.models.head_format import save_head
from tests.engine.tiny import tiny_decoder, tiny_head


@pytest.fixture
def head(tmp_path: Path) -> str:
    save_head(make_head(tiny_head(tiny_decoder()).head_config), tmp_path / "head")
    return str(tmp_path / "head")


def test_the_command_says_what_the_worker_reads(head: str) -> None:
    tree = TreeConfig(budget=32, width=4, depth=5)
    command = serve_command("owner/model", head, tree, ["--port", "9000"])
    said = dict(zip(command[3::2], command[4::2], strict=True))
    speculative = json.loads(said["--speculative-config"])
    assert tree_config(json.loads(said["--additional-config"]), speculative["num_speculative_tokens"]) == tree
    assert speculative["model"] == head and said["--port"] == "9000"


def test_a_tree_smaller_than_a_block_is_refused(head: str) -> None:
    with pytest.raises(ValueError, match=r"a budget of 4 .* at least 6"):
        serve_command("owner/model", head, TreeConfig(budget=4))


@pytest.mark.parametrize(("given", "said"), [({"jetspec": {"widht": 4}}, "widht"), ({"jetspec": 4}, "not a table")])
def test_unknown_options_are_named(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tree_config(given, 15)


def test_other_versions_and_other_hooks_are_refused() -> None:
    check_version("0.32.1")
    check_version("0.26.0")
    with pytest.raises(ValueError, match=r"0\.26\.0, 0\.32\.x, this is 0\.33\.0"):
        check_version("0.33.0")

    def hook(first: int, second: int, third: int = 0) -> None: ...

    check_hook(hook, "first", "second")
    with pytest.raises(ValueError, match="takes"):
        check_hook(hook, "second", "first")


def test_a_worker_without_drafts_is_refused() -> None:
    nothing = SimpleNamespace(parallel_config=None, model_config=None, speculative_config=None)
    assert "dflash" in refusals(nothing)[0]


def test_the_terminal_prints_the_command(head: str) -> None:
    result = CliRunner().invoke(app, ["vllm", "serve", "owner/model", "--head", head, "--dry-run", "--port", "9000"])
    assert result.exit_code == 0
    assert shlex.split(result.stdout) == serve_command("owner/model", head, TreeConfig(), ["--port", "9000"])
