"""`jetspec export`: a head in the format of another engine, or a model as a Hugging Face folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jetspec.commands.options import examples
from jetspec.commands.screen import note, out, working
from jetspec.models.hub import check_name, head_path

if TYPE_CHECKING:
    from jetspec.models.export import Engine

Format = Literal["hf", "vllm", "sglang", "speculators"]

app = typer.Typer(add_completion=False)


@app.command(
    "export",
    epilog=examples(
        "jetspec export heads/mine --format vllm --out mine-vllm",
        "jetspec export heads/mine --format speculators --target Qwen/Qwen3-8B --out mine-speculators",
        "jetspec export smollm2-135m-instruct --format hf --out smollm2",
    ),
)
def export_command(
    name: Annotated[
        str,
        typer.Argument(help="A head or a model. For other engines a model stands for its own head.", metavar="NAME"),
    ],
    folder: Annotated[Path, typer.Option("--out", help="Folder to write.", metavar="FOLDER")],
    format: Annotated[
        Format,
        typer.Option(
            help="hf: the published layout of a head, or a model for any engine. Else: a chain drafter for it."
        ),
    ] = "hf",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Number format to write.")
    ] = "bfloat16",
    target: Annotated[str | None, typer.Option(help="The head's target, for speculators.", metavar="NAME")] = None,
) -> None:
    """Write a head or a model for other engines.

    A head's edge term is kept where the engine has one of that form: without a gate as DSpark, with a gate alone as
    DFlash2, in both cases of heads that are not causal. The result is read back by the rules of its engine, which might
    fill a missing setting with a wrong default. With --format hf, a head in a pickle (pytorch_model.bin), such as those
    of EAGLE-3's authors, becomes a folder of safetensors; nothing in it is run.
    """
    check_name(head_path(name))
    import torch

    from jetspec.models.describe import describe
    from jetspec.models.export import PICKLES, chain_kind, convert_pickles, export_head, save_target
    from jetspec.models.head_folder import kind_of
    from jetspec.models.head_format import load_head
    from jetspec.models.hub import resolve, shipped_head
    from jetspec.models.weights import load_target

    engine: Engine | None = None if format == "hf" else format
    own_head = shipped_head(name) if engine else None
    number_format: torch.dtype = getattr(torch, dtype)
    source = resolve(head_path(name)) if engine is None else None
    if source is not None and source.is_dir() and kind_of(source) and not any(source.glob("*.safetensors")):
        with working(f"Writing {folder}"):
            convert_pickles(resolve(head_path(name), PICKLES), folder, number_format)
        out().print(str(folder), markup=False)
        return
    if own_head is None and describe(name)["kind"] == "target":
        if engine is not None:
            raise ValueError(f"{name} is a model, not a head: {engine} loads it as it is written with --format hf")
        with working(f"Writing {folder}"):
            save_target(load_target(name, torch.float32), folder, number_format)
        out().print(str(folder), markup=False)
        return
    head = load_head(str(own_head or name), dtype=torch.float32)
    kind = chain_kind(head.head_config, engine) if engine else "dflash"
    if engine and head.edge is not None and kind == "dflash":
        note("the edge term is left out: no other engine has one of this form")
    with working(f"Writing {folder}"):
        export_head(head, folder, engine, number_format, target)
    out().print(str(folder), markup=False)
    if engine:
        method = "dspark" if kind == "dspark" else "dflash"
        note(_start(engine, folder, method, head.head_config.depth, target or "TARGET"))


def _start(engine: Engine, folder: Path, method: str, depth: int, target: str) -> str:
    """The command that drafts chains with the exported head."""
    if engine == "speculators":
        return shlex.join(["vllm", "serve", str(folder)])
    if engine == "sglang":
        drafts = ["--speculative-algorithm", method.upper(), "--speculative-draft-model-path", str(folder)]
        return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", target, *drafts])
    drafting = {"method": method, "model": str(folder), "num_speculative_tokens": depth}
    return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(drafting)])
