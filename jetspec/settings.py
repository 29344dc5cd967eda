"""Settings as dataclasses: read from YAML, changed by `--set section.field=value`, described for help.

Reading is strict. An unknown setting is an error that names the nearest known one, every value must have the type
that its field declares, and a setting that is given twice is refused. Nothing here imports torch.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from jetspec.aliases import RENAMED, renamed

C = TypeVar("C")

MIN_SIMILARITY = 0.6
"""Least similarity, from 0 to 1, of a name that an error suggests."""
NUMBER_TAGS = INT_TAG, FLOAT_TAG = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


# -- checks of single values


def at_least(least: int, name: str, value: int | None) -> None:
    if value is not None and value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def positive(name: str, value: float | None, otherwise: str = "") -> None:
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}; it must be positive and finite{otherwise}")


def fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; it must be from 0 to 1")


# -- YAML


class StrictLoader(yaml.SafeLoader):
    """YAML in which a setting that is given twice is an error, and numbers are decimal.

    YAML itself reads 010 as 8, 1:30 as 90, and 1e-3 as text.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise ValueError(f"{key.value} is given twice, again in line {key.start_mark.line + 1}")
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in NUMBER_TAGS]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
StrictLoader.add_implicit_resolver(INT_TAG, re.compile(r"[-+]?(0|[1-9]\d*)\Z", re.ASCII), list("-+0123456789"))
StrictLoader.add_implicit_resolver(
    FLOAT_TAG,
    re.compile(r"([-+]?(((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?|\.inf)|\.nan)\Z", re.ASCII),
    list("-+.0123456789"),
)


