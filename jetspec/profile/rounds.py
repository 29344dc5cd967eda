"""Where the time of a round goes: its stages, a plain step, and the floor under both, measured on one batch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

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
from jetspec.tree import accept
from jetspec.types import SamplingParams

STAGES = ("draft", "build", "verify", "accept", "commit")
PREFILL_CHUNK = 65_536
SPARE_ROUNDS = 8
"""Rounds that the first requests may run while the last are prefilled."""


@dataclass(frozen=True)
class Workload:
    """A batch of requests, each with `context` random tokens, and how many rounds of it to time."""

    context: int
    batch: int = 1
    rounds: int = 200
    max_len: int | None = None
    """Room of a request in the cache, by which kernels are chosen. None: what an engine gives it by itself."""
    temperature: float = 0.0
    """0: requests are greedy."""

    def __post_init__(self) -> None:
        for name in ("context", "batch", "rounds"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        SamplingParams(temperature=self.temperature)


@dataclass(frozen=True)
class Profile:
    """What a round costs, in milliseconds. A ratio is a time over its floor."""

    budget: int
    context: int
    batch: int
    max_len: int
    """Room that a request had in the cache."""
    temperature: float
    round_ms: float
    stages_ms: dict[str, float]
    """Each stage on its own. They add up to a little more than the round, whose gaps between them are smaller."""
    plain_ms: float
    floor_round_ms: float
    floor_plain_ms: float
    ratio_round_range: tuple[float, float]
    """The least and the largest ratio of a group of rounds to the group of its floor beside it."""
    ratio_plain_range: tuple[float, float]
    bytes_round: int
    """Weights that the floor of the round reads."""
    bytes_plain: int
    experts_round: float | None
    """Experts that a verify pass visits, in the mean over sparse layers."""
    experts_plain: float | None
    step_ms: float
    """A round in the engine's loop, with all that the host does for it."""
    idle_frac: float
    """Share of that loop between the end of a round and the start of the next, by the device's own clock."""
    tokens_per_round: float
    read_gb_per_s: float
    """What memory gives whoever only reads it."""

    @property
    def read_round_ms(self) -> float:
        """The weights of the round, read and not used."""
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
    """Refuse what cannot be measured, before anything is loaded."""
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
    """Measure rounds and plain steps, one after the other, so that one of them is in memory at a time."""
    check(target.config, tree, work)
    device = target.embedding.device
    plain = _profile_plain(target, work)
    decoding = Decoding(target, head, tree, work)
    still = StandingRound(decoding.engine)
    experts = count_experts(target, still.verify_once)
    stages_ms = still.stages_ms(work.rounds)
    floor = round_floor(target, head, work.batch, tree.budget, experts)
    timed = still.time_beside(floor, work.rounds)
    loop = decoding.run(work.rounds)
    return Profile(
        budget=tree.budget,
        context=work.context,
        batch=work.batch,
        max_len=decoding.engine.max_len,
        temperature=work.temperature,
        round_ms=timed.ms,
        stages_ms=stages_ms,
        floor_round_ms=timed.floor_ms,
        ratio_round_range=timed.ratio_range,
        bytes_round=floor.num_bytes,
        experts_round=mean_experts(experts),
        **plain,
        step_ms=loop.step_ms,
        idle_frac=loop.idle_frac,
        tokens_per_round=loop.tokens_per_round,
        read_gb_per_s=read_gb_per_s(device, work.rounds),
    )


def _profile_plain(target: Decoder, work: Workload) -> dict[str, Any]:
    """What a profile says of a plain step."""
    still = StandingRound(Decoding(target, None, TreeConfig(budget=1), work).engine)
    experts = count_experts(target, still.verify_once)
    floor = plain_floor(target, work.batch, experts)
    timed = still.time_beside(floor, work.rounds)
    return {
        "plain_ms": timed.ms,
        "floor_plain_ms": timed.floor_ms,
        "ratio_plain_range": timed.ratio_range,
        "bytes_plain": floor.num_bytes,
        "experts_plain": mean_experts(experts),
    }


def mean_experts(experts: Sequence[int]) -> float | None:
    return statistics.fmean(experts) if experts else None


@dataclass(frozen=True)
class Loop:
    """The engine's own loop over some rounds."""

    step_ms: float
    idle_frac: float
    tokens_per_round: float


