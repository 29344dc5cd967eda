"""Measures the rows of `jetspec/ops/select.py`: whole rounds with every kernel, and without one row at a time.

Rounds are captured as CUDA graphs and replayed in turns, so that clock changes of the GPU affect all of them alike. The
first measurement is repeated as the last: their difference is the noise. Rows that a workload does not use are skipped.
A record of the same commit, hardware and versions is continued.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.options import RecordFile, examples
from jetspec.config import TreeConfig
from jetspec.models.decoder import Decoder
from jetspec.ops import select
from jetspec.profile.rounds import Decoding, StandingRound, Workload
from jetspec.profile.shapes import open_head, open_target
from jetspec.profile.timing import as_graph, time_in_turns_ms
from jetspec.record import make_record, write_record
from jetspec.train.config import HeadShape

SAME = ("commit", "hardware", "versions")
EMPTY = 0.01
"""Share of a round below which a captured graph holds none of it."""
EPILOG = examples("kernel-choices --out docs/results/kernel_choices.json --seconds 900")


@dataclass(frozen=True)
class Case:
    """A workload of one shape. One node is a plain decode step."""

    shape: str
    batch: int
    nodes: int
    context: int = 256
    depth: int | None = None
    calls: int = 50
    """Rounds to time of each variant."""


def _cases(shape: str, calls: int, *loads: tuple[int, int, int]) -> list[Case]:
    """Cases of (batch, nodes, context). Large batches draft 8 tokens deep."""
    return [
        Case(shape, batch, nodes, context, 8 if batch == 32 and nodes > 1 else None, calls)
        for batch, nodes, context in loads
    ]


CASES = [
    *_cases("smollm2-135m", 100, (1, 64, 256), (32, 16, 256), (1, 1, 256), (32, 1, 256)),
    *_cases("qwen3-8b", 50, (1, 64, 256), (1, 128, 256), (1, 1, 256), (32, 16, 256), (32, 1, 256)),
    *_cases("qwen3-8b", 50, (1, 128, 8192), (1, 1, 8192)),
    *_cases("qwen3-30b-a3b", 40, (1, 64, 256), (32, 16, 256), (1, 1, 256), (32, 1, 256)),
    *_cases("smollm2-135m", 100, (1, 32, 256), (1, 128, 256), (1, 64, 4096), (8, 32, 256)),
]
"""In order of importance, of one shape together."""


def measure(case: Case, target: Decoder) -> dict[str, Any]:
    """Time of a round, and by which share it is slower without each row it uses. None: it cannot be captured."""
    tree = TreeConfig(budget=case.nodes, depth=case.depth)
    head = open_head(target, None, HeadShape(edge_rank=128)) if case.nodes > 1 else None
    still = StandingRound(Decoding(target, head, tree, Workload(case.context, case.batch, case.calls)).engine)
    with select.watch() as used:
        graphs = {"": as_graph(still.whole, still.device)}
    for name in sorted(used):
        with select.without(name):
            try:
                graphs[name] = as_graph(still.whole, still.device)
            except Exception as error:  # some references read results on the host
                print(f"  without {name}: {error!r:.120}", flush=True)
    turns = time_in_turns_ms([*graphs.values(), as_graph(still.whole, still.device)], still.device, case.calls)
    base, *others, repeated = (statistics.median(times) for times in zip(*turns, strict=True))
    times = dict(zip(list(graphs)[1:], others, strict=True))
    without = {name: times[name] / base - 1 if times.get(name, 0.0) > EMPTY * base else None for name in sorted(used)}
    return {**asdict(case), "round_ms": base, "noise": repeated / base - 1, "without": without}


def missing_cases(results: Sequence[dict[str, Any]]) -> list[Case]:
    done = {tuple(result[name] for name in ("shape", "batch", "nodes", "context")) for result in results}
    return [case for case in CASES if (case.shape, case.batch, case.nodes, case.context) not in done]


def read_results(path: Path) -> list[dict[str, Any]]:
    """Results of an earlier run that this one may continue."""
    if not path.exists():
        return []
    record, now = json.loads(path.read_text()), make_record({})
    results: list[dict[str, Any]] = record["cases"] if all(record[key] == now[key] for key in SAME) else []
    return results


def summary(results: Sequence[dict[str, Any]]) -> str:
    """The largest gain of every row, and the workload."""
    shares: dict[str, list[tuple[float, str]]] = {name: [] for result in results for name in result["without"]}
    for result in results:
        label = f"{result['shape']}, batch {result['batch']}, {result['nodes']} nodes, context {result['context']}"
        for name, share in result["without"].items():
            shares[name] += [] if share is None else [(share, label)]
    told = {name: "{:+7.1%}  {}".format(*max(found)) if found else "not measurable" for name, found in shares.items()}
    return "\n".join(f"{name:40} {told[name]}" for name in sorted(told))


@torch.inference_mode()
def main(
    out: RecordFile,
    seconds: Annotated[float, typer.Option(help="Start no workload after this time.")] = 3600,
) -> None:
    """Measure the rows of `jetspec/ops/select.py`.

    Stop it at any time: the same command resumes with the workloads that the record lacks.
    """
    began, results, device = time.monotonic(), read_results(out), torch.device("cuda")
    shape, target = "", None
    for case in missing_cases(results):
        if time.monotonic() - began > seconds:
            break
        if target is None or case.shape != shape:
            target = None  # frees its memory before the next one is loaded
            torch.cuda.empty_cache()
            shape, target = case.shape, open_target(case.shape, "random", torch.bfloat16, device)
        results.append(measure(case, target))
        write_record(out, {"cases": results})
        torch.cuda.empty_cache()
        print(f"{time.monotonic() - began:5.0f} s  {case}: {results[-1]['round_ms']:.3f} ms", flush=True)
    print(summary(results))
