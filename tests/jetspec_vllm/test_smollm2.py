"""Default model with its head in vLLM: same text and same tokens per round as JetSpec's engine."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs an environment with vLLM; make test-vllm makes one")

from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

import jetspec
from jetspec import LLM, TreeConfig
from jetspec.models.export import export_head, save_target
from jetspec.models.head_format import load_head
from jetspec.models.hub import DEFAULT_MODEL, HEADS
from tests.jetspec_vllm.cpu import counted, generate, start

pytestmark = [pytest.mark.vllm, pytest.mark.model]

QUESTIONS = (
    "What is 12 + 30?",
    "Write a haiku about autumn.",
    "Explain why the sky is blue.",
    "List five European capitals.",
)
LENGTH, BUDGET, WIDTH = 32, 32, 8
SETTINGS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_batched_tokens": 160,
    "disable_log_stats": False,
    "skip_tokenizer_init": False,
}


@pytest.fixture(scope="module")
def ours() -> LLM:
    return LLM(DEFAULT_MODEL, tree=TreeConfig(budget=BUDGET, width=WIDTH, ngrams=False), dtype="float32")


@pytest.fixture(scope="module")
def folder(ours: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    save_target(ours.target, folder / "target", torch.float32)
    export_head(load_head(HEADS / DEFAULT_MODEL), folder / "chain", "vllm", torch.float32)
    return folder


@pytest.fixture(scope="module")
def prompts(ours: LLM) -> list[list[int]]:
    return [ours.tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return start(str(folder / "target"), **SETTINGS)


@pytest.fixture(scope="module")
def texts(plain: Any, prompts: list[list[int]]) -> list[list[int]]:
    return generate(plain, prompts, LENGTH)


def our_rounds(llm: LLM, prompts: list[list[int]], texts: list[list[int]]) -> int:
    """Rounds after the first token, which vLLM samples during prefill."""
    begun = [prompt + text[:1] for prompt, text in zip(prompts, texts, strict=True)]
    done = llm.generate(begun, jetspec.SamplingParams(max_tokens=len(texts[0]) - 1, ignore_eos=True))
    assert [completion.token_ids for completion in done] == [text[1:] for text in texts]
    return sum(completion.stats.rounds for completion in done)


@pytest.fixture(scope="module")
def trees(folder: Path, plain: Any) -> Any:
    """Created after the other engine, which resets the metrics."""
    return start(str(folder / "target"), str(HEADS / DEFAULT_MODEL), budget=BUDGET, tree={"width": WIDTH}, **SETTINGS)


def test_the_text_is_the_same_and_so_are_the_rounds(
    ours: LLM, prompts: list[list[int]], texts: list[list[int]], trees: Any
) -> None:
    assert generate(trees, prompts, LENGTH) == texts
    rounds = counted(trees)["num_drafts"]
    assert rounds == pytest.approx(our_rounds(ours, prompts, texts), rel=0.02)
    assert rounds < 0.6 * LENGTH * len(prompts)


def test_stop_strings_end_the_same_texts(
    ours: LLM, plain: Any, trees: Any, prompts: list[list[int]], texts: list[list[int]]
) -> None:
    """Stop strings end inside tokens and inside paths."""
    written = [ours.tokenizer.decode(text) for text in texts]
    stops = [text[n : n + 4] for n, text in enumerate(written, 30)]
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, stop=stops)

    def ends(llm: Any) -> list[tuple[str, str | int | None]]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [(output.outputs[0].text, output.outputs[0].stop_reason) for output in outputs]

    alone = ends(plain)
    assert ends(trees) == alone
    assert all(reason in stops for _, reason in alone)


def test_a_request_with_a_grammar_decodes_plainly_beside_trees(
    plain: Any, trees: Any, prompts: list[list[int]]
) -> None:
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    number = StructuredOutputsParams(regex="The answer is [0-9]{1,3}")
    bound = SamplingParams(temperature=0, max_tokens=12, structured_outputs=number)

    def written(llm: Any) -> list[list[int]]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts[:2]]
        return [list(output.outputs[0].token_ids) for output in llm.generate(asked, [bound, free], use_tqdm=False)]

    assert written(trees) == written(plain)


def test_chunks_few_pages_full_contexts_and_known_prefixes(
    folder: Path, prompts: list[list[int]], texts: list[list[int]]
) -> None:
    """Chunked prompts, pages for two requests, full contexts; then one prompt again."""
    tight: dict[str, Any] = {"max_model_len": 64, "block_size": 16, "num_gpu_blocks_override": 11}
    small = {**SETTINGS, **tight, "max_num_batched_tokens": 40}
    trees = start(str(folder / "target"), str(HEADS / DEFAULT_MODEL), budget=16, tree={"width": WIDTH}, **small)
    room = [text[: 64 - len(prompt)] for prompt, text in zip(prompts, texts, strict=True)]
    assert generate(trees, prompts, 100) == room
    assert counted(trees)["num_drafts"] < 0.8 * sum(map(len, room))
    again = [prompts[-1] + room[-1][:9]]
    assert generate(trees, again, 100) == [room[-1][9:]]
    assert next(metric.value for metric in trees.get_metrics() if metric.name == "vllm:prefix_cache_hits") > 0


def test_an_exported_head_drafts_in_stock_vllm_as_it_does_here(
    ours: LLM, folder: Path, prompts: list[list[int]], texts: list[list[int]]
) -> None:
    chain = {"method": "dflash", "model": str(folder / "chain"), "num_speculative_tokens": 15}
    stock = start(str(folder / "target"), speculative_config=chain, **SETTINGS)
    few, short = prompts[1:3], [text[:20] for text in texts[1:3]]  # its drafts are slow where kernels are interpreted
    assert generate(stock, few, 20) == short
    here = ours.with_head(folder / "chain").with_drafter("head", TreeConfig(budget=16, width=1, ngrams=False))
    rounds = counted(stock)["num_drafts"]
    assert rounds == our_rounds(here, few, short) < 0.9 * 20 * len(few)
