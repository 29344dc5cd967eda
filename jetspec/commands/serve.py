"""`jetspec serve`: what is said before the server takes over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tqdm import tqdm

from jetspec.commands.screen import err
from jetspec.serve.config import ServeConfig

if TYPE_CHECKING:
    from jetspec.engine.llm import LLM


def serve_model(load: Callable[[], LLM], config: ServeConfig, template: str | None, warm_up: bool = True) -> None:
    """Take the port, then load: a port that is taken is said at once. `template` replaces the model's own."""
    try:
        from jetspec.serve.run import listen, open_socket, serve
    except ImportError as error:
        raise ValueError(f"the server needs the package {error.name}: pip install 'jetspec[serve]'") from None
    with open_socket(config) as listener:
        llm = load()
        if template is not None:
            llm.tokenizer.chat_template = template
        if warm_up:
            _warm_up(llm)
        listen(listener, config)
        address = f"http://{config.shown_host}:{listener.getsockname()[1]}/v1"
        err().print(f"Serving {config.model_name or llm.model_name} at {address}", markup=False)
        if not (config.keys or config.is_local):
            err().print("Anyone who reaches this port may use the model; --api-keys closes it.", style="yellow")
        serve(llm, config, listener)


def _warm_up(llm: LLM) -> None:
    from jetspec.engine.warm_up import warm_up_batches

    planned = warm_up_batches(llm.engine)
    for batch in tqdm(planned, desc="warming up", unit="graph", leave=False, disable=not planned):
        batch.run(llm.engine)
