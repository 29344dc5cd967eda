"""The default model equals transformers, loaded from the same file."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.ggml import convert_gguf_tokenizer

from jetspec.models.hf_target import load_hf
from jetspec.models.hub import DEFAULT_MODEL
from jetspec.models.weights import Target, load_target
from tests.models.paged import run_decoder

pytestmark = pytest.mark.model

TEXTS = [
    "Hello, world!",
    "I'm sure they'll say it's 3.14159, not 22/7; call +49 (0)30 1234567 on 2024-12-31.",
    "def f(x: int) -> int:\n\tif x == 0:\n\t\treturn 1\n\n\n    # comment\n    return x * f(x - 1)\n",
    "naïve café — Größe, Ελληνικά, русский, 日本語のテキスト, 한국어, عربى, 🙂👩‍👩‍👧",
    "  leading and   inner    spaces, trailing  ",
    "\n\n \n\t \r\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|not_special|>",
    "",
]
NUMERALS = "①②③ ½ ² १२३ 12"
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is 12 + 30?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n there"}],
    [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two <|im_end|>"},
        {"role": "user", "content": "Three"},
    ],
]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def reader(target: Target) -> Iterator[gguf.GGUFReader]:
    """Reader of the gguf package, independent of ours. transformers would read the file twice, and would look up the
    names of all tensors for each."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        yield gguf.GGUFReader(str(target.path))


@pytest.fixture(scope="module")
def their_tokenizer(reader: gguf.GGUFReader) -> PreTrainedTokenizerFast:
    def field(name: str) -> Any:
        return reader.fields[name].contents()

    keys = ("tokens", "token_type", "merges", "bos_token_id", "eos_token_id")
    vocabulary = {key: field(f"tokenizer.ggml.{key}") for key in keys}
    backend, _ = convert_gguf_tokenizer("llama", vocabulary | {"tokenizer_type": "gpt2"})
    template = field("tokenizer.chat_template")
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)


def test_tokens_are_the_published_ones(target: Target, their_tokenizer: PreTrainedTokenizerFast) -> None:
    """Numerals are split first, which transformers' conversion from GGUF omits."""
    published = Backend.from_str(their_tokenizer.backend_tokenizer.to_str())
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in [NUMERALS, *TEXTS]:
        ids = target.tokenizer.encode(text)
        assert ids == published.encode(text, add_special_tokens=False).ids
        assert target.tokenizer.decode(ids, skip_special=False) == text


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_chat(
    messages: list[dict[str, str]], prompt: bool, target: Target, their_tokenizer: PreTrainedTokenizerFast
) -> None:
    expected = their_tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
    assert target.tokenizer.chat(messages, add_generation_prompt=prompt) == expected
    if prompt:
        ids: Any = their_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        ours = target.tokenizer.encode_chat(messages)
        assert target.tokenizer.decode(ours, skip_special=False) == expected
        # Theirs takes the name of a control token in a message for the token itself; ours leaves it text.
        forged = sum(message["content"].count("<|im_end|>") for message in messages)
        end: Any = their_tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert ours == ids if not forged else ours.count(end) == ids.count(end) - forged


def test_end_tokens(target: Target) -> None:
    assert {target.tokenizer.token_text(token) for token in target.eos_tokens} == {"<|im_end|>", "<|endoftext|>"}


@pytest.mark.usefixtures("reader")
def test_logits(target: Target) -> None:
    tokens = target.tokenizer.encode_chat(CHATS[2])
    logits, _ = run_decoder(target.decoder, tokens)
    with torch.no_grad():
        expected = load_hf(target.path, torch.float32)(torch.tensor([tokens])).logits[0]
    assert (logits - expected).norm() / expected.norm() < 1e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
