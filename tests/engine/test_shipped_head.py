"""The shipped head on its model."""

from __future__ import annotations

import json

import pytest

from benchmarks.ship_head import MAX_BYTES, measured
from jetspec.engine.llm import LLM
from jetspec.models.draft_head import DraftHead
from jetspec.models.head_folder import CARD_FILE
from jetspec.models.hub import DEFAULT_MODEL, shipped_head
from jetspec.models.tensor_files import WEIGHTS_FILE
from jetspec.types import SamplingParams

QUESTION = [{"role": "user", "content": "Tom has 5 apples and buys 7 more. How many apples does he have now?"}]


@pytest.mark.model
def test_shipped_head_is_the_default_and_accepted() -> None:
    llm = LLM(device="cpu", dtype="float32")
    assert llm.drafter == "head" and isinstance(llm.head, DraftHead) and llm.head.edge is not None
    ask = SamplingParams(max_tokens=32)
    fast, plain = llm.chat(QUESTION, ask), llm.with_drafter("none").chat(QUESTION, ask)
    assert fast.token_ids == plain.token_ids
    assert fast.stats.tokens_per_round > 3


def test_shipped_head_is_small_and_has_a_card() -> None:
    folder = shipped_head(DEFAULT_MODEL)
    assert folder is not None and (folder / WEIGHTS_FILE).stat().st_size <= MAX_BYTES
    card = (folder / CARD_FILE).read_text()
    for task in ("gsm8k", "math500", "humaneval", "mbpp", "mt_bench", "alpaca_eval"):
        assert f"| {task} |" in card


def test_card_matches_the_record() -> None:
    counts = {"a": {"chain": 2.0, "64": 3.0}, "b": {"chain": 4.0, "64": 5.0}}
    about = {"dtype": "bfloat16", "limit": 3, "max_tokens": 9, "tree": {"width": 8}, "hardware": {}, "commit": "c0ffee"}
    text = measured(json.loads(json.dumps({**about, "tokens_per_round": counts, "real": {}})))
    assert "| b | 4.00 | 5.00 |" in text and "| mean | 3.00 | 4.00 |" in text and "c0ffee" in text
    assert "Decoding" not in text
