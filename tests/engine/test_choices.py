"""The choice model: drafts depend on it, texts never do, and with the target's own logits it predicts every choice."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetspec.config import EngineConfig, TreeConfig
from jetspec.engine.choices import SPARE, STEP_ROUNDS, ChoiceTable
from jetspec.engine.llm import LLM
from jetspec.models.choices import CHOICES_FILE, ChoiceFits, Fit, Weights
from jetspec.models.draft_head import DraftHead, with_filters
from jetspec.ops import topk_logprob
from jetspec.ops.noise import gumbel
from jetspec.train.evaluate import whole
from jetspec.tree import Acceptance, DraftTree
from jetspec.types import KVPages, RowSampling, SamplingParams
from tests.engine.tiny import Texts, engine_of, head_of, make_engine, run, tiny_decoder

TARGET = tiny_decoder()
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [5, 4] * 10]
SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, seed=11)
FILTERED = replace(SAMPLED, temperature=0.7, top_p=0.8, top_k=20)
SETTINGS = [SAMPLED, FILTERED, replace(SAMPLED, min_p=0.1), replace(SAMPLED, temperature=0.0)]
TRUTH = Texts(TARGET, PROMPTS)

weights = st.builds(Weights, st.sampled_from([0.05, 0.8, 30.0]), st.floats(-5, 5), st.sampled_from([0.0, -3.0, 50.0]))


@settings(max_examples=5)
@given(
    st.sampled_from(["causal", "edge", "eagle3", "eagle3_few_tokens"]),
    st.lists(
        st.tuples(st.sampled_from([0.3, 1.0]), weights, weights), min_size=1, max_size=2, unique_by=lambda x: x[0]
    ),
    st.sampled_from(SETTINGS),
    st.sampled_from([3, 16, 40]),
    st.sampled_from([0, 3]),
)
def test_texts_do_not_depend_on_the_weights(
    who: str, fits: list[tuple[float, Weights, Weights]], sampling: SamplingParams, budget: int, parents: int
) -> None:
    head = head_of(who, TARGET)
    assert head is not None
    head.choices = ChoiceFits(tuple(Fit(temperature, depths=tuple(depths)) for temperature, *depths in fits))
    tree = TreeConfig(budget=budget, width=3, shortlist=8, shortlist_parents=parents)
    done = run(make_engine(TARGET, "head", head, tree, EngineConfig(page_size=4, max_batch=2)), PROMPTS, sampling)
    assert [c.token_ids for c in done] == TRUTH[sampling]


@pytest.mark.parametrize("refine", [False, True])
def test_texts_stay_while_weights_are_refined(monkeypatch: pytest.MonkeyPatch, refine: bool) -> None:
    """And a switch freezes them."""
    monkeypatch.setattr("jetspec.engine.choices.STEP_ROUNDS", 2)
    head = head_of("edge", TARGET)
    assert head is not None
    fitted = Weights(1.0, 0.3)
    head.choices = ChoiceFits((Fit(0.9, depths=(fitted,)),))
    tree = TreeConfig(budget=16, width=4, shortlist=8, refine_choices=refine)
    engine = make_engine(TARGET, "head", head, tree, EngineConfig(page_size=4, max_batch=2))
    for sampling in (SAMPLED, SETTINGS[3], SAMPLED):
        assert [c.token_ids for c in run(engine, PROMPTS, sampling)] == TRUTH[sampling]
    assert engine.cache.rows.choices is not None
    (report,) = engine.cache.rows.choices.report()
    assert (report["choices"] > 0) == refine
    assert (report["depths"][0] != list(fitted)) == refine


def test_refined_weights_approach_those_of_the_choices() -> None:
    """Logits count for more than the fit says, the noise for less. Bounds hold for choices that say the opposite."""
    fits = ChoiceFits((Fit(1.0, depths=(Weights(1.0, 0.8),)),))
    rng = torch.Generator().manual_seed(0)
    for scale, noise_weight, bounds in ((1.4, 0.5, None), (-30.0, -30.0, (2.0, 0.3))):
        entry_R = torch.zeros(1, dtype=torch.int64)
        table = ChoiceTable(fits, 0.8, entry_R, 1, refine=True)
        entry_R[0] = table.enter(0, SamplingParams(1.0))
        table.flush()
        for at in range(60):
            num = 128
            token_BC = torch.rand(num, 20, generator=rng).argsort(1)[:, :6]
            logit_BC, position_B = torch.randn(num, 6, generator=rng), torch.arange(num) + at * num
            seed_B = torch.zeros_like(position_B)
            noise_BC = gumbel(seed_B, position_B + 1, 20).gather(1, token_BC)
            temperature, weight, _ = table.weight_3SD[:, 1, 0].tolist()
            score_BN = torch.cat((torch.zeros(num, 1), logit_BC / temperature + weight * noise_BC), 1)
            token_BN = torch.cat((torch.zeros(num, 1).long(), token_BC), 1)
            size_B = torch.full((num,), 7)
            tree = DraftTree.from_parents(token_BN, torch.zeros_like(token_BN), size_B, 1, score_BN)
            odds_BC = scale * logit_BC + noise_weight * noise_BC
            chosen_B1 = token_BC.gather(1, odds_BC.softmax(1).multinomial(1, generator=rng))
            verdict = Acceptance(torch.zeros(num, 2).long(), size_B * 0, chosen_B1[:, 0], chosen_B1.expand(-1, 2))
            sampling = RowSampling.of([SamplingParams(1.0)] * num, [0] * num, "cpu")
            table.observe(torch.zeros(num, dtype=torch.int64), sampling, position_B, tree, verdict)
            table.rounds = STEP_ROUNDS - 1
            table.refine()
        expected = (1 / scale, noise_weight) if bounds is None else bounds
        assert table.weight_3SD[:2, 1, 0].tolist() == pytest.approx(expected, abs=0.08 if bounds is None else 1e-6)


def logits_of(tokens: list[int]) -> Tensor:
    """The target's logits after every token."""
    import numpy as np

    c = TARGET.config
    pages = [
        KVPages(*torch.zeros(2, len(tokens), 1, c.num_kv_heads, c.head_dim).unbind(0)) for _ in range(c.num_layers)
    ]
    with torch.inference_mode():
        return TARGET.logits(TARGET(whole(np.asarray(tokens), torch.device("cpu")), pages).hidden_TM)


