"""A prompt with its answers as one sequence of tokens, encoded by the chat template."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from jetspec.data.prompts import BadPrompt, Prompt
from jetspec.data.rows import Row
from jetspec.models.tokenizer import Tokenizer

PLACEHOLDER = secrets.token_hex(16)
"""Stands for an answer in a rendered conversation. It is random, so no message contains it."""


class Conversation:
    """The tokens of a prompt and its answers so far. `variables` are passed to the chat template."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer, **variables: Any) -> None:
        self.prompt, self.tokenizer, self.variables = prompt, tokenizer, variables
        self.messages = [*system_messages(prompt.system), user_message(prompt.turns[0])]
        self.token_ids = tokenizer.encode_chat(self.messages, **variables)
        self.spans: list[tuple[int, int]] = []
        self.finish: list[str] = []

    @property
    def has_next_turn(self) -> bool:
        return len(self.spans) < len(self.prompt.turns)

    @property
    def row(self) -> Row:
        return Row(self.prompt.id, self.token_ids, self.spans, self.finish)

    def answer(self, token_ids: Sequence[int], finish: str) -> None:
        start = len(self.token_ids)
        self.token_ids = [*self.token_ids, *token_ids]
        self.spans.append((start, len(self.token_ids)))
        self.finish.append(finish)

    def with_next_turn(self) -> list[int]:
        """Tokens of the conversation up to the next answer.

        Tokens that the target wrote are kept: encoding their text again could split it differently.
        """
        self.messages += [assistant_message(PLACEHOLDER), user_message(self.prompt.turns[len(self.spans)])]
        between = self.tokenizer.encode_behind(PLACEHOLDER, self.messages, **self.variables)
        has_end = bool(between) and self.token_ids[-1] == between[0]
        return self.token_ids + between[has_end:]


def system_messages(text: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}] if text else []


def user_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant_message(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def require_template(tokenizer: Tokenizer) -> None:
    if tokenizer.chat_template is None:
        raise ValueError("this model has no chat template, so it cannot answer turns; choose a chat model")


def start_conversation(prompt: Prompt, tokenizer: Tokenizer, max_prompt_tokens: int) -> Conversation | BadPrompt:
    try:
        conversation = Conversation(prompt, tokenizer)
    except ValueError as error:
        return BadPrompt(prompt.where, f"cannot be encoded: {error}")
    if (count := len(conversation.token_ids)) > max_prompt_tokens:
        return BadPrompt(prompt.where, f"is longer than the context ({count} tokens, {max_prompt_tokens} fit)")
    return conversation
