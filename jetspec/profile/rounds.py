"""Times of a round, its stages and a plain step, beside their floors, for one batch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from jetspec import ops
from jetspec.config import MAX_BATCH, EngineConfig, TreeConfig
from jetspec.engine.drafter import RoundState
from jetspec.engine.engine import CPU_CACHE_GB, GPU_CACHE_FRAC, Engine
from jetspec.engine.kv_cache import page_bytes
from jetspec.engine.round import Round, RoundResult
from jetspec.engine.runner import Runner
from jetspec.models.decoder import Decoder, DecoderConfig
from jetspec.models.draft_head import DraftHead
from jetspec.ops.transfer import upload
from jetspec.profile.floor import Floor, count_experts, plain_floor, read_gb_per_s, round_floor
from jetspec.profile.timing import Moment, as_graph, time_in_turns_ms, time_ms
from jetspec.settings import at_least
from jetspec.tree import accept
from jetspec.types import SamplingParams

STAGES = ("draft", "build", "verify", "accept", "commit")
PREFILL_CHUNK = 65_536
SPARE_ROUNDS = 8
"""Rounds that the first requests may run during the prefill of the last."""


@dataclass(frozen=True)
class Workload:
    """A batch of requests with `context` random tokens each, and the number of rounds to time."""

    context: int
    batch: int = 1
    rounds: int = 200
    max_len: int | None = None
    """Longest sequence of a request, which decides the choice of kernels. None: the engine's default."""
    temperature: float = 0.0
    """0: greedy."""

    def __post_init__(self) -> None:
        for name in ("context", "batch", "rounds"):
            at_least(1, name, getattr(self, name))
        SamplingParams(temperature=self.temperature)


@dataclass(frozen=True)
class Profile:
    """Times of a round in milliseconds. A ratio is a time divided by its floor."""

    budget: int
    context: int
    batch: int
    max_len: int
    """Longest sequence of a request."""
    temperature: float
    round_ms: float
    stages_ms: dict[str, float]
    """Time of each stage alone. The sum is slightly above the round, which has smaller gaps between stages."""
    plain_ms: float
    floor_round_ms: float
    floor_plain_ms: float
    ratio_round_range: tuple[float, float]
    """Smallest and largest ratio of a group of rounds to the adjacent group of its floor."""
    ratio_plain_range: tuple[float, float]
    bytes_round: int
    """Bytes of weights that the floor of the round reads."""
    bytes_plain: int
    experts_round: float | None
    """Mean number of experts per sparse layer that a verify pass visits."""
    experts_plain: float | None
    step_ms: float
    """Time per round in the engine's loop, host work included."""
    idle_frac: float
    """Fraction of the loop between the end of a round and the start of the next, by the device's clock."""
    tokens_per_round: float
    read_gb_per_s: float
    """Bandwidth of reading memory alone."""

    @property
    def read_round_ms(self) -> float:
        """Time to read the weights of the round alone."""
        return self.bytes_round / self.read_gb_per_s / 1e6

    @property
    def ratio_round(self) -> float:
        return self.round_ms / self.floor_round_ms

    @property
    def ratio_plain(self) -> float:
        return self.plain_ms / self.floor_plain_ms

    def to_dict(self) -> dict[str, Any]:
        derived = ("ratio_round", "ratio_plain", "read_round_ms")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def check(config: DecoderConfig, tree: TreeConfig, work: Workload) -> None:
    """Refuses an invalid workload before anything is loaded."""
    if tree.budget < 2:
        raise ValueError("a budget of 1 is plain decoding, which is timed in any case; give at least 2")
    if work.batch > MAX_BATCH:
        raise ValueError(f"batch is {work.batch}; it must be at most {MAX_BATCH}")
    if work.context >= config.max_len:
        raise ValueError(f"context is {work.context}, and the model's holds {config.max_len} tokens; lower it")
    if work.max_len is not None and not work.context < work.max_len <= config.max_len:
        raise ValueError(
            f"max_len is {work.max_len}; it must be above the context of {work.context} and at most the model's, "
            f"{config.max_len}"
        )


