"""Plain decoding against `transformers` with its KV cache, and a round of 16 nodes against a plain step.

All three are timed in turns in the same process, so that they share whatever else the machine does. Writes a record.

    python -m benchmarks.check_cpu_speed --out docs/results/cpu_speed.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from jetspec.config import EngineConfig, TreeConfig
from jetspec.engine.drafter import OnDevice, RoundState
from jetspec.engine.engine import Engine
from jetspec.models.hf_target import load_hf
from jetspec.models.hub import DEFAULT_MODEL, resolve
from jetspec.models.weights import load_target
from jetspec.record import current_commit, write_record
from jetspec.tree import DraftTree
from jetspec.types import SamplingParams

PROMPT = "Explain in a few sentences how a bicycle stays upright while it is moving."


class FullTree(OnDevice):
    """Always a tree of exactly so many nodes, so that a round costs what its budget says."""

    tap_layers: tuple[int, ...] = ()

    def __init__(self, budget: int) -> None:
        self.lookahead, self.tree = budget, TreeConfig(budget)

    def draft(self, state: RoundState) -> None:
        return None

    def build(self, state: RoundState, drafted: None) -> DraftTree:
        node = torch.arange(self.lookahead)
        token = torch.where(node == 0, state.anchor_B[:, None], node)
        parent = ((node - 1).clamp(min=0) // 2).expand_as(token)
        return DraftTree.from_parents(token, parent, torch.full_like(state.anchor_B, self.lookahead), max_depth=8)

    def observe(self, *_: object) -> None:
        raise AssertionError("nothing is tapped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name or GGUF file")
    parser.add_argument("--tokens", type=int, default=12, help="tokens per timing")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True, help="where the record goes")
    args = parser.parse_args()

    commit = current_commit()  # now, because the checkout may move on while this runs
    target = load_target(args.model, torch.float32, torch.device("cpu"))
    prompt = target.tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    other = load_hf(resolve(args.model), torch.float32)

    def engine(budget: int) -> Engine:
        config = EngineConfig(max_batch=1, max_len=1024, prefix_cache=False)
        made = Engine(target.decoder, drafter="none", tree=TreeConfig(budget=budget), config=config)
        if budget > 1:
            made.drafter = made.round.drafter = FullTree(budget)
            made.scheduler.lookahead = budget
        return made

    plain, tree = Decoding(engine(1), prompt), Decoding(engine(args.budget), prompt)
    timings: dict[str, list[float]] = {"plain_ms": [], "transformers_ms": [], "round_ms": []}
    for repeat in range(args.repeats + 2):
        step = {
            "plain_ms": plain.ms(args.tokens),
            "transformers_ms": transformers_ms(other, prompt, args.tokens),
            "round_ms": tree.ms(args.tokens),
        }
        if repeat >= 2:  # the first ones touch memory and warm up
            for name, value in step.items():
                timings[name].append(value)
    results = {
        "model": target.name,
        "budget": args.budget,
        **{name: statistics.median(values) for name, values in timings.items()},
        "transformers_over_plain": median_ratio(timings["transformers_ms"], timings["plain_ms"]),
        "round_over_plain": median_ratio(timings["round_ms"], timings["plain_ms"]),
        "all": timings,
    }
    write_record(args.out, results, commit)
    print(json.dumps({name: value for name, value in results.items() if name != "all"}))


def median_ratio(above: list[float], below: list[float]) -> float:
    """Of neighbouring timings, so that a machine that is slower for a while is slower for both."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


class Decoding:
    """A request that is started anew from the prompt whenever it is timed."""

    def __init__(self, engine: Engine, prompt: list[int]) -> None:
        self.engine, self.prompt = engine, prompt

    def ms(self, rounds: int) -> float:
        """Milliseconds per round, prefill and the first round left out."""
        sampling = SamplingParams(max_tokens=self.engine.max_len, ignore_eos=True)
        request_id = self.engine.add(self.prompt, sampling)
        self.engine.step()
        began = time.perf_counter()
        for _ in range(rounds):
            self.engine.step()
        seconds = time.perf_counter() - began
        self.engine.cancel(request_id)
        return seconds / rounds * 1e3


class Clock(BaseStreamer):
    """Notes when `generate` hands over a token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@torch.inference_mode()
def transformers_ms(model: PreTrainedModel, prompt: list[int], tokens: int) -> float:
    """Milliseconds per token of `generate`, prefill and the first token left out."""
    ids, clock = torch.tensor([prompt]), Clock()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens + 1,
        min_new_tokens=tokens + 1,
        do_sample=False,
        pad_token_id=0,
        streamer=clock,
    )
    _, first, *_, last = clock.times  # the streamer is handed the prompt before the first token
    return (last - first) / tokens * 1e3


if __name__ == "__main__":
    main()
