"""Teacher-forced rounds equal the engine's; ranks, gaps and depths are counted correctly."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from jetspec.commands.app import app
from jetspec.commands.eval_head import _draw, draw_reliability
from jetspec.config import EngineConfig, TreeConfig
from jetspec.data.answers import Answerer, decode
from jetspec.data.corpus import Document, PackedData, answer_spans
from jetspec.data.prompts import Prompt, find_tasks, read_questions
from jetspec.engine.engine import Engine
from jetspec.models.choices import ChoiceFits
from jetspec.models.decoder import Decoder
from jetspec.models.draft_head import DraftHead
from jetspec.models.heads import Head
from jetspec.train import evaluate
from jetspec.train.blocks import choose_anchors, document_mask, lay_out
from jetspec.train.choices import SETTINGS, Reliability
from jetspec.train.config import LossConfig
from jetspec.train.evaluate import ABSENT, BEYOND, HeadScore, make_trees, score_head
from jetspec.train.loss import HeadWithLoss
from jetspec.types import Completion, RoundTrace, SamplingParams
from tests.engine.tiny import VOCAB, make_engine, plain, run, tiny_decoder, tiny_eagle3, tiny_head, tiny_peagle
from tests.models.paged import run_decoder
from tests.train.test_blocks import decoded_states

BUDGETS = ("chain", "3", "40")
PROMPTS = [[5], [7, 11, 3], [9, 9, 30, 2, 17, 8], [4, 40, 22, 13]]
LENGTHS = (1, 9, 24, 25)
TRAINING_STEPS = 12


@cache
def trained_pair(edge: bool, causal: bool) -> tuple[Decoder, DraftHead]:
    """A random target, and a head trained on its text until about half of its drafts are correct."""
    target = tiny_decoder()
    head = tiny_head(target, edge=edge, causal=causal).requires_grad_(True)
    data = PackedData(documents_of(target, PROMPTS, LENGTHS), 64, seed=0)
    batch = data.batch(0, data.rows_per_pass)
    drafts = lay_out(batch, *choose_anchors(batch, 64, torch.Generator()), head.head_config)
    seen = target.forward_dense(batch.token_RT, batch.position_RT, document_mask(batch), head.head_config.tap_layers)
    optimizer, loss = torch.optim.Adam(head.parameters(), lr=0.01), HeadWithLoss(head, LossConfig(kind="sft"))
    for _ in range(TRAINING_STEPS):
        optimizer.zero_grad()
        loss(target, batch, drafts, seen).loss_sum.backward()
        optimizer.step()
    return target, head.requires_grad_(False)


def documents_of(target: Decoder, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Document]:
    documents = []
    for prompt, length in zip(prompts, lengths, strict=True):
        written = plain(target, [prompt], SamplingParams(max_tokens=length))[0]
        tokens = np.array([*prompt, *written])
        documents.append(Document(tokens, np.arange(len(tokens)) >= len(prompt)))
    return documents


def engine_rounds(target: Decoder, head: DraftHead, tree: TreeConfig) -> list[list[int]]:
    engine = make_engine(target, "head", head, tree, EngineConfig(page_size=4))
    done = run(engine, PROMPTS, [SamplingParams(max_tokens=n) for n in LENGTHS])
    return [completion.stats.accepted_lengths for completion in done]


@pytest.mark.parametrize(
    ("causal", "edge", "changes"),
    [
        (True, True, {}),
        (True, False, {"expand": "paper"}),
        (False, True, {"expand": "paper"}),
        (False, False, {}),
        (True, True, {"width": 3, "depth": 3, "score": "entropy", "shortlist": 0}),
        (True, True, {"width": 3, "depth": 3, "score": "hybrid", "entropy_weight": 0.5, "shortlist": 0}),
    ],
)
def test_teacher_forced_rounds_equal_the_engine(
    causal: bool, edge: bool, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = trained_pair(edge, causal)
    tree = TreeConfig(**{"width": 4, "shortlist": 12, **changes})
    depth = head.head_config.draft_depth(tree.depth)
    monkeypatch.setattr(evaluate, "MAX_FLOATS", 11 * VOCAB * depth)  # several batches of anchors
    score = score_head(target, head, documents_of(target, PROMPTS, LENGTHS), BUDGETS, tree)
    for name, setting in make_trees(BUDGETS, tree, depth).items():
        assert score.rounds[name] == engine_rounds(target, head, setting), name
        assert sum(len(rounds) + sum(rounds) for rounds in score.rounds[name]) == sum(LENGTHS)
    assert max(max(rounds) for rounds in score.rounds["chain"]) <= depth
    assert 1.3 < score.tokens_per_round["chain"] < score.tokens_per_round["40"] < 5


def test_end_token_ends_the_last_round() -> None:
    target, head = trained_pair(edge=True, causal=True)
    prompt = PROMPTS[2]
    free = plain(target, [prompt], SamplingParams(max_tokens=24))[0]
    end = free[len(free) // 2]
    tree = TreeConfig(budget=16, width=4, ngrams=False)
    engine = make_engine(target, "head", head, tree, eos_tokens=frozenset({end}))
    done = run(engine, [prompt], SamplingParams(max_tokens=24))[0]
    assert done.finish_reason == "stop"
    tokens = np.array(prompt + done.token_ids)
    document = Document(tokens, np.arange(len(tokens)) >= len(prompt))
    assert score_head(target, head, [document], ("16",), TreeConfig(width=4)).rounds["16"] == [
        done.stats.accepted_lengths
    ]


def test_two_answers_in_one_text_score_like_two_texts() -> None:
    target, head = trained_pair(edge=True, causal=False)
    first = documents_of(target, [PROMPTS[1]], [9])[0]
    question = [*first.tokens.tolist(), 6, 31]
    second = documents_of(target, [question], [12])[0]
    written = second.written.copy()
    written[: len(first.tokens)] = first.written
    both = Document(second.tokens, written)
    assert answer_spans(both) == [(3, 12), (14, 26)]
    joint, apart = (score_head(target, head, d, BUDGETS, TreeConfig(width=4)) for d in ([both], [first, second]))
    assert joint.rounds == apart.rounds
    assert joint.rank_AD.tolist() == apart.rank_AD.tolist()


def test_gap_is_the_difference_of_logprobs() -> None:
    """Recomputes the gap at every anchor of a short answer from the head's argmax chain and a fresh target pass."""
    target, head = trained_pair(edge=False, causal=True)
    document = documents_of(target, [PROMPTS[1]], [8])[0]
    score = score_head(target, head, [document], ("16",), TreeConfig(width=4), num_gaps=1000)
    gaps = []
    with torch.inference_mode():
        for anchor in range(2, 10):
            length = min(head.head_config.depth, 10 - anchor)
            logq = target.logits(decoded_states(target, head, document.tokens[: anchor + 1].tolist())).log_softmax(-1)
            best, path = logq.max(-1)
            logits, _ = run_decoder(target, [*document.tokens[: anchor + 1].tolist(), *path.tolist()])
            logp = logits.log_softmax(-1)[anchor:-1].gather(1, path[:, None])[:, 0]
            gaps.append(float((best - logp)[:length].sum()))
    torch.testing.assert_close(score.gap_A, torch.tensor(gaps), rtol=1e-3, atol=1e-3)