@torch.inference_mode()
def profile(target: Decoder, head: DraftHead, tree: TreeConfig, work: Workload) -> Profile:
    """Measures plain steps, then rounds, so that memory holds one engine at a time."""
    check(target.config, tree, work)
    alone = StandingRound(Decoding(target, None, TreeConfig(budget=1), work).engine)
    experts = count_experts(target, alone.verify_once)
    plain = alone.times_beside("plain", plain_floor(target, work.batch, experts), experts, work.rounds)
    del alone
    decoding = Decoding(target, head, tree, work)
    still = StandingRound(decoding.engine)
    experts = count_experts(target, still.verify_once)
    stages_ms = still.stages_ms(work.rounds)
    floor = round_floor(target, head, work.batch, tree.budget, experts)
    return Profile(
        budget=tree.budget,
        context=work.context,
        batch=work.batch,
        max_len=decoding.engine.max_len,
        temperature=work.temperature,
        stages_ms=stages_ms,
        **still.times_beside("round", floor, experts, work.rounds),
        **plain,
        **decoding.run(work.rounds),
        read_gb_per_s=read_gb_per_s(still.device, work.rounds),
    )


class Decoding:
    """An engine with a prefilled batch of requests without end tokens."""

    def __init__(self, target: Decoder, head: DraftHead | None, tree: TreeConfig, work: Workload) -> None:
        depth = head.head_config.depth if head else 0
        max_tokens = (work.rounds + SPARE_ROUNDS) * (depth + 1)
        config = EngineConfig(
            max_batch=work.batch,
            max_len=work.max_len,
            cache_gb=cache_gb(target, head, tree, work, max_tokens),
            prefill_chunk=min(work.batch * work.context, PREFILL_CHUNK),
            prefix_cache=False,
        )
        self.device = target.embedding.device
        self.engine = Engine(target, head, drafter="head" if head else "none", tree=tree, config=config)
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(target.config.vocab_size, (work.batch, work.context), generator=generator)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=work.temperature, ignore_eos=True)
        for seed, tokens in enumerate(prompts.tolist()):
            self.engine.add(tokens, replace(self.engine.clip(sampling), seed=seed))
        while len(self.engine.decode_batch.requests) < work.batch:
            self.engine.step()
            if len(self.engine.requests) < work.batch:
                raise ValueError(
                    f"{work.batch} requests of {work.context} tokens do not fit into memory and the model's context "
                    f"of {target.config.max_len}; lower the batch or the context"
                )

    def run(self, rounds: int) -> dict[str, Any]:
        """Fields of a profile that the engine's loop measures, in `rounds` rounds or until a context is full."""
        engine, before, watched = self.engine, self.engine.runner, WatchedRound(self.engine.round, rounds)
        self.prepared = engine.runner = self._prepare(watched)  # graphs of a pool are destroyed together
        watched.reset()
        tokens, count, requests = list[int](), 0, len(engine.requests)
        began = Moment(self.device)
        while count < rounds and len(engine.requests) == requests:
            tokens += [len(update.token_ids) for update in engine.step()]
            count += 1
        whole_ms = began.ms_until(Moment(self.device))
        engine.runner = before
        return {
            "step_ms": whole_ms / count,
            "idle_frac": watched.idle_frac(),
            "tokens_per_round": statistics.fmean(tokens),
        }

    def _prepare(self, round: Round) -> Runner:
        """A runner for the engine's batch. On a GPU its round is captured before it is timed."""
        decode_batch = self.engine.decode_batch
        size = len(decode_batch.requests)
        runner = Runner(round, EngineConfig(max_batch=size), self.engine.graphs)
        if self.engine.uses_graphs:
            runner.capture_round(size, decode_batch.features)
        return runner


def cache_gb(target: Decoder, head: DraftHead | None, tree: TreeConfig, work: Workload, max_tokens: int) -> float:
    """Cache size for one request of full length and for all requests of the workload, at most the engine's default."""
    models = [target.config, *([head.config] if head else [])]
    page_size, device = EngineConfig.page_size, target.embedding.device
    overlap_rounds = tree.budget + 2 * (head.head_config.block_size + 1 if head else 1) + page_size
    room = min(work.max_len or target.config.max_len, target.config.max_len)
    positions = max(room + overlap_rounds, work.batch * (min(work.context + max_tokens, room) + overlap_rounds))
    needed = positions * page_bytes(models, page_size, target.embedding.dtype) / page_size / 2**30
    if device.type == "cpu":
        return min(needed, CPU_CACHE_GB)
    torch.cuda.empty_cache()  # returns the memory of earlier caches
    return min(needed, GPU_CACHE_FRAC * torch.cuda.mem_get_info(device)[0] / 2**30)


