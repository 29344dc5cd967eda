"""Two tensor-parallel processes produce the text of one."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs an environment with vLLM; make test-vllm makes one")

from pathlib import Path
from typing import Any

from jetspec_vllm import OPTIONS
from tests.jetspec_vllm.cpu import counted, generate, start
from tests.jetspec_vllm.tiny import random_prompts, write_head, write_target

pytestmark = pytest.mark.vllm

LENGTH = 24
PROMPTS = random_prompts((20, 3, 60, 11))
REPOSITORY = Path(__file__).parents[2]


def test_tensor_parallel_text_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    target, head = str(write_target(tmp_path / "target")), str(write_head(tmp_path / "head"))
    texts = generate(start(target), PROMPTS, LENGTH)
    known = [prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)]
    two: dict[str, Any] = {"tensor_parallel_size": 2, "disable_log_stats": False}
    trees = start(
        target,
        head,
        worker_cls="tests.jetspec_vllm.workers.OracleWorker",
        additional_config={OPTIONS: {}, "oracle": known},
        **two,
    )
    assert generate(trees, PROMPTS, LENGTH) == texts
    assert counted(trees)["num_drafts"] < 0.7 * LENGTH * len(PROMPTS)
