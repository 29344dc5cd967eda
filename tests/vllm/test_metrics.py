"""What vLLM reports about drafts is what happened; and without a wish for trees, vLLM is as it was."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs an environment with vLLM; make test-vllm makes one")

import subprocess
import sys
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, generate_latest

from jetspec.integrations.vllm.drafter import TreeDrafter
from jetspec.integrations.vllm.runner import TreeRunner
from tests.vllm.cpu import counted, generate, start
from tests.vllm.tiny import Oracle, random_prompts, write_head, write_target

pytestmark = pytest.mark.vllm

PROMPTS = random_prompts((20, 3, 60, 11))


def test_metrics_count_trees_and_accepted_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = str(write_target(tmp_path / "target"))
    texts = generate(start(target), PROMPTS, 20)
    oracle = Oracle([prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)])
    rounds: list[int] = []
    report = TreeRunner.report

    def count(runner: Any, batch: Any, token_BD1: Any, length_B: Any, logprobs: Any) -> Any:
        drafted = batch.num_draft_tokens_per_req
        rounds.extend(length for length, nodes in zip(length_B.tolist(), drafted.tolist(), strict=True) if nodes)
        return report(runner, batch, token_BD1, length_B, logprobs)

    monkeypatch.setattr(TreeDrafter, "guess", lambda drafter, *given: oracle.guess(drafter, *given))
    monkeypatch.setattr(TreeRunner, "report", count)
    trees = start(target, str(write_head(tmp_path / "head")), disable_log_stats=False)
    assert generate(trees, PROMPTS, 20) == texts
    found = counted(trees)
    assert found["num_drafts"] == len(rounds) > 0
    assert found["num_accepted_tokens"] == sum(rounds) > len(rounds)
    lines = generate_latest(REGISTRY).decode().splitlines()
    for name, value in (("num_drafts", len(rounds)), ("num_accepted_tokens", sum(rounds))):
        shown = [line for line in lines if line.startswith(f"vllm:spec_decode_{name}_total")]
        assert [float(line.split()[-1]) for line in shown] == [value]
    depths = [line for line in lines if line.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")]
    by_depth = [float(line.split()[-1]) for line in depths]
    assert by_depth[: max(rounds)] == [sum(length > depth for length in rounds) for depth in range(max(rounds))]


UNUSED = """
import sys
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

def picture():
    names = [name for name in AttentionBackendEnum.__members__ if name != "CUSTOM"]
    backends = {name: AttentionBackendEnum[name].get_path() for name in names if AttentionBackendEnum[name].value}
    kinds = (GPUModelRunner, Sampler, DFlashSpeculator, CPUWorker, Worker)
    return backends, [{name: id(value) for name, value in vars(kind).items()} for kind in kinds]

before = picture()
from jetspec.integrations.vllm import register
register()
register()
assert picture() == before
heavy = [name for name in sys.modules if name.startswith("jetspec.") and name.split(".")[1] != "integrations"]
assert not heavy and "jetspec.integrations.vllm.worker" not in sys.modules, heavy
print("unchanged")
"""


def test_installed_and_not_asked_for_the_plugin_changes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip().endswith("unchanged"), done.stderr[-2000:]