@pytest.mark.parametrize("sampling", SETTINGS[:3], ids=["plain", "filtered", "min_p"])
@pytest.mark.parametrize("late", [0, 1])
def test_the_targets_own_logits_and_the_noise_give_its_choices(sampling: SamplingParams, late: int) -> None:
    """At the positions of the choices: one position later the noise is another."""
    fits = ChoiceFits((Fit(sampling.temperature, depths=(Weights(sampling.temperature, 1.0, 1e4),)),))
    depth = sampling.token_limit
    entry_R = torch.zeros(1, dtype=torch.int64)
    table = ChoiceTable(fits, 0.8, entry_R, depth)
    entry_R[0] = table.enter(0, sampling)
    table.flush()
    hits = 0
    for prompt, answer in zip(PROMPTS, TRUTH[sampling], strict=True):
        logits_1DV = logits_of([*prompt, *answer])[len(prompt) - 1 : -1][None]
        length_B = torch.tensor([len(prompt) - 1 + late])
        columns = RowSampling.of([sampling], [sampling.seed or 0], "cpu")
        model = table.model(torch.tensor([0]), columns, length_B, depth)
        token_1D1, logprob_1D1 = topk_logprob(logits_1DV, 1, with_filters(model, logits_1DV))
        hits += int((token_1D1[0, :, 0] == torch.tensor(answer)).sum())
        assert (logprob_1D1 <= 0).all()
    assert (hits == depth * len(PROMPTS)) == (not late)


def test_noise_is_left_out_on_request() -> None:
    head = head_of("edge", TARGET)
    assert head is not None
    head.choices = ChoiceFits((Fit(1.0, depths=(Weights(1.0, 5.0),)),))
    trees = []
    for uses in (True, False):
        tree = TreeConfig(budget=8, width=4, choice_model=uses, ngrams=False)
        engine = make_engine(TARGET, "head", head, tree)
        trees.append([c.stats.accepted_lengths for c in run(engine, PROMPTS, SAMPLED)])
    plain = engine_of(TARGET, "edge", TreeConfig(budget=8, width=4, ngrams=False))
    assert trees[0] != trees[1] == [c.stats.accepted_lengths for c in run(plain, PROMPTS, SAMPLED)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=120))