def read_yaml(text: str, where: str) -> Any:
    """A value from YAML. `where` names its origin in errors."""
    try:
        return yaml.load(text, StrictLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error


def read_settings(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, unchecked."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read the recipe {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    raw = read_yaml(text, str(path))
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must be a mapping of settings")
    return raw


# -- overrides


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Write `section.field=value` into a mapping of settings. The value is YAML."""
    name, equals, text = override.partition("=")
    if not equals:
        raise ValueError(f"{override!r} is not of the form section.field=value")
    *sections, last = name.split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
        if not isinstance(raw, dict):
            raise ValueError(f"{name!r}: {section} is not a group of settings")
    raw[last] = read_yaml(text, f"the value of {name}")


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Several `section.field=value` as one mapping; the last one of a name counts."""
    raw: dict[str, Any] = {}
    for override in overrides:
        apply_override(raw, override)
    return raw


# -- dataclasses from mappings


def from_dict(cls: type[C], raw: dict[str, Any], where: str = "", root: type[Any] | None = None) -> C:
    """A dataclass from a mapping. `where` is the path of its group, `root` the dataclass of all settings."""
    values = _values(cls, raw, where, root or cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    given = {f.name for f in fields if f.default is not MISSING or f.default_factory is not MISSING} | values.keys()
    if missing := [f.name for f in fields if f.name not in given]:
        raise ValueError(f"the recipe lacks {', '.join(where + name for name in missing)}")
    return cls(**values)


def updated(config: C, raw: dict[str, Any], where: str = "", root: type[Any] | None = None) -> C:
    """A dataclass with the values of a mapping, each group a field that holds another dataclass."""
    values = _values(type(config), raw, where, root or type(config), config)
    return dataclasses.replace(config, **values)  # type: ignore[type-var]


def _values(cls: type[Any], raw: dict[str, Any], where: str, root: type[Any], now: Any = None) -> dict[str, Any]:
    """The fields of a dataclass in a mapping, as their types and under their current names. Groups start from those of
    `now`."""
    section = where.rstrip(".").rpartition(".")[2]
    if section in RENAMED:
        raw = renamed(raw, section, where=where.rstrip("."))
    hints, values = typing.get_type_hints(cls), {}
    for key, value in raw.items():
        if key not in hints:
            near = nearest_setting(root, where, str(key))
            hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(where + k for k in hints)}"
            raise ValueError(f"unknown setting {where}{key}; {hint}")
        group = getattr(now, key, None)
        if dataclasses.is_dataclass(group) and isinstance(value, dict):
            values[key] = updated(group, value, f"{where}{key}.", root)
        else:
            values[key] = convert(hints[key], value, where + key, root)
    return values


def convert(hint: Any, value: Any, where: str, root: type[Any]) -> Any:
    """A YAML value as the type that a field declares, or a ValueError that names what was expected."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if (dataclasses.is_dataclass(hint) or origin in (dict, Mapping)) and not isinstance(value, dict):
        raise ValueError(f"{where} must be a group of settings")
    if dataclasses.is_dataclass(hint):
        return from_dict(hint, value, where + ".", root)  # type: ignore[arg-type]
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in choices:
            return None
        groups = [c for c in choices if dataclasses.is_dataclass(c) or typing.get_origin(c) is dict]
        plain = [c for c in choices if c not in groups and c is not type(None)]
        return convert((groups if isinstance(value, dict) and groups else plain)[0], value, where, root)
    if origin is Literal:
        if value not in choices:
            raise ValueError(f"{where} is {value!r}; choose one of {', '.join(map(str, choices))}")
        return value
    if origin in (dict, Mapping):
        keys = [convert(choices[0], key, where, root) for key in value]
        return {key: convert(choices[1], value[key], f"{where}.{key}", root) for key in keys}
    if origin is tuple:
        if isinstance(value, str) and hasattr(choices[0], "parse"):  # a short form, such as BATCH:BUDGET,BATCH:BUDGET
            return choices[0].parse(value)
        items = value if isinstance(value, list) else [value]
        if choices[-1] is not Ellipsis and len(items) != len(choices):
            raise ValueError(f"{where} must have {len(choices)} values")
        return tuple(convert(choices[0], item, where, root) for item in items)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is hint:
        return value
    raise ValueError(f"{where} is {value!r}; expected {getattr(hint, '__name__', hint)}")


# -- the nearest name


def nearest_setting(root: type[Any], where: str, key: str) -> list[str]:
    """Paths of the settings named most like `key`. Of equally near ones those of the group `where` count."""
    names = {path: path.rpartition(".")[2] for path in setting_paths(root)}
    initials = "".join(word[:1] for word in key.split("_")) if "_" in key else None  # `lr` is `learning_rate`
    best = [initials] if initials in names.values() else get_close_matches(key, names.values(), 1, MIN_SIMILARITY)
    near = [path for path, name in names.items() if name in best]
    return [path for path in near if path == where + names[path]] or near


def setting_paths(hint: Any, where: str = "") -> Iterator[str]:
    """Full paths of all settings in a type, groups and their members alike."""
    if dataclasses.is_dataclass(hint):
        for name, inner in typing.get_type_hints(hint).items():
            yield where + name
            yield from setting_paths(inner, f"{where}{name}.")
    else:
        for choice in typing.get_args(hint):
            yield from setting_paths(choice, where)


# -- descriptions


@dataclass(frozen=True)
class Setting:
    """One setting as help shows it."""

    path: str
    """Full name, such as `optimizer.lr`."""
    hint: Any
    """Declared type."""
    default: Any
    """`dataclasses.MISSING` where a value must be given."""
    help: str
    """Docstring of the field."""

    @property
    def type(self) -> str:
        """Type or choices in words, such as `int or null`."""
        return type_words(self.hint)


def describe_settings(config: Any, where: str = "") -> list[Setting]:
    """All settings of a dataclass, those of its groups under `group.field`. Defaults are the values of an instance."""
    cls = config if isinstance(config, type) else type(config)
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    found: list[Setting] = []
    for item in dataclasses.fields(cls):
        hint, path = hints[item.name], where + item.name
        default = item.default if item.default_factory is MISSING else item.default_factory()
        value = default if config is cls else getattr(config, item.name)
        group = next((c for c in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(c)), None)
        if group is None or typing.get_origin(hint) is tuple:
            found.append(Setting(path, hint, value, docs.get(item.name, "")))
        else:
            found += describe_settings(group if value is None else value, f"{path}.")
    return found


def type_words(hint: Any) -> str:
    """A type as a user writes its values."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "|".join(map(str, choices))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_words(choice) for choice in choices)
    if origin is tuple:
        return f"list of {type_words(choices[0])}"
    if origin in (dict, Mapping):
        return f"{{{type_words(choices[0])}: {type_words(choices[1])}}}"
    if hint is type(None):
        return "null"
    return {str: "text", bool: "true|false"}.get(hint, getattr(hint, "__name__", str(hint)))


@cache
def field_docs(cls: Any) -> dict[str, str]:
    """Docstrings under the fields of a dataclass, each on one line. Those of base classes are included."""
    docs: dict[str, str] = {}
    for base in [each for each in reversed(cls.__mro__) if hasattr(each, "__dataclass_fields__")]:
        try:
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except OSError:  # no source, such as in a frozen application
            continue
        assert isinstance(node, ast.ClassDef)
        for field, doc in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                match doc:
                    case ast.Expr(ast.Constant(str() as text)):
                        docs[field.target.id] = " ".join(text.split())
    return docs
