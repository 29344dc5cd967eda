"""Greedy output of the engine against `transformers` generate, token for token, in float32, on SmolLM2.

Every drafter, budget, batch size and prefix-cache setting must write the same tokens. Writes a record.

    python -m benchmarks.check_lossless --data ../shared/data/eval --out docs/results/lossless.json
"""

from __future__ import annotations

import argparse
import json
import random
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from jetspec.config import EngineConfig, TreeConfig
from jetspec.engine.engine import Engine
from jetspec.models.decoder import Decoder, DecoderConfig
from jetspec.models.draft_head import DraftHead, EdgeConfig, HeadConfig, default_tap_layers
from jetspec.models.hf_target import load_hf
from jetspec.models.hub import DEFAULT_MODEL, resolve
from jetspec.models.weights import Target, load_target
from jetspec.record import current_commit, write_record
from jetspec.types import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of JSONL files with `turns`")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name, folder or GGUF file")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--budgets", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 6])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="settings checked at the same time")
    parser.add_argument("--commit", help="commit of the source, where git cannot tell")
    parser.add_argument("--out", type=Path, required=True, help="where the record goes")
    args = parser.parse_args()

    commit = args.commit or current_commit()  # now, because the checkout may move on while this runs
    target = loaded(args.model, args.device)
    texts = draw_prompts(args.data, args.prompts)
    prompts = [target.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    expected = transformers_greedy(args.model, prompts, args.tokens, args.device, target.eos_tokens)
    settings = [
        (drafter, budget, batch, prefix_cache)
        for drafter in ("none", "ngram", "head", "edge head")
        for budget in args.budgets
        if (budget == 1) == (drafter == "none")
        for batch in args.batches
        for prefix_cache in (True, False)
    ]
    job = partial(check, args.model, args.device, prompts, expected, args.tokens)
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        runs = list(pool.map(job, settings))
    different = sum(int(run["different"]) for run in runs)
    results = {"model": target.name, "prompts": len(prompts), "tokens": args.tokens, "dtype": "float32"}
    write_record(args.out, {**results, "different": different, "runs": runs}, commit)
    print(json.dumps({"runs": len(runs), "different": different}))
    raise SystemExit(1 if different else 0)


def draw_prompts(folder: Path, count: int) -> list[str]:
    """First turns drawn over all files, the same for every run."""
    files = sorted(folder.glob("*.jsonl"))
    turns = [json.loads(line)["turns"][0] for file in files for line in file.read_text().splitlines()]
    short = [turn for turn in turns if len(turn) < 1200]
    return random.Random(0).sample(short, count)


def transformers_greedy(
    model: str, prompts: list[list[int]], tokens: int, device: str, eos: frozenset[int]
) -> list[list[int]]:
    other = load_hf(resolve(model), torch.float32, device)
    written = []
    for prompt in tqdm(prompts, desc="transformers"):
        ids = torch.tensor([prompt], device=device)
        out = other.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=sorted(eos),
            pad_token_id=0,
        )
        written.append(out[0, len(prompt) :].tolist())
    return written


def random_head(target: Decoder, edge: bool) -> DraftHead:
    """A head that knows nothing, in the shape of a real one."""
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
    """The target of a worker process."""
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
    began = time.perf_counter()
    index = {engine.add(prompt, SamplingParams(max_tokens=tokens)): i for i, prompt in enumerate(prompts)}
    different, rounds = 0, 0
    while engine.has_work:
        for update in engine.step():
            if update.completion:
                rounds += update.completion.stats.rounds
                different += update.completion.token_ids != expected[index[update.request_id]]
    seconds = time.perf_counter() - began
    run = {"drafter": drafter, "budget": budget, "batch": batch, "prefix_cache": prefix_cache}
    written = sum(map(len, expected))
    print(run, f"different {different}, {written / rounds:.2f} tokens per round, {seconds:.0f} s", flush=True)
    return {**run, "different": different, "tokens": written, "rounds": rounds, "seconds": seconds}


if __name__ == "__main__":
    main()
