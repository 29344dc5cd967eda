"""The two speed formulas of speculative decoding, fitted to histograms of accepted lengths.

Both assume that every draft token is accepted with the same probability `alpha`, at any depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def expected_tokens(alpha: float, length: float) -> float:
    """Equation 1: tokens of a round whose draft is a chain of `length` tokens."""
    return length + 1 if alpha >= 1 else (1 - alpha ** (length + 1)) / (1 - alpha)


def expected_speedup(alpha: float, length: float, cost: float) -> float:
    """Equation 2: speedup over plain decoding. `cost` is that of drafting one token, in target passes."""
    return expected_tokens(alpha, length) / (length * cost + 1)


def fit_alpha(accepted: Sequence[int]) -> float:
    """The most likely `alpha`: a round has seen a success per accepted draft, and a failure unless all were."""
    kept = sum(length * rounds for length, rounds in enumerate(accepted))
    failed = sum(accepted[:-1])
    return kept / (kept + failed) if kept + failed else 0.0


def reach_shares(accepted: Sequence[int]) -> list[float]:
    """Share of rounds that keep at least 1, 2, .. drafts."""
    total = sum(accepted)
    at_least = list(accumulate(reversed(accepted)))[::-1]
    return [rounds / total for rounds in at_least[1:]]


def tokens_when_cut(accepted: Sequence[int]) -> list[float]:
    """Tokens per round had every draft been cut at depth 0, 1, ..: drafts beyond it are lost, all else stays."""
    return list(accumulate(reach_shares(accepted), initial=1.0))


def implied_cost(tokens_per_round: float, speedup: float, length: int) -> float:
    """The `cost` of equation 2 at which a round of so many tokens gives this speedup."""
    return (tokens_per_round / speedup - 1) / length