class Decoding:
    """An engine whose requests are prefilled and never end by themselves. They have the room that an engine gives them,
    and pages for what they come to."""

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

    def run(self, rounds: int) -> Loop:
        """Let the engine go on, up to so many rounds or the first request that reaches the end of its context."""
        engine, before, watched = self.engine, self.engine.runner, WatchedRound(self.engine.round, rounds)
        self.prepared = engine.runner = self._prepare(watched)  # graphs of a pool end together
        watched.forget()
        tokens, count, requests = list[int](), 0, len(engine.requests)
        began = Moment(self.device)
        while count < rounds and len(engine.requests) == requests:
            tokens += [len(update.token_ids) for update in engine.step()]
            count += 1
        whole_ms = began.ms_until(Moment(self.device))
        engine.runner = before
        return Loop(whole_ms / count, watched.idle_frac(), statistics.fmean(tokens))

    def _prepare(self, round: Round) -> Runner:
        """A runner for the engine's batch. On a GPU its round is captured before it is timed."""
        decode_batch = self.engine.decode_batch
        size = len(decode_batch.requests)
        runner = Runner(round, EngineConfig(max_batch=size), self.engine.graphs)
        if self.engine.uses_graphs:
            runner.capture_round(size, decode_batch.features)
        return runner


def cache_gb(target: Decoder, head: DraftHead | None, tree: TreeConfig, work: Workload, max_tokens: int) -> float:
    """Enough for one request that fills its room, and for all with what they come to; but no more than an engine takes
    by itself."""
    models = [target.config, *([head.config] if head else [])]
    page_size, device = EngineConfig.page_size, target.embedding.device
    overlap_rounds = tree.budget + 2 * (head.head_config.block_size + 1 if head else 1) + page_size
    room = min(work.max_len or target.config.max_len, target.config.max_len)
    positions = max(room + overlap_rounds, work.batch * (min(work.context + max_tokens, room) + overlap_rounds))
    needed = positions * page_bytes(models, page_size, target.embedding.dtype) / page_size / 2**30
    if device.type == "cpu":
        return min(needed, CPU_CACHE_GB)
    torch.cuda.empty_cache()  # what earlier caches took is free for this one
    return min(needed, GPU_CACHE_FRAC * torch.cuda.mem_get_info(device)[0] / 2**30)


class WatchedRound(Round):
    """A round that looks at the device's clock as it begins and as it ends."""

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

    def forget(self) -> None:
        self.count_1.zero_()

    def idle_frac(self) -> float:
        """From the start of the first round to the end of the last, the share of time between rounds."""
        time_R2 = self.time_S[: int(self.count_1)].view(-1, 2).tolist()
        busy = sum(ended - began for began, ended in time_R2)
        return 1 - busy / (time_R2[-1][1] - time_R2[0][0])


class TimedBeside(NamedTuple):
    """A round and its floor, each the median of its groups, and the range of their ratio over turns."""

    ms: float
    floor_ms: float
    ratio_range: tuple[float, float]


class StandingRound:
    """One round of an engine's batch, over and over from the same state, whole or stage by stage.

    It writes K and V behind what is cached, where the engine's next round writes, too; lengths and anchors are put
    back after every round.
    """

    def __init__(self, engine: Engine) -> None:
        engine.scheduler.next_batch()  # makes room for the next round
        engine.cache.flush()
        self.round, self.device = engine.round, engine.device
        self.table = engine.cache.rows
        self.length_R, self.anchor_R = self.table.length_R.clone(), self.table.anchor_R.clone()
        row_B = upload(engine.decode_batch.rows, torch.int64, self.device)
        self.state = RoundState.of(self.table, row_B, engine.decode_batch.features, engine.decode_batch.requests)

    def time_beside(self, floor: Floor, rounds: int) -> TimedBeside:
        """In turns with its floor: a GPU that must save power slows down both."""
        graphs = [as_graph(run, self.device) for run in (self.whole, floor.run)]
        turns = time_in_turns_ms(graphs, self.device, rounds)
        ms, floor_ms = (statistics.median(times) for times in zip(*turns, strict=True))
        ratios = [own / other for own, other in turns]
        return TimedBeside(ms, floor_ms, (min(ratios), max(ratios)))

    def whole(self) -> None:
        self.packed_BD3 = self.round(self.state).packed
        self.rewind()

    def stages_ms(self, rounds: int, stages: Sequence[str] = STAGES) -> dict[str, float]:
        """Each stage on what the one before it left; the first ones, or all."""
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

    def commit(self) -> None:
        self.round.commit(self.state, self.batch, self.out, self.verdict)
