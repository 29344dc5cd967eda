"""The card of the shipped head says what was measured last, and nothing else about it changes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ship_head
from benchmarks.pages import marks


def record(value: float) -> dict[str, Any]:
    row = {"chain": value, "64": value + 1}
    return {
        "commit": "0123456789",
        "hardware": {"cpu": "a CPU"},
        "dtype": "float32",
        "limit": 3,
        "max_tokens": 8,
        "tree": {"width": 8, "shortlist": 256, "draft_temperature": 0.8},
        "tokens_per_round": {"gsm8k": row},
        "real": {"gsm8k": {name: {"tokens_per_round": number} for name, number in row.items()}},
    }


def ship(monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["ship_head", *map(str, args)])
    ship_head.main()


def test_measuring_again_changes_the_card_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, page, found = tmp_path / "head", tmp_path / "page.md", tmp_path / "record.json"
    head.mkdir()
    (head / "README.md").write_text("# A head\n\n## Training\n\nLong.\n\n## Results\n\n9.87\n\n## Origin\n\nHere.\n")
    (head / "model.safetensors").write_bytes(b"weights")
    begin, end = marks("head")
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    for value in (2.5, 4.25):
        found.write_text(json.dumps(record(value)))
        ship(monkeypatch, "--record", found, "--page", page, "--out", head)
    card = (head / "README.md").read_text()
    assert card.startswith("# A head\n\n## Training\n\nLong.\n\n## Origin\n\nHere.\n\n## Tokens per round\n\n")
    assert card.count(ship_head.MEASURED) == 1
    assert card.count("| gsm8k | 4.25 | 5.25 |") == 2 and "2.50" not in card and "a heat of 0.8" in card
    assert "| gsm8k | 4.25 | 5.25 |" in page.read_text() and "old" not in page.read_text()
    assert (head / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("args", [["--weights-only"], ["--record", "r.json", "--prompts", "p"], []])
def test_what_cannot_be_written_without_a_head_is_refused(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        ship(monkeypatch, *args)
