"""Tokenizers of folders and GGUF files, and chat templates, hostile ones included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from jetspec.models.tokenizer import PRE_TOKENIZERS, Tokenizer, TooLong
from tests.train.tiny_model import TEMPLATE, byte_tokenizer

TEXTS = [
    "low lower lowest new newer newest wide 2024 12 345,678",
    "def f(x):\n    return x + 1\n\n\n",
    "naïve café 你好 🙂",
]
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]


def train_backend() -> Backend:
    """Trains a byte-level BPE on a few lines."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>", "<|a|>"], initial_alphabet=alphabet)
    backend.train_from_iterator(TEXTS * 4, trainer)
    return backend


BACKEND = train_backend()


def gguf_metadata(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    model = json.loads(BACKEND.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in ("<s>", "</s>", "<|a|>") else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    named = {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items() if value is not None}
    return named | {"tokenizer.chat_template": PLAIN}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "h", "e", "l", "o", "w", "he", "ll", "llo", "hello", "▁hello", "▁w", "lo", "▁lo", "▁low"]
    metadata = {
        "model": "llama",
        "tokens": pieces + words,
        "scores": [0.0] * len(pieces) + [-float(i) for i in range(len(words))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items()}


def write_folder(folder: Path, config: dict[str, Any], template: str | None = None) -> Path:
    BACKEND.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="▁"), min_size=1))
@settings(max_examples=60)
def test_round_trip(text: str) -> None:
    for kind in BOUNDED.keys() - {"qwen2"}:  # qwen2 normalises
        tokenizer = BOUNDED[kind]
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


GGUF = {pre: Tokenizer.from_gguf(gguf_metadata(pre)) for pre in PRE_TOKENIZERS}


@given(st.text())
@settings(max_examples=60)
def test_gguf_equals_its_source_tokenizer(text: str) -> None:
    assert GGUF["gpt-2"].encode(text) == BACKEND.encode(text).ids


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'m", " 2024", ",", " ok", "\n\n", "\n", "x"]),
        ("smollm", ["I", "'m", " ", "2", "0", "2", "4", ",", " ok", "\n\n", "\n", "x"]),
        ("llama-bpe", ["I", "'m", " ", "202", "4", ",", " ok", "\n\n\n", "x"]),
        ("qwen2", ["I", "'m", " ", "2", "0", "2", "4", ",", " ok", "\n\n\n", "x"]),
        ("tekken", ["I", "'m", " ", "2", "0", "2", "4", ",", " ok", "\n\n\n", "x"]),
    ],
)
def test_pre_tokenizers_split_words(pre: str, pieces: list[str]) -> None:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]]
    cut = pre_tokenizers.Sequence(splits).pre_tokenize_str("I'm 2024, ok\n\n\nx")
    assert [piece for piece, _ in cut] == pieces


@pytest.mark.parametrize(("kind", "shown"), [(3, "low"), (4, "low<|a|></s>")])
def test_control_tokens_are_special_and_user_defined_ones_are_not(kind: int, shown: str) -> None:
    metadata = gguf_metadata()
    types = [kind if type == 3 else type for type in metadata["tokenizer.ggml.token_type"]]
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.token_type": types})
    ids = tokenizer.encode("low<|a|></s>")
    assert ids[-2:] == [2, 1] and tokenizer.decode(ids) == shown
    assert tokenizer.decode(ids, skip_special=False) == "low<|a|></s>"


def test_unused_ids_are_no_tokens() -> None:
    """Files name embedding rows beyond the vocabulary."""
    metadata = gguf_metadata()
    tokens, types = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    count = len(tokens)
    metadata = gguf_metadata(tokens=[*tokens, "[PAD0]", "[PAD1]"], token_type=[*types, 5, 5])
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.vocab_size == len(tokenizer.token_bytes()) == count
    assert tokenizer.decode([count, *tokenizer.encode("low"), count + 1], skip_special=False) == "low"
    assert tokenizer.token_text(count) == f"<{count}>"
    assert tokenizer.encode("[PAD0]") == GGUF["gpt-2"].encode("[PAD0]")