@settings(max_examples=30)
def test_rows_have_the_weights_of_their_setting(entered: list[tuple[int, int]]) -> None:
    """However many settings were seen before."""
    fits = ChoiceFits((Fit(1.0, depths=(Weights(2.0, 0.8),)),))
    entry_R = torch.zeros(4, dtype=torch.int64)
    table, params = ChoiceTable(fits, 0.75, entry_R, 2), [SamplingParams()] * 4
    for number, (row, kind) in enumerate(entered):
        params[row] = SamplingParams(kind / 40, seed=number)
        entry_R[row] = table.enter(row, params[row])
        if number % 3 == 0:
            table.flush()
    table.flush()
    expected = torch.tensor([fits.weights(s, 0.75, 2) for s in params]).permute(2, 0, 1)
    torch.testing.assert_close(table.weight_3SD[:, entry_R], expected)
    assert len(table.entries) <= 4 + SPARE


def test_weights_are_those_of_similar_filters_between_temperatures() -> None:
    fits = ChoiceFits(
        (
            Fit(0.5, depths=(Weights(1.0, 0.4),)),
            Fit(1.0, depths=(Weights(2.0, 0.8), Weights(3.0, 0.6))),
            Fit(1.0, top_p=0.8, top_k=20, depths=(Weights(1.0, 0.1, 0.7),)),
        )
    )
    assert fits.weights(SamplingParams(0.0), 0.8, 2) == [Weights(0.8, 0.0)] * 2
    assert fits.weights(SamplingParams(0.5), 0.8, 1) == [Weights(1.0, 0.4)]
    assert fits.weights(SamplingParams(2.0), 0.8, 3) == [Weights(2.0, 0.8), *[Weights(3.0, 0.6)] * 2]
    assert fits.weights(SamplingParams(1.0, top_p=0.9, top_k=40), 0.8, 1) == [Weights(1.0, 0.1, 0.7)]
    assert fits.weights(SamplingParams(0.75), 0.8, 1)[0] == pytest.approx((1.5, 0.6, 0.0))
    assert fits.weights(SamplingParams(0.25), 0.8, 1)[0] == pytest.approx((0.9, 0.2, 0.0))


def test_fits_are_kept_in_the_folder_of_a_head(tmp_path: Path) -> None:
    fits = ChoiceFits((Fit(0.7, 0.8, 20, 0.1, (Weights(0.8, 0.5, 0.3),), 100),))
    fits.write(tmp_path)
    assert ChoiceFits.read(tmp_path) == fits
    (tmp_path / CHOICES_FILE).write_text('{"fits": [{"temperature": 1, "depth": []}]}')
    with pytest.raises(ValueError, match=CHOICES_FILE):
        ChoiceFits.read(tmp_path)


@pytest.mark.gpu
@pytest.mark.model
def test_seeded_texts_of_the_default_model_do_not_depend_on_drafts() -> None:
    """200 prompts in four settings; drafter, budget and weights are drawn for each 20 of them, absurd ones included."""
    draw = random.Random(0)
    things = ("rain", "bread", "a bicycle", "the moon", "chess", "a river", "glass", "an old map")
    asked = [
        f"{draw.choice(('Explain', 'Describe', 'Praise'))} {draw.choice(things)} in {n} words." for n in range(200)
    ]
    plain = LLM(drafter="none", dtype="float32", engine=EngineConfig(max_batch=20, max_len=512))
    prompts = [plain.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in asked]
    unfiltered = SamplingParams(1.0, max_tokens=48)
    settings = [unfiltered, replace(unfiltered, temperature=0.7), replace(unfiltered, min_p=0.1)]
    settings.append(replace(unfiltered, temperature=0.7, top_p=0.8, top_k=20))
    fast = LLM(dtype="float32", engine=plain.config)
    assert isinstance(fast.head, DraftHead)
    for first in range(0, len(prompts), 20):
        depths = [
            Weights(draw.choice((0.05, 0.8, 1.2, 30.0)), draw.uniform(-5, 5), draw.uniform(-3, 3)) for _ in range(15)
        ]
        fast.head.choices = ChoiceFits((Fit(1.0, depths=tuple(depths)), Fit(1.0, 0.8, 20, depths=tuple(depths[::-1]))))
        tree = TreeConfig(budget=draw.randint(16, 128), width=draw.randint(1, 8), ngrams=draw.random() < 0.5)
        drafting = fast.with_drafter(draw.choice(("head", "head", "ngram")), tree)
        some = prompts[first : first + 20]
        for sampling in settings:
            params = [replace(sampling, seed=first + i) for i in range(len(some))]
            expected, found = plain.generate(some, params), drafting.generate(some, params)
            assert [c.token_ids for c in found] == [c.token_ids for c in expected]
