"""All methods behind one interface: our engine, `generate` of transformers, OpenAI-compatible servers."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import torch
from torch import Tensor

from benchmarks.recipe import HeadKind, MethodConfig
from benchmarks.servers import BROKEN, STREAMED, Timing, first_model, stream_together
from jetspec.config import EngineConfig
from jetspec.engine.llm import LLM
from jetspec.engine.runner import batch_sizes
from jetspec.files import missing_package
from jetspec.models.head_folder import nested_head
from jetspec.models.hub import HUGGING_FACE_ID, head_path, resolve
from jetspec.models.tokenizer import Tokenizer
from jetspec.models.weights import Target
from jetspec.profile.timing import without_capture
from jetspec.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOOKUP_TOKENS = 10
PREFILL_CHUNK = 65_536
"""Enough for the prompts of a group in one piece, so that no request decodes while another is prefilled."""


class UnequalConditions(ValueError):
    """Two methods were not asked the same, or did not stop by the same rules: they cannot be compared."""


@dataclass(frozen=True)
class Ask:
    messages: Sequence[dict[str, str]]
    """Conversation so far, for methods that apply the chat template themselves."""
    prompt: list[int]
    """The same as token ids."""
    sampling: SamplingParams
    turn: int = 0


@dataclass(frozen=True)
class Reply:
    token_ids: list[int]
    """With the end token, where it is visible."""
    text: str
    finish: str
    num_tokens: int
    """Written tokens, which speed counts."""
    accepted: list[int] | None
    """Draft tokens accepted per round. None: not known."""
    num_read: int
    """Tokens of the prompt, as the method counted them."""
    other_prompt: bool = False
    """It answers another prompt: a server that tokenized its own earlier answer differently."""


@dataclass(frozen=True)
class Timed:
    """Replies of a group decoded together, with times. A reply that is text is an error."""

    replies: list[Reply | str]
    prefill_s: float
    """Seconds until every prompt was read."""
    decode_s: float
    """Seconds from then to the last token of the last reply."""


def split_time(
    began: float, prefilled: float, ended: float, written: int, answers: int, early: int
) -> tuple[float, float]:
    """Seconds of prefill and of decoding.

    One token per answer may come with the prefill. `early` more of them did: their share of the time counts as decoding
    at the rate of the rest. Without a rest, all of the time is that of decoding.
    """
    whole, decode, rest = ended - began, ended - prefilled, written - answers - early
    if early:
        decode = min(whole, decode * (rest + early) / rest) if rest > 0 else whole
    return whole - decode, decode


class Method(Protocol):
    def warm_up(self, asks: Sequence[Ask]) -> None:
        """Compile and capture what decoding these needs."""
        self.decode(asks)

    def decode(self, asks: Sequence[Ask]) -> Timed:
        """Answer these together."""


class EngineMethod(Method):
    """Our engine."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def warm_up(self, asks: Sequence[Ask]) -> None:
        """Batches shrink as answers end, and a graph serves one size."""
        engine = self.llm.engine
        sizes = batch_sizes(len(asks), engine.drafter.tree.batch_trees) if engine.uses_graphs else [len(asks)]
        for size in sizes:
            self._decode([replace(ask, sampling=replace(ask.sampling, ignore_eos=True)) for ask in asks[:size]])

    def decode(self, asks: Sequence[Ask]) -> Timed:
        return without_capture(self.llm.engine.graphs, lambda: self._decode(asks))

    def _decode(self, asks: Sequence[Ask]) -> Timed:
        began = time.perf_counter()
        done = dict(self.llm.complete((i, ask.prompt, ask.sampling) for i, ask in enumerate(asks)))
        seconds = time.perf_counter() - began
        prefill_s = max(completion.stats.prefill_s for completion in done.values())
        replies: list[Reply | str] = []
        for i in range(len(asks)):
            ids, stats = done[i].token_ids, done[i].stats
            text = self.llm.tokenizer.decode(ids)
            finish, num_read = done[i].finish_reason, stats.prompt_tokens
            replies.append(Reply(ids, text, finish, len(ids), stats.accepted_lengths, num_read))
        return Timed(replies, prefill_s, seconds - prefill_s)