@pytest.mark.parametrize(("pre", "wish", "first"), [
    ("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False),
])  # fmt: skip
def test_first_token(pre: str, wish: bool | None, first: bool) -> None:
    tokenizer = Tokenizer.from_gguf(gguf_metadata(pre, add_bos_token=wish))
    assert tokenizer.bos_token == 0
    assert (tokenizer.encode("low", add_special=True)[0] == 0) is first
    assert tokenizer.encode("low")[0] != 0


def test_chat_adds_no_second_bos_token() -> None:
    metadata = gguf_metadata(add_bos_token=True) | {"tokenizer.chat_template": "{{ bos_token }}" + PLAIN}
    assert Tokenizer.from_gguf(metadata).encode_chat(USER).count(0) == 1


SENTENCEPIECE = Tokenizer.from_gguf(sentencepiece_metadata())
BOUNDED = GGUF | {"sentencepiece": SENTENCEPIECE}
PARTS = ["<|a|>", "<|", "</s>", "low", "er", " ", "\n", "2024", "n", "-", "'m"]
PARTS += ["e\u0301", "α\u0313\u0300\u0345", "你", "🙂"]


@pytest.mark.parametrize("kind", BOUNDED)
@given(data=st.data())
@settings(max_examples=50)
def test_bounded_encoding_is_equal_or_refused(kind: str, data: st.DataObject) -> None:
    """Prefixes, as short as possible, never refuse a text within the limit."""
    tokenizer = BOUNDED[kind]
    text = "".join(data.draw(st.lists(st.sampled_from(PARTS), max_size=30)))
    whole = tokenizer.encode(text, add_special=True)
    most = data.draw(st.integers(0, len(whole) + 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jetspec.models.tokenizer.PEEK", 2)
        if len(whole) <= most:
            assert tokenizer.encode(text, add_special=True, most=most) == whole
        else:
            with pytest.raises(TooLong):
                tokenizer.encode(text, add_special=True, most=most)


@pytest.mark.parametrize("text", ["1", "a", " ", "low er ", "<|a|>", "🙂"])
@pytest.mark.parametrize("kind", ["smollm", "qwen2", "sentencepiece"])
def test_refusal_reads_a_bounded_prefix(kind: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, encode, read = BOUNDED[kind], Tokenizer._encoding, 0

    def counted(self: Tokenizer, text: str, add_special: bool = False) -> Any:
        nonlocal read
        read += len(text)
        return encode(self, text, add_special)

    monkeypatch.setattr(Tokenizer, "_encoding", counted)
    with pytest.raises(TooLong):
        tokenizer.encode(text * 1_000_000, most=100)
    assert read <= 2 * 100 * tokenizer.longest_token


@given(st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im_", "end|>", "<", "\n", "system", "hi ", "1f"])))
@settings(max_examples=50)
def test_messages_cannot_contain_control_tokens(parts: list[str]) -> None:
    """Control tokens in templates are special; in messages and tools they are plain text, unchanged."""
    tokenizer, said = byte_tokenizer(), "".join(parts)
    tokenizer.chat_template = "{{ tools | tojson }}" + TEMPLATE
    messages: list[dict[str, Any]] = [{"role": "user", "content": said}, {"role": "tool", "content": [said]}]
    tools = [{"description": said}]
    tokens = tokenizer.encode_chat(messages, begin="<|im_start|>", tools=tools)
    plain = tokenizer.encode_chat([{**message, "content": ""} for message in messages], "<|im_start|>", tools=[])
    text_of = tokenizer.token_bytes()
    assert [token for token in tokens if not text_of[token]] == [token for token in plain if not text_of[token]]
    assert tokenizer.decode(tokens, skip_special=False) == tokenizer.chat(messages, tools=tools) + "<|im_start|>"


def test_end_tokens_of_gguf() -> None:
    assert GGUF["gpt-2"].eos_tokens == {1}
    assert Tokenizer.from_gguf(gguf_metadata(eot_token_id=2)).eos_tokens == {1, 2}
    assert Tokenizer.from_gguf(gguf_metadata(eos_token_id=None)).eos_tokens == {1}  # </s> by its text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "martian"}, "martian"),
        ({"model": "rwkv"}, "rwkv"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "twice"),
        ({"tokens": []}, "empty"),
        ({"tokens": [1, 2]}, "list of str"),
        ({"token_type": [1]}, "type per token"),
        ({"merges": ["no such"]}, "fit together"),
        ({"merges": ["unsplit"]}, "fit together"),
        ({"model": "llama", "scores": [0.0]}, "score per token"),
    ],
)
def test_damaged_vocabulary(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(gguf_metadata(**changes))


def test_sentencepiece_merges_by_score() -> None:
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    assert [tokens[id] for id in SENTENCEPIECE.encode("hello low")] == ["▁hello", "▁low"]
    assert [tokens[id] for id in SENTENCEPIECE.encode("é")] == ["▁", "<0xC3>", "<0xA9>"]
    assert SENTENCEPIECE.encode("hello", add_special=True)[0] == 1
    assert [SENTENCEPIECE.token_text(id) for id in SENTENCEPIECE.encode("é")] == [" ", r"\xc3", r"\xa9"]


def test_token_text_is_one_printable_line() -> None:
    for tokenizer in (GGUF["gpt-2"], SENTENCEPIECE):
        assert all(tokenizer.token_text(id).isprintable() for id in range(tokenizer.vocab_size))
    vocabulary = BACKEND.get_vocab()
    assert GGUF["gpt-2"].token_text(vocabulary["Ċ"]) == r"\n"
    assert GGUF["gpt-2"].token_text(vocabulary["Ã"]) == r"\xc3"
    assert GGUF["gpt-2"].token_text(10_000) == "<10000>"
    assert SENTENCEPIECE.token_text(SENTENCEPIECE.encode("hello")[0]) == " hello"


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="▁<"), min_size=1))
@settings(max_examples=60)
def test_token_bytes_concatenate_to_the_text(text: str) -> None:
    for tokenizer, prefix in ((GGUF["gpt-2"], b""), (SENTENCEPIECE, b" ")):
        parts = tokenizer.token_bytes()
        assert b"".join(parts[id] for id in tokenizer.encode(text)) == prefix + text.encode()
        assert not any(parts[id] for id in tokenizer.eos_tokens) and len(parts) == tokenizer.vocab_size


def test_folder(tmp_path: Path) -> None:
    config = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "chat_template": PLAIN}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, config))
    assert tokenizer.encode("low lower") == BACKEND.encode("low lower").ids
    assert tokenizer.bos_token == 0
    assert tokenizer.eos_tokens == {1}
    assert tokenizer.vocab_size == BACKEND.get_vocab_size()
    assert tokenizer.chat(USER) == "<|user|>hi<|a|>"
    assert tokenizer.chat(USER, add_generation_prompt=False) == "<|user|>hi"


