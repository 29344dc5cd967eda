"""vLLM's draft metrics count trees correctly, and the installed plugin does not change vLLM without trees."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs an environment with vLLM; make test-vllm makes one")

import subprocess
import sys
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, generate_latest

from jetspec_vllm.drafter import TreeDrafter
from jetspec_vllm.runner import TreeRunner
from tests.jetspec_vllm.cpu import counted, generate, start
from tests.jetspec_vllm.tiny import Oracle, random_prompts, write_head, write_target

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
from types import SimpleNamespace
import vllm
from vllm import SamplingParams
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

def answer(call, *args):
    try:
        return call(*args)
    except Exception as error:
        return type(error).__name__, str(error)

def checks():
    configs = [None, SimpleNamespace(), SimpleNamespace(target_parallel_config=SimpleNamespace(worker_cls="auto"))]
    asked = [SamplingParams(min_p=0.1), SamplingParams(logit_bias={3: 1.0}), SamplingParams()]
    return [answer(params._validate_spec_decode, config) for params in asked for config in configs]

def picture(*left_out):
    kinds = (GPUModelRunner, Sampler, DFlashSpeculator, CPUWorker, Worker, SamplingParams)
    members = [{name: id(value) for name, value in vars(kind).items() if name not in left_out} for kind in kinds]
    return {name: answer(backend.get_path) for name, backend in AttentionBackendEnum.__members__.items()}, members

if sys.argv[1] == "other backend":
    register_backend(AttentionBackendEnum.CUSTOM, "other.plugin.Backend")
if sys.argv[1] == "other version":
    vllm.__version__ = "0.33.0"
if sys.argv[1] == "missing hook":
    del SamplingParams._validate_spec_decode
left_out = ["_validate_spec_decode"] if sys.argv[1] in ("as it is", "other backend") else []
before, checked = picture(*left_out), checks() if left_out else None
from jetspec_vllm import register
register()
register()
assert picture(*left_out) == before
assert not left_out or checks() == checked
heavy = [name for name in sys.modules if name.startswith("jetspec.") and name.split(".")[1] != "integrations"]
assert not heavy and "jetspec_vllm.worker" not in sys.modules, heavy
print("unchanged")
"""


@pytest.mark.parametrize("where", ["as it is", "other backend", "other version", "missing hook"])
def test_unused_plugin_changes_nothing(where: str) -> None:
    program, root = [sys.executable, "-c", UNUSED, where], Path(__file__).parents[2]
    done = subprocess.run(program, capture_output=True, text=True, cwd=root)
    assert done.stdout.strip().endswith("unchanged"), done.stderr[-2000:]


ASKED = """
import sys
import vllm
vllm.__version__ = "0.33.0"
class Elsewhere:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("vllm.v1.worker"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Elsewhere())
import jetspec_vllm.worker
"""


def test_unsupported_version_is_refused_in_one_line() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, cwd=root)
    assert "support vLLM 0.26.0, 0.32.x, this is 0.33.0" in done.stderr.strip().splitlines()[-1]
