"""Comparison of texts with those of plain decoding: equal, near ties of two logits, or mistakes.

Near ties: two greedy texts may differ only where the target itself was undecided.

Kernels that sum in another order differ a little, so the best of two nearly equal logits may be one for a plain step
and the other for a verify pass. A third pass over the common text is the judge: if the distance of two logits changes
by at most e from it to either of them, tokens that changed places are at most e apart in it. The value of e is measured
on the target alone, at some positions. At others rounding does more, such as in a text that repeats itself: there the
text is read several times more, each with some random rounding, by plain torch in place of our kernels, which may be
wrong. Another reading is assumed to be as far beyond these as they are from each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cells import Measured
from benchmarks.measure import Bench
from jetspec.data.conversation import Conversation
from jetspec.data.prompts import Prompt
from jetspec.engine.chunk import Chunk, PackedChunks
from jetspec.engine.kv_cache import KVCache
from jetspec.models.decoder import Decoder, Hidden
from jetspec.models.draft_head import DraftHead
from jetspec.ops import Residual
from jetspec.ops.select import force
from jetspec.tree import filter_logits, gumbel
from jetspec.types import Request, RowSampling, SamplingParams

PAGE_SIZE = 16
CANDIDATES = 64
"""Most likely tokens of a position: the rest of the vocabulary is noisier."""
RIVALS = 64
"""Least number of tokens near the best of their positions for a measurement of their rounding."""
READINGS = 8
"""Readings of a text besides the first. More would excuse more: their extremes decide."""
ONE_IN = 6
"""One number in so many changes by a unit of its last place: the mean square error of two roundings, each a twelfth of
a square unit, since a layer rounds the residual twice."""

NOISE_TOKENS = 64
"""Most tokens of an answer that rounding is measured on."""
Texts = Mapping[str, Sequence[int]]
"""Tokens by the name of a prompt."""
Judge = Callable[[Sequence[int]], Tensor]
"""Logits behind a text, (1, V), that a gap is taken from."""


class FreshPass:
    """One pass over a whole text, as in a prefill: its logits, and its K and V."""

    def __init__(self, target: Decoder, head: DraftHead | None, max_len: int) -> None:
        self.target, self.head = target, head
        self.cache = KVCache(
            target.config,
            head.config if head else None,
            num_rows=1,
            row_len=max_len,
            num_pages=-(-max_len // PAGE_SIZE),
            page_size=PAGE_SIZE,
            dtype=target.embedding.dtype,
            device=target.embedding.device,
            prefix_cache=False,
        )

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], last: int = 1, size: int | None = None) -> Tensor:
        """Logits behind each of the last tokens, (last, V), float32.

        With a size, they are from several passes: over the text before the last tokens, then over these, `size` at a
        time.
        """
        parts = []
        with self._admitted(tokens) as request:
            if size is not None and len(tokens) > last:
                self._pass(request, len(tokens) - last)
            while missing := len(tokens) - request.num_cached:
                hidden_TM = self._pass(request, min(size or missing, missing)).hidden_TM[-last:]
                parts.append(self.target.logits(hidden_TM).float())
        return torch.cat(parts)

    @torch.inference_mode()
    def rows(self, tokens: Sequence[int]) -> list[Tensor]:
        """Expected contents of an engine's cache after these tokens; see `cached_rows`."""
        with self._admitted(tokens) as request:
            self._pass(request, len(tokens))
            return cached_rows(self.cache, request)

    @contextmanager
    def _admitted(self, tokens: Sequence[int]) -> Iterator[Request]:
        request = Request(0, list(tokens), len(tokens), SamplingParams(), seed=0, max_len=len(tokens))
        if not self.cache.admit(request, tokens_ahead=1):
            raise ValueError(f"{len(tokens)} tokens exceed the longest text of this pass")
        try:
            yield request
        finally:
            self.cache.release(request)

    def _pass(self, request: Request, count: int) -> Hidden:
        """Pass over the next tokens of a text."""
        self.cache.flush()
        chunks = PackedChunks.of([Chunk.of(request, count)], self.cache.device)
        batch = self.cache.place_chunks(chunks)
        taps = self.head.head_config.tap_layers if self.head else ()
        out = self.target(batch, self.cache.target.layers, taps)
        if self.head is not None and self.cache.head is not None and out.tap_TX is not None:
            self.head.write_context(out.tap_TX, batch.position_T, batch.slot_T, self.cache.head.layers)
        self.cache.advance(request, count)
        return out


