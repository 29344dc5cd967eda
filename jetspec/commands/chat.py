"""`jetspec chat`: a conversation in the terminal. The tokens of a round share a shade, which shows the speed-up."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from jetspec.commands.options import Decoding, Given, System, examples, load_llm, options
from jetspec.commands.screen import held_interrupt, out, printable, shade, statistics, total
from jetspec.files import read_text, write_whole
from jetspec.settings import parse_overrides, updated
from jetspec.types import RoundStats, SamplingParams

if TYPE_CHECKING:
    from jetspec.engine.llm import LLM

HELP = '''\
/reset             forget the conversation
/retry             answer the last message again
/system [TEXT]     show the system message, or replace it
/set [NAME=VALUE]  show the sampling settings, or change one: /set temperature=0.7
/save FILE         write the conversation as JSON
/load FILE         continue a conversation that was saved
/stats             statistics of the answers so far
/help              this list
/quit              leave (or Ctrl-D)
"""                begins a message of several lines, up to the next """
Ctrl-C stops an answer. Where the shade changes, a new round begins:
one forward pass of the target for all tokens of one shade.'''

BAR_WIDTH = 40
ROLES = ("system", "user", "assistant")

app = typer.Typer(add_completion=False)


@app.command("chat", epilog=examples("jetspec chat", 'jetspec chat --temperature 0.7 --system "Answer in rhymes."'))
@options(
    *("--model=model.name", "model.head", "model.drafter", "sampling.temperature"),
    *("sampling.max_tokens",),
)
def chat(settings: Decoding, given: Given, system: System = None) -> None:
    """Talk to the model.

    Each change of shade in an answer is a new round.
    """
    Chat(load_llm(settings.model, settings.engine, given.get("tree")), settings.sampling, system).run()


class Chat:
    """One conversation: its messages, and the statistics of each answer."""

    def __init__(self, llm: LLM, sampling: SamplingParams, system: str | None = None) -> None:
        self.llm = llm
        self.sampling = sampling
        self.console = out()
        self.messages: list[dict[str, str]] = []
        self.answers: list[RoundStats] = []
        self.set_system(system)

    def run(self) -> None:
        self.console.print(
            f"{self.llm.model_name}, drafter {self.llm.drafter}. /help lists the commands.", markup=False
        )
        for message in _messages():
            if message in ("/quit", "/exit"):
                return
            if message.startswith("/"):
                self.command(message)
            elif message:
                self.answer(message.strip())

    def command(self, line: str) -> None:
        """Runs a command of the chat and prints its reply."""
        name, _, rest = line[1:].partition(" ")
        run = getattr(self, f"do_{name}", None)
        try:
            reply = run(rest.strip()) if run else f"There is no command /{name}; /help lists them."
        except (ValueError, OSError) as error:
            reply = str(error)
        if reply:
            self.console.print(reply, markup=False)

    def do_help(self, rest: str) -> str:
        return HELP

    def do_stats(self, rest: str) -> str:
        return _report(self.answers)

    def do_reset(self, rest: str) -> str:
        self.messages = [message for message in self.messages if message["role"] == "system"]
        return "The conversation is empty."

    def do_retry(self, rest: str) -> str:
        asked = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            return "There is no message to answer again."
        before, question = self.messages, self.messages[asked[-1]]["content"]
        self.messages = before[: asked[-1]]
        if not self.answer(question):
            self.messages = before
        return ""

    def do_system(self, rest: str) -> str:
        if rest:
            self.set_system(rest)
            return "The system message is set; it holds from the next answer on."
        return next((m["content"] for m in self.messages if m["role"] == "system"), "There is no system message.")

    def do_set(self, rest: str) -> str:
        if not rest:
            return "\n".join(f"{name}={value}" for name, value in vars(self.sampling).items())
        self.sampling = updated(self.sampling, parse_overrides([rest]))
        return f"{rest} holds from the next answer on."

    def do_save(self, rest: str) -> str:
        path = _file(rest)
        write_whole(path, json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1) + "\n")
        return f"Wrote {len(self.messages)} messages to {path}."

    def do_load(self, rest: str) -> str:
        self.messages = read_messages(_file(rest))
        return f"The conversation has {len(self.messages)} messages."

    def set_system(self, text: str | None) -> None:
        others = [message for message in self.messages if message["role"] != "system"]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *others]

    def answer(self, question: str) -> bool:
        """Streams the answer to a message. False: an error, which leaves the conversation unchanged."""
        asked = [*self.messages, {"role": "user", "content": question}]
        try:
            text = self.stream(asked)
        except ValueError as error:
            self.console.print(f"{error} (/reset starts anew)", style="red", markup=False)
            return False
        self.messages = [*asked, {"role": "assistant", "content": text}]
        return True

    def stream(self, messages: list[dict[str, str]]) -> str:
        """Shows the answer as it appears. Ctrl-C ends it; the text until then is kept and counted."""
        parts: list[str] = []
        stopped, began = RoundStats(), time.perf_counter()
        updates = self.llm.stream_chat(messages, self.sampling)
        with held_interrupt() as interrupted:
            for index, update in enumerate(updates):
                parts.append(update.text)
                self.console.out(printable(update.text), style=shade(index), end="")
                stopped.accepted_lengths.append(len(update.token_ids) - 1)
                stopped.decode_s = time.perf_counter() - began
                if update.completion:
                    self.answers.append(update.completion.stats)
                    if update.completion.finish_reason == "length":
                        self.console.out(" (cut at the limit)", style="dim", end="")
                elif interrupted():
                    self.answers.append(stopped)
                    self.console.out(" (stopped)", style="dim", end="")
                    break
        self.console.out("\n")
        return "".join(parts)


def read_messages(path: Path) -> list[dict[str, str]]:
    """The messages of a saved conversation."""
    try:
        found: Any = json.loads(read_text(path))["messages"]
        messages = [{"role": m["role"], "content": m["content"]} for m in found]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is not a saved conversation: a JSON object with messages") from None
    if not all(m["role"] in ROLES and isinstance(m["content"], str) for m in messages):
        raise ValueError(f"{path} has a message of an unknown role, or one without text")
    return messages


def _file(name: str) -> Path:
    if not name:
        raise ValueError("name a file")
    return Path(name).expanduser()


def _messages() -> Iterator[str]:
    """Messages and commands that the user types, until Ctrl-D. Ctrl-C discards the current one."""
    with suppress(ImportError):
        import_module("readline")  # input() edits the line and keeps a history once it is loaded
    while True:
        try:
            message = _line("> ").strip()
            if message.startswith('"""'):
                message = _block(message[3:])
        except KeyboardInterrupt:
            print("\nCtrl-D leaves")
        except EOFError:
            print()
            return
        else:
            yield message


def _block(begun: str) -> str:
    """A message of several lines, up to the next triple quotes. It begins with a line break, so it is no command."""
    lines = [f"\n{begun}"]
    while not lines[-1].rstrip().endswith('"""'):
        lines.append(_line("... "))
    return "\n".join(lines).rstrip().removesuffix('"""')


def _line(prompt: str) -> str:
    return input(prompt if sys.stdin.isatty() else "")


def _report(answers: Sequence[RoundStats]) -> str:
    """Statistics of the last answer and of all, and how often each number of draft tokens was accepted."""
    if not answers:
        return "No answer yet."
    every = total(answers)
    lines = [
        f"last answer  {statistics(answers[-1])}",
        f"all answers  {statistics(every)}",
        f"prompts      {every.prompt_tokens} tokens, {every.cached_tokens} of them cached",
        "accepted lengths, and how often",
    ]
    counts = Counter(every.accepted_lengths)
    most = max(counts.values())
    for length in range(max(counts) + 1):
        lines.append(f"{length:>4}  {'█' * round(BAR_WIDTH * counts[length] / most)} {counts[length]}")
    return "\n".join(lines)
