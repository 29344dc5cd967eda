"""vLLM with trees produces the text of vLLM without them, and each step of the commit is necessary for that."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs an environment with vLLM; make test-vllm makes one")

from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams

from jetspec.ops.select import force
from jetspec_vllm import WORKER, register
from jetspec_vllm.attention import StepTrees
from jetspec_vllm.drafter import TreeDrafter
from jetspec_vllm.runner import TreeRunner
from tests.jetspec_vllm.cpu import generate, start
from tests.jetspec_vllm.tiny import Oracle, random_prompts, write_head, write_target

pytestmark = pytest.mark.vllm

LENGTH = 40
PROMPTS = random_prompts((20, 3, 60, 11))
"""The third prompt exceeds the step's token limit, so it is prefilled in chunks beside the trees of others."""
OWN_GUESS = TreeDrafter.guess
KEPT: list[Any] = []
"""Kept alive: deleting an engine destroys the process groups of the others."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture(scope="module")
def plain(target: str) -> Any:
    return start(target)


@pytest.fixture(scope="module")
def texts(plain: Any) -> list[list[int]]:
    return generate(plain, PROMPTS, LENGTH)


@pytest.fixture(scope="module")
def trees(target: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return start(target, str(write_head(tmp_path_factory.mktemp("heads") / "head")))


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch, texts: list[list[int]], trees: Any) -> Iterator[Oracle]:
    oracle = Oracle([prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)])
    monkeypatch.setattr(TreeDrafter, "guess", lambda drafter, *args: oracle.guess(drafter, *args))
    assert trees.reset_prefix_cache()
    yield oracle


def test_a_ragged_batch_with_chunked_prompts(trees: Any, oracle: Oracle, texts: list[list[int]]) -> None:
    assert generate(trees, PROMPTS, LENGTH) == texts
    assert sum(oracle.seen) < 0.7 * len(PROMPTS) * LENGTH, "hardly anything was accepted: the test says nothing"


def unchanged(*args: Any) -> None:
    return None


def no_masks(*args: Any) -> tuple[None, None]:
    return None, None


@pytest.mark.parametrize(
    ("owner", "name", "without"),
    [
        (TreeRunner, "compact", unchanged),
        (TreeRunner, "set_positions", unchanged),
        (StepTrees, "masks", no_masks),
    ],
)
def test_each_part_is_needed(
    trees: Any,
    oracle: Oracle,
    texts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    without: Callable[..., Any],
) -> None:
    monkeypatch.setattr(owner, name, without)
    assert generate(trees, PROMPTS, LENGTH) != texts


def test_the_kernels_of_a_gpu_write_and_draft_the_same(
    trees: Any, oracle: Oracle, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts only, one of them chunked: interpreted kernels are slow."""
    drafted: dict[tuple[int, int], list[Any]] = {}

    def guess(drafter: Any, block: Any, anchor_B: Any, temperature_B: Any, cache: Any) -> Any:
        tree, length_B = OWN_GUESS(drafter, block, anchor_B, temperature_B, cache), block.layout.cached_len_B
        columns = (anchor_B, length_B, tree.token_BN, tree.parent_BN)
        for anchor, length, *shape in zip(*(column.tolist() for column in columns), strict=True):
            drafted.setdefault((anchor, length), []).append(shape)
        return oracle.guess(drafter, block, anchor_B, temperature_B, cache)

    monkeypatch.setattr(TreeDrafter, "guess", guess)
    for kernels in ("reference", "triton"):
        assert trees.reset_prefix_cache()
        with force(kernels):
            assert generate(trees, PROMPTS[1:3], 6) == [text[:6] for text in texts[1:3]]
    assert sum(oracle.seen) < 2 * 2 * 6
    assert any(len(shapes) == 2 for shapes in drafted.values())
    assert all(shape == shapes[0] for shapes in drafted.values() for shape in shapes)


@pytest.mark.parametrize("filters", [{}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "logit_bias": {7: 2.0}}])
def test_draws_with_a_seed_are_those_of_plain_decoding(
    plain: Any, trees: Any, oracle: Oracle, filters: dict[str, Any]
) -> None:
    how = {"temperature": 0.8, "seed": 11, **filters}
    drawn = generate(plain, PROMPTS, 24, **how)
    oracle.texts = [prompt + text for prompt, text in zip(PROMPTS, drawn, strict=True)]
    assert generate(trees, PROMPTS, 24, **how) == drawn
    assert sum(oracle.seen) < 0.7 * len(PROMPTS) * 24


def test_requests_that_depend_on_history_decode_plainly(plain: Any, trees: Any, oracle: Oracle) -> None:
    how = {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
    assert generate(trees, PROMPTS[:2], 12, **how) == generate(plain, PROMPTS[:2], 12, **how)


def test_log_probabilities_are_those_of_the_path(plain: Any, trees: Any, oracle: Oracle) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=2)

    def reported(llm: Any) -> list[list[dict[int, Any]]]:
        outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in PROMPTS], params, use_tqdm=False)
        return [
            [{token: entry.logprob for token, entry in place.items()} for place in output.outputs[0].logprobs]
            for output in outputs
        ]

    for alone, with_trees in zip(reported(plain), reported(trees), strict=True):
        assert len(with_trees) == 16
        assert with_trees == [pytest.approx(place, abs=1e-3) for place in alone]
    assert sum(oracle.seen) < 0.8 * len(PROMPTS) * 16


