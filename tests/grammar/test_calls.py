"""Text outside of tool calls is free, and every call follows its schema, with any tokenization."""

from __future__ import annotations

import json
import random
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jetspec.engine.engine import Engine
from jetspec.grammar.constraint import Grammars, mask_tree
from jetspec.grammar.tools import BEGIN, END, forced_call
from jetspec.tree import unpack_bits
from jetspec.types import Grammar, SamplingParams
from tests.engine.tiny import Script, make_engine, run, tiny_decoder, use
from tests.grammar.texts import allowed_tokens
from tests.train.tiny_model import END_TOKEN, byte_tokenizer

pytest.importorskip("xgrammar", reason="grammars need xgrammar")

ACROSS = ['>{"', ">\n", "x<tool_call>{", "<tool", "}}</", ">x", "call>oh", "x<tool_call>y", "</tool_call>\n<tool_call>"]
"""Tokens that cross the borders of tags. Some are never allowed, or only in some places."""
TOKENS = [*byte_tokenizer([BEGIN, END]).token_bytes(), *(text.encode() for text in ACROSS)]
VOCAB = len(TOKENS) + 2
"""Includes a few ids without a token, as in many models."""
BEGIN_TOKEN, END_TAG_TOKEN = 258, 259
SILENT = [256, VOCAB - 2, VOCAB - 1]
"""Tokens that add nothing to a text and do not end it."""
ENDS = frozenset({END_TOKEN})


