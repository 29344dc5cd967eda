"""Tasks, and the sources of their questions.

A question is one line of JSON: `id`, `turns` (the user's messages in order, each sent as it stands through the chat
template) and what its answer is graded by, if anything. Questions lie in a folder as TASK.jsonl, on Hugging Face, or,
for the task `builtin`, in this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal

from jetspec.data.prompts import BadPrompt, Prompt, find_tasks, load_rows, parse_prompt, read_questions

Grader = Literal["math", "tests"]
Row = Mapping[str, Any]

BUILTIN = "builtin"
BUILTIN_FILE = Path(__file__).with_name("builtin.jsonl")
MOST_QUESTIONS = 1 << 20
"""More than any task has."""
GRADED_AS = "graded_as"
"""Field of a built-in question: the task that grades it."""


@dataclass(frozen=True)
class Task:
    grader: Grader | None = None
    """Grading: as mathematics, or by running tests. None: answers are not graded."""
    hub: str | None = None
    """Dataset on Hugging Face."""
    question: Callable[[Row], dict[str, Any]] = dict
    """Conversion of its rows."""
    limit: int = 80
    """Default number of questions."""
    split: str = "test"
    part: str | None = None
    file: str | None = None
    """One of its JSON files, where the dataset needs a script that `datasets` does not run any more."""
    parts: Mapping[str, Callable[[Prompt], str | None]] = field(default_factory=dict)
    """Tasks whose questions it takes, in turn, with the message that it makes of one. None: it leaves that one out."""


def _math(row: Row) -> dict[str, Any]:
    wording = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    return {"turns": [row["problem"] + wording], "answer": str(row["answer"])}


def _gsm8k(row: Row) -> dict[str, Any]:
    return _math({"problem": row["question"], "answer": row["answer"].rpartition("####")[2].strip().replace(",", "")})


def _humaneval(row: Row) -> dict[str, Any]:
    wording = "Write a solution to the following problem and make sure that it passes the tests:"
    turn = f"{wording}\n```python\n{row['prompt']}\n```"
    graded_by = {"answer": row["canonical_solution"], "test": row["test"], "entry_point": row["entry_point"]}
    return {"turns": [turn], **graded_by}


def _mbpp(row: Row) -> dict[str, Any]:
    wording = "You are an expert Python programmer. Write a solution to the following task and make sure it passes"
    tests = "\n".join(row["test_list"])
    turn = f"{wording} the tests:\n{row['text']}\nYour code should pass these tests:\n{tests}"
    return {"turns": [turn], "answer": row["code"]}


def _livecodebench(row: Row) -> dict[str, Any]:
    wording = "Write a Python solution to the following competitive-programming problem:"
    return {"turns": [f"{wording}\n```\n{row['question_content']}\n```"]}


def _of_category(name: str, prompt: Prompt) -> str | None:
    """A question of one category of Spec-Bench."""
    return prompt.turns[0] if str(prompt.row.get("source", "")).endswith(f":{name}") else None


def _edit_code(prompt: Prompt) -> str:
    """A solution of HumanEval to return with another name: most of the answer is a copy."""
    begin = prompt.turns[0].partition("```python\n")[2].partition("```")[0]
    ask = "Rename the function to `solve` and return the whole code, docstring included."
    return f"{ask}\n```python\n{begin.rstrip()}\n{str(prompt.row['answer']).rstrip()}\n```"


def _edit_text(prompt: Prompt) -> str | None:
    """The first words of an article of Spec-Bench to return corrected: most of the answer is a copy."""
    article = _of_category("summarization", prompt)
    text = article and " ".join(article.removeprefix("Summarize: ").split()[:EDITED_WORDS])
    return text and f"Correct the spelling of this text and return it in full.\n\n{text}"


EDITED_WORDS = 110

TASKS: dict[str, Task] = {
    "gsm8k": Task("math", "openai/gsm8k", _gsm8k, part="main"),
    "math500": Task("math", "HuggingFaceH4/MATH-500", _math),
    "aime24": Task("math", "HuggingFaceH4/aime_2024", _math, 30, "train"),
    "aime25": Task("math", "yentinglin/aime_2025", _math, 30, "train"),
    "humaneval": Task("tests", "openai/openai_humaneval", _humaneval),
    "mbpp": Task("tests", "google-research-datasets/mbpp", _mbpp),
    "livecodebench": Task(None, "livecodebench/code_generation_lite", _livecodebench, file="test.jsonl"),
    "mt_bench": Task(None, "HuggingFaceH4/mt_bench_prompts", lambda row: {"turns": list(row["prompt"])}, split="train"),
    "alpaca_eval": Task(
        None, "tatsu-lab/alpaca_eval", lambda row: {"turns": [row["instruction"]]}, file="alpaca_eval.json"
    ),
    "spec_bench": Task(),
    "summarization": Task(parts={"spec_bench": partial(_of_category, "summarization")}),
    "retrieval": Task(parts={"spec_bench": partial(_of_category, "rag")}),
    "editing": Task(parts={"humaneval": _edit_code, "spec_bench": _edit_text}),
    BUILTIN: Task("tests", limit=28),
}


def check_tasks(names: Sequence[str], data_dir: Path | None) -> None:
    """Refuse a task without questions, before anything is loaded."""
    if data_dir is not None:
        if not data_dir.is_dir():
            raise ValueError(f"{data_dir} is not a folder of questions; --data-dir needs one with TASK.jsonl files")
        find_tasks(data_dir, [part for name in names if name != BUILTIN for part in parts_of(name)] or None)
        return
    for name in names:
        if name not in TASKS:
            raise ValueError(f"there is no task {name!r}; choose from {', '.join(TASKS)}, or give your own --data-dir")
        for part in parts_of(name):
            if name != BUILTIN and TASKS[part].hub is None:
                raise ValueError(f"{part} is not on Hugging Face; give a folder with {part}.jsonl as --data-dir")


def parts_of(name: str) -> tuple[str, ...]:
    """Tasks whose files hold the questions of a task."""
    return tuple(TASKS[name].parts) if name in TASKS and TASKS[name].parts else (name,)


def read_task(name: str, data_dir: Path | None, limit: int | None, skip: int = 0) -> list[Prompt]:
    """First questions of a task behind those to skip, from the folder if given, else from Hugging Face."""
    task = TASKS.get(name, Task())
    count = skip + (task.limit if limit is None else limit)
    if task.parts:
        found = _from_parts(name, task, data_dir)[:count]
    elif name == BUILTIN:
        found = read_questions(BUILTIN_FILE, count)
    elif data_dir is not None:
        found = read_questions(find_tasks(data_dir, [name])[name], count)
    else:
        found = _read_hub(name, task, count)
    if len(found) <= skip:
        raise ValueError(
            f"{name} has {len(found)} questions, none of them behind the first {skip}; choose a smaller skip"
        )
    return found[skip:]


def _from_parts(name: str, task: Task, data_dir: Path | None) -> list[Prompt]:
    parts = [
        [
            replace(prompt, id=f"{name}/{prompt.id}", turns=[turn])
            for prompt in read_task(part, data_dir, MOST_QUESTIONS)
            if (turn := make(prompt)) is not None
        ]
        for part, make in task.parts.items()
    ]
    return [prompt for turn in zip_longest(*parts) for prompt in turn if prompt is not None]


def _read_hub(name: str, task: Task, count: int) -> list[Prompt]:
    assert task.hub is not None
    try:
        rows = list(islice(load_rows(task.hub, task.split, task.part, task.file), count))
        questions = [{"id": f"{name}-{i:05d}", **task.question(row)} for i, row in enumerate(rows)]
    except Exception as error:  # the library raises many kinds, each with its own base class
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(
            f"{name} cannot be read from Hugging Face ({reason}); give a folder with {name}.jsonl as --data-dir"
        ) from error
    found = [parse_prompt(question, f"{task.hub}:{question['id']}", question["id"]) for question in questions]
    if bad := next((prompt for prompt in found if isinstance(prompt, BadPrompt)), None):
        raise ValueError(f"{bad.where} {bad.reason}")
    return [prompt for prompt in found if isinstance(prompt, Prompt)]