def test_a_prefix_that_trees_have_written_is_found_again(
    plain: Any, trees: Any, oracle: Oracle, texts: list[list[int]]
) -> None:
    generate(trees, PROMPTS, LENGTH)
    longer = [prompt + text[:-1] for prompt, text in zip(PROMPTS, texts, strict=True)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    outputs = trees.generate([{"prompt_token_ids": tokens} for tokens in longer], params, use_tqdm=False)
    found = [output.num_cached_tokens - len(prompt) for output, prompt in zip(outputs, PROMPTS, strict=True)]
    assert max(found) > 0, "no page that trees have written was found"
    assert [list(output.outputs[0].token_ids) for output in outputs] == generate(plain, longer, 8)


def test_a_stop_token_ends_a_text_in_the_middle_of_a_path(plain: Any, trees: Any, oracle: Oracle) -> None:
    stops = [oracle.texts[i][len(PROMPTS[i]) + at] for i, at in enumerate((5, 9, 12, 20))]
    alone = generate(plain, PROMPTS, LENGTH, stop_token_ids=stops)
    assert generate(trees, PROMPTS, LENGTH, stop_token_ids=stops) == alone
    assert all(len(text) < LENGTH for text in alone)


def test_the_end_of_the_longest_sequence(plain: Any, trees: Any, oracle: Oracle) -> None:
    prompts = random_prompts((150, 141))
    texts = generate(plain, prompts, 100)
    oracle.texts = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    assert generate(trees, prompts, 100) == texts
    assert [len(text) for text in texts] == [10, 19]


def test_what_the_head_proposes_depends_on_the_text_alone(
    trees: Any, oracle: Oracle, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's context is that of the committed path for any accepted length."""

    def proposals(is_right: bool) -> dict[tuple[int, int], list[float]]:
        found: dict[tuple[int, int], list[float]] = {}

        def guess(drafter: Any, block: Any, anchor_B: Any, temperature_B: Any, cache: Any) -> Any:
            hidden, length_B = drafter.head.propose(block, drafter.target, cache), block.layout.cached_len_B
            for anchor, length, state in zip(anchor_B.tolist(), length_B.tolist(), hidden, strict=True):
                found[anchor, length] = state.flatten().tolist()
            return oracle.guess(drafter, block, anchor_B, temperature_B, cache)

        monkeypatch.setattr(TreeDrafter, "guess", guess)
        oracle.texts = [prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)] if is_right else []
        assert trees.reset_prefix_cache()
        assert generate(trees, PROMPTS, 24) == [text[:24] for text in texts]
        return found

    one_by_one, many = proposals(False), proposals(True)
    shared = one_by_one.keys() & many.keys()
    assert len(shared) > 12
    assert all(one_by_one[key] == pytest.approx(many[key], abs=1e-3) for key in shared)
    monkeypatch.setattr(TreeRunner, "committed", partialmethod(in_order, TreeRunner.committed))
    wrong = proposals(True)
    assert any(one_by_one[key] != pytest.approx(wrong[key], abs=1e-3) for key in one_by_one.keys() & wrong.keys())


def in_order(runner: Any, committed: Any, batch: Any, source_BD1: Any = None, target_BD1: Any = None) -> Any:
    """Broken variant: treats the first rows of a request as its path."""
    return committed(runner, batch, target_BD1, target_BD1)


def test_preemption_keeps_texts(target: str, plain: Any, oracle: Oracle, tmp_path: Path) -> None:
    """Requests are preempted and recomputed from prompt and generated tokens."""
    prompts, length = [PROMPTS[i] for i in (0, 1, 3)], 90
    texts = generate(plain, prompts, length)
    oracle.texts = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    tight: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 12, "disable_log_stats": False}
    few = start(target, str(write_head(tmp_path / "head")), **tight)
    KEPT.append(few)
    assert generate(few, prompts, length) == texts
    assert next(metric.value for metric in few.get_metrics() if metric.name == "vllm:num_preemptions") > 0
    assert sum(oracle.seen) < 0.7 * len(prompts) * length


def test_plain_vllm_still_refuses_min_p() -> None:
    def validate(worker: str) -> None:
        parallel = SimpleNamespace(worker_cls=worker)
        SamplingParams(min_p=0.1)._validate_spec_decode(SimpleNamespace(target_parallel_config=parallel))

    register()
    validate(WORKER)
    with pytest.raises(Exception, match="min_p"):
        validate("auto")


@pytest.mark.parametrize("kind", [{"causal": False}, {"edge": True}])
def test_heads_of_every_kind(kind: dict[str, bool], target: str, texts: list[list[int]], tmp_path: Path) -> None:
    trees = start(target, str(write_head(tmp_path / "head", **kind)))
    KEPT.append(trees)
    assert generate(trees, PROMPTS, 10) == [text[:10] for text in texts]