@pytest.mark.parametrize(
    ("template", "file", "said"),
    [
        ("old", "new", "new"),
        ([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}], None, "plain"),
    ],
)
def test_template_of_a_folder(template: Any, file: str | None, said: str, tmp_path: Path) -> None:
    assert Tokenizer.from_folder(write_folder(tmp_path, {"chat_template": template}, file)).chat(USER) == said


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "BPE"}}', None])
def test_damaged_folder(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing" if content is None else "not a valid tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_tokenizer_without_decoder(tmp_path: Path) -> None:
    Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.token_text(1), tokenizer.decode([1])) == ("b", "b")


def with_template(template: str | None) -> Tokenizer:
    return Tokenizer(BACKEND, template, {"bos_token": "<s>"})


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].missing.field }}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(10000000000) %}{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ open('/etc/passwd') }}",
    ],
)
def test_hostile_template_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="chat template failed"):
        with_template(template).chat(USER)


def test_template_tools() -> None:
    assert with_template("{{ messages | tojson }}").chat([{"role": "é<"}]) == '[{"role": "é<"}]'
    assert with_template("{{ strftime_now('%Y') | length }}").chat(USER) == "4"
    loop = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert with_template(loop).chat(USER) == "01"
    assert with_template("{{ enable_thinking }}").chat(USER, enable_thinking=False) == "False"
    with pytest.raises(ValueError, match="not colour"):
        with_template("x").chat(USER, colour="red")
    with pytest.raises(ValueError, match="--raw"):
        with_template(None).chat(USER)
    with pytest.raises(ValueError, match="surrogate"):
        GGUF["gpt-2"].encode("\ud800")
