"""The best tokens against the full log-softmax."""

from __future__ import annotations

import torch

from jetspec.ops import topk_logprob


def test_topk_logprob_is_the_best_of_the_full_log_softmax() -> None:
    logits = torch.randn(2, 3, 50) * 4
    token, logprob = topk_logprob(logits, 7)
    expected, order = logits.log_softmax(-1).sort(descending=True)
    assert torch.equal(token, order[..., :7])
    torch.testing.assert_close(logprob, expected[..., :7])
