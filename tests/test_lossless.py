"""The engine generates the greedy text of transformers with the default model. `python -m benchmarks lossless` compares
more prompts and settings."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from benchmarks import engine as check
from jetspec.models.export import save_target
from jetspec.models.hub import DEFAULT_MODEL

PROMPTS = [
    "Repeat after me: one two three one two three one two three.",
    "Write a Python function that adds two numbers, then one that subtracts them.",
    "Why is the sky blue?",
]
TOKENS = 6


@pytest.mark.model
def test_every_drafter_generates_the_text_of_transformers() -> None:
    """transformers reads exported weights, which takes a third of the time of its GGUF reader.

    `tests/models/test_smollm2.py` compares them with the file.
    """
    model = DEFAULT_MODEL
    target = check.loaded(model, "cpu")
    prompts = [target.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]
    with TemporaryDirectory() as folder:
        save_target(target, Path(folder) / "model", torch.float32)
        expected = check.transformers_greedy(f"{folder}/model", prompts, TOKENS, "cpu", target.eos_tokens)
    for setting in (("none", 1, 3, True), ("ngram", 8, 1, True), ("head", 8, 3, False), ("edge head", 24, 2, True)):
        run = check.check_setting(model, "cpu", prompts, expected, TOKENS, setting)
        assert run["different"] == 0, run
