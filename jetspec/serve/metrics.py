"""Prometheus metrics of the server. To add one: create it in `Metrics.__init__` and update it in an `on_` method; a
value that is read when scraped is a row of the gauges there.

Quantities that vLLM publishes too have its names, prefix included, because dashboards and `vllm bench serve` read
these. Those of tree decoding are named `jetspec:`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from jetspec.engine.choices import ChoiceTable
from jetspec.engine.engine import Engine
from jetspec.models.choices import Weights
from jetspec.types import Update

FIRST_TOKEN_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
BETWEEN_TOKENS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
REQUEST_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
WINDOW_S = 10.0
"""Time over which rates are averaged."""
M = TypeVar("M", Counter, Gauge, Histogram, Summary)
COMPLETION_ROUTES = ("/v1/chat/completions", "/v1/completions")


class ChoiceWeights(Collector):
    """Weights of the choice model of each sampling setting in use."""

    def __init__(self, table: ChoiceTable) -> None:
        self.table = table

    def collect(self) -> Iterator[GaugeMetricFamily]:
        setting = ["temperature", "top_p", "top_k", "min_p"]
        weight = GaugeMetricFamily(
            "jetspec:choice_weight", "Weights by which sampled text is drafted.", labels=[*setting, "depth", "weight"]
        )
        choices = GaugeMetricFamily("jetspec:choices", "Choices that refined these weights.", labels=setting)
        for row in self.table.report():
            labels = [repr(row[name]) for name in setting]  # rounded ones could be equal
            choices.add_metric(labels, row["choices"])
            for depth, values in enumerate(row["depths"], 1):
                for name, value in zip(Weights._fields, values, strict=True):
                    weight.add_metric([*labels, str(depth), name], value)
        yield from (choices, weight)


class Metrics:
    """Metrics of one server. The engine's thread calls `on_admission` and `on_update`, the event loop the rest."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        # Names of creation times begin like those of the counters, and readers would add them up.
        prometheus_client.disable_created_metrics()
        self.registry = CollectorRegistry()
        self._model = {"model_name": model_name}
        self._recent: deque[tuple[float, int]] = deque()
        """(end time, committed tokens) of the rounds in the window."""

        make = self._make
        self._requests = make(Counter, "jetspec:requests", "HTTP requests.", "route", "status")
        self._prompt_tokens = make(Counter, "vllm:prompt_tokens", "Prompt tokens.")
        self._tokens = make(Counter, "vllm:generation_tokens", "Generated tokens.")
        self._success = make(Counter, "vllm:request_success", "Finished completions.", "finished_reason")
        self._drafts = make(Counter, "vllm:spec_decode_num_drafts", "Rounds with a draft.")
        self._draft_tokens = make(Counter, "vllm:spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = make(Counter, "vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._by_ngrams = make(Counter, "jetspec:ngram_tokens", "Draft tokens accepted that only n-grams proposed.")
        per_position = "vllm:spec_decode_num_accepted_tokens_per_pos"
        self._accepted_at = make(Counter, per_position, "Draft tokens accepted, by position in the draft.", "position")
        self._rounds = make(Counter, "jetspec:rounds", "Rounds, counted per completion.")
        per_round = make(Summary, "jetspec:round_tokens", "Tokens committed per round.", "sampled")
        self._per_round = {is_sampled: per_round.labels("yes" if is_sampled else "no") for is_sampled in (False, True)}
        lengths = [*range(16), 31, 63, 255]
        self._lengths = make(Histogram, "jetspec:accepted_length", "Draft tokens accepted per round.", buckets=lengths)
        first, between = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
        self._first = make(Histogram, first, "Time to the first token.", buckets=FIRST_TOKEN_S)
        self._between = make(Histogram, between, "Time of a round divided by its tokens.", buckets=BETWEEN_TOKENS_S)
        whole = "vllm:e2e_request_latency_seconds"
        self._whole = make(Histogram, whole, "Time of a whole request.", buckets=REQUEST_S)

        # Values that are read when the metrics are scraped.
        pool, scheduler = engine.cache.pool, engine.scheduler
        gauges: list[tuple[str, str, Callable[[], float]]] = [
            ("vllm:num_requests_running", "Completions in the batch.", lambda: len(scheduler.running)),
            ("vllm:num_requests_waiting", "Completions in the queue.", lambda: scheduler.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of pages in use, 0 to 1.", lambda: pool.num_used / pool.num_pages),
            ("jetspec:pages_in_use", "Pages of the KV cache in use.", lambda: pool.num_used),
            ("jetspec:pages", "Pages of the KV cache.", lambda: pool.num_pages),
            ("jetspec:tokens_per_second", f"Mean of the last {WINDOW_S:g} s.", self.tokens_per_s),
            ("jetspec:tokens_per_round", f"Mean of the last {WINDOW_S:g} s.", self.tokens_per_round),
        ]
        for name, help, read in gauges:
            make(Gauge, name, help).set_function(read)
        if engine.cache.rows.choices is not None:
            self.registry.register(ChoiceWeights(engine.cache.rows.choices))

    def _make(self, kind: type[M], name: str, help: str, *labels: str, **options: Any) -> M:
        """Returns a metric. One with vLLM's name has its label, too, with a value unless there are other labels."""
        model: dict[str, str] = self._model if name.startswith("vllm:") else {}
        metric = kind(name, help, [*model, *labels], registry=self.registry, **options)
        return metric.labels(**model) if model and not labels else metric

    def on_admission(self, prompt_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)

    def on_update(self, update: Update, waited_s: float, is_first: bool, is_sampled: bool) -> None:
        """`waited_s` is the time since the previous update of the completion, or since the request arrived."""
        num, now = len(update.token_ids), time.monotonic()
        self._recent.append((now, num))
        while self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()
        self._tokens.inc(num)
        self._rounds.inc()
        self._per_round[is_sampled].observe(num)
        self._lengths.observe(update.accepted)
        if update.drafted:
            self._drafts.inc()
            self._draft_tokens.inc(update.drafted)
            self._accepted.inc(update.accepted)
            self._by_ngrams.inc(update.by_ngrams)
            for position in range(update.accepted):
                self._accepted_at.labels(**self._model, position=position).inc()
        if is_first:
            self._first.observe(waited_s)
        else:
            self._between.observe(waited_s / num)
        if update.completion:
            self._success.labels(**self._model, finished_reason=update.completion.finish_reason).inc()

    def on_response(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, status).inc()
        if route in COMPLETION_ROUTES and status == 200:
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
        """The metrics in Prometheus' text format."""
        return prometheus_client.generate_latest(self.registry)
