"""Synthesized prompts depend on the settings alone; a killed run resumes; attempts without a prompt are dropped."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import Result

from jetspec.data.config import BUILTIN_FILE, SynthesizeConfig, builtin_prefixes, read_prefixes
from jetspec.data.prompts import Prompt, PromptData
from jetspec.data.rows import Row
from jetspec.data.synthesize import (
    GIVE_UP,
    PromptFile,
    Tally,
    UserTurn,
    around_user_text,
    attempt_number,
    fingerprint,
    read_attempt,
    synthesize,
    write_prompts,
)
from jetspec.data.workers import Answer, Results
from jetspec.models.tokenizer import Tokenizer
from jetspec.settings import read_settings
from jetspec.types import Completion, RoundStats, SamplingParams
from tests.commands.cli import run as run_words
from tests.data.test_regenerate import FakeAnswerer
from tests.train.tiny_model import END_TOKEN, TEMPLATE, byte_tokenizer, write_model

TOKENIZER = byte_tokenizer()
TURN = UserTurn(TOKENIZER, frozenset({END_TOKEN}))
CONFIG = SynthesizeConfig("tiny", prefix=("", "Why is", "List "), max_tokens=12)


def fake_completion(tokens: Sequence[int], sampling: SamplingParams) -> Completion:
    """Few letters and spaces, so that some texts are empty, short, repeated or without an end."""
    pick = random.Random(f"{list(tokens)} {sampling.seed}")
    written = [pick.choice(b"ab  ") for _ in range(pick.randint(0, sampling.token_limit))]
    ends = len(written) < sampling.token_limit
    return Completion("", written + [END_TOKEN] * ends, "stop" if ends else "length", RoundStats())


def start_fake(window: int = 3, config: SynthesizeConfig = CONFIG) -> Answer:
    return partial(synthesize, FakeAnswerer(window, fake_completion), config, TURN)


def write(out: Path, count: int, *starts: Callable[[], Answer], config: SynthesizeConfig = CONFIG) -> Tally:
    return write_prompts(out, count, config, TURN, starts or [partial(start_fake, config=config)])


def written_row(text: str, finish: str = "stop", prefix: str = "", turn: UserTurn = TURN) -> Row:
    """The row of an attempt that wrote `text`, in which control tokens are spelled out."""
    begun, ids = turn.encode_start(prefix), turn.tokenizer.encode(text)
    return Row("invented-s0-000000", [*begun, *ids], [(len(begun), len(begun) + len(ids))], [finish])


def with_template(template: str) -> Tokenizer:
    return Tokenizer(TOKENIZER._backend, template, {"eos_token": "<|im_end|>"})


@pytest.fixture
def no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetspec.data.rows.write_record", lambda path, results: None)


# -- the turn


def test_turn_starts_and_ends_with_the_template() -> None:
    assert TURN.before == "<|im_start|>user\n" and TURN.end_tokens == {END_TOKEN} and TURN.stop == ()
    steered = UserTurn(TOKENIZER, frozenset(), "Be kind.")
    assert steered.before == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"
    assert steered.end_tokens == {END_TOKEN}, "the template names the end of a turn if the model's files do not"
    assert TURN.encode_start("Why") == TOKENIZER.encode("<|im_start|>user\nWhy")


def test_template_without_control_tokens_ends_the_turn_with_text() -> None:
    turn = UserTurn(with_template("[INST] {{ messages[0]['content'] }} [/INST]"), frozenset({END_TOKEN}))
    assert turn.stop == ("[/INST]",) and turn.end_tokens == {END_TOKEN}
    assert turn.encode_start("") == TOKENIZER.encode("[INST]"), "the space belongs to the first word"
    assert turn.encode_start("Sort") == TOKENIZER.encode("[INST] Sort")
    for text in ("Sort [1, 2] now [/INST] Sure", "Sort [1, 2] now<|im_end|>"):
        assert read_attempt(turn, written_row(text, turn=turn), "", set()) == ("Sort [1, 2] now", None)


@pytest.mark.parametrize(
    ("content", "is_shown"),
    [
        ("m['content']", True),
        ("m['content'] | trim", True),
        ("'.'", False),
        ("m['content'] | tojson", False),
        ("m['content'] | upper", False),
        ("m['content'] | replace('\n', ' ')", False),
        ("m['content'] ~ m['content']", False),
    ],
)
def test_template_must_contain_the_user_text_unchanged(content: str, is_shown: bool) -> None:
    tokenizer = with_template(TEMPLATE.replace("m['content']", content))
    if is_shown:
        assert around_user_text(tokenizer, None) == around_user_text(TOKENIZER, None)
    else:
        with pytest.raises(ValueError, match="chat template"):
            around_user_text(tokenizer, None)


@pytest.mark.parametrize(
    ("text", "finish", "prefix", "expected"),
    [
        ("Why is it so?<|im_end|>", "stop", "", ("Why is it so?", None)),
        (" the sky blue?\n<|im_end|>", "stop", "Why is", ("Why is the sky blue?", None)),
        ("Größe, 漢字 und 🙂<|im_end|>", "stop", "", ("Größe, 漢字 und 🙂", None)),
        ("one two", "length", "", ("one two", "unfinished")),
        ("<|im_end|>", "stop", "", ("", "empty")),
        ("\n <|im_end|>", "stop", "Why is", ("Why is", "empty")),
        ("Why?<|im_end|>", "stop", "", ("Why?", "short")),
        (" 1<|im_end|>", "stop", "List", ("List 1", None)),
        ("one <|im_start|>two<|im_end|>", "stop", "", ("", "garbled")),
        ("seen \n before<|im_end|>", "stop", "", ("seen \n before", "repeated")),
    ],
)
def test_unusable_attempts_are_dropped(text: str, finish: str, prefix: str, expected: tuple[str, str | None]) -> None:
    assert read_attempt(TURN, written_row(text, finish, prefix), prefix, {fingerprint("seen before")}) == expected


def test_incomplete_character_is_dropped() -> None:
    row = written_row("one two é")
    assert read_attempt(TURN, replace(row, token_ids=[*row.token_ids[:-1], END_TOKEN]), "", set())[1] == "garbled"


# -- prefixes


def test_builtin_prefixes_are_balanced() -> None:
    prefixes, kinds = builtin_prefixes(), read_settings(BUILTIN_FILE)
    assert set(prefixes[1::2]) == {""} and len(set(prefixes[::2])) == len(prefixes) // 2 == 64
    kind_of = {prefix: kind for kind, group in kinds.items() for prefix in group}
    for start in range(0, len(prefixes), 2 * len(kinds)):
        assert [kind_of[prefix] for prefix in prefixes[start : start + 2 * len(kinds) : 2]] == [*kinds]
    assert all(prefix == prefix.strip(" ") for prefix in prefixes), "a space is part of the next word's token"


def test_prefixes_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prefixes.txt"
    file.write_bytes(b"\xef\xbb\xbfWhy is\n\nList the\n")
    assert read_prefixes(str(file)) == ("Why is", "", "List the")
    assert read_prefixes("none") == ("",) and read_prefixes("builtin") == builtin_prefixes()
    for content in (b"", b"\xff"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="prefixes"):
            read_prefixes(str(file))


def test_prompts_start_with_their_prefixes(tmp_path: Path, no_record: None) -> None:
    write(tmp_path / "p.jsonl", 30)
    for prompt in PromptData((tmp_path / "p.jsonl",)):
        assert isinstance(prompt, Prompt)
        prefix = CONFIG.prefix[attempt_number(prompt.id) % 3]
        assert prompt.turns[0].startswith(prefix.strip()) and len(prompt.turns[0].split()) >= 2


# -- the file


def test_files_of_earlier_releases_resume(tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"
    write(out, 5)
    first, meta = out.read_bytes().splitlines()[0], out.with_name("p.jsonl.meta.json")
    assert first.startswith(b'{"id": "invented-s0-') and json.loads(meta.read_text())["settings"]["openings"]
    assert CONFIG.sampling("invented-s0-000001").seed == 1455213231347089529


@settings(max_examples=20)
@given(window=st.integers(1, 12), count=st.integers(1, 25))
def test_file_does_not_depend_on_batch_and_processes(
    tmp_path_factory: pytest.TempPathFactory, window: int, count: int
) -> None:
    folder = tmp_path_factory.mktemp("prompts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jetspec.data.rows.write_record", lambda path, results: None)
        write(folder / "whole.jsonl", 25)
        tally = write(folder / "part.jsonl", count, partial(start_fake, window))
        part, whole = ((folder / f"{name}.jsonl").read_bytes() for name in ("part", "whole"))
        assert tally.kept == count == part.count(b"\n") and whole.startswith(part)
        assert write(folder / "part.jsonl", 25, partial(start_fake, window)).already == count
        assert (folder / "part.jsonl").read_bytes() == whole


def test_prompts_are_unique_and_drops_are_counted(tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"
    tally = write(out, 150)
    texts = [" ".join(json.loads(line)["turns"][0].split()) for line in out.open()]
    assert len(set(texts)) == len(texts) == 150
    assert tally.dropped.keys() == {"unfinished", "empty", "short", "repeated"}
    assert f"{tally.dropped.total()} dropped ({tally.reasons})" in tally.summary(tmp_path)
    record = json.loads((tmp_path / "p.jsonl.meta.json").read_text())
    assert record["runs"][0]["dropped"] == dict(tally.dropped) and record["settings"]["openings"] == [*CONFIG.prefix]


def test_run_without_new_prompts_ends(tmp_path: Path, no_record: None) -> None:
    out, greedy = tmp_path / "out.jsonl", replace(CONFIG, prefix=("",))

    def same_again(attempts: Iterator[Any]) -> Results:
        for attempt in attempts:
            yield replace(written_row("one two<|im_end|>"), id=attempt.id)

    with pytest.raises(ValueError, match=rf"{GIVE_UP} repeated"):
        write(out, 2, lambda: same_again, config=greedy)
    assert PromptFile(out, {}, writes=False).num_rows == 1


# -- the command, with a real engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, made to write letters and spaces until it ends the turn."""
    folder = write_model(tmp_path_factory.mktemp("model") / "tiny")
    weights = load_file(folder / "model.safetensors")
    used = torch.zeros(len(weights["lm_head.weight"]), 1)
    used[[*b"abcdefgh ", END_TOKEN]] = 5.0
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"] * used}, folder / "model.safetensors")
    return folder


