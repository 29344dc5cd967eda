"""Workers for tests where vLLM starts its own processes: plain ones on JetSpec's operations, and with an oracle."""

from __future__ import annotations

from typing import Any

from jetspec.tree import DraftTree
from jetspec_vllm.drafter import TreeDrafter
from jetspec_vllm.worker import TreeWorker
from tests.jetspec_vllm import cpu  # noqa: F401  its import puts the operations in place
from tests.jetspec_vllm.tiny import Oracle

TEXTS = "oracle"
"""Key of vLLM's additional config with the oracle's texts."""


class OracleWorker(TreeWorker):
    """Tree worker whose trees come from the oracle."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        oracle, own = Oracle(vllm_config.additional_config[TEXTS]), TreeDrafter.guess

        def guess(drafter: Any, *given: Any) -> DraftTree:
            own(drafter, *given)  # what the processes exchange for it goes on as usual
            return oracle.guess(drafter, *given)

        TreeDrafter.guess = guess  # type: ignore[method-assign, assignment]
        super().__init__(vllm_config, *args, **kwargs)
