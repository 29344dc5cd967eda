"""Every text that the grammar of a JSON schema allows is valid; unenforceable schemas are refused."""

from __future__ import annotations

import ipaddress
import json
import random
import re
import time
from collections.abc import Callable
from datetime import date, datetime, timedelta
from datetime import time as clock
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, Optional, Union
from uuid import UUID

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from jetspec.grammar.schema import enforceable
from jetspec.types import Grammar
from tests.grammar.texts import allowed_tokens, grammars
from tests.train.tiny_model import END_TOKEN

pytest.importorskip("xgrammar", reason="grammars need xgrammar")


def write(schema: dict[str, Any], seed: int, most: int = 4000) -> str:
    """Generates a random text of a schema without spaces, preferring tokens that close something."""
    rng = random.Random(seed)
    constraint = grammars().start(Grammar("json_schema", json.dumps(schema)))
    text: list[int] = []
    while len(text) < most:
        allowed = allowed_tokens(constraint)
        if END_TOKEN in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return bytes(text).decode()
        printed = [token for token in allowed if 32 < token < 127]
        closing = [token for token in printed if token in b'"]}']
        text.append(rng.choice(closing if closing and rng.random() < 0.3 else printed))
        assert constraint.advance(text[-1])
    raise AssertionError("the text has no end")


def allows(schema: dict[str, Any], text: str) -> bool:
    constraint = grammars().start(Grammar("json_schema", json.dumps(schema)))
    return all(constraint.advance(token) for token in [*text.encode(), END_TOKEN])


@pytest.mark.parametrize("schema", [{"type": "string", "maxLength": 3}, {"type": "string"}, {"type": "object"}])
def test_json_has_no_raw_control_character(schema: dict[str, object]) -> None:
    constraint = grammars().start(Grammar("json_schema", json.dumps(schema)))
    for token in b'{"' if schema["type"] == "object" else b'"':
        assert constraint.advance(token)
    allowed = allowed_tokens(constraint)
    assert min(allowed) >= 32 and {*b'a"'} <= {*allowed}


# ---- models of pydantic, the source of most schemas ----


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Size(IntEnum):
    S = 1
    M = 2


class Point(BaseModel):
    x: int
    y: Annotated[float, Field(ge=0, le=2.5)] = 0.5
    colour: Colour = Colour.RED


class Circle(BaseModel):
    kind: Literal["circle"]
    radius: Annotated[int, Field(gt=0, lt=1000)]


class Square(BaseModel):
    kind: Literal["square", "box"] = "square"
    side: Size


class Drawing(BaseModel):
    title: Annotated[str, Field(min_length=1, max_length=8, description="What it shows")]
    centre: Point
    shapes: Annotated[list[Annotated[Circle | Square, Field(discriminator="kind")]], Field(min_length=1, max_length=3)]
    note: Optional[str] = None  # noqa: UP045
    scale: Union[int, str, None] = None  # noqa: UP007
    mode: Literal["a", 1, None] = None
    pair: tuple[int, bool] = (1, True)
    code: Annotated[str, Field(pattern=r"^[A-Z]{2}\d{3}$")] = "AB123"
    names: dict[str, int] = Field(default_factory=dict)


class Node(BaseModel):
    value: bool
    children: list[Node] = Field(default_factory=list, max_length=2)


class Moments(BaseModel):
    day: date
    moment: datetime
    hour: clock
    span: timedelta
    id: UUID
    host: ipaddress.IPv4Address
    other: ipaddress.IPv6Address
    secret: pydantic.SecretStr


MODELS: list[Any] = [Drawing, Node, Moments, Point]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_pydantic_accepts_generated_texts(model: Any, seed: int) -> None:
    model.model_validate_json(write(model.model_json_schema(), seed))


# ---- enforced ----

FORMATS: dict[str, Callable[[str], object]] = {
    "date": date.fromisoformat,
    "date-time": datetime.fromisoformat,
    "time": clock.fromisoformat,
    "duration": pydantic.TypeAdapter(timedelta).validate_python,
    "uuid": UUID,
    "uuid7": lambda text: match("7", str(UUID(text).version)),
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "hostname": lambda text: match(r"(?=.{1,253}$)[a-z0-9-]{1,63}(\.[a-z0-9-]{1,63})*", text),
    "email": lambda text: match(r"(?=.{1,64}@)[^@\s]+@[^@\s]+\.[a-z]+", text),
    "uri": lambda text: match(r"[A-Za-z][A-Za-z0-9+.-]*:\S*", text),
}