def cached_rows(cache: KVCache, request: Request) -> list[Tensor]:
    """A request's K, then V, of every layer of target and head, each in order of position."""
    pages = torch.tensor(cache.pages_of[request.row], device=cache.device)
    layers = cache.target.layers + (cache.head.layers if cache.head else ())
    return [part[pages].flatten(0, 1)[: request.num_cached] for layer in layers for part in (layer.k, layer.v)]


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Distance of two tokens after a text. None throughout: one text ends there, which no tie explains."""

    gap: float | None = None
    """Distance of the worse of the two tokens from the best logit of a fresh pass over the common text."""
    least: float | None = None
    """Least gap of several readings, where the first is wider than a tie."""
    moved: float | None = None
    """Distance from the least to the widest of these readings."""
    tie: bool = False
    """Rounding alone may have decided between the two tokens: it changes logits by up to the limit of a tie, or by the
    distance measured here."""


@dataclass(frozen=True, kw_only=True)
class Difference(Gap):
    """Place where a text leaves the plain one."""

    prompt: str
    place: int
    """Common tokens before."""
    plain: int | None = None
    other: int | None = None


def rounded(fresh: FreshPass, seed: int) -> Judge:
    """A fresh pass by plain torch in which the input of every layer is rounded a little more, by a seed."""

    def logits(tokens: Sequence[int]) -> Tensor:
        with force("reference"), rounding_more(fresh.target, seed):
            return fresh.logits(tokens)

    return logits


@contextmanager
def rounding_more(target: Decoder, seed: int) -> Iterator[None]:
    generator = torch.Generator(target.embedding.device).manual_seed(seed)

    def round_input(_: nn.Module, inputs: tuple[Residual, *tuple[Any, ...]]) -> tuple[Any, ...]:
        residual, *others = inputs
        return Residual(round_more(residual.x, generator)), *others

    hooks = [layer.register_forward_pre_hook(round_input) for layer in target.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def round_more(x: Tensor, generator: torch.Generator) -> Tensor:
    """One number in `ONE_IN` changed by a unit of its last place, half of them up."""
    mantissa, exponent = torch.frexp(x.double())
    draw = torch.randint(2 * ONE_IN, x.shape, generator=generator, device=x.device)
    step = (draw == 0).double() - (draw == 1).double()
    unit = mantissa.sign() * torch.finfo(x.dtype).eps / 2  # of a number from a half to one; zeros stay
    return torch.ldexp(mantissa + step * unit, exponent).to(x.dtype)


def readings(fresh: FreshPass) -> list[Judge]:
    """Judges of a text: the fresh pass, and others with more rounding."""
    return [fresh.logits, *(rounded(fresh, seed) for seed in range(READINGS))]


def find_differences(
    prompts: Texts, plain: Texts, other: Texts, judges: Sequence[Judge], limit: float
) -> list[Difference]:
    """First difference of every text from the plain one; behind it the prefix differs. `limit` is the widest tie."""
    found = []
    for name, text in other.items():
        if (divergence := find_divergence(plain[name], text)) is None:
            continue
        place, pair = divergence
        gap = gap_by_all(*pair, [*prompts[name], *text[:place]], judges, limit) if pair else Gap()
        plain_token, token = pair or (None, None)
        found.append(Difference(prompt=name, place=place, plain=plain_token, other=token, **vars(gap)))
    return found


def find_divergence(plain: Sequence[int], other: Sequence[int]) -> tuple[int, tuple[int, int] | None] | None:
    """Length of the common prefix, and the tokens behind it unless one text ends. None: the texts are equal."""
    pairs = enumerate(zip(plain, other, strict=False))
    place = next((i for i, (x, y) in pairs if x != y), min(len(plain), len(other)))
    if place == len(plain) == len(other):
        return None
    return place, None if place in (len(plain), len(other)) else (plain[place], other[place])


def gap_by_all(a: int, b: int, tokens: Sequence[int], judges: Sequence[Judge], limit: float) -> Gap:
    """Distance of the worse of two tokens from the best logit after a text: by the first judge, and where that is no
    tie, by the others. The gap of a wrong token is wide in all readings, and changes little between them."""

    def gap_by(judge: Judge) -> float:
        logits_V = judge(tokens)[0]
        return float(logits_V.max() - torch.minimum(logits_V[a], logits_V[b]))

    gap = gap_by(judges[0])
    again = list(map(gap_by, judges[1:])) if gap > limit else []
    known = [other for other in again if other < math.inf]  # without what a draw leaves out
    least, moved = min(again, default=gap), max(known) - min(known) if known else 0.0
    return Gap(gap=gap, least=least, moved=moved, tie=least <= max(limit, moved))


@dataclass(frozen=True)
class PairNoise:
    """Largest change of the distance of two logits from a fresh pass to others, over a sample of positions."""

    steps: float
    """Change to passes over one token, of the best token and those that may take its place."""
    trees: float
    """The same to passes over as many tokens as a tree has."""
    drawn: float
    """Change between any two of the likeliest tokens, between which a draw may choose."""
    positions: int

    @property
    def widest_tie(self) -> float:
        """Largest distance at which rounding may exchange two tokens."""
        return max(self.steps, self.trees)

    def tie_at(self, temperature: float) -> float:
        return self.drawn if temperature > 0 else self.widest_tie


def pair_noise(
    fresh: FreshPass, texts: Sequence[tuple[Sequence[int], Sequence[int]]], budget: int, most: int = 8
) -> PairNoise:
    """Rounding of the target alone, which reads answers behind their prompts in pieces of one token and of a tree: the
    first tokens of at most so many, drawn evenly from all.

    No engine is involved: a wrong one cannot be excused by its own noise. Tokens too unlikely to become the best are
    left out, if the texts hold enough others: their noise is larger.
    """
    behind, moved = list[Tensor](), {1: list[Tensor](), budget: list[Tensor]()}
    for prompt, whole in texts[:: -(-len(texts) // most)]:
        answer = whole[:NOISE_TOKENS]
        tokens, last = [*prompt, *answer[:-1]], len(answer)
        fresh_TV = fresh.logits(tokens, last)
        best_TK = fresh_TV.topk(min(CANDIDATES, fresh_TV.shape[-1]))
        behind.append(best_TK.values[:, :1] - best_TK.values)
        for size, off in moved.items():
            off.append((fresh.logits(tokens, last, size) - fresh_TV).gather(1, best_TK.indices))
    behind_PK, off_PK = torch.cat(behind), {size: torch.cat(off) for size, off in moved.items()}
    drawn = max(float((off.amax(1) - off.amin(1)).max()) for off in off_PK.values())
    rival_PK = behind_PK[:, 1:] <= drawn
    if rival_PK.sum() < RIVALS:
        return PairNoise(drawn, drawn, drawn, len(behind_PK))
    near = {size: float((off[:, 1:] - off[:, :1]).abs()[rival_PK].max()) for size, off in off_PK.items()}
    return PairNoise(near[1], near[budget], drawn, len(behind_PK))


# -- answers of a benchmark

OTHER_PROMPT = "other prompt"
"""Reason for a server that tokenized its own earlier answer differently."""


@dataclass(frozen=True, kw_only=True)
class Divergence(Gap):
    """Place where an answer leaves the plain one."""

    id: str
    turn: int
    position: int
    """Common tokens of the turn before."""
    why: str | None = None
    """Another reason. Such an answer is listed, and counts neither as compared nor as a mistake."""


class LosslessCheck:
    """Compares answers with those of plain decoding, token by token.

    Greedy answers of all methods are compared, and sampled ones of our engine, which samples by seed and position
    alone. A difference is listed with its gap: the distance of the worse of the two tokens from the target's best,
    noise of the draw included. It is a tie where the gap, in some reading of the text, is within the rounding of two
    logits, in general or there, and a mistake elsewhere. Texts of servers are tokenized first.
    """

    def __init__(self, bench: Bench, plain: Sequence[Measured]) -> None:
        self.bench, self.plain = bench, plain
        self.methods = {method.name: method for method in bench.methods}
        self._gaps: dict[Hashable, Gap] = {}

    @cached_property
    def fresh(self) -> FreshPass:
        return FreshPass(self.bench.llm.target.decoder, None, self.bench.max_len)

    @cached_property
    def noise(self) -> PairNoise:
        """Rounding, measured on first turns of plain answers."""
        texts = []
        for measured in self.plain:
            prompts = self._prompts(measured.cell.task)
            for answer in measured.all_whole_answers:
                asked = Conversation(prompts[answer["id"]], self.bench.llm.tokenizer, **self.bench.variables)
                texts.append((asked.token_ids, answer["turn_tokens"][0]))
        config = self.bench.config
        budgets = [budget or 1 for method in self.bench.methods for budget in config.budgets_of(method)]
        return pair_noise(self.fresh, texts, max(budgets))

    def noise_record(self) -> dict[str, Any] | None:
        """Rounding for the record. None: no difference was found, and it was not measured."""
        if "noise" not in self.__dict__:
            return None
        return {**asdict(self.noise), "widest_tie": self.noise.widest_tie}

    def of(self, mine: Measured, plain: Measured) -> dict[str, Any] | None:
        """Comparison of a cell. Repeats of a greedy answer count once; draws of another repeat are other answers."""
        method, temperature = self.methods[mine.cell.method], mine.cell.temperature
        if temperature > 0 and not method.is_ours:
            return None
        is_text = method.url is not None
        prompts = self._prompts(mine.cell.task)
        judged: dict[Hashable, list[Divergence | None]] = {}
        repeats_of: dict[Divergence, list[int]] = {}
        for repeat in range(len(mine.repeats)):
            others = plain.answers[repeat]
            for answer in mine.whole_answers[repeat]:
                id = answer["id"]
                if others[id]["error"]:
                    continue
                found = self.first_difference(prompts[id], others[id], answer, repeat, temperature, is_text)
                if found is not None:
                    repeats_of.setdefault(found, []).append(repeat)
                if found is None or found.why is None:
                    judged.setdefault((id, repeat) if temperature > 0 else id, []).append(found)
        return {
            "check": "seeded tokens" if temperature > 0 else "greedy text" if is_text else "greedy tokens",
            "compared": len(judged),
            "identical": sum(not any(divergences) for divergences in judged.values()),
            "ties": sum(
                any(divergences) and all(p is None or p.tie for p in divergences) for divergences in judged.values()
            ),
            "different": [{**asdict(divergence), "repeats": repeats} for divergence, repeats in repeats_of.items()],
        }

    def _prompts(self, task: str) -> dict[str, Prompt]:
        return {prompt.id: prompt for prompt in self.bench.questions[task]}

    def first_difference(
        self,
        prompt: Prompt,
        plain: Mapping[str, Any],
        mine: Mapping[str, Any],
        repeat: int,
        temperature: float,
        is_text: bool,
    ) -> Divergence | None:
        """First turn that differs, and the place; turns after it answer another conversation."""
        talk = Conversation(prompt, self.bench.llm.tokenizer, **self.bench.variables)
        for turn, (expected, given) in enumerate(zip(plain["turn_tokens"], mine["turn_tokens"], strict=True)):
            if turn in mine.get("other_prompts", ()):
                return Divergence(id=prompt.id, turn=turn, position=0, why=OTHER_PROMPT)
            asked = talk.with_next_turn() if turn else talk.token_ids
            talk.token_ids = asked
            talk.answer(expected, plain["finish"][turn])
            if is_text:
                expected = self.bench.llm.tokenizer.encode_words(plain["text"][turn])
            if (divergence := find_divergence(expected, given)) is None:
                continue
            place, pair = divergence
            sampling = self.bench.config.sampling(temperature, repeat, prompt.id, turn)
            gap = self.gap(*pair, (*asked, *given[:place]), sampling) if pair else Gap()
            return Divergence(id=prompt.id, turn=turn, position=place, **vars(gap))
        return None

    def gap(self, a: int, b: int, tokens: tuple[int, ...], sampling: SamplingParams) -> Gap:
        """Gap of two tokens after a text, cached: many methods leave the plain text at the same place."""
        key = a, b, tokens, sampling if sampling.temperature > 0 else None
        if key not in self._gaps:
            judges = [drawn(reading, sampling) for reading in readings(self.fresh)]
            self._gaps[key] = gap_by_all(a, b, tokens, judges, self.noise.tie_at(sampling.temperature))
        return self._gaps[key]


def drawn(judge: Judge, sampling: SamplingParams) -> Judge:
    """A judge with the noise of a draw: the drawn token has the best of these logits."""
    if sampling.temperature == 0:
        return judge
    assert sampling.seed is not None
    seed = sampling.seed

    @torch.inference_mode()
    def logits(tokens: Sequence[int]) -> Tensor:
        logits_1V = judge(tokens)
        row = RowSampling.of([sampling], [seed], logits_1V.device)
        position = torch.tensor([len(tokens)], device=logits_1V.device)
        noisy = filter_logits(logits_1V, row) + gumbel(row.seed_B, position, logits_1V.shape[-1])
        return noisy * sampling.temperature

    return logits
