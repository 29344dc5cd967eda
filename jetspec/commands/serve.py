"""`jetspec serve`: options of the server, and its first lines on stderr."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jetspec.commands.options import DEFAULT_TREES, Given, ModelConfig, check_model, examples, load_llm, options
from jetspec.commands.screen import err
from jetspec.config import EngineConfig, TreeConfig
from jetspec.serve.config import ServeConfig

if TYPE_CHECKING:
    from jetspec.engine.llm import LLM

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Serving:
    """Settings of the server."""

    NOTE = DEFAULT_TREES
    model: ModelConfig = field(default_factory=ModelConfig)
    tree: TreeConfig = field(default_factory=TreeConfig)
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(max_batch=32))
    server: ServeConfig = field(default_factory=ServeConfig)


@app.command(
    "serve",
    epilog=examples(
        "jetspec serve",
        "jetspec serve --head heads/mine --port 9000 --max-batch 64",
        "jetspec serve --host 0.0.0.0 --api-keys keys.txt",
        'curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\',
        """  -d '{"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hi"}]}'""",
    ),
)
@options(
    *("--model=model.name", "model.head", "model.device", "tree.budget", "engine.max_batch"),
    *("engine.max_len", "server.host", "server.port", "--name=server.model_name"),
)
def serve(
    settings: Serving,
    given: Given,
    api_keys: Annotated[Path | None, typer.Option(metavar="FILE", help="File of API keys, one per line.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Jinja file in place of the model's own template.")
    ] = None,
    warm_up: Annotated[bool, typer.Option(help="On a GPU, capture graphs before the first request.")] = True,
) -> None:
    """Answer OpenAI clients over HTTP.

    The log goes to stderr, one JSON object per line. Ctrl-C or SIGTERM: running answers are finished first.
    """
    from jetspec.files import missing_package, read_text
    from jetspec.serve.config import read_keys

    config = replace(settings.server, keys=read_keys(api_keys)) if api_keys else settings.server
    template = read_text(chat_template) if chat_template else None
    check_model(settings.model)
    try:
        from jetspec.serve import run
        from jetspec.serve.app import Server
    except ImportError as error:
        raise missing_package(str(error.name), "serve", "the server") from None
    with run.open_socket(config) as listener:  # before the model is loaded: a port in use is an error at once
        llm = load_llm(settings.model, settings.engine, given.get("tree"))
        if template is not None:
            llm.tokenizer.chat_template = template
        server = Server(llm, config)
        if warm_up:
            _warm_up(llm)
        run.listen(listener, config)
        address = f"http://{config.shown_host}:{listener.getsockname()[1]}/v1"
        err().print(f"Serving {config.model_name or llm.model_name} at {address}", markup=False)
        if not (config.keys or config.is_local):
            err().print("Anyone who reaches this port may use the model; --api-keys closes it.", style="yellow")
        run.serve(server, listener)


def _warm_up(llm: LLM) -> None:
    from jetspec.engine.warm_up import warm_up_batches
    from jetspec.progress import progress_bar

    planned = warm_up_batches(llm.engine)
    for batch in progress_bar(planned, desc="warming up", unit="graph", leave=False, disable=not planned):
        batch.run(llm.engine)