def test_depth_counts_by_hand() -> None:
    rank = torch.tensor([[0, 0, 1], [0, 2, 0], [3, 0, 0], [ABSENT, 0, 0], [0, BEYOND, BEYOND]])
    score = HeadScore({"16": [[2, 1]]}, rank, torch.tensor([6.0, -2.0, 1.0, -7.0]), width=3)
    depths = score.depths()
    assert depths["anchors"] == [5, 4, 4]
    assert depths["hit"] == [3 / 5, 3 / 4, 3 / 4]
    assert depths["hit_on_path"] == [3 / 5, 1 / 2, 0]
    assert depths["hit_below_sibling"] == [None, None, 1]  # rank 3 is outside the width
    assert depths["in_best"]["4"] == [4 / 5, 1, 1]
    assert score.top_path()["hit_on_path"] == 1 / 3
    assert score.top_path()["near_frac"] == 1 / 2
    assert score.top_path()["gaps_nats"] == [6.0, -2.0, 1.0, -7.0]
    assert score.tokens_per_round == {"16": 2.5}


class Chatter:
    """An LLM of tiny models with letters as tokens."""

    model_name, max_prompt_tokens = "tiny", 200
    config = EngineConfig(max_batch=3)
    head_name: str | None = None

    def __init__(self, target: Decoder, head: Head | None = None, tree: TreeConfig | None = None) -> None:
        self.target, self.head, self.tree = SimpleNamespace(decoder=target), head, tree
        self.tokenizer, self.num_calls = self, 0

    def with_drafter(self, drafter: str, tree: TreeConfig | None = None) -> Chatter:
        return Chatter(self.target.decoder, self.head if drafter == "head" else None, tree)

    @property
    def engine(self) -> Engine:
        return make_engine(self.target.decoder, "head", self.head, self.tree)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [ord(letter) % VOCAB for message in messages for letter in f"{message['role'][0]}{message['content']}"]

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, progress: bool = False
    ) -> list[Completion]:
        self.num_calls += 1
        engine = make_engine(self.target.decoder, "head" if self.head else "none", self.head, self.tree)
        done = run(engine, prompts, sampling)
        return [replace(c, text="".join(chr(97 + t) for t in c.token_ids)) for c in done]


