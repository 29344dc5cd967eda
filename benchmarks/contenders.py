"""Outside contenders: what people decode with today, behind the interface of our own methods."""

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

from benchmarks.methods import Ask, Reply, Timed, split_time
from benchmarks.recipe import MethodConfig
from benchmarks.servers import first_model
from jetspec.models.hub import resolve
from jetspec.models.weights import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOOKUP_TOKENS = 10


def check_ready(method: MethodConfig) -> None:
    """Whether the package is there, the assistant can be had, the server answers."""
    if method.url is not None:
        first_model(method.url)
        return
    need(method, "transformers")
    if method.assistant is not None:
        resolve(method.assistant)


def check_files(method: MethodConfig, target: Path) -> None:
    """Whether it can read what it decodes: GGUF files, such as that of the default model, take one more package."""
    models = [target, *([resolve(method.assistant)] if method.assistant else [])]
    if any(model.is_file() for model in models):
        need(method, "accelerate")


def need(method: MethodConfig, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{method.name} needs the package `{package}`: pip install 'jetspec[bench]'")


def lookup_tokens(method: MethodConfig) -> int | None:
    return (method.lookup_tokens or LOOKUP_TOKENS) if method.kind_name == "transformers-lookup" else None


@lru_cache(maxsize=2)
def _read(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A target or an assistant, kept in the host's memory for all openings: transformers reads a GGUF file slowly.

    It has none of the settings of its own generation_config.json, which would fill what a request leaves open.
    """
    from transformers import GenerationConfig

    from jetspec.models.hf_target import load_hf

    model = load_hf(path, dtype, torch.device("cpu"))
    model.generation_config = GenerationConfig()
    return model


def _load(path: Path, like: Tensor) -> PreTrainedModel:
    """A copy of its own, since hooks and settings stay with a model."""
    model: PreTrainedModel = copy.deepcopy(_read(path, like.dtype)).to(like.device)
    return model


class TransformersMethod:
    """`generate` of transformers over the same weights: plain, with an assistant model, or with prompt lookup.

    Its prefill is its first pass, from which it also takes the first token, and with drafts more than one: these are
    paid for as in `split_time`.
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

    def _room(self, ask: Ask) -> int:
        """Tokens that an answer may have, as in our engine: those of its own prompt's room, not of the longest one."""
        return max(1, min(ask.sampling.token_limit, self.max_len - len(ask.prompt)))

    def _settings(self, asks: Sequence[Ask]) -> Any:
        """Our rules and none of the model's own: no filters, no penalties.

        A whole batch is given the room of its shortest prompt, and what others write beyond theirs is cut off.
        """
        from transformers import GenerationConfig

        sampling = asks[0].sampling
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        ends = None if sampling.ignore_eos else sorted(self.target.eos_tokens) or None
        return GenerationConfig(
            max_new_tokens=max(map(self._room, asks)),
            eos_token_id=ends,
            pad_token_id=self._padding,
            prompt_lookup_num_tokens=self.lookup,
            **(drawn if sampling.temperature > 0 else {"do_sample": False}),
        )

    def _reply(self, ask: Ask, tokens: list[int], counter: RoundCounter | None, num_read: int) -> Reply:
        """Up to the first end token, or the end of its room; the rest of a row is padding."""
        tokens = tokens[: self._room(ask)]
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
    """Sees the tokens of every round of assisted generation, after the prompt."""

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
        """Draft tokens kept per round, of the rounds that wrote these tokens."""
        lengths = []
        for length in self.lengths[1:]:
            if num_tokens <= 0:
                break
            lengths.append(min(length, num_tokens) - 1)
            num_tokens -= length
        return lengths
