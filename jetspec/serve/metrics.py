"""What the server counts, for Prometheus.

Quantities that vLLM publishes, too, carry its names, prefix included, because dashboards and `vllm bench serve` look
for exactly these. What only a tree decoder has is named `jetspec:`.
"""

from __future__ import annotations

import time
from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from jetspec.engine.engine import Engine
from jetspec.types import Update

FIRST_TOKEN_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
BETWEEN_TOKENS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
WHOLE_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
WINDOW_S = 10.0
"""Speeds are means over this time."""
ANSWER_ROUTES = ("/v1/chat/completions", "/v1/completions")


class Metrics:
    """Counters of one server. `joined` and `saw` are called in the engine's thread, the rest in the event loop."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        disable_created_metrics()  # their names begin like those of the counters, and readers would add them up
        self.registry = CollectorRegistry()
        self._model = {"model_name": model_name}
        self._recent: deque[tuple[float, int]] = deque()
        """When rounds ended, and the tokens they committed."""

        requests = Counter("jetspec:requests", "HTTP requests.", ["route", "status"], registry=self.registry)
        self._requests = requests
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._tokens = self._counter("vllm:generation_tokens", "Tokens written.")
        self._success = Counter(
            "vllm:request_success", "Answers completed.", ["model_name", "finished_reason"], registry=self.registry
        )
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Rounds with a draft.")
        self._draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens checked.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by place in the draft.",
            ["model_name", "position"],
            registry=self.registry,
        )
        self._rounds = Counter("jetspec:rounds", "Rounds, counted per answer.", registry=self.registry)
        self._accepted_length = Histogram(
            "jetspec:accepted_length",
            "Draft tokens accepted per round.",
            buckets=[*range(16), 31, 63, 255],
            registry=self.registry,
        )
        self._first = self._times("vllm:time_to_first_token_seconds", "Until the first token.", FIRST_TOKEN_S)
        self._between = self._times(
            "vllm:inter_token_latency_seconds", "Between tokens: a round's time by its tokens.", BETWEEN_TOKENS_S
        )
        self._whole = self._times("vllm:e2e_request_latency_seconds", "From request to last token.", WHOLE_S)
        self._watch(engine)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(name, help, ["model_name"], registry=self.registry).labels(**self._model)

    def _times(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, help, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(**self._model)

    def _watch(self, engine: Engine) -> None:
        """Quantities that are looked up when somebody asks."""
        pool, scheduler = engine.cache.pool, engine.scheduler

        def used() -> int:
            return pool.num_pages - pool.num_available

        shared = {
            "vllm:num_requests_running": ("Answers being written.", lambda: len(scheduler.running)),
            "vllm:num_requests_waiting": ("Answers that wait.", lambda: len(scheduler.waiting)),
            "vllm:kv_cache_usage_perc": ("Share of pages in use, 0 to 1.", lambda: used() / pool.num_pages),
        }
        for name, (help, look) in shared.items():
            Gauge(name, help, ["model_name"], registry=self.registry).labels(**self._model).set_function(look)
        own = {
            "jetspec:pages_in_use": ("Pages of the KV cache in use.", used),
            "jetspec:pages": ("Pages of the KV cache.", lambda: pool.num_pages),
            "jetspec:tokens_per_second": (f"Mean of the last {WINDOW_S:g} s.", self.tokens_per_s),
            "jetspec:tokens_per_round": (f"Mean of the last {WINDOW_S:g} s.", self.tokens_per_round),
        }
        for name, (help, look) in own.items():
            Gauge(name, help, registry=self.registry).set_function(look)

    def joined(self, prompt_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)

    def saw(self, update: Update, waited_s: float, is_first: bool) -> None:
        num, now = len(update.token_ids), time.monotonic()
        self._recent.append((now, num))
        while self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()
        self._tokens.inc(num)
        self._rounds.inc()
        self._accepted_length.observe(update.accepted)
        if update.drafted:
            self._drafts.inc()
            self._draft_tokens.inc(update.drafted)
            self._accepted.inc(update.accepted)
            for position in range(update.accepted):
                self._accepted_at.labels(**self._model, position=position).inc()
        if is_first:
            self._first.observe(waited_s)
        else:
            self._between.observe(waited_s / num)
        if update.completion:
            self._success.labels(**self._model, finished_reason=update.completion.finish_reason).inc()

    def answered(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, status).inc()
        if route in ANSWER_ROUTES and status == 200:
            self._whole.observe(seconds)

    def tokens_per_s(self) -> float:
        return sum(num for _, num in self._window()) / WINDOW_S

    def tokens_per_round(self) -> float:
        window = self._window()
        return sum(num for _, num in window) / len(window) if window else 0.0

    def _window(self) -> list[tuple[float, int]]:
        oldest = time.monotonic() - WINDOW_S
        return [(ended, num) for ended, num in tuple(self._recent) if ended >= oldest]

    def page(self) -> bytes:
        return generate_latest(self.registry)