def answerer(chatter: Chatter, max_prompt_tokens: int = 200) -> Answerer:
    return Answerer(chatter, chatter, "tiny", max_prompt_tokens, VOCAB, max_tokens=10)


ASKED = [Prompt("a", ["hello", "and then?"], [], None, ""), Prompt("b", ["why"], [], None, "")]


def test_answers_are_cached_and_decoded_identically(tmp_path: Path) -> None:
    target, head = trained_pair(edge=True, causal=True)
    chatter = Chatter(target)
    documents = answerer(chatter).answers("task", ASKED, tmp_path / "answers")
    assert [len(document.tokens) - int(document.written.sum()) for document in documents] == [6, 4, 6 + 11 + 10]
    calls = chatter.num_calls
    again = answerer(chatter).answers("task", ASKED, tmp_path / "answers")
    assert chatter.num_calls == calls
    assert [d.tokens.tolist() for d in again] == [d.tokens.tolist() for d in documents]
    answerer(chatter).answers("task", ASKED[:1], tmp_path / "answers")
    assert chatter.num_calls > calls, "other questions need other answers"

    tree = TreeConfig(budget=16, width=4, ngrams=False)
    real = decode(Chatter(target, head, tree), documents, max_tokens=10)
    forced = score_head(target, head, documents, ("16",), tree)
    assert real.same_frac == 1
    assert real.tokens_per_round == pytest.approx(forced.tokens_per_round["16"])


def test_turns_beyond_the_context_are_left_out_and_questions_refused() -> None:
    chatter = Chatter(trained_pair(edge=True, causal=True)[0])
    assert len(answerer(chatter, max_prompt_tokens=20).answers("task", ASKED, None)) == 2
    asked = [Prompt("a", ["why"], [], None, "quiz.jsonl:1"), Prompt("b", ["why"], [], "be brief", "quiz.jsonl:2")]
    calls = chatter.num_calls
    with pytest.raises(ValueError, match=r"quiz\.jsonl:2"):
        answerer(chatter, max_prompt_tokens=12).answers("task", asked, None)
    assert chatter.num_calls == calls
    assert len(answerer(chatter, max_prompt_tokens=13).answers("task", asked, None)) == 2


