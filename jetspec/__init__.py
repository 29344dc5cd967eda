"""Tree-speculative decoding: the target model's own text, several tokens per forward pass.

    from jetspec import LLM
    print(LLM().generate("Why is the sky blue?")[0].text)

The public names load on first use, so importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetspec.config import BatchTree, EngineConfig, TreeConfig
    from jetspec.engine.llm import LLM
    from jetspec.models.draft_head import DraftHead
    from jetspec.models.head_format import load_head
    from jetspec.types import Completion, Grammar, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BatchTree",
    "Completion",
    "DraftHead",
    "EngineConfig",
    "Grammar",
    "SamplingParams",
    "TreeConfig",
    "load_head",
]

_HOME = {
    "LLM": "jetspec.engine.llm",
    "Completion": "jetspec.types",
    "DraftHead": "jetspec.models.draft_head",
    "EngineConfig": "jetspec.config",
    "Grammar": "jetspec.types",
    "SamplingParams": "jetspec.types",
    "BatchTree": "jetspec.config",
    "TreeConfig": "jetspec.config",
    "load_head": "jetspec.models.head_format",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
        return value
    from jetspec.aliases import RENAMED, current

    if name in RENAMED["python"]:
        return __getattr__(current(name, "python"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
