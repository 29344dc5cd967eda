"""What a benchmark measures: a recipe in YAML, checked to the last key, as a list of cells.

A method is a setting of the one engine, or an outside contender behind the same interface. Plain decoding is always
among them: it is what speed and text of all others are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal

from benchmarks.tasks import BUILTIN, TASKS
from jetspec.config import DrafterName, Expand, Score, TreeConfig
from jetspec.data.prompts import stable_hash
from jetspec.models.hub import DEFAULT_MODEL
from jetspec.record import shown, shown_head
from jetspec.settings import at_least
from jetspec.types import SamplingParams

PLAIN, TRANSFORMERS = "plain", "transformers"
HeadKind = Literal["bidirectional", "causal", "edge", "eagle3"]

PAPER_WIDTH, PAPER_DEPTH = 7, 15
"""Of the paper's trees: children of a node, and levels, one less than the slots of a block."""
PAPER_BUDGET = 64
"""From so many nodes on its trees have that width, though one that is that wide is that deep from 100 nodes on."""
PAPER_DRAFT_TEMPERATURE = 1.0
"""Its trees are built on what a head says as it says it."""


@dataclass(frozen=True)
class Kind:
    """What methods of a kind have in common."""

    drafter: DrafterName | None = None
    """Who drafts in our engine. None: a head, or an outside contender."""
    head: HeadKind | None = None
    """The head that it needs."""
    budgets: tuple[int | None, ...] = ()
    """Its trees, unless the method says otherwise; () follows the recipe."""
    width: int = 8
    narrows: bool = False
    """Whether small trees are as narrow as they must be to reach the paper's depth, down to a chain."""
    expand: Expand = "optimal"
    draft_temperature: float = TreeConfig.draft_temperature
    takes: tuple[str, ...] = ()
    """Settings of a method that count, beside those that all have."""
    one_at_a_time: bool = False
    """Whether it cannot decode several prompts together."""
    about: str = ""
    """What a reader of its numbers must know."""

    def width_at(self, budget: int) -> int:
        """Seven children of every node would leave a tree of 16 nodes three levels, one of 32 five."""
        return max(1, (budget - 1) // PAPER_DEPTH) if self.narrows and budget < PAPER_BUDGET else self.width


_TREE = ("budgets", "width", "depth", "draft_temperature")
_SCORED = (*_TREE, "head", "expand", "score", "entropy_weight")
_EAGER = (
    "`generate` as it comes: eager, with a cache that grows; nothing is compiled or captured, so on a GPU it is as fast"
    " as the host."
)

KINDS: dict[str, Kind] = {
    PLAIN: Kind("none", budgets=(1,)),
    "ngram": Kind(
        "ngram",
        takes=_TREE[:-1],
        about="Matches are found on the host, so a round starts when the last one was read; those of heads start"
        " before.",
    ),
    "dflash": Kind(
        head="bidirectional", budgets=(16,), width=1, draft_temperature=1.0, takes=("head", "budgets", "depth")
    ),
    "ddtree": Kind(head="bidirectional", takes=_SCORED),
    "eagle3": Kind(
        head="eagle3",
        width=10,
        draft_temperature=1.0,
        takes=("head", *_TREE),
        about="Unless set, its depth is the one it was trained for and its width that of its authors, at every budget.",
    ),
    "jetspec-paper": Kind(
        head="causal",
        width=PAPER_WIDTH,
        narrows=True,
        expand="paper",
        draft_temperature=PAPER_DRAFT_TEMPERATURE,
        takes=_SCORED,
    ),
    "jetspec": Kind(head="causal", takes=_SCORED),
    "jetspec-edge": Kind(head="edge", takes=(*_SCORED, "shortlist", "shortlist_parents")),
    TRANSFORMERS: Kind(budgets=(None,), about=_EAGER),
    "transformers-assisted": Kind(budgets=(None,), takes=("assistant",), one_at_a_time=True, about=_EAGER),
    "transformers-lookup": Kind(budgets=(None,), takes=("lookup_tokens",), one_at_a_time=True, about=_EAGER),
    "server": Kind(budgets=(None,), takes=("url", "served_model")),
}
"""DFlash drafts a chain with a bidirectional head, DDTree a tree with it; EAGLE-3 drafts token by token. JetSpec drafts
with a causal head: as published, where a tree has all children of the best nodes, or with the best nodes alone, without
an edge term or with one. What is published of JetSpec's small trees: those of 16 nodes are chains; of 32 nothing."""

USUAL: dict[HeadKind, str] = {
    "edge": "jetspec-edge",
    "causal": "jetspec",
    "bidirectional": "ddtree",
    "eagle3": "eagle3",
}
"""The method that a head is measured by when none is asked for."""

SHORT = {**{name: "head" for name, kind in KINDS.items() if kind.head}, "transformers-assisted": "assistant"}
SHORT["server"] = "url"
"""What stands behind the equals sign when a method is written as NAME=VALUE."""


@dataclass(frozen=True)
class MethodConfig:
    """One contender. What is None follows its kind."""

    name: str
    kind: str | None = None
    """None: the one that its name says."""
    head: str | None = None
    """Folder or name of its head. None: that of the recipe."""
    budgets: tuple[int, ...] | None = None
    batches: tuple[int, ...] | None = None
    """None: those of the recipe."""
    temperatures: tuple[float, ...] | None = None
    """Some of the recipe's, for slow ones. None: all of them."""
    tasks: tuple[str, ...] | None = None
    """Likewise."""
    limit: int | None = None
    """Ask it only the first so many questions of a task: for slow ones. Others are compared with it on these alone."""
    width: int | None = None
    depth: int | None = None
    expand: Expand | None = None
    score: Score | None = None
    entropy_weight: float | None = None
    draft_temperature: float | None = None
    shortlist: int | None = None
    shortlist_parents: int | None = None
    assistant: str | None = None
    """A smaller model of the same vocabulary, for the assisted generation of transformers."""
    lookup_tokens: int | None = None
    """Tokens that the prompt lookup of transformers drafts, 10 unless given."""
    url: str | None = None
    """Where an OpenAI-compatible server answers, such as http://localhost:8000/v1."""
    served_model: str | None = None
    """What the server calls the model. None: the first that it offers."""

    def __post_init__(self) -> None:
        if self.kind_name not in KINDS:
            where = f"its kind is {self.kind!r}" if self.kind else "its name is no kind, and it has none"
            raise ValueError(f"method {self.name!r}: {where}; choose from {', '.join(KINDS)}")
        every = {"name", "kind", "batches", "temperatures", "tasks", "limit"}
        given = {key for key, value in vars(self).items() if value is not None} - every
        for key in sorted(given - set(self.traits.takes)):
            raise ValueError(f"method {self.name!r}: {key} means nothing to {self.kind_name}")
        if self.kind_name == "server" and self.url is None:
            raise ValueError(f"method {self.name!r} needs a url, such as http://localhost:8000/v1")
        if self.kind_name == "transformers-assisted" and self.assistant is None:
            raise ValueError(f"method {self.name!r} needs an assistant: a smaller model of the same vocabulary")
        at_least(1, f"lookup_tokens of {self.name}", self.lookup_tokens)
        at_least(1, f"limit of {self.name}", self.limit)
        for key in ("temperatures", "tasks"):
            some = getattr(self, key)
            if some == () or len(some or ()) != len(set(some or ())):
                raise ValueError(f"{key} of {self.name} must name at least one, and none twice")
        for budget in self.budgets or ():
            self.tree(budget)
        for batch in self.batches or ():
            at_least(1, f"a batch of {self.name}", batch)

    @classmethod
    def parse(cls, text: str) -> MethodConfig:
        """NAME, or NAME=VALUE with its head, assistant or url."""
        name, equals, value = text.partition("=")
        if equals and name not in SHORT:
            raise ValueError(f"method {text!r}: {name} takes nothing behind an equals sign")
        if not equals and SHORT.get(name) in ("assistant", "url"):
            raise ValueError(f"method {name!r} needs its {SHORT[name]}: {name}=VALUE")
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
        names = [*_SCORED[1:], "shortlist", "shortlist_parents"]
        names.remove("head")
        chosen = {key: value for key in names if (value := getattr(self, key)) is not None}
        fallback = {
            "width": self.traits.width_at(budget),
            "expand": self.traits.expand,
            "draft_temperature": self.traits.draft_temperature,
        }
        return TreeConfig(budget=budget, **{**fallback, **chosen})


@dataclass(frozen=True)
class Cell:
    """One place of the results table."""

    method: str
    task: str
    temperature: float
    budget: int | None
    """Most nodes in a tree. None: an outside contender, which has none."""
    batch: int

    def beside(self, method: str, budget: int | None) -> Cell:
        """The same place for another method."""
        return replace(self, method=method, budget=budget)


@dataclass(frozen=True)
class BenchConfig:
    """A whole benchmark. Its cells are all methods on all tasks, temperatures, budgets and batch sizes."""

    model: str = DEFAULT_MODEL
    head: str | None = None
    """The head of methods that name none. None: the one that the model comes with."""
    data_dir: str | None = None
    """Folder with TASK.jsonl files. None: from Hugging Face."""
    tasks: tuple[str, ...] = (BUILTIN,)
    methods: tuple[str | MethodConfig, ...] | None = None
    """Names, NAME=HEAD, or groups of settings. None: plain, ngram, and the head where there is one."""
    url: str | None = None
    """An OpenAI-compatible server to measure as well, as the method `server`."""
    budgets: tuple[int, ...] = (64,)
    batches: tuple[int, ...] = (1,)
    """Questions decoded together."""
    temperatures: tuple[float, ...] = (0.0,)
    repeats: int = 3
    limit: int | None = None
    """Questions per task. None: the usual number of each."""
    skip: int | dict[str, int] = 0
    """Questions of every task to pass over first, such as those that settings were chosen on; or by task how many, and
    none of those that are not named."""
    max_tokens: int = 256
    """Most tokens of an answer."""
    warmup: int = 16
    """Tokens decoded before any are timed, for every batch size that may occur."""
    seed: int = 0
    """Draws of a temperature above 0 depend on it, the question and the repeat, never on the method."""
    thinking: bool | None = None
    """Whether the chat template lets the model think first. None: as the template likes."""
    notes: tuple[str, ...] = ()
    """What a reader of the results should know; reports show it."""
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    def __post_init__(self) -> None:
        for name in ("repeats", "limit", "max_tokens", "warmup"):
            at_least(1, name, getattr(self, name))
        at_least(0, "seed", self.seed)
        for task, count in self.skip.items() if isinstance(self.skip, dict) else [("", self.skip)]:
            at_least(0, f"skip{task and f' of {task}'}", count)
            if task and task not in (*self.tasks, *TASKS):
                raise ValueError(f"skip: there is no task {task}")
        for name in ("tasks", "methods", "budgets", "batches", "temperatures"):
            values = getattr(self, name)
            if values == () or len(values or ()) != len(set(values or ())):
                raise ValueError(f"{name} must name at least one, and none twice")
        for temperature in self.temperatures:
            SamplingParams(temperature)
        for batch in self.batches:
            at_least(1, "a batch", batch)
        for budget in self.budgets:
            TreeConfig(budget=budget)
        self._check_methods()

    def _check_methods(self) -> None:
        methods = self.contenders()
        names = [method.name for method in methods]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two methods are called {twice.pop()}; give one of them another name")
        for method in methods:
            if method.name in (PLAIN, TRANSFORMERS) and method.kind_name != method.name:
                raise ValueError(f"{method.name} must be what its name says, as others are compared with it")
            for own in ("limit", "temperatures", "tasks"):
                if method.name == PLAIN and getattr(method, own) is not None:
                    raise ValueError(f"plain decoding has no {own} of its own, as all others are compared with it")
            for temperature in method.temperatures or ():
                if temperature not in self.temperatures:
                    raise ValueError(f"{method.name}: temperature {temperature:g} is none of the recipe's")
            for task in method.tasks or ():
                if task not in self.tasks:
                    raise ValueError(f"{method.name}: task {task} is none of the recipe's")
            for batch in self.batches_of(method):
                if method.traits.one_at_a_time and batch > 1:
                    raise ValueError(f"{method.name} decodes one prompt at a time; give it batches: [1]")
            for budget in self.budgets_of(method):
                if budget is not None:
                    method.tree(budget)
                if budget == 1 and method.name != PLAIN:
                    raise ValueError(f"{method.name}: a budget of 1 drafts nothing, as plain decoding; give 2 or more")

    def contenders(self, head: HeadKind | None = None) -> list[MethodConfig]:
        """All methods, plain decoding first. `head` is the kind of the head that those have which name none."""
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
        return tuple(sorted({*self.batches, *(batch for batches in own for batch in batches)}))

    def cells(self, method: MethodConfig) -> list[Cell]:
        """Grouped by what an engine is made for: budget and batch size."""
        temperatures, tasks = method.temperatures or self.temperatures, method.tasks or self.tasks
        places = product(self.budgets_of(method), self.batches_of(method), temperatures, tasks)
        return [Cell(method.name, task, temperature, budget, batch) for budget, batch, temperature, task in places]

    def sampling(self, temperature: float, repeat: int, id: str, turn: int) -> SamplingParams:
        seed = stable_hash(f"{self.seed}/{repeat}/{id}/{turn}") >> 1
        return SamplingParams(temperature, max_tokens=self.max_tokens, seed=seed)

    def to_dict(self, methods: Sequence[MethodConfig]) -> dict[str, Any]:
        """For the record: with the methods that it came to and their trees, without the paths of one machine."""
        named = {"model": shown(self.model), "data_dir": self.data_dir and shown(self.data_dir)}
        named["head"] = self.head and shown_head(self.head)
        return {**asdict(self), **named, "methods": [self._settled(method) for method in methods]}

    def _settled(self, method: MethodConfig) -> dict[str, Any]:
        trees = [asdict(method.tree(budget)) for budget in self.budgets_of(method) if budget and method.is_ours]
        head = {"head": shown_head(method.head)} if method.head else {}
        return {**method_dict(method), **head, "kind": method.kind_name, "about": method.traits.about, "trees": trees}


def method_dict(method: MethodConfig) -> dict[str, Any]:
    """What a method says beyond its kind, without the paths of one machine: a head that moves is the same head."""
    settings = {key: value for key, value in asdict(method).items() if value is not None}
    return settings | {key: shown(settings[key]) for key in ("head", "assistant") if key in settings}