def with_head_of(llm: LLM, method: MethodConfig) -> LLM:
    """The target with the head of a method, if that is of its kind; unchanged for a method without one."""
    if method.traits.head is None:
        return llm
    found = llm if method.head is None else llm.with_head(method.head)
    if found.head is None:
        raise ValueError(f"{method.name} needs a head: name it as {method.name}=FOLDER, or with `head` in the recipe")
    if (kind := kind_of(found.head)) != method.traits.head != "any":
        whose = "the model's own head" if method.head is None else method.head
        raise ValueError(f"{method.name} needs a head of kind {method.traits.head}, and {whose} is of kind {kind}")
    return found


def find_head(head: str) -> None:
    """Refuse a folder or name without a head."""
    try:
        problem = None if (resolve(head_path(head)) / "config.json").is_file() else "it has no config.json"
    except ValueError as error:
        problem = str(error) if re.fullmatch(HUGGING_FACE_ID, head) else "there is no such folder"
    if problem is not None:
        advice = nested_head(Path(head)) or "train it first, as the lines at the top of the recipe say"
        raise ValueError(f"no head in {head}: {problem}; {advice}")


def open_engine(llm: LLM, method: MethodConfig, budget: int, batch: int, max_len: int) -> LLM:
    """Engine of a method, without prefix cache: a question of the next repeat is read again."""
    config = EngineConfig(max_batch=batch, max_len=max_len, prefill_chunk=PREFILL_CHUNK, prefix_cache=False)
    opened = llm.with_drafter(method.traits.drafter, method.tree(budget), engine=config)
    if opened.engine.max_len < max_len:
        raise ValueError(f"{method.name}: no memory for {batch} texts of {max_len} tokens; choose a smaller batch")
    return opened


def kind_of(head: Any) -> HeadKind:
    config = head.head_config
    if config.kind == "eagle3":
        return "eagle3"
    return "bidirectional" if not config.causal else "edge" if config.edge else "causal"


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


# -- transformers