def match(pattern: str, text: str) -> None:
    assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("name", FORMATS)
def test_format_is_enforced(name: str) -> None:
    for seed in range(30):
        FORMATS[name](json.loads(write({"type": "string", "format": name}, seed)))


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", ["2024-02-29", "2000-02-29", "0001-01-01", "9999-12-31"], ["2021-02-30", "1900-02-29", "2021-04-31"]),
        ("date-time", ["2024-02-29T23:59:59Z", "2020-01-01T00:00:00.5+01:30"], ["2023-02-29T00:00:00Z"]),
        ("ipv4", ["0.0.0.0", "255.255.255.255", "10.0.0.7"], ["256.0.0.1", "01.2.3.4", "1.2.3"]),
        ("ipv6", ["::", "::1", "1::", "fe80::1:2", "1:2:3:4:5:6:7:8", "1::3:4:5:6:7:8"], ["1:2", "1::2::3", ":1"]),
        ("email", ["a.b+c@example.org"], ["a b@c.de", "a@b", "@c.de"]),
        ("duration", ["P1Y2M3DT4H5M6S", "PT0S", "P3W"], ["P", "PT", "1D"]),
    ],
)
def test_format_accepts_and_refuses(name: str, good: list[str], bad: list[str]) -> None:
    schema = {"type": "string", "format": name}
    assert [text for text in good if not allows(schema, f'"{text}"')] == []
    assert [text for text in bad if allows(schema, f'"{text}"')] == []
    assert allows({"type": ["string", "null"], "format": name, "minLength": 1}, "null")


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"a(xy+)?z", r"a(xy{1,2}){1,}z", r"a(xy{0,2}){0,}z", r"((ab+)?c)?d", r"(ab+)??c", r"[)?]+x", r"\(\)?x"),
        *(r"^\d{3}-\w+\.[A-Z]$", r"(a|b+|)c", r"(?:a[bc]{1,2})?d", r"x{2,}y*?"),
    ],
)
def test_pattern_is_enforced(pattern: str) -> None:
    for seed in range(20):
        match(pattern, json.loads(write({"type": "string", "pattern": pattern}, seed)))


@pytest.mark.parametrize("seed", range(8))
def test_bounds_are_enforced(seed: int) -> None:
    number = {"type": "number", "exclusiveMinimum": -0.25, "maximum": 1.5}
    integer = {"type": ["integer", "null"], "minimum": -17, "exclusiveMaximum": 120}
    schema = {
        "type": "object",
        "properties": {
            "numbers": {"type": "array", "prefixItems": [{"const": 0}], "items": number, "minItems": 2, "maxItems": 4},
            "counted": {
                "type": "object",
                "properties": dict.fromkeys("abcd", integer),
                "additionalProperties": False,
                "minProperties": 2,
                "maxProperties": 3,
            },
            "named": {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": integer},
            "odd": {"type": "integer", "multipleOf": 7},
            "text": {"type": ["string", "null"], "minLength": 2, "maxLength": 3},
        },
        "required": ["numbers", "counted", "named", "odd", "text"],
    }
    found = json.loads(write(schema, seed))
    assert found["numbers"][0] == 0 and 2 <= len(found["numbers"]) <= 4
    assert all(-0.25 < value <= 1.5 for value in found["numbers"][1:])
    assert (
        2 <= len(found["counted"]) <= 3 and found["counted"].keys() <= set("abcd") and found["named"].keys() <= {*"xy"}
    )
    assert all(value is None or -17 <= value < 120 for part in ("counted", "named") for value in found[part].values())
    assert found["odd"] % 7 == 0 and (found["text"] is None or 2 <= len(found["text"]) <= 3)


def test_one_of_branches_are_disjoint() -> None:
    """A text without the distinguishing property is not allowed."""
    tagged = [{"type": "object", "properties": {"k": {"const": c}, "v": {"type": "integer"}}} for c in "ab"]
    schema = {"oneOf": [*tagged, {"type": "null"}]}
    assert allows(schema, '{"k":"b","v":1}') and allows(schema, "null")
    assert not allows(schema, '{"v":1}') and not allows(schema, "{}")
    assert allows({"oneOf": [{"const": "a"}, {"const": 1}, {"enum": ["b", 2]}]}, "2")


ANNOTATED = {"type": "integer", "title": "t", "examples": [1], "readOnly": True, "x-order": 3, "$comment": "c"}


def test_annotations_are_accepted() -> None:
    assert allows(ANNOTATED, "7")
    assert allows({"type": ["string", "null"], "enum": ["a", None]}, "null")
    assert allows({"type": "number", "const": 1}, "1")


# ---- refused ----

OVERLAPPING = [{"type": "object", "properties": {name: {"type": "integer"}}} for name in "ab"]


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "required"),
        (
            {"type": "object", "properties": {"a": {}}, "required": ["a", "b"], "additionalProperties": False},
            "required",
        ),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 2}, "minProperties"),
        ({"type": "object", "properties": {"abc": {}}, "propertyNames": {"enum": ["a"]}}, "propertyNames"),
        ({"type": "object", "propertyNames": {"enum": ["a", 1]}}, "propertyNames"),
        ({"type": "integer", "enum": ["a", 1]}, "not of its type"),
        ({"type": "boolean", "const": 1}, "not of its type"),
        *(
            ({"type": "string", "format": name}, "format")
            for name in ("iri", "idn-email", "regex", "zebra", "json-pointer")
        ),
        ({"type": "string", "format": "uuid", "maxLength": 3}, "maxLength"),
        ({"type": "string", "format": "date", "minLength": 11}, "minLength"),
        ({"type": "integer", "multipleOf": 3, "minimum": 10}, "multipleOf"),
        ({"type": "string", "pattern": "(ab{1,2}){2,}"}, "pattern"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"oneOf": OVERLAPPING}, "oneOf"),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf"),
        ({"type": "string", "minlength": 5}, "minlength"),
        ({"type": "string", "contentEncoding": "base64"}, "contentEncoding"),
        ({"type": "string", "nullable": True}, "nullable"),
        ({"type": "string", "$dynamicRef": "#x"}, "\\$dynamicRef"),
        ({"type": "string", "maxLength": 1e9}, "maxLength"),
        ({"type": "string", "y" * 9000: 1}, "yyy"),
    ],
)
def test_unenforceable_keyword_is_named(schema: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word) as caught:
        enforceable(json.dumps(schema))
    assert len(str(caught.value)) < 400


