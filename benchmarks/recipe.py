"""A benchmark recipe: YAML, checked to the last key, as a list of cells.

A method is a setting of the engine, or a baseline behind the same interface. Plain decoding is always among them: speed
and text of all others are compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal

from benchmarks.tasks import BUILTIN, TASKS
from jetspec.aliases import RENAMED
from jetspec.config import BatchTree, DrafterName, Expand, Score, TreeConfig
from jetspec.data.prompts import stable_hash
from jetspec.models.hub import DEFAULT_MODEL
from jetspec.record import shown, shown_head
from jetspec.settings import at_least, from_dict, read_settings
from jetspec.types import SamplingParams

PLAIN, TRANSFORMERS = "plain", "transformers"
HeadKind = Literal["bidirectional", "causal", "edge", "eagle3", "any"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

PAPER_WIDTH, PAPER_DEPTH = 7, 15
"""Children of a node and levels of the paper's trees; a block has one slot more than levels."""
PAPER_BUDGET = 64
"""From this budget on the paper's trees have that width."""
PAPER_DRAFT_TEMPERATURE = 1.0

OLD_KEYS = {**RENAMED["tree"], "shrinks": "batch_trees"}
"""Keys of older recipes and records, and their names today."""


def with_new_keys(value: Any) -> Any:
    """The value with older keys renamed, however deep they are."""
    if isinstance(value, dict):
        return {OLD_KEYS.get(key, key): with_new_keys(inner) for key, inner in value.items()}
    return [with_new_keys(inner) for inner in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Kind:
    """Defaults and settings that methods of a kind share; see `methods.yaml`."""

    drafter: DrafterName | None = None
    """Drafter of our engine. None: a head, or a baseline."""
    head: HeadKind | None = None
    """Kind of head that it needs."""
    budgets: tuple[int | None, ...] = ()
    """Its trees, unless the method says otherwise; () follows the recipe."""
    width: int = 8
    narrows: bool = False
    """Small trees are narrow enough to reach the paper's depth, down to a chain."""
    expand: Expand = "optimal"
    draft_temperature: float = TreeConfig.draft_temperature
    takes: tuple[str, ...] = ()
    """Settings of a method that have an effect, beside those that all have."""
    one_at_a_time: bool = False
    """It cannot decode several prompts together."""
    about: str = ""
    """Remark for a reader of its numbers."""


_SHAPE = (
    *("width", "depth", "ngrams", "choice_model", "expand", "score", "entropy_weight", "draft_temperature"),
    *("shortlist", "shortlist_parents", "batch_trees"),
)
"""Settings of a method that are settings of its trees."""
KINDS = {name: from_dict(Kind, raw) for name, raw in read_settings(Path(__file__).with_name("methods.yaml")).items()}

USUAL: dict[HeadKind, str] = {kind.head: name for name, kind in KINDS.items() if kind.head and kind.head != "any"}
"""Method of a head when none is named: the last above."""

SHORT = {**{name: "head" for name, kind in KINDS.items() if kind.head}, "transformers-assisted": "assistant"}
SHORT["server"] = "url"
"""Setting behind the equals sign of NAME=VALUE."""


def distinct(name: str, values: Sequence[Any] | None) -> None:
    if values is not None and (not values or len(values) != len(set(values))):
        raise ValueError(f"{name} must name at least one, and none twice")


@dataclass(frozen=True)
class MethodConfig:
    """One method. Settings that are None follow its kind."""

    name: str
    kind: str | None = None
    """None: the kind of its name."""
    head: str | None = None
    """Folder or name of its head. None: the recipe's."""
    budgets: tuple[int, ...] | None = None
    batches: tuple[int, ...] | None = None
    """None: the recipe's."""
    temperatures: tuple[float, ...] | None = None
    """Some of the recipe's, for slow methods. None: all."""
    tasks: tuple[str, ...] | None = None
    """Some of the recipe's, for slow methods. None: all."""
    limit: int | None = None
    """First questions of a task, for slow methods. Others are compared with it on these alone."""
    width: int | None = None
    depth: int | None = None
    expand: Expand | None = None
    score: Score | None = None
    entropy_weight: float | None = None
    draft_temperature: float | None = None
    shortlist: int | None = None
    shortlist_parents: int | None = None
    batch_trees: tuple[BatchTree, ...] | None = None
    """Smaller trees of larger batches. None by default, so that a budget means the same at every batch size."""
    ngrams: bool | None = None
    """N-grams of the text join the trees of a head. False by default, as heads are published."""
    choice_model: bool | None = None
    assistant: str | None = None
    """Smaller model of the same vocabulary, for assisted generation of transformers."""
    lookup_tokens: int | None = None
    """Tokens that prompt lookup of transformers drafts, 10 by default."""
    url: str | None = None
    """Address of an OpenAI-compatible server, such as http://localhost:8000/v1."""
    served_model: str | None = None
    """The server's name of the model. None: the first that it offers."""

    def __post_init__(self) -> None:
        if self.kind_name not in KINDS:
            where = f"its kind is {self.kind!r}" if self.kind else "its name is no kind, and it has none"
            raise ValueError(f"method {self.name!r}: {where}; choose from {', '.join(KINDS)}")
        every = {"name", "kind", "batches", "temperatures", "tasks", "limit"}
        given = {key for key, value in vars(self).items() if value is not None} - every
        for key in sorted(given - set(self.traits.takes)):
            raise ValueError(f"method {self.name!r}: {key} means nothing to {self.kind_name}")
        needed = SHORT.get(self.kind_name, "head")
        if needed != "head" and getattr(self, needed) is None:
            example = {"url": "http://localhost:8000/v1", "assistant": "a smaller model of the same vocabulary"}[needed]
            raise ValueError(f"method {self.name!r} needs its {needed}, such as {example}: {self.kind_name}=VALUE")
        for key in ("lookup_tokens", "limit"):
            at_least(1, f"{key} of {self.name}", getattr(self, key))
        for key in ("temperatures", "tasks"):
            distinct(f"{key} of {self.name}", getattr(self, key))

    @classmethod
    def parse(cls, text: str) -> MethodConfig:
        """NAME, or NAME=VALUE with its head, assistant or url."""
        name, equals, value = text.partition("=")
        if equals and name not in SHORT:
            raise ValueError(f"method {text!r}: {name} takes nothing behind an equals sign")
        return cls(name, **({SHORT[name]: value} if equals else {}))  # type: ignore[arg-type]

    @property
    def kind_name(self) -> str:
        return self.kind or self.name

    @property
    def traits(self) -> Kind:
        return KINDS[self.kind_name]

    @property
    def is_ours(self) -> bool:
        return self.traits.drafter is not None or self.traits.head is not None

    def tree(self, budget: int) -> TreeConfig:
        kind = self.traits
        # Seven children of every node would leave 16 nodes three levels, 32 nodes five.
        width = max(1, (budget - 1) // PAPER_DEPTH) if kind.narrows and budget < PAPER_BUDGET else kind.width
        usual = {"width": width, "expand": kind.expand, "draft_temperature": kind.draft_temperature}
        usual["ngrams"] = kind.drafter == "ngram"  # a method with a head drafts with it alone, as published
        chosen = {key: value for key in _SHAPE if (value := getattr(self, key)) is not None}
        return TreeConfig(budget=budget, **{**usual, **chosen})

    def to_dict(self) -> dict[str, Any]:
        """Settings beyond its kind, without the paths of one machine."""
        settings = {key: value for key, value in asdict(self).items() if value is not None}
        return settings | {key: shown(settings[key]) for key in ("head", "assistant") if key in settings}


@dataclass(frozen=True)
class Cell:
    method: str
    task: str
    temperature: float
    budget: int | None
    """Most nodes of a tree. None: a baseline without trees."""
    batch: int

    def beside(self, method: str, budget: int | None) -> Cell:
        """The same place for another method."""
        return replace(self, method=method, budget=budget)


@dataclass(frozen=True)
class BenchConfig:
    """A whole benchmark: all methods on all tasks, temperatures, budgets and batch sizes."""

    model: str = DEFAULT_MODEL
    head: str | None = None
    """Head of methods that name none. None: the model's own."""
    data_dir: str | None = None
    """Folder with TASK.jsonl files. None: from Hugging Face."""
    tasks: tuple[str, ...] = (BUILTIN,)
    methods: tuple[str | MethodConfig, ...] | None = None
    """Names, NAME=HEAD, or groups of settings. None: plain, ngram, and the head where there is one."""
    url: str | None = None
    """OpenAI-compatible server to measure as well, as the method `server`."""
    budgets: tuple[int, ...] = (64,)
    batches: tuple[int, ...] = (1,)
    """Questions decoded together."""
    temperatures: tuple[float, ...] = (0.0,)
    repeats: int = 3
    limit: int | None = None
    """Questions per task. None: the usual number of each."""
    skip: int | dict[str, int] = 0
    """Questions of every task to pass over first, or by task how many; unnamed tasks pass over none."""
    max_tokens: int = 256
    """Most tokens of an answer."""
    warmup: int = 16
    """Tokens decoded before any are timed, for every batch size that may occur."""
    seed: int = 0
    """Draws at a temperature above 0 depend on it, the question and the repeat, never on the method."""
    thinking: bool | None = None
    """`enable_thinking` of the chat template. None: the template's default."""
    notes: tuple[str, ...] = ()
    """Remarks for readers of the results; reports show them."""
    device: str = "auto"
    dtype: DtypeName = "auto"

    def __post_init__(self) -> None:
        for name in ("repeats", "limit", "max_tokens", "warmup"):
            at_least(1, name, getattr(self, name))
        at_least(0, "seed", self.seed)
        for task, count in self.skip.items() if isinstance(self.skip, dict) else [("", self.skip)]:
            at_least(0, f"skip{task and f' of {task}'}", count)
            if task and task not in (*self.tasks, *TASKS):
                raise ValueError(f"skip: there is no task {task}")
        for name in ("tasks", "methods", "budgets", "batches", "temperatures"):
            distinct(name, getattr(self, name))
        for temperature in self.temperatures:
            SamplingParams(temperature)
        for budget in self.budgets:
            TreeConfig(budget=budget)
        methods = self.all_methods()
        for batch in self.batches_of(methods[0]):
            at_least(1, "a batch", batch)
        names = [method.name for method in methods]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two methods are called {twice.pop()}; give one of them another name")
        for method in methods:
            self._check(method, method.name)

    def _check(self, method: MethodConfig, name: str) -> None:
        if name in (PLAIN, TRANSFORMERS) and method.kind_name != name:
            raise ValueError(f"{name} must be of the kind of its name, as others are compared with it")
        for own in ("limit", "temperatures", "tasks"):
            if name == PLAIN and getattr(method, own) is not None:
                raise ValueError(f"plain decoding has no {own} of its own, as all others are compared with it")
        for own in ("temperatures", "tasks"):
            if other := [value for value in getattr(method, own) or () if value not in getattr(self, own)]:
                raise ValueError(f"{name}: {own} {other[0]} is not among the recipe's")
        if method.traits.one_at_a_time and max(self.batches_of(method)) > 1:
            raise ValueError(f"{name} decodes one prompt at a time; give it batches: [1]")
        for budget in self.budgets_of(method):
            if budget is not None:
                method.tree(budget)
            if budget == 1 and name != PLAIN:
                raise ValueError(f"{name}: a budget of 1 drafts nothing, as plain decoding; give 2 or more")

    def all_methods(self, head: HeadKind | None = None) -> list[MethodConfig]:
        """All methods, plain decoding first. `head` is the kind of the default head."""
        usual = ("ngram", *((USUAL[head],) if head else ()))
        asked = [MethodConfig.parse(m) if isinstance(m, str) else m for m in self.methods or usual]
        if self.url is not None:
            asked.append(MethodConfig("server", url=self.url))
        plain = next((method for method in asked if method.name == PLAIN), MethodConfig(PLAIN))
        return [plain, *(method for method in asked if method is not plain)]

    def skip_of(self, task: str) -> int:
        return self.skip.get(task, 0) if isinstance(self.skip, dict) else self.skip

    def budgets_of(self, method: MethodConfig) -> tuple[int | None, ...]:
        return method.budgets or method.traits.budgets or self.budgets

    def batches_of(self, method: MethodConfig) -> tuple[int, ...]:
        """Plain decoding comes in every batch size that any method has."""
        if method.name != PLAIN:
            return method.batches or self.batches
        own = [m.batches or () for m in self.methods or () if isinstance(m, MethodConfig)]
        return tuple(sorted({*self.batches, *chain(*own)}))

    def cells(self, method: MethodConfig) -> list[Cell]:
        """Cells of a method, grouped by budget and batch size, which an engine is made for."""
        temperatures, tasks = method.temperatures or self.temperatures, method.tasks or self.tasks
        places = product(self.budgets_of(method), self.batches_of(method), temperatures, tasks)
        return [Cell(method.name, task, temperature, budget, batch) for budget, batch, temperature, task in places]

    def sampling(self, temperature: float, repeat: int, id: str, turn: int) -> SamplingParams:
        seed = stable_hash(f"{self.seed}/{repeat}/{id}/{turn}") >> 1
        return SamplingParams(temperature, max_tokens=self.max_tokens, seed=seed)

    def to_dict(self, methods: Sequence[MethodConfig]) -> dict[str, Any]:
        """Settings for the record: methods with their trees, without the paths of one machine."""
        settled = []
        for method in methods:
            trees = [asdict(method.tree(budget)) for budget in self.budgets_of(method) if budget and method.is_ours]
            head = {"head": shown_head(method.head)} if method.head else {}
            kind = {"kind": method.kind_name, "about": method.traits.about, "trees": trees}
            settled.append({**method.to_dict(), **head, **kind})
        named = {"model": shown(self.model), "data_dir": self.data_dir and shown(self.data_dir)}
        return {**asdict(self), **named, "head": self.head and shown_head(self.head), "methods": settled}
