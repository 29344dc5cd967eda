"""At temperature 1, through vLLM's API, text from trees follows the target's distribution."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs an environment with vLLM; make test-vllm makes one")

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from jetspec.tree import DraftTree
from jetspec.types import TreeBatch
from jetspec_vllm.drafter import TreeDrafter
from tests.jetspec_vllm.cpu import counted, generate, start
from tests.jetspec_vllm.tiny import BLOCK, random_prompts, write_head, write_target

pytestmark = pytest.mark.vllm

PROMPT = random_prompts((9,))[0]
WIDTH, DRAWS = 2, 280

Law = dict[tuple[int, ...], float]


class Following:
    """Target's two most probable tokens after a text, with renormalized probabilities."""

    def __init__(self, folder: str) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.known: dict[tuple[int, ...], dict[int, float]] = {}

    def __call__(self, text: tuple[int, ...]) -> dict[int, float]:
        if text not in self.known:
            with torch.no_grad():
                best = self.model(torch.tensor([PROMPT + list(text)])).logits[0, -1].topk(WIDTH)
            self.known[text] = dict(zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True))
        return self.known[text]

    def law(self, length: int) -> Law:
        """Probabilities of all texts of a length."""
        law: Law = {(): 1.0}
        for _ in range(length):
            law = {(*text, token): p * q for text, p in law.items() for token, q in self(text).items()}
        return law


def excess(found: Counter[tuple[int, ...]], law: Law) -> float:
    """Standard deviations of the chi-square statistic above its mean."""
    draws = found.total()
    statistic = sum((found[text] - draws * p) ** 2 / (draws * p) for text, p in law.items())
    return float((statistic - (len(law) - 1)) / (2 * (len(law) - 1)) ** 0.5)


def test_three_tokens_follow_the_target_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token comes from prefill, the second is a tree node, the third follows that node."""
    target = str(write_target(tmp_path / "target", sharpness=3.0))
    following = Following(target)

    def guess(
        drafter: Any, block: TreeBatch, anchor_B: torch.Tensor, temperature_B: torch.Tensor, cache: Any
    ) -> DraftTree:
        rows = []
        for anchor, length in zip(anchor_B.tolist(), block.layout.cached_len_B.tolist(), strict=True):
            children = list(following((anchor,))) if length == len(PROMPT) else [1, 2]
            rows.append([anchor, *children, *range(3, BLOCK)])
        token = torch.tensor(rows)
        parent = torch.tensor([0, 0, 0, *[1] * (BLOCK - 3)]).expand(len(rows), -1)
        return DraftTree.from_parents(token, parent, torch.full((len(rows),), BLOCK), drafter.depth)

    monkeypatch.setattr(TreeDrafter, "guess", guess)
    more: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 192, "disable_log_stats": False}
    trees = start(target, str(write_head(tmp_path / "head")), budget=BLOCK, **more)
    drawn = generate(trees, [PROMPT] * DRAWS, 3, temperature=1.0, top_k=WIDTH)
    law, found = following.law(3), Counter(map(tuple, drawn))
    assert set(found) <= set(law), "something was drawn that is not among the best"
    assert excess(found, law) < 4
    assert counted(trees)["num_accepted_tokens"] >= 0.99 * DRAWS, "the trees hold what is drawn: it must be accepted"
    even = dict.fromkeys(product(*[range(WIDTH)] * 3), 1 / WIDTH**3)
    assert excess(Counter(dict(zip(even, found.values(), strict=False))), even) > 10, "the law is too even to be tested"