def test_questions_are_checked(tmp_path: Path) -> None:
    good = {"id": 7, "turns": ["why"]}
    turns = ("[]", '[" "]', "[3]")
    for bad in ("{", '{"id": 1}', r'{"id": "\ud800", "turns": ["a"]}', *(f'{{"id": 1, "turns": {t}}}' for t in turns)):
        (tmp_path / "quiz.jsonl").write_text(f"{json.dumps(good)}\n{bad}\n")
        assert [q.turns for q in read_questions(tmp_path / "quiz.jsonl", 1)] == [["why"]]
        with pytest.raises(ValueError, match=r"quiz\.jsonl:2"):
            read_questions(tmp_path / "quiz.jsonl", 2)
    (tmp_path / "quiz.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="quiz"):
        read_questions(tmp_path / "quiz.jsonl", 2)
    assert list(find_tasks(tmp_path, None)) == ["quiz"]
    with pytest.raises(ValueError, match="quiz"):
        find_tasks(tmp_path, ["test"])
    with pytest.raises(ValueError, match="nowhere"):
        find_tasks(tmp_path / "nowhere", None)


def test_backup_files_are_not_tasks(tmp_path: Path) -> None:
    for name in ("quiz.jsonl", "quiz.jsonl.gz", "quiz.jsonl.bak", "quiz.jsonl~"):
        (tmp_path / name).touch()
    assert find_tasks(tmp_path, None) == {"quiz": tmp_path / "quiz.jsonl"}


def test_budgets_are_numbers_or_chain() -> None:
    assert make_trees(["chain"], TreeConfig(), reach=15)["chain"] == TreeConfig(width=1, budget=16, ngrams=False)
    assert make_trees(["chain"], TreeConfig(depth=4), reach=15)["chain"].budget == 5
    for bad in ("many", "", "0"):
        with pytest.raises(ValueError, match="budget"):
            make_trees([bad], TreeConfig(), reach=15)


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of questions, with a tiny LLM in place of the one that the command loads."""

    def load(model: str, head: str | None = None, **options: Any) -> Chatter:
        target, trained = trained_pair(edge=True, causal=True)
        heads: dict[str | None, Head | None] = {None: None, "eagle3": tiny_eagle3(target)}
        heads["peagle"] = tiny_peagle(target)
        llm = Chatter(target, heads.get(head, trained))
        llm.head_name = head
        return llm

    monkeypatch.setitem(sys.modules, "jetspec.engine.llm", SimpleNamespace(LLM=load))
    monkeypatch.setattr("jetspec.commands.options.check_name", lambda name: None)
    folder = tmp_path / "questions"
    folder.mkdir()
    for task in ("chat", "quiz"):
        rows = [{"id": f"{task}-{c.id}", "turns": c.turns} for c in ASKED]
        (folder / f"{task}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def command(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(
        app, ["eval-head", "--data-dir", str(folder), "-n", "12", "--set", "tree.width=4", *words]
    )


@pytest.mark.parametrize("head", ["mine", "eagle3", "peagle"])
def test_command_reports_both_numbers_and_they_agree(head: str, data_dir: Path, tmp_path: Path) -> None:
    record, words = tmp_path / "results" / "mine.json", ("--set", "tree.shortlist=9", "--json")
    result = command(data_dir, "--head", head, "--budgets", "chain,16", *words, "--out", str(record))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (
        found["head"] == head
        and found["tree"]["shortlist"] == 9
        and found["tokens_per_round"].keys() == {"chat", "quiz"}
    )
    for task, row in found["tokens_per_round"].items():
        assert row.keys() == {"chain", "16"}
        for budget, value in row.items():
            assert value == pytest.approx(found["real"][task][budget]["tokens_per_round"])
            assert found["mean"][budget] == pytest.approx(value), "both tasks ask the same"
        assert found["details"][task]["answers"] == 3
    written = json.loads(record.read_text())
    assert found.items() <= written.items() and "commit" in written
    assert len(list((tmp_path / "results" / "answers").iterdir())) == 2


def test_table_shows_tasks_and_budgets(data_dir: Path) -> None:
    result = command(data_dir, "--head", "mine", "--tasks", "quiz", "--budgets", "16,7")
    assert result.exit_code == 0, result.output
    assert all(word in result.stdout for word in ("quiz", "tree 16", "tree 7", "the same text as plain", "100.0%"))
    assert "chat" not in result.stdout


def test_choice_model_is_fitted_stored_and_compared(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    monkeypatch.setattr("jetspec.commands.eval_head.SAMPLED_TOKENS", 6)
    monkeypatch.setattr("jetspec.train.choices.SETTINGS", SETTINGS[:2])
    words = ("--tasks", "quiz", "--budgets", "16", "--no-real", "--choices")
    result = command(data_dir, "--head", str(folder), *words, "fit", "--json")
    assert result.exit_code == 0, result.output
    assert len(ChoiceFits.read(folder).fits) == 2
    sampled = json.loads(result.stdout)["sampled"]
    assert len(sampled) == 3 and all(min(row["without"], row["with"]) >= 1 for row in sampled.values())
    for row in sampled.values():
        count, predicted, taken = (
            np.array(row["reliability"][f"{name}_G10"]) for name in ("count", "predicted", "taken")
        )
        assert count.sum() > 0 and (predicted <= count).all() and (taken <= count).all()
        assert (predicted >= count * np.arange(10) / 10 - 1e-6).all(), "each node is in the decile of its probability"
    record = tmp_path / "record.json"
    shown = command(data_dir, "--head", str(folder), *words, "check", "--out", str(record)).stdout
    assert "predicted and chosen" in shown
    assert sampled.keys() == json.loads(record.read_text())["sampled"].keys()
    if importlib.util.find_spec("matplotlib"):
        ElementTree.parse(tmp_path / "record_choices.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _draw(sampled, tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists(), "nothing is drawn without the package"


def test_picture_holds_the_numbers_of_the_record() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    trace = RoundTrace([0, 1, 2, 3], [0, 0, 0, 1], [0.0, math.log(0.75), math.log(0.25), math.log(0.375)], [0, 1, 3], 4)
    traces = [trace, replace(trace, path=[0, 1]), replace(trace, path=[0])]
    axes = figure.subplots()
    draw_reliability(Reliability.of(traces).to_dict(), axes)
    first, second, *others = [line.get_xydata() for line in axes.lines[1:]]
    assert np.allclose(first, [(0.25, 0), (0.75, 2 / 3)]) and np.allclose(second, [(0.5, 0.5)])
    assert not any(map(len, others)) and 2 + len(others) == len(axes.get_legend_handles_labels()[1])


def test_questions_of_all_tasks_are_checked_first(data_dir: Path) -> None:
    (data_dir / "quiz.jsonl").write_text(json.dumps({"turns": ["why" * 100]}))
    result = command(data_dir, "--head", "mine", "--budgets", "16")
    assert result.exit_code == 2
    assert "quiz.jsonl:1" in result.stderr and "301" in result.stderr
    assert "answers to" not in result.stderr


def test_screen_counts_turns_beyond_the_context(data_dir: Path) -> None:
    (data_dir / "quiz.jsonl").write_text(json.dumps({"turns": ["why", "why" * 70]}))
    result = command(data_dir, "--head", "mine", "--tasks", "quiz", "--budgets", "16", "--no-real")
    assert result.exit_code == 0 and "outgrow the context: 1" in " ".join(result.stderr.split())


def test_results_are_shown_before_they_are_written(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jetspec.record.write_record", full)
    words = ("--head", "mine", "--tasks", "quiz", "--budgets", "16", "--no-real", "--out", str(data_dir / "x.json"))
    result = command(data_dir, *words)
    assert result.exit_code == 2 and "No space left" in result.stderr and "tree 16" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--head", "mine", "--out", "/"], "/ is a folder"),
        (["--head", "mine", "--budgets", "chain,big"], "'big'"),
        (["--head", "mine", "--tasks", "maths"], "there is no task 'maths'"),
        ([], "give one with --head"),
        (["--head", "eagle3", "--set", "tree.expand=paper"], "ranks by probability"),
    ],
)
def test_the_command_refuses_in_one_line(data_dir: Path, words: list[str], message: str) -> None:
    result = command(data_dir, *words)
    assert result.exit_code == 2
    assert message in result.stderr.splitlines()[-1]