ODD: list[Any] = [None, True, -1, 2.5, "a", [], ["a"], [3], {}, {"a": 3}, {"a": {}}, [{}]]
"""Values of every kind."""
TAKEN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("properties", "$defs", "definitions"), ({}, {"a": {}})),
    **dict.fromkeys(("items", "additionalProperties", "propertyNames"), (True, {}, {"a": 3}, {"a": {}})),
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), ([{}],)),
    "prefixItems": ([], [{}]),
    **dict.fromkeys(("$ref", "pattern", "format"), ("a",)),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (-1, 2.5)),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), ()),
    "multipleOf": (2.5,),
    "type": (),
    "enum": (["a"], [3], [{}]),
    "required": ([], ["a"]),
}


@pytest.mark.parametrize("keyword", TAKEN)
@pytest.mark.parametrize("place", ["alone", "property", "definition"])
def test_malformed_keyword_is_named(keyword: str, place: str) -> None:
    for value in ODD:
        if any(type(value) is type(good) and value == good for good in TAKEN[keyword]):
            continue
        part = {"type": "object", keyword: value}
        whole = {"alone": part, "property": {"properties": {"p": part}}, "definition": {"$defs": {"p": part}}}[place]
        with pytest.raises(ValueError, match=f"^{re.escape(keyword)} "):
            enforceable(json.dumps(whole))


@settings(max_examples=500)
@given(
    st.recursive(
        st.sampled_from([*ODD, "integer", "object", "#", "#/properties/a", "date", 0]),
        lambda inner: st.dictionaries(st.sampled_from([*TAKEN, "a", "const"]), inner, max_size=3) | st.lists(inner),
        max_leaves=12,
    )
)
def test_any_schema_is_accepted_or_refused(schema: Any) -> None:
    try:
        enforceable(json.dumps(schema))
    except ValueError as error:
        assert str(error)


def test_reference_chain_takes_linear_time() -> None:
    def seconds(length: int) -> float:
        chain: dict[str, Any] = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(length)}
        chain[str(length)] = {"type": "integer"}
        source = json.dumps({"$ref": "#/$defs/0", "$defs": chain})
        began = time.process_time()
        enforceable(source)
        return time.process_time() - began

    assert min(seconds(4000) for _ in range(3)) < 30 * min(seconds(400) for _ in range(3))
