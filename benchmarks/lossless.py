"""Comparison of answers with those of plain decoding: equal, a tie of two logits, or a mistake."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks.cells import Measured
from benchmarks.measure import Bench
from benchmarks.precision import FreshPass, Gap, Judge, PairNoise, find_divergence, gap_by_all, pair_noise, readings
from jetspec.data.conversation import Conversation
from jetspec.data.prompts import Prompt
from jetspec.tree.sample import filter_logits, gumbel
from jetspec.types import RowSampling, SamplingParams

OTHER_PROMPT = "other prompt"
"""Reason for a server that tokenized its own earlier answer differently."""
NOISE_TEXTS, NOISE_TOKENS = 8, 64
"""Answers that rounding is measured on, and the most tokens of each."""


@dataclass(frozen=True)
class Divergence:
    """Place where an answer leaves the plain one."""

    id: str
    turn: int
    position: int
    """Common tokens of the turn before."""
    gap: float | None = None
    """Distance of the two tokens in the target's logits. None: one text ends earlier."""
    least: float | None = None
    """Least gap of several readings, where the first is wider than a tie."""
    moved: float | None = None
    """Spread of these readings."""
    tie: bool = False
    """Rounding alone may have decided between the tokens."""
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
        """Rounding, measured on first turns of plain answers, drawn evenly from all."""
        texts = []
        for measured in self.plain:
            prompts = self._prompts(measured.cell.task)
            for answer in measured.all_whole_answers:
                asked = Conversation(prompts[answer["id"]], self.bench.llm.tokenizer, **self.bench.variables)
                texts.append((asked.token_ids, answer["turn_tokens"][0][:NOISE_TOKENS]))
        config = self.bench.config
        budgets = [budget or 1 for method in self.bench.methods for budget in config.budgets_of(method)]
        return pair_noise(self.fresh, texts[:: -(-len(texts) // NOISE_TEXTS)], max(budgets))

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
            others = plain.answers(repeat)
            for answer in mine.whole_answers(repeat):
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
                return Divergence(prompt.id, turn, 0, why=OTHER_PROMPT)
            asked = talk.with_next_turn() if turn else talk.token_ids
            talk.token_ids = asked
            talk.answer(expected, plain["finish"][turn])
            if is_text:
                expected = self.bench.llm.tokenizer.encode_words(plain["text"][turn])
            if (divergence := find_divergence(expected, given)) is None:
                continue
            place, pair = divergence
            if pair is None:
                return Divergence(prompt.id, turn, place)
            sampling = self.bench.config.sampling(temperature, repeat, prompt.id, turn)
            gap = self.gap(*pair, (*asked, *given[:place]), sampling)
            return Divergence(prompt.id, turn, place, *gap, tie=gap.is_tie(self.noise.tie_at(temperature)))
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
