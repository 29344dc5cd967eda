"""Small models and scripted drafters for the engine's tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from jetspec.config import DrafterName, EngineConfig, TreeConfig
from jetspec.engine.chunk import Chunk, PackedChunks
from jetspec.engine.drafter import Drafter, RoundState
from jetspec.engine.engine import Engine
from jetspec.models.decoder import Decoder, DecoderConfig
from jetspec.models.draft_head import DraftHead, EdgeConfig, HeadConfig
from jetspec.models.eagle3 import Eagle3Config, Eagle3Head
from jetspec.models.heads import Head
from jetspec.models.peagle import PEagleConfig, PEagleHead
from jetspec.tree import DraftTree
from jetspec.types import Completion, Request, SamplingParams, Update

VOCAB = 48

M = TypeVar("M", bound=torch.nn.Module)


def tiny_decoder(vocab: int = VOCAB, layers: int = 2, seed: int = 1, spread: float = 0.3) -> Decoder:
    config = DecoderConfig("llama", vocab, 32, layers, 4, 2, 8, 64, max_len=256, windows=())
    return randomize(Decoder(config), seed, spread)


def tiny_head(target: Decoder, *, seed: int = 3, edge: bool = False, causal: bool = True, block: int = 6) -> DraftHead:
    layers = DecoderConfig("qwen3", target.config.vocab_size, 32, 2, 4, 2, 8, 64, max_len=256, qk_norm=True)
    taps = (0, target.config.num_layers - 1)
    term = EdgeConfig(rank=8) if edge else None
    config = HeadConfig(layers, taps, mask_token=2, block_size=block, causal=causal, edge=term)
    return randomize(DraftHead(config), seed, 0.3)


def tiny_eagle3(
    target: Decoder, *, seed: int = 3, draft_vocab: int | None = None, depth: int = 4, **changes: Any
) -> Eagle3Head:
    """An EAGLE-3 head whose vocabulary is every other token, or all."""
    vocab = target.config.vocab_size
    layers = DecoderConfig("llama", vocab, 32, 1, 4, 2, 8, 64, max_len=256)
    config = Eagle3Config(layers, (0, target.config.num_layers - 2, target.config.num_layers - 1), vocab, depth)
    head = randomize(Eagle3Head(replace(config, draft_vocab_size=draft_vocab or vocab, **changes)), seed, 0.3)
    if draft_vocab is not None:
        head.token_of.copy_(torch.arange(draft_vocab) * 2 % vocab)
    return head


def tiny_peagle(target: Decoder, layers: int = 2, draft_vocab: int = 24, **changes: Any) -> PEagleHead:
    """A P-EAGLE head whose vocabulary is every other token."""
    vocab = target.config.vocab_size
    sizes = DecoderConfig("llama", vocab, 32, layers, 4, 2, 8, 64, max_len=256)
    config = PEagleConfig(sizes, (0, 0, target.config.num_layers - 1), draft_vocab, 5, mask_token=2)
    head = randomize(PEagleHead(replace(config, **changes)), 3, 0.3)
    head.token_of.copy_(torch.arange(draft_vocab) * 2 % vocab)
    return head


def randomize(module: M, seed: int, spread: float) -> M:
    """Fills matrices and biases with random numbers; norms keep their initial values."""
    generator = torch.Generator().manual_seed(seed)
    module.eval().requires_grad_(False)
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1 or name.endswith("bias"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return module


class Script(Drafter):
    """A drafter that is given the target's text and drafts a fraction of it correctly.

    Each tree holds the coming tokens as far as they are right, among wrong siblings and cousins, in an order that
    scatters the true path, so that verification and compaction have something to do.
    """

    def __init__(self, truth: dict[tuple[int, ...], list[int]], right: float, budget: int, seed: int = 0) -> None:
        self.truth, self.right, self.lookahead, self.tree = truth, right, budget, TreeConfig(budget)
        self.random = random.Random(seed)

    def prepare(self, requests: Sequence[Request]) -> None:
        self.requests = requests

    def draft(self, state: RoundState) -> list[list[int]]:
        coming = []
        for request in self.requests:
            prompt = tuple(request.tokens[: request.prompt_len])
            written = len(request.tokens) - request.prompt_len
            depth = min(6, self.lookahead - 1)
            rest = self.truth[prompt][written : written + depth]
            coming.append([t if self.random.random() < self.right else (t + 1) % VOCAB for t in rest])
        return coming

    def build(self, state: RoundState, drafted: list[list[int]]) -> DraftTree:
        N = self.lookahead
        token = torch.zeros(len(drafted), N, dtype=torch.int64)
        parent = torch.arange(N).repeat(len(drafted), 1)
        size = []
        for row, path in enumerate(drafted):
            nodes = self.scatter(path, N)
            size.append(len(nodes))
            for i, (t, p) in enumerate(nodes):
                token[row, i], parent[row, i] = (int(state.anchor_B[row]) if i == 0 else t), p
        device = state.anchor_B.device
        size_B = torch.tensor(size, device=device)
        return DraftTree.from_parents(token.to(device), parent.to(device), size_B, max_depth=6)

    def scatter(self, path: list[int], budget: int) -> list[tuple[int, int]]:
        nodes, tip = [(0, 0)], 0
        for t in path:
            left = budget - len(nodes)
            if left == 0:
                break
            family = [(t + k) % VOCAB for k in range(1, 1 + self.random.randint(0, min(2, left - 1)))]
            family.insert(self.random.randint(0, len(family)), t)
            first = len(nodes)
            nodes += [(token, tip) for token in family]
            tip = first + family.index(t)
        return nodes


def use(engine: Engine, drafter: Script) -> Engine:
    engine.drafter = engine.round.drafter = drafter
    engine.scheduler.lookahead = drafter.lookahead
    return engine


def make_engine(
    target: Decoder,
    drafter: DrafterName = "none",
    head: Head | None = None,
    tree: TreeConfig | None = None,
    config: EngineConfig | None = None,
    **options: object,
) -> Engine:
    tree = tree or TreeConfig(budget=8, width=4)
    return Engine(target, head, drafter=drafter, tree=tree, config=config or EngineConfig(page_size=4), **options)  # type: ignore[arg-type]


def head_of(who: str, target: Decoder) -> Head | None:
    """Head of a kind of drafter, with the device and precision of the target; none for other drafters."""
    if who in ("none", "ngram"):
        return None
    head: Head
    if who == "peagle":
        head = tiny_peagle(target)
    elif who.startswith("eagle3"):
        head = tiny_eagle3(target, draft_vocab=3 if who == "eagle3_few_tokens" else None)
    else:
        head = tiny_head(target, edge=who == "edge", causal=who != "bidirectional")
    return head.to(target.embedding)


def engine_of(
    target: Decoder, who: str, tree: TreeConfig | None = None, config: EngineConfig | None = None, **options: object
) -> Engine:
    """Engine whose drafter has a name of `head_of`."""
    head = head_of(who, target)
    return make_engine(target, "head" if head else who, head, tree, config, **options)  # type: ignore[arg-type]


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    watch: Callable[[Engine, list[Update]], None] = lambda engine, updates: None,
) -> list[Completion]:
    params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    ids = [engine.add(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
    done = finish(engine, watch)
    return [done[i] for i in ids]


def finish(
    engine: Engine, watch: Callable[[Engine, list[Update]], None] = lambda engine, updates: None
) -> dict[int, Completion]:
    """Steps until all requests have ended. Returns their completions by id."""
    done: dict[int, Completion] = {}
    while engine.has_work:
        updates = engine.step()
        watch(engine, updates)
        done.update({u.request_id: u.completion for u in updates if u.completion})
    return done


def plain(target: Decoder, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[list[int]]:
    """Plain decoding of each prompt in a new engine."""
    return [run(make_engine(target), [prompt], sampling)[0].token_ids for prompt in prompts]


class Texts(dict[SamplingParams, list[list[int]]]):
    """Results of `plain`, computed on first use."""

    def __init__(self, target: Decoder, prompts: Sequence[Sequence[int]]) -> None:
        self.target, self.prompts = target, prompts

    def __missing__(self, sampling: SamplingParams) -> list[list[int]]:
        self[sampling] = plain(self.target, self.prompts, sampling)
        return self[sampling]


@torch.inference_mode()
def next_logits(target: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """The target's logits after some tokens, from one pass over them in a fresh engine."""
    engine = make_engine(target)
    engine.add([*tokens, 0], SamplingParams())
    ((request, _),) = engine.scheduler.next_chunks()
    engine.cache.flush()
    chunks = PackedChunks.of([Chunk.of(request, len(tokens))], engine.device)
    out = target(engine.cache.place_chunks(chunks), engine.cache.target.layers)
    return target.logits(out.hidden_TM[-1])
