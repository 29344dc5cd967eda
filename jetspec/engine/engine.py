"""The engine: requests in, updates out. A step runs one chunk of prefill, if any, and one round."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from jetspec.capture import GraphPool
from jetspec.config import DrafterName, EngineConfig, TreeConfig
from jetspec.engine.chunk import Chunk
from jetspec.engine.detokenize import Decode, TextStream
from jetspec.engine.drafter import Drafter, HeadDrafter, NgramDrafter, NoDrafter
from jetspec.engine.kv_cache import KVCache, page_bytes
from jetspec.engine.round import Round, RoundResult
from jetspec.engine.runner import DecodeBatch, Launched, PrefillSizes, RoundRow, Runner
from jetspec.engine.scheduler import Scheduler
from jetspec.interrupt import uninterrupted
from jetspec.models.decoder import Decoder
from jetspec.models.draft_head import EngineHead
from jetspec.types import (
    Completion,
    Constraint,
    Grammar,
    Request,
    RoundStats,
    RoundTrace,
    SamplingParams,
    TreeLimits,
    Update,
)

CPU_CACHE_GB = 2.0
GPU_CACHE_FRAC = 0.8


def check_drafter(drafter: DrafterName, head: EngineHead | None, tree: TreeConfig) -> None:
    """Refuses settings that contradict each other."""
    if drafter == "head" and head is None:
        raise ValueError("drafter is head, but no head was given; give one or choose ngram or none")
    if drafter == "ngram" and not tree.ranks_by_probability:
        raise ValueError("expand and score do not apply to the ngram drafter, which ranks by matches")
    if drafter == "head" and head is not None and not head.uses_score and not tree.ranks_by_probability:
        raise ValueError("expand and score do not apply to this head, which ranks by probability")


class Engine:
    """Continuous batching of speculative rounds over one target.

    Requests join and leave between rounds. `decode` turns token ids into text; without it there is no text.
    `constrain` creates the constraint of a grammar; without it grammars are refused.

    With `overlap_rounds` a round starts before the host has read the last one. Rounds that are launched but not read
    are in `in_flight`.
    """

    def __init__(
        self,
        target: Decoder,
        head: EngineHead | None = None,
        *,
        drafter: DrafterName,
        tree: TreeConfig,
        config: EngineConfig,
        eos_tokens: frozenset[int] = frozenset(),
        decode: Decode | None = None,
        constrain: Callable[[Grammar], Constraint] | None = None,
    ) -> None:
        check_drafter(drafter, head, tree)
        if drafter == "none" or tree.budget == 1:
            drafter, tree = "none", NoDrafter.tree
        head = head if drafter == "head" else None
        self.target, self.eos_tokens = target, eos_tokens
        self.decode, self.constrain = decode, constrain
        self.device = target.embedding.device
        self.uses_graphs = self._uses_graphs(config)
        self.overlap_rounds = self._overlap_rounds(drafter, config)
        lookahead = self._lookahead(head, tree)
        self._make_cache(head, tree, config, lookahead)
        self.drafter = self._make_drafter(drafter, head, tree)
        self.round = Round(target, self.drafter, self.cache)
        self.graphs = GraphPool(self.device) if self.uses_graphs else None
        self.runner = Runner(self.round, config, self.graphs)
        self.scheduler = Scheduler(self.cache, lookahead, config.prefill_chunk, config.max_admission_delay)
        self.requests: dict[int, Request] = {}
        self.texts: dict[int, TextStream] = {}
        self.clock: Callable[[], float] = time.perf_counter
        self.decode_began: dict[int, float] = {}
        self.next_id = 0
        self.decode_batch = DecodeBatch.of([])
        self.in_flight: deque[Launched] = deque()
        self.updates: list[Update] = []
        """Updates to be taken. After an interrupted step they include those of the step before."""

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.updates)

    @uninterrupted()
    def add(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        limits: TreeLimits | None = None,
        trace: bool = False,
        quiet: bool = False,
        cache_salt: str = "",
        tenant: str = "",
    ) -> int:
        """Queues a prompt. Returns the request id that its updates carry. A quiet request gets only its last update.

        `limits` cut its trees after drafting, so they save time only in a batch where every budget is 1. Prompts share
        cached pages only within a `cache_salt`. Tenants have equal shares of the rows.
        """
        self._check(tokens, sampling)
        seed = random.getrandbits(63) if sampling.seed is None else sampling.seed
        request = Request(
            self.next_id,
            list(tokens),
            len(tokens),
            sampling,
            seed,
            max_len=min(len(tokens) + sampling.token_limit, self.max_len),
            end_tokens=frozenset() if sampling.ignore_eos else self.eos_tokens,
            limits=limits,
            traced=trace,
            quiet=quiet,
            cache_salt=cache_salt,
            tenant=tenant,
            constraint=self._constraint(sampling.grammar) if sampling.grammar else None,
            stats=RoundStats(prompt_tokens=len(tokens)),
        )
        self.next_id += 1
        self.requests[request.id] = request
        if self.decode and (sampling.stop or not quiet):
            self.texts[request.id] = TextStream(self.decode, sampling.stop)
        self.scheduler.add(request)
        return request.id

    @uninterrupted()
    def add_several(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        count: int,
        **options: Any,
    ) -> list[int]:
        """Queues a prompt `count` times, with the options of `add`. With a prefix cache its full pages are computed
        once and shared. Seeds are s, s + 1, .., so the first completion is that of a single request."""
        ids = []
        for i in range(count):
            seed = None if sampling.seed is None else (sampling.seed + i) % (1 << 63)
            ids.append(self.add(tokens, replace(sampling, seed=seed), **options))
            if i and self.cache.pool.prefix_cache:
                self.requests[ids[i]].prefix_leader = self.requests[ids[0]]
        return ids

    def clip(self, sampling: SamplingParams) -> SamplingParams:
        """`sampling` with `max_tokens` cut to the context."""
        return replace(sampling, max_tokens=min(sampling.token_limit, self.max_len))

    @uninterrupted()
    def cancel(self, request_id: int) -> None:
        """Removes a request and frees its pages. Does nothing if the request has ended."""
        if request_id in self.requests:
            self._remove(self.requests[request_id])
        self.updates = [update for update in self.updates if update.request_id != request_id]

    def step(self) -> list[Update]:
        """Runs one prefill chunk and launches one round. Returns new updates, which may belong to an earlier round."""
        self.work()
        return self.take()

    @torch.inference_mode()
    def work(self) -> None:
        """Runs a step and keeps its updates for `take`."""
        try:
            with torch.cuda.device_of(self.target.embedding):  # kernels run on the current device
                self._step()
        except BaseException:
            self._preempt_all()
            raise

    def take(self) -> list[Update]:
        updates, self.updates = self.updates, []
        return updates

    def _step(self) -> None:
        self._prefill(self.scheduler.next_chunks())
        batch = self.scheduler.next_batch()
        if batch:
            if not self.decode_batch.is_of(batch):
                self.decode_batch = DecodeBatch.of(batch)
                for request in batch:
                    self.decode_began.setdefault(request.id, self.clock())
            self.cache.flush()
            self.drafter.prepare(batch)
            self.in_flight.append(self.runner.launch_round(self.decode_batch))
        self._read(self.overlap_rounds if batch and not self.decode_batch.is_synchronous else 0)

    def _read(self, left: int) -> None:
        """Reads and publishes rounds until `left` are in flight."""
        while len(self.in_flight) > left:
            launched = self.in_flight.popleft()
            self._publish(launched, launched.read())

    @uninterrupted()
    def _preempt_all(self) -> None:
        """Preempts all requests after an interrupted step. Unread results on the device are dropped: each request
        continues from its published tokens."""
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # a failed device writes nothing
                torch.cuda.synchronize(self.device)
        self.in_flight.clear()
        self.cache.reset_idle_row()
        for request in reversed(list(self.scheduler.running.values())):
            self.scheduler.preempt(request)

    def _prefill(self, chunks: list[tuple[Request, int]]) -> None:
        if not chunks:
            return
        began = self.clock()
        self.cache.flush()
        self.runner.launch_prefill([Chunk.of(request, count) for request, count in chunks])
        if self.device.type == "cuda" and not self.in_flight:  # nothing else waits, so time it
            torch.cuda.synchronize()
        for request, count in chunks:
            self.cache.advance(request, count)
            request.stats.prefill_s += self.clock() - began

    @uninterrupted()
    def _publish(self, launched: Launched, rows: Sequence[RoundRow]) -> None:
        """Appends committed tokens to the requests of a round, except those that have lost their row since."""
        decode_batch, now = launched.decode_batch, self.clock()
        for i, (request, row_epoch) in enumerate(zip(decode_batch.requests, decode_batch.row_epoch, strict=True)):
            if request.row_epoch != row_epoch:
                continue
            size, by_ngrams, tokens, packed = rows[i]
            trace = self._trace(launched.result, i) if request.traced else None
            kept = self._append(request, tokens)
            self.scheduler.serve(request, len(kept))
            request.num_cached += len(tokens)
            logprobs = None
            if request.sampling.logprobs is not None:
                assert launched.result.logprobs is not None
                logprobs = launched.result.logprobs.unpack(packed, kept, request.sampling.logprobs)
                request.logprobs += logprobs
            request.stats.accepted_lengths.append(len(kept) - 1)
            if by_ngrams:
                request.stats.ngram_tokens += max(0, by_ngrams - (len(tokens) - len(kept)))  # they end the path
            completion, new = None, ""
            if request.finish_reason:
                completion, new = self._finish(request, now)
            elif request.quiet:
                continue
            elif text := self.texts.get(request.id):
                new = text.take()
            counts = size - 1, len(tokens) - 1, by_ngrams
            self.updates.append(Update(request.id, kept, new, completion, trace, logprobs, *counts))

    def _append(self, request: Request, tokens: list[int]) -> list[int]:
        """Appends committed tokens up to the one that ends the text. Returns those appended."""
        text, written = self.texts.get(request.id), request.tokens
        for count, token in enumerate(tokens, 1):
            written.append(token)
            if request.constraint is not None:
                request.constraint.advance(token)
            stopped = text is not None and text.push(token)
            if stopped or token in request.end_tokens:
                request.finish_reason = "stop"
            elif len(written) >= request.max_len:
                request.finish_reason = "length"
            else:
                continue
            return tokens[:count]
        return tokens

    def _finish(self, request: Request, now: float) -> tuple[Completion, str]:
        """Removes an ended request. Returns its completion, and text that was held back."""
        assert request.finish_reason
        text = self.texts.get(request.id)
        last = text.finish() if text else ""
        request.stats.decode_s = now - self.decode_began[request.id]
        completion = Completion(
            text.text if text else "",
            request.answer,
            request.finish_reason,
            request.stats,
            request.logprobs if request.sampling.logprobs is not None else None,
        )
        self.cache.rows.remember(request)
        self._remove(request)
        return completion, last

    def _remove(self, request: Request) -> None:
        self.scheduler.remove(request)
        del self.requests[request.id]
        self.texts.pop(request.id, None)
        self.decode_began.pop(request.id, None)
        if not self.requests:
            self.in_flight.clear()

    def _trace(self, result: RoundResult, row: int) -> RoundTrace:
        tree, verdict = result.tree, result.verdict
        size, length = int(tree.size_B[row]), int(verdict.length_B[row])
        scores = tree.score_BN[row, :size].tolist() if tree.score_BN is not None else [0.0] * size
        return RoundTrace(
            tokens=tree.token_BN[row, :size].tolist(),
            parents=tree.parent_BN[row, :size].tolist(),
            scores=scores,
            path=verdict.path_BD1[row, : length + 1].tolist(),
            bonus=int(verdict.bonus_B[row]),
        )

    def _constraint(self, grammar: Grammar) -> Constraint:
        if self.constrain is None:
            raise ValueError("grammar needs an engine with `constrain`")
        if not self.eos_tokens:
            raise ValueError("grammar needs a model with an end token")
        return self.constrain(grammar)

    def _check(self, tokens: Sequence[int], sampling: SamplingParams) -> None:
        if not tokens:
            raise ValueError("the prompt is empty: give at least one token")
        if len(tokens) >= self.max_len:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, but the context holds {self.max_len} with the answer"
            )
        if sampling.max_tokens is not None and sampling.max_tokens > self.max_len:
            raise ValueError(f"max_tokens is {sampling.max_tokens}, but the context holds {self.max_len} tokens")
        for token in (min(tokens), max(tokens), *sampling.logit_bias):
            if not 0 <= token < self.target.config.vocab_size:
                raise ValueError(f"token id {token} is not in the vocabulary")

    def _uses_graphs(self, config: EngineConfig) -> bool:
        possible = self.device.type == "cuda"
        if config.execution == "graph" and not possible:
            raise ValueError("execution is graph, which needs a GPU; use eager")
        return possible and config.execution != "eager"

    def _overlap_rounds(self, drafter: DrafterName, config: EngineConfig) -> int:
        """Rounds launched before the host has read an earlier one. The n-gram drafter needs the committed text."""
        if drafter == "ngram" and config.overlap_rounds:
            raise ValueError(f"overlap_rounds is {config.overlap_rounds}, but the ngram drafter allows only 0")
        default = int(self.uses_graphs and drafter != "ngram")
        return default if config.overlap_rounds is None else config.overlap_rounds

    def _lookahead(self, head: EngineHead | None, tree: TreeConfig) -> int:
        """Positions behind the cached tokens that a round may write: nodes of a tree or tokens in flight in the head,
        behind one path for each round that the host has not read."""
        depth = head.head_config.draft_depth(tree.depth) if head else 0
        num_in_flight = head.head_config.num_in_flight(tree) if head else 1
        return max(tree.budget, num_in_flight, depth + 1) + self.overlap_rounds * (depth + 1)

    def _make_drafter(self, name: DrafterName, head: EngineHead | None, tree: TreeConfig) -> Drafter:
        if name == "none":
            return NoDrafter()
        self.target.prepare()
        if head is None:
            return NgramDrafter(tree, self.cache.rows.num_rows, self.device)
        head.prepare()
        return HeadDrafter(head, self.target, self.cache, tree)

    def _make_cache(self, head: EngineHead | None, tree: TreeConfig, config: EngineConfig, lookahead: int) -> None:
        """Allocates the cache. `max_len` is the longest sequence that fits into it while it is otherwise empty, so that
        any admitted request can finish."""
        ngrams = head is not None and tree.ngrams and tree.ranks_by_probability
        if config.ngram_corpus and not ngrams:
            raise ValueError("ngram_corpus needs a draft head whose trees take n-grams: set tree.ngrams to true")
        models = [self.target.config] + ([head.config] if head else [])
        dtype, feature_size = self.target.embedding.dtype, head.feature_size if head else 0
        context = min(config.max_len or self.target.config.max_len, self.target.config.max_len)
        num_pages, row_len = config.num_pages, context + lookahead
        if num_pages is None:
            if config.cache_gb is None and self.device.type == "cuda":
                num_bytes = torch.cuda.mem_get_info(self.device)[0] * GPU_CACHE_FRAC
            else:
                num_bytes = (CPU_CACHE_GB if config.cache_gb is None else config.cache_gb) * 2**30
            affordable = int(num_bytes) // page_bytes(models, config.page_size, dtype, feature_size)
            num_pages = max(1, min(config.max_batch * -(-row_len // config.page_size), affordable))
        self.max_len = min(context, num_pages * config.page_size - lookahead)
        if self.max_len < 2:
            raise ValueError(
                f"a cache of {num_pages} pages cannot hold a tree of {tree.budget} nodes; raise num_pages or cache_gb"
            )
        self.cache = KVCache(
            self.target.config,
            head.config if head else None,
            num_rows=config.max_batch,
            row_len=min(row_len, num_pages * config.page_size),
            num_pages=num_pages,
            page_size=config.page_size,
            dtype=dtype,
            device=self.device,
            prefix_cache=config.prefix_cache,
            ngrams=ngrams,
            ngram_corpus=config.ngram_corpus,
            feature_size=feature_size,
            idle_len=max(lookahead, PrefillSizes.of(config).max_padding) if self.uses_graphs else 0,
        )
