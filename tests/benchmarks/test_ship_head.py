"""The card of the shipped head holds the last measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ship_head import MEASURED
from tests.benchmarks.tiny_bench import invoke


def record(value: float) -> dict[str, Any]:
    row = {"chain": value, "64": value + 1}
    return {
        "commit": "0123456789",
        "hardware": {"cpu": "a CPU"},
        "dtype": "float32",
        "limit": 3,
        "max_tokens": 8,
        "tree": {"width": 8, "shortlist": 256, "heat": 0.8},
        "tokens_per_round": {"gsm8k": row},
        "real": {"gsm8k": {name: {"tokens_per_round": number} for name, number in row.items()}},
    }


def test_measuring_again_changes_the_card_alone(tmp_path: Path) -> None:
    head, found = tmp_path / "head", tmp_path / "record.json"
    head.mkdir()
    (head / "README.md").write_text("# A head\n\n## Training\n\nLong.\n\n## Results\n\n9.87\n\n## Origin\n\nHere.\n")
    (head / "model.safetensors").write_bytes(b"weights")
    for value in (2.5, 4.25):
        found.write_text(json.dumps(record(value)))
        assert invoke("ship-head", "--record", found, "--out", head).exit_code == 0
    card = (head / "README.md").read_text()
    assert card.startswith("# A head\n\n## Training\n\nLong.\n\n## Origin\n\nHere.\n\n## Tokens per round\n\n")
    assert card.count(MEASURED) == 1 and card.count("| gsm8k | 4.25 | 5.25 |") == 2 and "2.50" not in card
    assert "draft temperature of 0.8" in card and (head / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("args", [["--weights-only"], ["--record", "r.json", "--prompts", "p"], []])
def test_a_card_needs_a_head_or_a_record(args: list[str]) -> None:
    assert invoke("ship-head", *args).exit_code == 2