class WatchedRound(Round):
    """A round that records the device's clock at its start and end."""

    def __init__(self, round: Round, rounds: int) -> None:
        super().__init__(round.target, round.drafter, round.cache)
        device = round.target.embedding.device
        self.time_S = torch.zeros(2 * rounds, dtype=torch.int64, device=device)
        self.count_1 = torch.zeros(1, dtype=torch.int64, device=device)

    def __call__(self, state: RoundState) -> RoundResult:
        ops.note_time(self.time_S, self.count_1)
        result = super().__call__(state)
        ops.note_time(self.time_S, self.count_1)
        return result

    def reset(self) -> None:
        self.count_1.zero_()

    def idle_frac(self) -> float:
        """Fraction of time between rounds, from the start of the first to the end of the last."""
        time_R2 = self.time_S[: int(self.count_1)].view(-1, 2).tolist()
        busy = sum(ended - began for began, ended in time_R2)
        return 1 - busy / (time_R2[-1][1] - time_R2[0][0])


class StandingRound:
    """A round of an engine's batch, repeated from the same state, whole or stage by stage.

    It writes K and V behind the cached tokens, where the engine's next round writes as well. Lengths and anchors are
    reset after every round.
    """

    def __init__(self, engine: Engine) -> None:
        engine.scheduler.next_batch()  # allocates pages for the next round
        engine.cache.flush()
        self.round, self.device = engine.round, engine.device
        self.table = engine.cache.rows
        self.length_R, self.anchor_R = self.table.length_R.clone(), self.table.anchor_R.clone()
        row_B = upload(engine.decode_batch.rows, torch.int64, self.device)
        self.state = RoundState.of(self.table, row_B, engine.decode_batch.features, engine.decode_batch.requests)

    def times_beside(self, kind: str, floor: Floor, experts: Sequence[int], rounds: int) -> dict[str, Any]:
        """Fields of a profile: times of the round and of its floor, measured in turns, so that a lower clock of the GPU
        affects both."""
        turns = time_in_turns_ms([as_graph(run, self.device) for run in (self.whole, floor.run)], self.device, rounds)
        ms, floor_ms = (statistics.median(times) for times in zip(*turns, strict=True))
        ratios = [own / other for own, other in turns]
        return {
            f"{kind}_ms": ms,
            f"floor_{kind}_ms": floor_ms,
            f"ratio_{kind}_range": (min(ratios), max(ratios)),
            f"bytes_{kind}": floor.num_bytes,
            f"experts_{kind}": statistics.fmean(experts) if experts else None,
        }

    def whole(self) -> None:
        self.packed_BD3 = self.round(self.state).packed
        self.rewind()

    def stages_ms(self, rounds: int, stages: Sequence[str] = STAGES) -> dict[str, float]:
        """Times each stage on the results of the stage before it."""
        times = {}
        for name in stages:
            times[name] = time_ms(as_graph(getattr(self, name), self.device), self.device, rounds)
        self.rewind()
        return times

    def verify_once(self) -> None:
        self.draft()
        self.build()
        self.verify()

    def rewind(self) -> None:
        self.table.length_R.copy_(self.length_R)
        self.table.anchor_R.copy_(self.anchor_R)

    def draft(self) -> None:
        self.drafter = self.round.drafter_of(self.state)
        self.drafted = self.drafter.draft(self.state)

    def build(self) -> None:
        self.tree = self.round.build(self.state, self.drafter, self.drafted)

    def verify(self) -> None:
        tree = self.tree
        self.batch = self.round.cache.place(self.state.row_B, tree.token_BN, tree.depth_BN, tree.ancestor_BNW)
        self.out, self.logits_BNV = self.round.verify(self.batch, tree)

    def accept(self) -> None:
        self.verdict = accept(self.tree, self.logits_BNV, self.state.sampling, self.batch.layout.cached_len_B)
        self.drafter.learn(self.state, self.drafted, self.tree, self.verdict)

    def commit(self) -> None:
        self.round.commit(self.state, self.batch, self.out, self.verdict)
