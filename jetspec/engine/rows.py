"""Per-request state on the device: lengths, anchors, sampling parameters.

Rounds read and write these columns, so the host passes only the row numbers of a batch. Changes by the host, when a
request joins, are collected and uploaded together before the next forward.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor

from jetspec.config import MAX_BUDGET, MAX_WIDTH
from jetspec.engine.choices import ChoiceTable
from jetspec.ops.transfer import upload
from jetspec.tree import NgramTable
from jetspec.types import (
    MAX_BIASED_TOKENS,
    Request,
    RoundFeatures,
    RowPenalties,
    RowSampling,
    TreeLimits,
)

SAMPLING = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
COLUMNS = {torch.int64: ("length", "anchor", "seed", "budget", "width", "top_k", "choices"), torch.float32: SAMPLING}
"""Column names by dtype. Columns of a dtype are one table, so that a joining request takes few writes."""

MAX_SALTS = 1024
"""Most cache salts whose answers are kept."""
NO_LIMITS = TreeLimits(MAX_BUDGET, MAX_WIDTH)


class RowTable:
    """Columns with one entry per row: cached length, anchor, sampling parameters and tree limits.

    Penalties need a count per vocabulary entry and row; that table is allocated for the first request with penalties.
    With `ngrams` the texts of the rows are on the device, behind earlier answers of the same cache salt.
    """

    ngrams: NgramTable | None = None
    choices: ChoiceTable | None = None

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.num_rows, self.vocab_size, self.device = num_rows, vocab_size, device
        self.tables = {t: torch.zeros(len(names), num_rows, dtype=t, device=device) for t, names in COLUMNS.items()}
        self.columns = {name: self.tables[t][i] for t, names in COLUMNS.items() for i, name in enumerate(names)}
        self.columns["top_p"].fill_(1)
        self.length_R, self.anchor_R = self.columns["length"], self.columns["anchor"]
        self.changes: dict[str, dict[int, Any]] = defaultdict(dict)
        self.token_counts: TokenCounts | None = None
        self.new_texts: dict[int, tuple[list[int], list[int]]] = {}
        """Tokens of admitted requests by row, and of the answers before them, for the next flush."""
        self.answers: OrderedDict[str, list[int]] = OrderedDict()
        """Tokens of the most recent answers by cache salt, the salt used last at the end."""

    def enter(self, request: Request) -> None:
        """Initializes the row of an admitted request."""
        sampling, limits = request.sampling, request.limits or NO_LIMITS
        self.set(request.row, length=request.num_cached, anchor=request.tokens[-1], seed=request.seed)
        self.set(request.row, budget=limits.budget, width=limits.width)
        self.set(request.row, **{name: getattr(sampling, name) for name in ("top_k", *SAMPLING)})
        if sampling.is_penalized and self.token_counts is None:
            self.token_counts = TokenCounts(self.num_rows, self.vocab_size, self.device)
        if self.token_counts is not None:
            self.token_counts.entered[request.row] = request
        if self.choices is not None:
            self.set(request.row, choices=self.choices.enter(request.row, sampling))
        if self.ngrams is not None:
            self.new_texts[request.row] = request.tokens[:], self.answers.get(request.cache_salt, [])

    def remember(self, request: Request) -> None:
        """Keeps the answer of an ended request for the n-grams of later ones under its cache salt."""
        if self.ngrams is None or not (size := self.ngrams.corpus_len):
            return
        self.answers[request.cache_salt] = [*self.answers.pop(request.cache_salt, []), *request.answer][-size:]
        if len(self.answers) > MAX_SALTS:
            self.answers.popitem(last=False)

    def limits(self, row_B: Tensor) -> tuple[Tensor, Tensor]:
        """Tree budget and width of the given rows."""
        return self.columns["budget"][row_B], self.columns["width"][row_B]

    def set(self, row: int, **values: float) -> None:
        for name, value in values.items():
            self.changes[name][row] = value

    def flush(self) -> None:
        """Uploads the changes: values with their indices, both exact in float64."""
        for dtype, names in COLUMNS.items():
            changed = [(i, row, value) for i, name in enumerate(names) for row, value in self.changes[name].items()]
            if changed:
                wide = torch.int64 if dtype == torch.int64 else torch.float64
                column, row, value = upload(changed, wide, self.device).unbind(1)
                self.tables[dtype][column.long(), row.long()] = value.to(dtype)
        self.changes.clear()
        if self.token_counts is not None:
            self.token_counts.flush()
        if self.choices is not None:
            self.choices.flush()
        if self.ngrams is not None:
            for entered, texts in self.new_texts.items():
                self.ngrams.enter(entered, *(upload(tokens, torch.int32, self.device) for tokens in texts))
        self.new_texts.clear()

    def sampling(self, row_B: Tensor, features: RoundFeatures) -> RowSampling:
        """Sampling parameters of the given rows; empty for a greedy batch, which does not read them."""

        def column(name: str) -> Tensor:
            return self.columns[name][row_B] if features.sampled else self.columns[name][:0]

        return RowSampling(
            temperature_B=column("temperature"),
            top_k_B=column("top_k"),
            top_p_B=column("top_p"),
            min_p_B=column("min_p"),
            seed_B=column("seed"),
            any_sampled=features.sampled,
            any_filtered=features.filtered,
        )

    def penalties(self, row_B: Tensor) -> RowPenalties:
        """Penalties and biases of the given rows."""
        assert self.token_counts is not None
        return RowPenalties(
            presence_B=self.columns["presence_penalty"][row_B],
            frequency_B=self.columns["frequency_penalty"][row_B],
            count_BV=self.token_counts.count_RV[row_B],
            bias_BV=self.token_counts.bias(row_B),
        )


class TokenCounts:
    """Occurrences of each token in the generated text of each row, and logit biases."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.count_RV = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        self.biased_RX = torch.zeros(num_rows, MAX_BIASED_TOKENS, dtype=torch.int64, device=device)
        self.bias_RX = torch.zeros(num_rows, MAX_BIASED_TOKENS, dtype=torch.float32, device=device)
        self.entered: dict[int, Request] = {}
        """Admitted requests by row; the next flush resets these rows."""

    def flush(self) -> None:
        if not self.entered:
            return
        device = self.count_RV.device
        row = upload(list(self.entered), torch.int64, device)
        for table in (self.count_RV, self.biased_RX, self.bias_RX):
            table[row] = 0
        # A request may have lost its row since; the next request of the row overwrites these values.
        for held, request in self.entered.items():
            if request.sampling.logit_bias:
                token, bias = zip(*request.sampling.logit_bias.items(), strict=True)
                self.biased_RX[held, : len(token)] = upload(token, torch.int64, device)
                self.bias_RX[held, : len(bias)] = upload(bias, torch.float32, device)
        text = [(held, token) for held, r in self.entered.items() for token in r.answer]
        if text:
            row_T, token_T = upload(text, torch.int64, device).unbind(1)
            self._add(row_T, token_T, torch.ones_like(token_T))
        self.entered.clear()

    def bias(self, row_B: Tensor) -> Tensor:
        bias_BV = torch.zeros(len(row_B), self.count_RV.shape[1], device=row_B.device)
        return bias_BV.scatter_add_(1, self.biased_RX[row_B], self.bias_RX[row_B])

    def commit(self, row_B: Tensor, token_BD1: Tensor, length_B: Tensor) -> None:
        """Counts committed tokens: accepted draft tokens and the bonus. No host sync."""
        is_new_BD1 = torch.arange(token_BD1.shape[1], device=row_B.device) <= length_B[:, None]
        self._add(row_B[:, None].expand_as(token_BD1).flatten(), token_BD1.flatten(), is_new_BD1.flatten())

    def _add(self, row_T: Tensor, token_T: Tensor, times_T: Tensor) -> None:
        place_T = row_T * self.count_RV.shape[1] + token_T
        self.count_RV.view(-1).scatter_add_(0, place_T, times_T.to(torch.int32))
