"""Recipes that contradict their target, data or start are refused, with the setting named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec.files import NAMED
from jetspec.models.decoder import Decoder, on_meta
from jetspec.models.draft_head import DraftHead
from jetspec.models.heads import load_any_head, save_any_head
from jetspec.train.config import HeadShape, TrainConfig
from jetspec.train.run import make_trainer, start_head
from tests.engine.tiny import tiny_decoder
from tests.models.peers import Peer

TARGET = tiny_decoder()
MASK = TARGET.config.vocab_size - 1
SHAPE = HeadShape(num_layers=2, block_size=5, tap_layers=(0, 1), mask_token=MASK, inner_size=24)


def write_rows(path: Path, ids: Sequence[str], length: int = 20) -> str:
    """Writes rows whose first token is the number of their prompt."""
    rows = [{"id": id, "token_ids": [i, *[5] * length], "spans": [[1, 1 + length]]} for i, id in enumerate(ids)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def recipe(tmp_path: Path, *data: str, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        data=data, out=str(tmp_path / "out"), head=SHAPE, rows=1, row_len=32, validation_rows=2, dtype="float32"
    )
    return replace(config, **changes)


def test_validation_prompts_are_held_out_of_all_files(tmp_path: Path) -> None:
    ids = [f"p{i}" for i in range(30)]
    files = [write_rows(tmp_path / f"{name}.jsonl", ids) for name in ("greedy", "sampled")]
    trainer = make_trainer(recipe(tmp_path, *files), TARGET)
    assert trainer.validation is not None
    held = {int(document.tokens[0]) for document in trainer.validation.documents()}
    assert held and not held & {int(document.tokens[0]) for document in trainer.data.documents}


def test_single_prompt_cannot_be_held_out(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", ["p"])
    with pytest.raises(ValueError, match="validation_rows"):
        make_trainer(recipe(tmp_path, file), TARGET)
    trainer = make_trainer(recipe(tmp_path, file, validation_rows=0), TARGET)
    assert trainer.validation is None and len(trainer.data.documents) == 1


@pytest.mark.parametrize("count", [0, NAMED, NAMED + 1])
def test_cut_rows_are_listed_at_every_start(count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message refers to the list only if it does not name all rows. An empty list is not written."""
    listed = tmp_path / "listed.txt"
    listed.write_text("of another start\n")
    good = write_rows(tmp_path / "good.jsonl", [f"p{i}" for i in range(12)])
    long = write_rows(tmp_path / "long.jsonl", [f"q{i}" for i in range(count)], length=40)
    make_trainer(recipe(tmp_path, good, long), TARGET, listed=listed)
    expected = [f"{long}:{line} cut: longer than row_len 32" for line in range(1, count + 1)]
    assert (listed.read_text().splitlines() if listed.exists() else []) == expected
    assert listed.exists() == (count > 0)
    assert (f"all of them are listed in {listed}\n" in capsys.readouterr().err) == (count > NAMED)


def test_mask_token_in_the_data_is_refused(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [f"p{i}" for i in range(12)])
    config = recipe(tmp_path, file, head=replace(SHAPE, mask_token=3))
    with pytest.raises(ValueError, match=r"mask token 3 .*a\.jsonl:4"):
        make_trainer(config, TARGET)
    trainer = make_trainer(replace(config, on_bad="skip", validation_rows=0), TARGET)
    assert len(trainer.data.documents) == 11


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token": None}, "head.mask_token is not set"),
        ({"mask_token": MASK + 1}, f"head.mask_token is {MASK + 1}"),
        ({"tap_layers": (0, 99)}, r"head.tap_layers is \[0, 99\]"),
        ({"tap_layers": None, "num_layers": 9}, "head.tap_layers would be"),
    ],
)
def test_head_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    target = tiny_decoder(layers=2)
    with pytest.raises(ValueError, match=message):
        start_head(recipe(tmp_path, "a", head=replace(SHAPE, **changes)), target)


@pytest.fixture
def finished(tmp_path: Path) -> str:
    save_any_head(start_head(recipe(tmp_path, "a"), TARGET), tmp_path / "head")
    return str(tmp_path / "head")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", 3),
        ("block_size", 8),
        ("causal", False),
        ("shifted", True),
        ("edge_gate", "none"),
        ("conv_taps", 2),
        ("tap_layers", (0,)),
        ("mask_token", 3),
        ("inner_size", 40),
    ],
)
def test_settings_that_contradict_the_start_are_refused(tmp_path: Path, finished: str, name: str, value: Any) -> None:
    for head in (SHAPE, HeadShape()):
        start_head(recipe(tmp_path, "a", start=finished, head=head), TARGET)
    with pytest.raises(ValueError, match=rf"head\.{name}"):
        start_head(recipe(tmp_path, "a", start=finished, head=replace(SHAPE, **{name: value})), TARGET)


def test_edge_term_is_added_or_kept(tmp_path: Path, finished: str) -> None:
    added = start_head(recipe(tmp_path, "a", start=finished, head=HeadShape(edge_rank=4), train_only_edge=True), TARGET)
    assert isinstance(added, DraftHead) and added.head_config.edge is not None and added.head_config.edge.rank == 4
    for name, value in load_any_head(finished, TARGET.config, dtype=torch.float32).named_parameters():
        assert torch.equal(added.get_parameter(name), value), name
    save_any_head(added, tmp_path / "edged")
    config = recipe(tmp_path, "a", start=str(tmp_path / "edged"), head=HeadShape())
    again = start_head(config, TARGET)
    assert isinstance(again, DraftHead) and again.edge is not None
    with pytest.raises(ValueError, match=r"head\.edge_rank is 8, but 4"):
        start_head(replace(config, head=HeadShape(edge_rank=8)), TARGET)


def test_head_with_parts_that_are_not_trained_is_refused(tmp_path: Path) -> None:
    Peer.make("dspark", markov_rank=6, markov_head_type="gated").save(tmp_path)
    config = replace(TARGET.config, vocab_size=37, hidden_size=16, num_layers=6)
    with pytest.raises(ValueError, match="path"):
        start_head(recipe(tmp_path, "a", start=str(tmp_path), head=HeadShape()), on_meta(Decoder, config))


def test_row_holds_a_block_of_the_start(tmp_path: Path) -> None:
    save_any_head(start_head(recipe(tmp_path, "a", head=replace(SHAPE, block_size=20)), TARGET), tmp_path / "head")
    config = recipe(tmp_path, "a", start=str(tmp_path / "head"), head=HeadShape(), row_len=20)
    with pytest.raises(ValueError, match="row_len 20"):
        start_head(config, TARGET)