def run(model: Path, out: Path, *more: str) -> Result:
    named = ["--model", str(model), "--out", str(out), "--max-tokens", "60", "--device", "cpu"]
    return run_words("data", "synthesize", *named, *more)


def test_engine_prompts_do_not_depend_on_the_batch(model: Path, tmp_path: Path) -> None:
    outs = [tmp_path / f"{batch}.jsonl" for batch in ("1", "5")]
    for out in outs:
        result = run(model, out, "--count", "3", "--batch", out.stem)
        assert result.exit_code == 0, result.output
        assert "3 prompts synthesized, 0 already there" in result.stdout
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert "3 already there" in run(model, outs[0], "--count", "3").stdout


def test_dry_run_writes_nothing(model: Path, tmp_path: Path) -> None:
    result = run(model, tmp_path / "out.jsonl", "--count", "9", "--system", "Be kind.", "--dry-run")
    assert "would synthesize 9 prompts" in result.stdout and "Be kind.<|im_end|>" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_model_without_chat_template_is_refused(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(model, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    result = run(folder, tmp_path / "out.jsonl", "--count", "2")
    assert result.exit_code == 2 and "no chat template" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.model
def test_published_model_writes_questions(tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"
    options = ["--count", "2", "--prefix", "What is the", "--max-tokens", "60", "--device", "cpu"]
    assert run_words("data", "synthesize", "--out", str(out), *options).exit_code == 0
    assert all(json.loads(line)["turns"][0].startswith("What is the ") for line in out.open())
