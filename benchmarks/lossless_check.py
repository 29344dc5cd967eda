"""`lossless`: greedy output of the engine against `generate` of transformers, token for token, in float32.

Every drafter, budget, batch size and prefix-cache setting must write the same tokens.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.engine import decode
from benchmarks.options import DEFAULT, Commit, Device, Model, Questions, RecordFile, examples, numbers
from jetspec.config import EngineConfig, TreeConfig
from jetspec.engine.engine import Engine
from jetspec.models.decoder import Decoder, DecoderConfig
from jetspec.models.draft_head import DraftHead, EdgeConfig, HeadConfig, default_tap_layers
from jetspec.models.hf_target import load_hf
from jetspec.models.hub import resolve
from jetspec.models.weights import Target, load_target
from jetspec.progress import progress_bar
from jetspec.record import current_commit, write_record

LONGEST = 1200
"""Characters of a prompt."""
EPILOG = examples("lossless --data data/eval --out docs/results/lossless_smollm2_cpu.json")


def lossless(
    data: Questions,
    out: RecordFile,
    model: Model = DEFAULT,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to draw.")] = 20,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 64,
    budgets: Annotated[str, typer.Option(help="Nodes of a tree; 1 is plain decoding.")] = "1,8,64",
    batches: Annotated[str, typer.Option(help="Requests at a time.")] = "1,6",
    device: Device = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="Settings checked at the same time.")] = 1,
    commit: Commit = None,
) -> None:
    """Compare greedy texts of every drafter with those of transformers.

    Exit status 1: a text differs.
    """
    settings = [
        (drafter, budget, batch, prefix_cache)
        for drafter, budget, batch, prefix_cache in product(
            ("none", "ngram", "head", "edge head"),
            numbers(budgets, name="--budgets"),
            numbers(batches, name="--batches"),
            (True, False),
        )
        if (budget == 1) == (drafter == "none")
    ]
    commit = commit or current_commit()  # now, because the checkout may change while this runs
    target = loaded(model, device)
    texts = draw_prompts(data, prompts)
    asked = [target.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    expected = transformers_greedy(model, asked, tokens, device, target.eos_tokens)
    job = partial(check, model, device, asked, expected, tokens)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        runs = list(pool.map(job, settings))
    different = sum(int(run["different"]) for run in runs)
    results = {"model": target.name, "prompts": len(asked), "tokens": tokens, "dtype": "float32"}
    write_record(out, {**results, "different": different, "runs": runs}, commit)
    print(json.dumps({"runs": len(runs), "different": different}))
    if different:
        raise typer.Exit(1)


def draw_prompts(folder: Path, count: int) -> list[str]:
    """First turns drawn over all files, the same for every run."""
    files = sorted(folder.glob("*.jsonl"))
    turns = [json.loads(line)["turns"][0] for file in files for line in file.read_text().splitlines()]
    return random.Random(0).sample([turn for turn in turns if len(turn) < LONGEST], count)


def transformers_greedy(
    model: str, prompts: list[list[int]], tokens: int, device: str, eos: frozenset[int]
) -> list[list[int]]:
    other = load_hf(resolve(model), torch.float32, device)
    greedy = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": sorted(eos), "pad_token_id": 0}
    written = []
    for prompt in progress_bar(prompts, desc="transformers"):
        ids = torch.tensor([prompt], device=device)
        out = other.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
        written.append(out[0, len(prompt) :].tolist())
    return written


def random_head(target: Decoder, edge: bool) -> DraftHead:
    c = target.config
    layers = DecoderConfig(
        "qwen3", c.vocab_size, c.hidden_size, 5, 9, 3, 64, c.inner_size, c.max_len, qk_norm=True, rope=c.rope
    )
    taps = default_tap_layers(5, c.num_layers)
    head = DraftHead(HeadConfig(layers, taps, mask_token=0, edge=EdgeConfig(32) if edge else None)).init_weights()
    if head.edge is not None:
        torch.nn.init.normal_(head.edge.successor, std=0.5, generator=torch.Generator().manual_seed(1))
    return head.requires_grad_(False).to(target.embedding.device)


@cache
def loaded(model: str, device: str) -> Target:
    return load_target(model, torch.float32, torch.device(device))


def check(
    model: str,
    device: str,
    prompts: list[list[int]],
    expected: list[list[int]],
    tokens: int,
    setting: tuple[str, int, int, bool],
) -> dict[str, Any]:
    """Decode all prompts in one setting and count those that differ."""
    drafter, budget, batch, prefix_cache = setting
    target = loaded(model, device)
    head = random_head(target.decoder, drafter == "edge head") if drafter.endswith("head") else None
    engine = Engine(
        target.decoder,
        head,
        drafter="head" if head else drafter,  # type: ignore[arg-type]
        tree=TreeConfig(budget=budget),
        config=EngineConfig(max_batch=batch, prefix_cache=prefix_cache, max_len=2048, cache_gb=4),
        eos_tokens=target.eos_tokens,
    )
    done = decode(engine, {str(i): prompt for i, prompt in enumerate(prompts)}, tokens, len(prompts))
    different = sum(text != expected[int(i)] for i, text in done.texts.items())
    rounds = sum(completion.stats.rounds for completion in done.completions.values())
    run = {"drafter": drafter, "budget": budget, "batch": batch, "prefix_cache": prefix_cache}
    written = sum(map(len, expected))
    print(run, f"different {different}, {written / rounds:.2f} tokens per round, {done.seconds:.0f} s", flush=True)
    return {**run, "different": different, "tokens": written, "rounds": rounds, "seconds": done.seconds}
