"""`cpu-speed`: plain decoding against `transformers` with its KV cache, and a round of 16 nodes against a plain step.

All three are timed in turn in one process, so that other load on the machine slows all of them.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Annotated

import torch
import typer

from benchmarks.baselines import token_times
from benchmarks.options import DEFAULT, Model, RecordFile, examples
from jetspec.config import EngineConfig, TreeConfig
from jetspec.engine.drafter import OnDevice, RoundState
from jetspec.engine.engine import Engine
from jetspec.models.hf_target import load_hf
from jetspec.models.hub import resolve
from jetspec.models.weights import load_target
from jetspec.record import current_commit, write_record
from jetspec.tree import DraftTree
from jetspec.types import SamplingParams

PROMPT = "Explain in a few sentences how a bicycle stays upright while it is moving."
WARM_UP = 2
EPILOG = examples("cpu-speed --out docs/results/cpu_speed.json")


class FullTree(OnDevice):
    """Drafter of a full binary tree, so that a round costs as much as its budget allows."""

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


def cpu_speed(
    out: RecordFile,
    model: Model = DEFAULT,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per timing.")] = 12,
    repeats: Annotated[int, typer.Option(min=1, help="Timings of each.")] = 30,
    budget: Annotated[int, typer.Option(min=2, help="Nodes of a tree.")] = 16,
) -> None:
    """Time plain decoding, `transformers`, and a round of a tree on a CPU, in turn."""
    commit = current_commit()  # now, because the checkout may change while this runs
    target = load_target(model, torch.float32, torch.device("cpu"))
    prompt = target.tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    other = load_hf(resolve(model), torch.float32)

    def engine(nodes: int) -> Engine:
        config = EngineConfig(max_batch=1, max_len=1024, prefix_cache=False)
        made = Engine(target.decoder, drafter="none", tree=TreeConfig(budget=nodes), config=config)
        if nodes > 1:
            made.drafter = made.round.drafter = FullTree(nodes)
            made.scheduler.lookahead = nodes
        return made

    plain, tree = engine(1), engine(budget)
    timings: dict[str, list[float]] = {"plain_ms": [], "transformers_ms": [], "round_ms": []}
    for _ in range(repeats + WARM_UP):
        times = token_times(other, prompt, tokens + 1)
        timings["plain_ms"].append(round_ms(plain, prompt, tokens))
        timings["transformers_ms"].append((times[-1] - times[0]) / tokens * 1e3)
        timings["round_ms"].append(round_ms(tree, prompt, tokens))
    timings = {name: values[WARM_UP:] for name, values in timings.items()}
    results = {
        "model": target.name,
        "budget": budget,
        **{name: statistics.median(values) for name, values in timings.items()},
        "transformers_over_plain": median_ratio(timings["transformers_ms"], timings["plain_ms"]),
        "round_over_plain": median_ratio(timings["round_ms"], timings["plain_ms"]),
    }
    write_record(out, {**results, "all": timings}, commit)
    print(json.dumps(results))


def median_ratio(above: list[float], below: list[float]) -> float:
    """Median ratio of neighbouring timings, which other load slows alike."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def round_ms(engine: Engine, prompt: list[int], rounds: int) -> float:
    """Milliseconds per round of a new request, without prefill and the first round."""
    request_id = engine.add(prompt, SamplingParams(max_tokens=engine.max_len, ignore_eos=True))
    engine.step()
    began = time.perf_counter()
    for _ in range(rounds):
        engine.step()
    seconds = time.perf_counter() - began
    engine.cancel(request_id)
    return seconds / rounds * 1e3
