"""`jetspec chat`: a conversation in the terminal. Each round's tokens share a shade, so the speed-up can be seen."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from jetspec.commands.screen import held_interrupt, out, printable, shade, statistics
from jetspec.types import RoundStats, SamplingParams

if TYPE_CHECKING:
    from jetspec.engine.llm import LLM

HELP = """\
/reset  forget the conversation
/stats  what the answers cost so far
/help   this list
/exit   leave (or Ctrl-D)
Ctrl-C stops an answer. Where the shade changes, a new round begins:
one forward pass of the target for everything in one shade."""

BAR_WIDTH = 40


class Chat:
    """One conversation: what was said, and what each answer cost."""

    def __init__(self, llm: LLM, sampling: SamplingParams) -> None:
        self.llm = llm
        self.sampling = sampling
        self.console = out()
        self.messages: list[dict[str, str]] = []
        self.answers: list[RoundStats] = []

    def run(self) -> None:
        self.console.print(
            f"{self.llm.model_name}, drafter {self.llm.drafter}. /help lists the commands.", markup=False
        )
        for line in _lines():
            if line == "/exit":
                return
            if line.startswith("/"):
                self.console.print(self.obey(line), markup=False)
            elif line:
                self.answer(line)

    def obey(self, command: str) -> str:
        if command == "/help":
            return HELP
        if command == "/stats":
            return _report(self.answers)
        if command == "/reset":
            self.messages.clear()
            return "The conversation is empty."
        return f"There is no command {command}; /help lists them."

    def answer(self, question: str) -> None:
        """Ask and stream the answer. A question that cannot be asked leaves the conversation as it was."""
        asked = [*self.messages, {"role": "user", "content": question}]
        try:
            text = self.stream(asked)
        except ValueError as error:
            self.console.print(f"{error} (/reset starts anew)", style="red", markup=False)
            return
        self.messages = [*asked, {"role": "assistant", "content": text}]

    def stream(self, messages: list[dict[str, str]]) -> str:
        """Show the answer as it appears; Ctrl-C ends it, and what was said until then counts."""
        parts: list[str] = []
        updates = self.llm.stream_chat(messages, self.sampling)
        with held_interrupt() as interrupted:
            for index, update in enumerate(updates):
                parts.append(update.text)
                self.console.out(printable(update.text), style=shade(index), end="")
                if update.completion:
                    self.answers.append(update.completion.stats)
                    if update.completion.finish_reason == "length":
                        self.console.out(" (cut at the limit)", style="dim", end="")
                elif interrupted():
                    self.console.out(" (stopped)", style="dim", end="")
                    break
        self.console.out("\n")
        return "".join(parts)


def _lines() -> Iterator[str]:
    """What the user types, until Ctrl-D. Ctrl-C discards the line."""
    with suppress(ImportError):
        import_module("readline")  # input() edits the line and keeps a history once it is loaded
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except KeyboardInterrupt:
            print("\nCtrl-D leaves")
        except EOFError:
            print()
            return
        else:
            yield line.strip()


def _report(answers: list[RoundStats]) -> str:
    """What the last answer and all of them cost, and how many draft tokens the rounds kept."""
    if not answers:
        return "No answer yet."
    total = RoundStats(
        prompt_tokens=sum(s.prompt_tokens for s in answers),
        cached_tokens=sum(s.cached_tokens for s in answers),
        accepted_lengths=[length for s in answers for length in s.accepted_lengths],
        prefill_s=sum(s.prefill_s for s in answers),
        decode_s=sum(s.decode_s for s in answers),
    )
    lines = [
        f"last answer  {statistics(answers[-1])}",
        f"all answers  {statistics(total)}",
        f"prompts      {total.prompt_tokens} tokens, {total.cached_tokens} of them cached",
        "accepted lengths, and how often",
    ]
    counts = Counter(total.accepted_lengths)
    most = max(counts.values())
    for length in range(max(counts) + 1):
        lines.append(f"{length:>4}  {'█' * round(BAR_WIDTH * counts[length] / most)} {counts[length]}")
    return "\n".join(lines)