@lru_cache(maxsize=2)
def _read(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A model in host memory, read once, without its generation config, which would fill settings left open."""
    from transformers import GenerationConfig

    from jetspec.models.hf_target import load_hf

    model = load_hf(path, dtype, torch.device("cpu"))
    model.generation_config = GenerationConfig()
    return model


class TransformersMethod(Method):
    """`generate` of transformers over the same weights: plain, with an assistant model, or with prompt lookup.

    Its prefill is its first pass, which also gives the first token, and with drafts more than one: see `split_time`.
    """

    def __init__(self, target: Target, max_len: int, assistant: str | None, lookup: int | None) -> None:
        embedding = target.decoder.embedding
        self.target, self.max_len, self.device = target, max_len, embedding.device
        self._padding = min(target.eos_tokens, default=0)
        paths = [target.path, *([resolve(assistant)] if assistant else [])]
        models = [
            copy.deepcopy(_read(path, embedding.dtype)).to(self.device) for path in paths
        ]  # hooks and settings stay
        self.lookup, self.model, self.assistant = lookup, models[0], models[1] if assistant else None
        self.model.register_forward_hook(self._after_pass)

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
    """Streamer that notes the tokens of every round of `generate`, after the prompt."""

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


# -- servers

NEUTRAL = {"top_p": 1, "presence_penalty": 0, "frequency_penalty": 0}
"""Servers fill what a request leaves open from the model's generation_config.json, or with values of their own."""
BEYOND = {"top_k": -1, "min_p": 0, "repetition_penalty": 1}
"""Likewise; these are none of OpenAI's fields, so a server may refuse them."""
PROBE = "Write the numbers from one to twenty as words."
PROBE_TOKENS = 16
VERSION_TIMEOUT_S = 10


class ServerMethod(Method):
    """A server that counts its own tokens and applies its own template.

    Its prefill lasts until the last of the group has its first text, or one of them has more than that: a server that
    serves them one after the other decodes by then. Answers in one piece show no prefill: all of the time is decoding.
    """

    def __init__(self, tokenizer: Tokenizer, url: str, model: str | None, variables: Mapping[str, Any]) -> None:
        self.tokenizer, self.url = tokenizer, url
        self.model = model or first_model(url)
        self.settings = neutral_sampling(url, self.model)
        if variables:
            self.settings["chat_template_kwargs"] = dict(variables)

    def decode(self, asks: Sequence[Ask]) -> Timed:
        timings = stream_together(self.url, [chat_body(self.model, ask, self.settings) for ask in asks])
        replies = [self._reply(*pair) for pair in zip(asks, timings, strict=True)]
        began, ended = timings[0].arrived, max(timing.ended for timing in timings)
        done = [
            (reply.num_tokens, t.said) for reply, t in zip(replies, timings, strict=True) if isinstance(reply, Reply)
        ]
        prefilled = prefill_end([(count, [at for at, _ in said]) for count, said in done], began, ended)
        early = 0  # tokens of first pieces that came during prefill, without the first of each
        for count, said in done:
            if said and said[0][0] <= prefilled:
                early += max(0, min(len(self.tokenizer.encode_words(said[0][1])), count) - 1)
        written = sum(count for count, _ in done)
        return Timed(replies, *split_time(began, prefilled, ended, written, len(done), early))

    def _reply(self, ask: Ask, timing: Timing) -> Reply | str:
        if timing.error is not None:
            return timing.error
        if "prompt_tokens" not in timing.usage:
            return "the server does not count the tokens of a prompt"
        num_read, count = timing.usage["prompt_tokens"], timing.usage["completion_tokens"]
        is_other = num_read != len(ask.prompt)
        if is_other and ask.turn == 0:
            raise UnequalConditions(
                f"{self.url} read {num_read} prompt tokens where ours are {len(ask.prompt)}: it runs"
                " another model or another chat template, so the two cannot be compared"
            )
        ids = self.tokenizer.encode_words(timing.text)
        return Reply(ids, timing.text, timing.finish or "", count, None, num_read, other_prompt=is_other)


def prefill_end(answers: Sequence[tuple[int, Sequence[float]]], began: float, ended: float) -> float:
    """Time at which the prompts of a group were read, from the tokens of every answer and the times of its pieces."""
    written = [(count, times) for count, times in answers if times]
    if not written:
        return ended
    # A piece of two tokens may be a word and the end, and tells when prefill was over; a longer one does not.
    if all(len(times) == 1 for _, times in written) and any(count > 2 for count, _ in written):
        return began
    return min([max(times[0] for _, times in written), *(times[1] for _, times in written if len(times) > 1)])


def chat_body(model: str, ask: Ask, settings: Mapping[str, Any]) -> dict[str, Any]:
    sampling = ask.sampling
    drawn = {"temperature": sampling.temperature, "seed": (sampling.seed or 0) & 0x7FFFFFFF}
    told = {"model": model, "messages": list(ask.messages), "max_tokens": sampling.max_tokens}
    return {**told, **drawn, **STREAMED, **settings}


def probe(url: str, model: str, settings: Mapping[str, Any], max_tokens: int) -> Timing:
    ask = Ask([{"role": "user", "content": PROBE}], [], SamplingParams(0.0, max_tokens=max_tokens))
    return stream_together(url, [chat_body(model, ask, settings)])[0]


def neutral_sampling(url: str, model: str) -> dict[str, Any]:
    """Settings that sample from the model's distribution alone; OpenAI's fields only where others are refused."""
    for settings in ({**NEUTRAL, **BEYOND}, NEUTRAL):
        status = probe(url, model, settings, 1).status
        if status == 200:
            return dict(settings)
        if status is None or not 400 <= status < 500:
            break
    return {**NEUTRAL, **BEYOND}


def left_open(settings: Mapping[str, Any]) -> list[str]:
    """Settings that a server given these chooses by itself."""
    return [name for name in (*NEUTRAL, *BEYOND) if name not in settings]


def identify(url: str, model: str | None) -> dict[str, Any] | None:
    """Model, version, settings and digest of a greedy answer, which tells weights apart. None: no server answers."""
    try:
        name = model or first_model(url)
    except ValueError:
        return None
    settings = neutral_sampling(url, name)
    answer = probe(url, name, settings, PROBE_TOKENS)
    said = answer.text if answer.error is None else answer.error.partition(":")[0]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]
    return {"model": name, "version": server_version(url), "sampling": settings, "probe": digest}


def server_version(url: str) -> str | None:
    """Version as vLLM and SGLang give theirs, llama.cpp its build. None: the server does not tell."""
    root = url.rstrip("/").removesuffix("/v1")
    for path, key in (("version", "version"), ("get_server_info", "version"), ("props", "build_info")):
        try:
            return str(httpx.get(f"{root}/{path}", timeout=VERSION_TIMEOUT_S).raise_for_status().json()[key])
        except BROKEN:
            continue
    return None
