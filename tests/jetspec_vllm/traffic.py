"""Random traffic with cancellations on a vLLM engine: nothing leaks and every text is right.

python -m tests.jetspec_vllm.traffic --minutes 10
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tests.jetspec_vllm.conftest  # noqa: F401  what vLLM reads when it is imported
from tests.jetspec_vllm.tiny import Oracle, random_prompts, write_head, write_target

LONGEST, MOST_WAITING = 40, 6
LENGTHS = (20, 3, 60, 11, 37, 5, 90, 14)


@dataclass
class Traffic:
    """Client that sends prompts at random times with random lengths and cancels some."""

    engine: Any
    prompts: list[list[int]]
    texts: list[list[int]]
    """Plain texts of the longest length."""
    source: random.Random = field(default_factory=lambda: random.Random(0))
    asked: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Open requests: prompt index and number of tokens."""
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("asked", "answered", "cancelled", "wrong"), 0)
    )

    def step(self) -> None:
        if len(self.asked) < MOST_WAITING and self.source.random() < 0.6:
            self.ask()
        if self.asked and self.source.random() < 0.08:
            self.cancel(self.source.choice(sorted(self.asked)))
        if self.engine.has_unfinished_requests():
            self.read(self.engine.step())

    def ask(self) -> None:
        from vllm import SamplingParams

        name, which = str(self.counts["asked"]), self.source.randrange(len(self.prompts))
        length = self.source.randint(1, LONGEST)
        # Some decode plainly, beside the trees of the others.
        plainly = {"presence_penalty": 1e-9} if self.source.random() < 0.1 else {}
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, **plainly)
        self.engine.add_request(name, {"prompt_token_ids": self.prompts[which]}, params)
        self.asked[name] = which, length
        self.counts["asked"] += 1

    def cancel(self, name: str) -> None:
        self.engine.abort_request([name])
        del self.asked[name]
        self.counts["cancelled"] += 1

    def read(self, outputs: list[Any]) -> None:
        for output in outputs:
            if output.finished and output.request_id in self.asked:
                which, length = self.asked.pop(output.request_id)
                self.counts["answered"] += 1
                self.counts["wrong"] += list(output.outputs[0].token_ids) != self.texts[which][:length]

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.read(self.engine.step())


def run(seconds: float, folder: Path) -> dict[str, Any]:
    """Run traffic for some seconds over few pages, so that requests are preempted; returns leaks."""
    from jetspec_vllm.drafter import TreeDrafter
    from tests.jetspec_vllm.cpu import generate, start

    target, prompts = str(write_target(folder / "target")), random_prompts(LENGTHS)
    texts = generate(start(target, max_model_len=192), prompts, LONGEST)
    oracle = Oracle([prompt + text for prompt, text in zip(prompts, texts, strict=True)])
    TreeDrafter.guess = lambda drafter, *given: oracle.guess(drafter, *given)  # type: ignore[method-assign]
    few: dict[str, Any] = {"max_model_len": 192, "block_size": 16, "num_gpu_blocks_override": 16}
    llm = start(target, str(write_head(folder / "head")), disable_log_stats=False, **few)
    core = llm.llm_engine.engine_core.engine_core
    pool = core.scheduler.kv_cache_manager.block_pool
    free, traffic = pool.get_num_free_blocks(), Traffic(llm.llm_engine, prompts, texts)
    ends, kept = time.monotonic() + seconds, []
    while time.monotonic() < ends:
        for _ in range(50):
            traffic.step()
        gc.collect()
        kept.append(resident())
    traffic.finish()
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return {
        **traffic.counts,
        "left_requests": len(core.scheduler.requests),
        "left_pages": free - pool.get_num_free_blocks(),
        "put_off": metrics["vllm:num_preemptions"],
        "trees": metrics["vllm:spec_decode_num_drafts"],
        "accepted": metrics["vllm:spec_decode_num_accepted_tokens"],
        "memory_mb": kept[:: max(len(kept) // 8, 1)],
    }


def resident() -> float:
    """Resident memory of this process in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(60 * args.minutes, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
