"""Constrained text follows its grammar and equals plain constrained decoding for every drafter."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from jetspec.config import EngineConfig, TreeConfig
from jetspec.engine.engine import Engine
from jetspec.grammar.constraint import Grammars
from jetspec.models.decoder import Decoder
from jetspec.tree import unpack_bits
from jetspec.types import Grammar, SamplingParams
from tests.engine import tiny
from tests.engine.test_engine import GREEDY, PROMPTS, TRUTH
from tests.engine.tiny import VOCAB, Script, make_engine, next_logits, run, tiny_decoder, use
from tests.grammar.texts import grammars
from tests.train.tiny_model import END_TOKEN
from tests.train.tiny_model import VOCAB as BYTES

ANYTHING = Grammar("ebnf")


class Sums:
    """Test constraint: no prefix sum of the text is a multiple of three."""

    def __init__(self, vocab: int = VOCAB) -> None:
        self.vocab, self.text = vocab, list[int]()

    def follows(self, token: int) -> bool:
        return (sum(self.text) + token) % 3 != 0

    def allow(self, mask_W: torch.Tensor) -> None:
        bits = [self.follows(token) << token % 32 for token in range(self.vocab)]
        for word in range(len(mask_W)):
            value = sum(bits[word * 32 : word * 32 + 32])
            mask_W[word] = value - (1 << 32) if value >= 1 << 31 else value

    def advance(self, token: int) -> bool:
        follows = self.follows(token)
        self.text += [token] * follows
        return follows

    def rollback(self, count: int) -> None:
        del self.text[len(self.text) - count :]


# ---- in the engine, with a constraint of our own ----

TARGET = tiny_decoder()
SETTINGS = {
    "greedy": SamplingParams(max_tokens=20, grammar=ANYTHING),
    "sampled": SamplingParams(max_tokens=20, temperature=0.9, top_k=20, seed=3, grammar=ANYTHING),
    "penalized": SamplingParams(max_tokens=20, frequency_penalty=0.7, grammar=ANYTHING, logprobs=2),
}
NO_END = frozenset({VOCAB - 1})


def engine_of(who: str, target: Decoder = TARGET, budget: int = 14, **options: Any) -> Engine:
    tree, config = TreeConfig(budget=budget, width=4), EngineConfig(page_size=4, **options)
    ends, start = (frozenset({END_TOKEN}), grammars().start) if target is WRITER else (NO_END, lambda _: Sums())
    return tiny.engine_of(target, who, tree, config, eos_tokens=ends, constrain=start)


@pytest.fixture(scope="module")
def texts() -> dict[str, list[list[int]]]:
    """Outputs of plain constrained decoding."""
    return {n: [c.token_ids for c in run(engine_of("none"), PROMPTS, s)] for n, s in SETTINGS.items()}


def test_constrained_decoding_takes_the_best_allowed_token(texts: dict[str, list[list[int]]]) -> None:
    for prompt, text in zip(PROMPTS[:2], texts["greedy"], strict=False):
        constraint = Sums()
        for i, token in enumerate(text):
            ranked = next_logits(TARGET, [*prompt, *text[:i]]).argsort(descending=True).tolist()
            assert token == next(t for t in ranked if constraint.follows(t))
            assert constraint.advance(token)
    assert all(a != b[:20] for a, b in zip(texts["greedy"], TRUTH[GREEDY], strict=True))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("who", ["ngram", "edge", "script"])
def test_trees_equal_plain_constrained_decoding(who: str, name: str, texts: dict[str, list[list[int]]]) -> None:
    engine = engine_of("none" if who == "script" else who, max_batch=4)
    if who == "script":
        use(engine, Script({tuple(p): t for p, t in zip(PROMPTS, texts[name], strict=True)}, 0.9, budget=16))
    done = run(engine, PROMPTS, SETTINGS[name])
    assert [c.token_ids for c in done] == texts[name]
    assert who != "script" or max(max(c.stats.accepted_lengths) for c in done) == 6


@pytest.mark.parametrize("overlap_rounds", [0, 2])
def test_constrained_and_free_requests_share_a_batch(overlap_rounds: int, texts: dict[str, list[list[int]]]) -> None:
    """Some requests are preempted; unconstrained ones overlap rounds while alone."""
    params = [SETTINGS["greedy"] if i % 2 else GREEDY for i in range(6)]
    engine = engine_of("edge", max_batch=4, num_pages=30, overlap_rounds=overlap_rounds)
    done = run(engine, PROMPTS, params)
    for i, completion in enumerate(done):
        free = TRUTH[GREEDY][i]
        free = free[: free.index(VOCAB - 1) + 1] if VOCAB - 1 in free else free
        assert completion.token_ids == (texts["greedy"][i] if i % 2 else free)


# ---- grammars ----

WRITER = tiny_decoder(vocab=BYTES, layers=2)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "ages", "kind"],
    "additionalProperties": False,
}
FORMATS = {
    "schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "object": Grammar("json_object"),
    "regex": Grammar("regex", r"(ab|cd){3,5}-[0-9]{2}"),
    "ebnf": Grammar("ebnf", 'root ::= "yes" | "no " root'),
}


def check_text(kind: str, text: str) -> None:
    if kind == "schema":
        value = json.loads(text)
        assert value.keys() == SCHEMA["properties"].keys()  # type: ignore[attr-defined]
        assert len(value["name"]) <= 6 and value["kind"] in ("cat", "dog")
        assert len(value["ages"]) <= 3 and all(0 <= age <= 99 for age in value["ages"])
    elif kind == "object":
        assert isinstance(json.loads(text), dict)
    else:
        assert re.fullmatch({"regex": FORMATS["regex"].source, "ebnf": "(no )*yes"}[kind], text)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", FORMATS)
def test_output_follows_the_grammar(kind: str, temperature: float) -> None:
    few_spaces = dict.fromkeys(b" \n\r", -100.0)
    sampling = SamplingParams(
        temperature=temperature, seed=2, max_tokens=150, logit_bias=few_spaces, grammar=FORMATS[kind]
    )
    prompts = [[65, 66, 67], [120, 10]]
    expected = run(engine_of("none", WRITER), prompts, sampling)
    texts = {tuple(p): c.token_ids for p, c in zip(prompts, expected, strict=True)}
    done = run(use(engine_of("none", WRITER), Script(texts, 0.9, budget=16)), prompts, sampling)
    assert [c.token_ids for c in done] == [c.token_ids for c in expected]
    for completion in done:
        if kind != "object" or completion.finish_reason == "stop":  # any object can go on for ever
            assert completion.finish_reason == "stop" and completion.token_ids[-1] == END_TOKEN
            check_text(kind, bytes(completion.token_ids[:-1]).decode(errors="surrogatepass"))


def test_text_ends_without_an_allowed_token() -> None:
    letters = Grammars([b"a", b"b", b""], 3, frozenset({2}))
    constraint = letters.start(Grammar("regex", "ab?c"))
    assert constraint.advance(0) and constraint.advance(1)
    mask_W = torch.full((1,), -1, dtype=torch.int32)
    constraint.allow(mask_W)
    assert unpack_bits(mask_W, 3).tolist() == [False, False, True]


def test_nothing_follows_the_end() -> None:
    constraint = grammars().start(Grammar("regex", "a"))
    assert constraint.advance(ord("a")) and not constraint.advance(ord("a")) and constraint.advance(END_TOKEN)
    assert not constraint.advance(ord("a"))
    constraint.rollback(1)
    assert constraint.advance(END_TOKEN)


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("regex", "([", "Unclosed"),
        ("ebnf", "root ::= missing", "missing"),
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", "3", "object or bool"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"properties": {"a": {"not": {"type": "string"}}}}', "not"),
        ("json_schema", '{"$defs": {"x": {"minLength": 3}}, "$ref": "#/$defs/x"}', "minLength"),
        ("json_schema", '{"anyOf": [{"type": "string"}], "maxLength": 3}', "maxLength"),
        ("json_schema", '{"allOf": [{"type": "string"}, {"type": "null"}]}', "allOf"),
        ("json_schema", '{"type": "number", "multipleOf": 0.5}', "multipleOf"),
        ("json_schema", '{"type": "array", "items": {"$ref": "#/x"}, "x": {"not": {}}}', "not"),
        ("json_schema", '{"$ref": "#x"}', "\\$ref"),
        ("json_schema", '{"type": "string", "pattern": "a", "minLength": 2}', "minLength"),
        ("json_schema", json.dumps({"type": "string", "pattern": '"'}), "pattern"),
        ("json_schema", json.dumps({"type": "string", "pattern": r"a\\\\"}), "pattern"),
        ("json_schema", json.dumps({"type": "string", "pattern": r"\x22"}), "pattern"),
        ("json_schema", '{"type": "array", "items": ' * 9999 + "{}" + "}" * 9999, "JSON"),
        *(("calls", source, "begin, end and schema") for source in ("{", "[]", '{"begin": "<", "end": ">"}')),
        ("calls", '{"begin": "<", "end": ">", "schema": {"type": "array", "uniqueItems": true}}', "uniqueItems"),
        *(("calls", f'{{"begin": {begin}, "end": ">", "schema": true}}', "calls") for begin in ('""', "5")),
        ("xml", "", "unknown"),
    ],
)
def test_invalid_grammar_is_refused_in_one_line(kind: Any, source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        grammars().start(Grammar(kind, source))
    assert "\n" not in str(caught.value) and ".cc" not in str(caught.value)


LIST = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
ENDLESS: dict[str, dict[str, Any]] = {
    "itself": {"$ref": "#"},
    "two in turn": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "a list without an end": LIST,
    "no type": {"properties": LIST["properties"], "required": ["next"]},
    "an item": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "one of the first items": {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2},
    "some property": {"type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#"}},
    "no choice ends": {"anyOf": [LIST, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]},
    "a choice": {
        "anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}],
        "$defs": {"x": {"allOf": [{"$ref": "#/$defs/x"}]}},
    },
    "under a name of its own": {
        "type": "object",
        "properties": {"a": {"$ref": "#/x-b"}},
        "x-b": {"$ref": "#/x-b"},
    },
}
ENDING: dict[str, dict[str, Any]] = {
    "may be left out": {"type": "object", "properties": {"next": {"$ref": "#"}}},
    "may be empty": {"type": "array", "items": {"$ref": "#"}},
    "may be null": {"type": ["object", "null"], **{k: v for k, v in LIST.items() if k != "type"}},
    "an end to choose": {"anyOf": [{"$ref": "#/$defs/x"}, {"const": 1}], "$defs": {"x": LIST}},
    "named like keywords": {
        "type": "object",
        "properties": {"not": {"type": "string", "title": "x", "default": {"if": 1}}},
    },
    "seen twice": {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 2, "$defs": {"x": {"type": "null"}}},
}


@pytest.mark.parametrize("name", [*ENDLESS, *ENDING])
def test_schema_without_finite_text_is_refused(name: str) -> None:
    if name in ENDING:
        grammars().compile(Grammar("json_schema", json.dumps(ENDING[name])))
        return
    with pytest.raises(ValueError, match="contains itself by \\$ref"):
        grammars().compile(Grammar("json_schema", json.dumps(ENDLESS[name])))


def test_grammar_needs_end_token_and_vocabulary() -> None:
    with pytest.raises(ValueError, match="ignore_eos"):
        SamplingParams(grammar=ANYTHING, ignore_eos=True)
    for engine, message in (
        (make_engine(TARGET, eos_tokens=NO_END), "constrain"),
        (make_engine(TARGET, constrain=lambda _: Sums()), "end token"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add([1], SamplingParams(grammar=ANYTHING))
        assert not engine.has_work