def call_of(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": "f"}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


NUMBER = {"type": "integer", "minimum": 1, "maximum": 20}
OPEN = call_of({"type": "object", "properties": {"n": NUMBER, "s": {"type": "string"}}, "required": ["n"]})
CLOSED = call_of({"type": "object", "properties": {"n": NUMBER}, "required": ["n"], "additionalProperties": False})


def calls(schema: Any = OPEN, begin: str = BEGIN, end: str = END, once: bool = False) -> Grammar:
    return Grammar("calls", json.dumps({"begin": begin, "end": end, "schema": schema, "once": once}))


@cache
def grammars() -> Grammars:
    return Grammars(TOKENS, VOCAB, ENDS)


def text_of(tokens: list[int]) -> str:
    return b"".join(TOKENS[token] if token < len(TOKENS) else b"" for token in tokens).decode(errors="replace")


def allowed(constraint: Any) -> list[int]:
    return allowed_tokens(constraint, VOCAB)


def check(text: str) -> int:
    """Every tag opens a call that keeps the schema. Returns their number."""
    count = 0
    while BEGIN in text:
        text = text.partition(BEGIN)[2].lstrip()
        call, size = json.JSONDecoder(strict=False).raw_decode(text)
        text = text[size:].lstrip()
        assert text.startswith(END)
        assert list(call) == ["name", "arguments"] and call["name"] == "f"
        assert 1 <= call["arguments"]["n"] <= 20 and isinstance(call["arguments"].get("s", ""), str)
        text, count = text.removeprefix(END), count + 1
    return count


class Walk:
    """A random text of allowed tokens; those that lead to calls and to their end are preferred."""

    def __init__(self, seed: int, schema: Any = OPEN) -> None:
        self.rng = random.Random(seed)
        self.constraint = grammars().start(calls(schema))
        self.tokens: list[int] = []

    def choose(self, tokens: list[int]) -> int:
        def weight(token: int) -> float:
            text = TOKENS[token] if token < len(TOKENS) else b""
            liked = token == BEGIN_TOKEN or any(text == word.encode() for word in ACROSS)
            is_next = self.spelled and text == self.spelled[:1].encode()
            return 500 if is_next else 40 if liked or text in (b'"', b"}") else 1 if text.strip() else 0.1

        return self.rng.choices(tokens, [weight(token) for token in tokens])[0]

    @property
    def spelled(self) -> str:
        """Rest of a tag that the text ends within."""
        text = text_of(self.tokens)
        size = next((size for size in range(len(BEGIN) - 1, 0, -1) if text.endswith(BEGIN[:size])), 0)
        return BEGIN[size:] if size else ""

    def step(self) -> None:
        token = self.choose([token for token in allowed(self.constraint) if token not in ENDS])
        assert self.constraint.advance(token)
        self.tokens.append(token)

    def write(self, steps: int) -> str:
        """Writes `steps` tokens, then continues until the text may end."""
        while len(self.tokens) < steps or END_TOKEN not in allowed(self.constraint):
            self.step()
            assert len(self.tokens) < 20 * steps
        return text_of(self.tokens)


@pytest.mark.parametrize("seed", range(12))
def test_tool_calls_follow_their_schema(seed: int) -> None:
    assert check(Walk(seed).write(60)) > 0


def is_inside(text: str) -> bool:
    """True if a call is open, given that no string in it contains a tag."""
    return text.rfind(BEGIN) > text.rfind(END)


@pytest.mark.parametrize("seed", range(4))
def test_control_tokens_and_ends_occur_only_outside_of_calls(seed: int) -> None:
    walk = Walk(seed, CLOSED)
    for _ in range(80):
        found = set(allowed(walk.constraint))
        is_free = END_TOKEN in found
        assert is_free == (not is_inside(text_of(walk.tokens))), text_of(walk.tokens)
        assert found.issuperset(SILENT) if is_free else found.isdisjoint(SILENT)
        assert [walk.constraint.advance(token) for token in SILENT] == [is_free] * 3
        walk.constraint.rollback(3 * is_free)
        walk.step()


@pytest.mark.parametrize("seed", range(4))
def test_a_text_with_one_call_ends_with_it(seed: int) -> None:
    walk = Walk(seed, CLOSED)
    walk.constraint = grammars().start(calls(CLOSED, once=True))
    while END not in text_of(walk.tokens).partition(BEGIN)[2]:
        walk.step()
    assert check(text_of(walk.tokens)) == 1 and text_of(walk.tokens).endswith(END)
    assert {*allowed(walk.constraint)} - {*SILENT} == ENDS


@pytest.mark.parametrize("text", ["", "hi\n\t\x00\x7f é", "a <tool", "</tool_call> <tool_call", '"<tool_cal'])
def test_text_outside_of_calls_is_unconstrained(text: str) -> None:
    constraint = grammars().start(calls())
    for token in [*text.encode(), 256, 0xFF, 0xC3, *text.encode()]:
        assert constraint.advance(token)
    for token in set(range(VOCAB)) - set(allowed(constraint)):
        opened = (text + text_of([token])).partition(BEGIN)[2]
        assert opened and opened.strip()[:1] not in ("", "{")
    if text != "</tool_call> <tool_call":
        assert len(allowed(constraint)) == VOCAB - 1, "one token opens a call in a wrong way all by itself"


@pytest.mark.parametrize("seed", range(4))
def test_masking_a_tree_restores_the_constraint(seed: int) -> None:
    walk, rng = Walk(seed), random.Random(seed)
    for _ in range(12):
        before = allowed(walk.constraint)
        tokens = [rng.choice([BEGIN_TOKEN, END_TAG_TOKEN, *SILENT, *b'{"x}', END_TOKEN]) for _ in range(12)]
        parents = [max(0, i - rng.randint(1, 3)) for i in range(12)]
        mask_NW = torch.full((12, -(-VOCAB // 32)), -1, dtype=torch.int32)
        mask_tree(walk.constraint, tokens, parents, mask_NW)
        assert allowed(walk.constraint) == before == unpack_bits(mask_NW[0], VOCAB).nonzero().flatten().tolist()
        fresh = grammars().start(calls())
        assert all(fresh.advance(token) for token in walk.tokens) and allowed(fresh) == before
        for _ in range(6):
            walk.step()


# ---- in the engine ----

TARGET = tiny_decoder(vocab=VOCAB, layers=2)
PROMPTS = [[65, 66, 67], [120, 10], [7] * 9, [99, 3]]
CALLING = {BEGIN_TOKEN: 9.0, END_TOKEN: 5.0, ord('"'): 4.0, ord("}"): 4.0, **dict.fromkeys(b" \n\r\t", -20.0)}
SETTINGS = {
    "greedy": SamplingParams(max_tokens=90, grammar=calls(CLOSED), logit_bias=CALLING),
    "sampled": SamplingParams(max_tokens=90, grammar=calls(CLOSED), logit_bias=CALLING, temperature=1.0, seed=4),
    "penalized": SamplingParams(max_tokens=90, grammar=calls(CLOSED), logit_bias=CALLING, presence_penalty=0.5),
}


def engine() -> Engine:
    return make_engine(TARGET, eos_tokens=ENDS, constrain=grammars().start)


@pytest.mark.parametrize("name", SETTINGS)
def test_trees_and_plain_decoding_write_the_same_calls(name: str) -> None:
    expected = run(engine(), PROMPTS, SETTINGS[name])
    texts = {tuple(prompt): done.token_ids for prompt, done in zip(PROMPTS, expected, strict=True)}
    done = run(use(engine(), Script(texts, 0.9, budget=16)), PROMPTS, SETTINGS[name])
    assert [c.token_ids for c in done] == [c.token_ids for c in expected]
    assert max(max(c.stats.accepted_lengths) for c in done) > 2
    written = [text_of(c.token_ids) for c in done]
    assert not any(is_inside(text) for text, c in zip(written, done, strict=True) if c.finish_reason == "stop")
    assert sum(check(text.rpartition(BEGIN)[0] if is_inside(text) else text) for text in written) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_without_calls_equals_unconstrained_text(temperature: float) -> None:
    """Of a model that likes tokens without text, which the library would not let it write."""
    bias = {token: -100.0 for token, text in enumerate(TOKENS) if BEGIN.encode() in text} | {256: 4.0, VOCAB - 1: 4.0}
    free = SamplingParams(max_tokens=80, temperature=temperature, seed=1, logit_bias=bias)
    bound = SamplingParams(max_tokens=80, temperature=temperature, seed=1, logit_bias=bias, grammar=calls(CLOSED))
    expected = [c.token_ids for c in run(make_engine(TARGET, eos_tokens=ENDS), PROMPTS, free)]
    assert [c.token_ids for c in run(engine(), PROMPTS, bound)] == expected
    assert all(any(token in tokens for tokens in expected) for token in (256, VOCAB - 1))


def test_objects_stay_open_between_tags() -> None:
    """Properties that a schema does not name are allowed, unless it forbids them."""
    constraint = grammars().start(calls({"type": "object", "properties": {"a": {"type": "integer"}}}))
    text = f'so {BEGIN}\n{{"a": 1, "b": {{"c": [2]}}}}\n{END} and {BEGIN}{{}}{END}'
    assert all(constraint.advance(token) for token in [*text.encode(), END_TOKEN])


@pytest.mark.parametrize("name", ["f", "g"])
@pytest.mark.parametrize("value", ["true", "7"])
def test_definitions_of_functions_do_not_collide(name: str, value: str) -> None:
    """References lead to definitions of the same function, also those in parts under names of their own."""

    def function(name: str, inner: dict[str, Any]) -> Any:
        parameters = {"type": "object", "properties": {"a": {"$ref": "#/x-a"}}, "required": ["a"]}
        parts = {"x-a": {"$ref": "#/$defs/Inner"}, "$defs": {"Inner": inner}}
        return SimpleNamespace(name=name, parameters={**parameters, **parts})

    both = forced_call([function("f", {"type": "boolean"}), function("g", {"const": 7})])
    constraint = grammars().start(both)
    text = f'{{"name": "{name}", "arguments": {{"a": {value}}}}}'
    fits = all(constraint.advance(token) for token in [*text.encode(), END_TOKEN])
    assert fits == ((name, value) in (("f", "true"), ("g", "7")))
