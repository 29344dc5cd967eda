"""All methods behind one interface: our engine, `generate` of transformers, OpenAI-compatible servers."""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.methods import Ask, EngineMethod, Method, Reply, Timed, find_head, open_engine, split_time, with_head_of
from benchmarks.recipe import MethodConfig
from benchmarks.servers import ServerMethod, first_model
from jetspec.engine.llm import LLM
from jetspec.files import missing_package
from jetspec.models.hub import resolve
from jetspec.models.weights import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOOKUP_TOKENS = 10


def check_found(method: MethodConfig, is_new: bool = True) -> None:
    """Refuse a missing head, package or server before a target is loaded. The server of existing rows may be gone."""
    if method.head is not None:
        find_head(method.head)
    elif method.url is not None and is_new:
        first_model(method.url)
    elif not method.is_ours and method.url is None:
        need(method, "transformers")
        if method.assistant is not None:
            resolve(method.assistant)


def check_ready(llm: LLM, method: MethodConfig) -> None:
    """Refuse a method that could not be opened, before hours are spent on the others."""
    if method.is_ours:
        with_head_of(llm, method)
        return
    check_found(method)
    models = [llm.target.path, *([resolve(method.assistant)] if method.assistant else [])]
    if method.url is None and any(model.is_file() for model in models):
        need(method, "accelerate")  # transformers needs it to read GGUF files


def open_method(
    llm: LLM, method: MethodConfig, budget: int | None, batch: int, max_len: int, **variables: Any
) -> Method:
    """Open a method for one budget and batch size. `variables` are those of the chat template, for servers."""
    if method.is_ours:
        assert budget is not None
        return EngineMethod(open_engine(llm, method, budget, batch, max_len))
    if method.url is not None:
        return ServerMethod(llm.tokenizer, method.url, method.served_model, variables)
    lookup = (method.lookup_tokens or LOOKUP_TOKENS) if method.kind_name == "transformers-lookup" else None
    return TransformersMethod(llm.target, max_len, method.assistant, lookup)


def need(method: MethodConfig, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise missing_package(package, "bench", method.name)


@lru_cache(maxsize=2)
def _read(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A model in host memory, read once, without its generation config, which would fill settings left open."""
    from transformers import GenerationConfig

    from jetspec.models.hf_target import load_hf

    model = load_hf(path, dtype, torch.device("cpu"))
    model.generation_config = GenerationConfig()
    return model


def _load(path: Path, like: Tensor) -> PreTrainedModel:
    """A copy, since hooks and settings stay with a model."""
    model: PreTrainedModel = copy.deepcopy(_read(path, like.dtype)).to(like.device)
    return model


class TransformersMethod:
    """`generate` of transformers over the same weights: plain, with an assistant model, or with prompt lookup.

    Its prefill is its first pass, which also gives the first token, and with drafts more than one: see `split_time`.
    """

    def __init__(self, target: Target, max_len: int, assistant: str | None, lookup: int | None) -> None:
        embedding = target.decoder.embedding
        self.target, self.max_len, self.device = target, max_len, embedding.device
        self.model = _load(target.path, embedding)
        self.lookup = lookup
        self.assistant = _load(resolve(assistant), embedding) if assistant else None
        self.model.register_forward_hook(self._after_pass)

    def warm_up(self, asks: Sequence[Ask]) -> None:
        self.decode(asks)

    def decode(self, asks: Sequence[Ask]) -> Timed:
        token_BT, mask_BT = self._pad([ask.prompt for ask in asks])
        counter = RoundCounter() if self.assistant or self.lookup else None
        self.prefilled: float | None = None
        torch.manual_seed(asks[0].sampling.seed or 0)
        began = time.perf_counter()
        out_BT = self.model.generate(
            token_BT,
            attention_mask=mask_BT,
            generation_config=self._settings(asks),
            assistant_model=self.assistant,
            streamer=counter,
        )
        written = out_BT[:, token_BT.shape[1] :].tolist()
        ended = time.perf_counter()
        assert self.prefilled is not None
        replies: list[Reply | str] = [
            self._reply(ask, tokens, counter, num_read)
            for ask, tokens, num_read in zip(asks, written, mask_BT.sum(1).tolist(), strict=True)
        ]
        early = min(counter.first_round, len(written[0])) - 1 if counter else 0
        return Timed(replies, *split_time(began, self.prefilled, ended, sum(map(len, written)), len(asks), early))

    def _pad(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        longest = max(map(len, prompts))
        tokens = [[self._padding] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return torch.tensor(tokens, device=self.device), torch.tensor(mask, device=self.device)

    @property
    def _padding(self) -> int:
        return min(self.target.eos_tokens, default=0)

    def _capacity(self, ask: Ask) -> int:
        """Tokens that an answer may have, by the length of its own prompt, not of the longest one."""
        return max(1, min(ask.sampling.token_limit, self.max_len - len(ask.prompt)))

    def _settings(self, asks: Sequence[Ask]) -> Any:
        """Our rules and none of the model's own: no filters, no penalties.

        The whole batch may write as much as its shortest prompt allows; `_reply` cuts the others.
        """
        from transformers import GenerationConfig

        sampling = asks[0].sampling
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        ends = None if sampling.ignore_eos else sorted(self.target.eos_tokens) or None
        return GenerationConfig(
            max_new_tokens=max(map(self._capacity, asks)),
            eos_token_id=ends,
            pad_token_id=self._padding,
            prompt_lookup_num_tokens=self.lookup,
            **(drawn if sampling.temperature > 0 else {"do_sample": False}),
        )

    def _reply(self, ask: Ask, tokens: list[int], counter: RoundCounter | None, num_read: int) -> Reply:
        """Reply up to the first end token or the limit; the rest of a row is padding."""
        tokens = tokens[: self._capacity(ask)]
        ends = frozenset() if ask.sampling.ignore_eos else self.target.eos_tokens
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), None)
        kept = tokens[:end]
        accepted = [0] * len(kept) if counter is None else counter.accepted(len(kept))
        finish = "length" if end is None else "stop"
        return Reply(kept, self.target.tokenizer.decode(kept), finish, len(kept), accepted, num_read)

    def _after_pass(self, *_: object) -> None:
        if self.prefilled is None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.prefilled = time.perf_counter()


class RoundCounter:
    """Streamer that counts the tokens of every round of assisted generation, after the prompt."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def put(self, tokens: Tensor) -> None:
        self.lengths.append(tokens.numel())

    def end(self) -> None:
        pass

    @property
    def first_round(self) -> int:
        """Tokens that came with the first pass over the prompt."""
        return self.lengths[1] if len(self.lengths) > 1 else 1

    def accepted(self, num_tokens: int) -> list[int]:
        """Draft tokens accepted per round, of the rounds that wrote these tokens."""
        lengths = []
        for length in self.lengths[1:]:
            if num_tokens <= 0:
                break
            lengths.append(min(length, num_tokens) - 1)
            num_tokens -= length
        return lengths
