"""First words of user messages, which decide what kind of work an invented prompt asks for."""

from __future__ import annotations

from pathlib import Path

from jetspec.files import read_text

KINDS: dict[str, tuple[str, ...]] = {
    "mathematics": (
        "A train leaves the station at",
        "A baker sells",
        "If a rectangle has",
        "Solve the equation",
        "Anna has twice as many",
        "A shop reduces the price of",
        "What is the probability that",
        "Two friends share",
    ),
    "code": (
        "Write a Python function that",
        "Write a Python program to",
        "Here is my Python code:\n```python\ndef",
        "How do I sort",
        "Implement a class in Python that",
        "Write a SQL query that",
        "Why does this code raise",
        "Write unit tests for a function that",
    ),
    "explanation": (
        "Explain how",
        "Explain why",
        "What is the difference between",
        "How does a",
        "Explain to a ten-year-old",
        "What happens when",
        "Describe the process of",
        "What does the term",
    ),
    "writing": (
        "Write a short story about",
        "Write an email to",
        "Write a poem about",
        "Write a product description for",
        "Draft a speech for",
        "Write a dialogue between",
        "Write a blog post about",
        "Compose a letter to",
    ),
    "question": (
        "Who was",
        "When did",
        "Which country",
        "Where can I",
        "Should I",
        "Why do people",
        "How long does it take to",
        "What are the main causes of",
    ),
    "summary": (
        "Summarize the following text:",
        "Summarize in one sentence:",
        "What are the key points of this article?\n\n",
        "Give a brief overview of",
        "Summarize the plot of",
        "Write a headline for this news story:",
        "Extract the names and dates from this text:",
        "Summarize the arguments for and against",
    ),
    "rewriting": (
        "Rewrite the following sentence",
        "Correct the grammar of this sentence:",
        "Make this paragraph sound more formal:",
        "Translate the following sentence into",
        "Turn these notes into",
        "Shorten this text:",
        "Rephrase this email politely:",
        "Change this sentence from active to passive voice:",
    ),
    "list": (
        "List five",
        "Give me ten ideas for",
        "Name three",
        "What are some ways to",
        "Make a step-by-step plan for",
        "Create a shopping list for",
        "Suggest some names for",
        "Make a table of",
    ),
}


def builtin_openings() -> tuple[str, ...]:
    """All kinds by turns, so that any stretch is balanced; every second prompt is the target's own choice."""
    by_turns = [opening for row in zip(*KINDS.values(), strict=True) for opening in row]
    return tuple(one for opening in by_turns for one in (opening, ""))


def read_openings(name: str) -> tuple[str, ...]:
    """`builtin`, `none`, or a text file with one opening per line, where an empty line stands for none."""
    if name == "builtin":
        return builtin_openings()
    if name == "none":
        return ("",)
    openings = tuple(read_text(Path(name)).splitlines())
    if not openings:
        raise ValueError(f"{name} holds no openings")
    return openings
