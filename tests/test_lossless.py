"""The real model through the real engine writes what `transformers` writes. `scripts/check_lossless.py` runs the
same comparison on more prompts and settings."""

from __future__ import annotations

import pytest

from jetspec.models.hub import DEFAULT_MODEL
from scripts import check_lossless as check

PROMPTS = [
    "Repeat after me: one two three one two three one two three.",
    "Write a Python function that adds two numbers, then one that subtracts them.",
    "Why is the sky blue?",
]


TOKENS = 8


@pytest.mark.model
def test_every_drafter_writes_what_transformers_writes() -> None:
    model = DEFAULT_MODEL
    target = check.loaded(model, "cpu")
    prompts = [target.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]
    expected = check.transformers_greedy(model, prompts, TOKENS, "cpu", target.eos_tokens)
    for setting in (("none", 1, 3, True), ("ngram", 8, 1, True), ("head", 8, 3, False), ("edge head", 24, 2, True)):
        run = check.check(model, "cpu", prompts, expected, TOKENS, setting)
        assert run["different"] == 0, run
