"""`jetspec vllm serve`: builds the `vllm serve` command line for draft trees. Does not import vLLM."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from jetspec.commands.options import examples
from jetspec.config import TreeConfig
from jetspec.models.head_format import read_config, require_fit
from jetspec.models.hub import DEFAULT_MODEL, head_path, local_file, resolve
from jetspec.models.tensor_files import read_json
from jetspec_vllm import OPTIONS, WORKER
from jetspec_vllm.options import TargetShape, head_refusals, refuse, tree_config

CAPTURED_TREES = 16
"""Largest batch of trees in a captured pass; larger batches run eagerly."""
DRAFTS = "JetSpec drafts here; use --head and --budget"
OURS = {
    "--worker-cls": "JetSpec sets the worker",
    **dict.fromkeys(("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens"), DRAFTS),
}
"""Options of vLLM that this command sets itself, each with the reason it is refused."""
ADDITIONAL = "--additional-config"
FLAG = re.compile(r"-O.+|--(no|enable|disable|enforce|trust|async)-.*")
"""Options of vLLM without a value, or with the value in the same word."""
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")
CHANGES_TARGET = {"--revision", "--hf-overrides", "--hf-config-path"}


def serve_command(words: Sequence[str], head: str, tree: TreeConfig) -> list[str]:
    """The `vllm serve` command for a draft head. `words` are the target and options of vLLM, in any order."""
    for word in words:
        if (name := option_name(word)) in OURS:
            raise ValueError(f"{name} cannot be given here: {OURS[name]}")
    model, more = take_model(words)
    additional, more = take_value(more, ADDITIONAL)
    settings = with_shape(additional, tree)
    folder = resolve(head_path(head))
    config = read_config(folder)
    refuse(head_refusals(config, tree_config(settings, tree.budget - 1)))
    if CHANGES_TARGET.isdisjoint(map(option_name, more)) and (target := local_shape(model)):
        require_fit(head, config, target)
    speculative = {"method": "dflash", "model": str(folder), "num_speculative_tokens": tree.budget - 1}
    return [
        *("vllm", "serve", model),
        *("--worker-cls", WORKER),
        *("--speculative-config", json.dumps(speculative)),
        *(ADDITIONAL, json.dumps(settings)),
        *_graphs(tree, more),
        *more,
    ]


def option_name(word: str) -> str | None:
    """Name of an option as vLLM spells it, without its value or dotted keys. None: the word is a value."""
    found = re.match(r"--?[A-Za-z][^=.]*", word)
    return found[0].replace("_", "-") if found else None


def take_model(words: Sequence[str]) -> tuple[str, list[str]]:
    """The target (first word that is neither an option nor the value of one), and the other words."""
    may_be_value = False
    for i, word in enumerate(words):
        if name := option_name(word):
            may_be_value = "=" not in word and not FLAG.fullmatch(name)
        elif may_be_value:
            may_be_value = False
        else:
            if (word == DEFAULT_MODEL or word.endswith(".gguf")) and not Path(word).is_dir():
                export = f"jetspec export {word} --out {Path(word).stem}"
                raise ValueError(f"vLLM cannot load {word}: run `{export}`, then give the folder as MODEL")
            return word, [*words[:i], *words[i + 1 :]]
    raise ValueError("no MODEL was found; write it first: `jetspec vllm serve MODEL --head HEAD ...`")


def take_value(words: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Last value given to an option, and the words without that option."""
    value, rest, left = None, [], list(words)
    while left:
        word = left.pop(0)
        if option_name(word) != name:
            rest.append(word)
        elif "=" in word and "." not in word.split("=")[0]:
            value = word.split("=", 1)[1]
        elif "." not in word and left:
            value = left.pop(0)
        else:
            raise ValueError(f"{word} cannot be given here: write {name} '{{..}}', in JSON")
    return value, rest


def with_shape(additional: str | None, tree: TreeConfig) -> dict[str, Any]:
    """The user's additional configuration with the shape of the tree added."""
    try:
        settings = json.loads(additional or "{}")
    except ValueError as error:
        raise ValueError(f"{ADDITIONAL} is not JSON: {error}") from None
    if not isinstance(settings, Mapping) or not isinstance(given := settings.get(OPTIONS, {}), Mapping):
        raise ValueError(f"{ADDITIONAL} and {OPTIONS} in it must be JSON objects")
    shape = {"width": tree.width} | ({"depth": tree.depth} if tree.depth is not None else {})
    for name, value in shape.items():
        if given.get(name, value) != value:
            raise ValueError(f"{name} is {given[name]} in {ADDITIONAL}, but --{name} is {value}; give it once")
    return {**settings, OPTIONS: {**given, **shape}}


def local_shape(model: str) -> TargetShape | None:
    """Shape of a target whose config.json is in the local cache; None if it is not."""
    if (path := local_file(model, "config.json")) is None:
        return None
    raw = read_json(path)
    text = raw.get("text_config") or raw
    sizes = [size for key in SIZES if isinstance(size := text.get(key), int)]
    return TargetShape(*sizes) if len(sizes) == len(SIZES) else None


def _graphs(tree: TreeConfig, more: Sequence[str]) -> list[str]:
    """Options that raise the largest captured pass: by default vLLM captures up to 512 rows, which is few trees."""
    told = ("--max-cudagraph", "--cudagraph", "--compilation-config", "-cc", "-O", "--optimization-level")
    if any((option_name(word) or "").startswith(told) for word in more):
        return []
    return ["--max-cudagraph-capture-size", str(max(512, CAPTURED_TREES * tree.budget))]


def run_command(command: list[str]) -> NoReturn:
    """Replace this process by vLLM, preferring the one installed beside the plugin."""
    if beside := shutil.which(command[0], path=str(Path(sys.executable).parent)):
        os.execv(beside, command)
    if find_spec("vllm"):
        os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.cli.main", *command[1:]])
    if shutil.which(command[0]) is None:
        raise ValueError("vLLM is not installed: pip install jetspec-vllm (in a clone: pip install -e ./jetspec_vllm)")
    os.execvp(command[0], command)


commands = typer.Typer(no_args_is_help=True, add_completion=False, help="Draft trees inside vLLM.")
"""`jetspec vllm`: the entry point of the group `jetspec.commands`."""


@commands.callback()
def vllm() -> None:
    """Draft trees inside vLLM."""


@commands.command(
    "serve",
    # vLLM's options of one dash have an h in them, such as -cc.cudagraph_mode.
    context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
    epilog=examples(
        "jetspec vllm serve Qwen/Qwen3-0.6B --head heads/mine --dry-run",
        "jetspec vllm serve Qwen/Qwen3-0.6B --head heads/mine --budget 32 --max-model-len 4096 --port 9000",
    ),
)
def serve(
    words: Annotated[list[str], typer.Argument(help="Target, as `vllm serve` takes it.", metavar="MODEL")],
    head: Annotated[str, typer.Option(help="Draft head: a name or folder, or a model for its own.", metavar="NAME")],
    budget: Annotated[int, typer.Option(help="Most nodes in a tree, the anchor included.")] = TreeConfig.budget,
    width: Annotated[int, typer.Option(help="Most children of one node; 1 is a chain.")] = TreeConfig.width,
    depth: Annotated[int | None, typer.Option(help="Longest path below the anchor.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the command.")] = False,
) -> None:
    """Start vLLM's server with draft trees.

    The command is printed, then run; options that are not listed here are vLLM's own.
    """
    command = serve_command(words, head, TreeConfig(budget=budget, width=width, depth=depth))
    print(shlex.join(command), flush=True)
    if not dry_run:
        run_command(command)
