"""Encodes text to token ids and back, and renders chat templates.

Built on the `tokenizers` library: from a folder's `tokenizer.json`, or from the vocabulary of a GGUF file.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Encoding, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from jetspec.models.tensor_files import read_json

Message = Mapping[str, Any]

CHAT_VARIABLES = ("tools", "documents", "enable_thinking", "date_string")
"""Variables that a chat template may get beside the messages."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
END_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "</s>")
"""Control tokens that end a turn or a text in the supported families."""

PEEK = 8
"""Characters per token that a bounded encoding reads first; nearly all texts within the bound are shorter."""
MOST_COMPOSED = 4
"""Limit on the characters that a normalizer composes to one: the longest decomposition in Unicode."""


class TooLong(ValueError):
    """A text with more tokens than the limit."""


class Tokenizer:
    """Vocabulary and chat template of a model. Only control tokens are special; plain text may contain them."""

    def __init__(
        self,
        backend: Backend,
        chat_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
        eos_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self._backend = backend
        self._named = dict(named_tokens or {})
        self.chat_template = chat_template
        self.eos_tokens = eos_tokens | {
            id for id in [backend.token_to_id(self._named.get("eos_token", ""))] if id is not None
        }
        added = backend.get_added_tokens_decoder().values()
        self._control = _first_characters([token.content for token in added if token.special])
        self._longest_added = max((len(token.content) for token in added), default=0)
        self._is_byte_level = backend.decoder is not None and b"ByteLevel" in backend.decoder.__getstate__()

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Reads `tokenizer.json` and, if present, `tokenizer_config.json` and `chat_template.jinja`."""
        file = folder / "tokenizer.json"
        if not file.exists():
            raise ValueError(f"{folder}: tokenizer.json is missing")
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises the bare class
            raise ValueError(f"{file}: is not a valid tokenizer ({error})") from error
        backend.no_padding()
        backend.no_truncation()
        described = folder / "tokenizer_config.json"
        config = read_json(described) if described.exists() else {}
        return cls(backend, _folder_template(folder, config), _named_tokens(config))

    def save(self, folder: Path) -> None:
        """Writes the files that `from_folder` and transformers read."""
        tokens, config, template = (folder / name for name in TOKENIZER_FILES)
        self._backend.save(str(tokens))
        described = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config.write_text(json.dumps({**described, **self._named}, indent=2) + "\n", encoding="utf-8")
        if self.chat_template is not None:
            template.write_text(self.chat_template, encoding="utf-8")

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds a tokenizer from the metadata of a GGUF file."""
        return _GGUFVocabulary(metadata).tokenizer()

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def bos_token(self) -> int | None:
        return self._backend.token_to_id(self._named["bos_token"]) if "bos_token" in self._named else None

    @cached_property
    def longest_token(self) -> int:
        """Limit on the characters of a token."""
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=0)
        return longest if self._backend.normalizer is None else longest * MOST_COMPOSED

    def encode(self, text: str, add_special: bool = False, most: int | None = None) -> list[int]:
        """Encodes a text. `add_special` adds tokens around plain text, such as the first token.

        More than `most` tokens raise TooLong, in time that does not depend on the length of the text.
        """
        is_longer = most is not None and self._is_surely_longer(text, most)
        ids = [] if is_longer else self._encoding(text, add_special).ids
        if is_longer or (most is not None and len(ids) > most):
            raise TooLong(f"the text has more than {most} tokens")
        return list(ids)

    def _encoding(self, text: str, add_special: bool = False) -> Encoding:
        try:
            return self._backend.encode(text, add_special_tokens=add_special)
        except TypeError:
            raise ValueError("the text holds half of a surrogate pair, which is not valid Unicode") from None

    def _is_surely_longer(self, text: str, most: int) -> bool:
        """Returns true if the length of a text, or the tokens of a prefix, exceed the limit."""
        if len(text) > most * self.longest_token:
            return True
        end = PEEK * max(most, 1)
        while end < len(text):
            if self._num_final_tokens(text[:end]) > most:
                return True
            end *= PEEK
        return False

    def _num_final_tokens(self, prefix: str) -> int:
        """Returns the number of tokens of a prefix that do not depend on the rest of the text.

        The last word may continue, and the last characters may begin an added token.
        """
        encoding = self._encoding(prefix)
        words, offsets = encoding.word_ids, encoding.offsets
        count, sure = len(words), len(prefix) - self._longest_added
        while count and (words[count - 1] == words[-1] or offsets[count - 1][1] > sure):
            count -= 1
        return count

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))

    def token_text(self, id: int) -> str:
        """Returns a token as printable text; bytes that are not a character are shown in hex."""
        token = self._backend.id_to_token(id)
        if token is None:
            return f"<{id}>"
        text = _token_bytes(token, self._is_byte_level).decode("utf-8", errors="backslashreplace")
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

    def token_bytes(self) -> list[bytes]:
        """Returns the bytes of each token by id; empty for control tokens and unused ids."""
        added = self._backend.get_added_tokens_decoder()
        found = [b""] * self.vocab_size
        for token, id in self._backend.get_vocab(with_added_tokens=True).items():
            if id not in added:
                found[id] = _token_bytes(token, self._is_byte_level)
            elif not added[id].special:
                found[id] = added[id].content.encode()
        return found

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """Renders a conversation with the model's chat template."""
        unknown = set(variables) - set(CHAT_VARIABLES)
        if unknown:
            raise ValueError(f"chat templates take {', '.join(CHAT_VARIABLES)}, not {', '.join(sorted(unknown))}")
        if self.chat_template is None:
            raise ValueError("this model has no chat template; use --raw to give it plain text")
        rendered = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return _compiled(self.chat_template).render(self._named | variables | rendered)
        except Exception as error:  # templates are programs
            raise ValueError(f"the chat template failed: {error or type(error).__name__}") from error

    def encode_chat(
        self, messages: Sequence[Message], begin: str = "", most: int | None = None, **variables: Any
    ) -> list[int]:
        """Encodes a conversation and `begin`, the first words of its answer, to at most `most` tokens.

        The template contains the first token. Names of control tokens are control tokens only in the template: in
        messages they are split and encoded as text, so that a message cannot forge another turn.
        """
        cut = secrets.token_hex(8)
        text = self.chat(self._cut(messages, cut), **self._cut(variables, cut)) + begin
        return self._encode_cut(text, cut, most)

    def encode_behind(
        self, mark: str, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Encodes the part of a rendered conversation after the last `mark`, a text in one of its messages."""
        cut = secrets.token_hex(8)
        text = self.chat(self._cut(messages, cut), add_generation_prompt, **self._cut(variables, cut))
        _, found, rest = text.rpartition(mark)
        if not found:
            raise ValueError("the chat template leaves out earlier messages")
        return self._encode_cut(rest, cut)

    def encode_words(self, text: str) -> list[int]:
        """Encodes plain text, in which names of control tokens are text."""
        cut = secrets.token_hex(8)
        return self._encode_cut(self._cut(text, cut), cut)

    def _encode_cut(self, text: str, cut: str, most: int | None = None) -> list[int]:
        tokens: list[int] = []
        for piece in text.split(cut):
            tokens += self.encode(piece, most=None if most is None else most - len(tokens))
        return tokens

    def _cut(self, value: Any, cut: str) -> Any:
        """Inserts `cut` after the first character of each control token name in a value's texts."""
        if isinstance(value, str):
            return self._control.sub(rf"\g<0>{cut}", value)
        if isinstance(value, Mapping):
            return {name: self._cut(part, cut) for name, part in value.items()}
        return [self._cut(part, cut) for part in value] if isinstance(value, list | tuple) else value


def _first_characters(texts: Sequence[str]) -> re.Pattern[str]:
    """Returns a pattern of the first character of each of these texts, overlapping ones included."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[:1], []).append(re.escape(text[1:]))
    patterns = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items() if first]
    return re.compile("|".join(patterns) or r"(?!)")


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    """Compiles a chat template, which is untrusted: it runs in a sandbox with a few harmless functions."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "range": environment.globals["range"],
        "namespace": environment.globals["namespace"],
        "dict": dict,
    }
    return environment.from_string(template)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Returns plain JSON; jinja's own filter escapes for HTML."""
    options = {"ensure_ascii": False} | options
    return json.dumps(value, indent=indent, **options)


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns bos_token, eos_token and others; each is a text or a table with a text inside."""
    named = {}
    for key in NAMES:
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            named[key] = text
    return named


PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
BYTE_OF = {chr(byte): byte for byte in PRINTABLE}
"""The byte of each printable character that byte-level vocabularies use for bytes."""
BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*PRINTABLE}))}


def _token_bytes(token: str, is_byte_level: bool) -> bytes:
    if is_byte_level:
        return bytes(BYTE_OF[c] for c in token) if all(c in BYTE_OF for c in token) else token.encode()
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": (GPT2,),
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "starcoder": (r"\p{N}", GPT2),
    "llama-bpe": (LLAMA3,),
    "llama3": (LLAMA3,),
    "llama-v3": (LLAMA3,),
    "qwen2": (QWEN2,),
    "tekken": (TEKKEN,),
}
"""Patterns by which each kind of byte-level vocabulary splits text, one after the other."""
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Kinds that encode a word of the vocabulary as it is, without merges."""


NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Names of tokens in chat templates, with those in GGUF (`tokenizer.ggml.*_token_id`)."""


class _GGUFVocabulary:
    """Tokenizer section of GGUF metadata."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = self._list("tokens", str)
        if len(set(self.tokens)) != len(self.tokens) or not self.tokens:
            raise ValueError("the GGUF vocabulary is empty or has a token twice")
        self.types: list[int] = self._list("token_type", int) or [1] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise ValueError("the GGUF vocabulary does not have one type per token")
        # Converters make up names for embedding rows without a token.
        self.id_of = {token: id for id, token in enumerate(self.tokens) if self.types[id] != UNUSED}

    def tokenizer(self) -> Tokenizer:
        kind = self._get("model")
        if kind == "gpt2":
            backend, adds_bos = self._byte_level(), self._get("pre") in WHOLE_WORDS
        elif kind == "llama":
            backend, adds_bos = self._sentencepiece(), True
        else:
            raise ValueError(f"GGUF tokenizer model {kind!r} is not supported; choose one of gpt2, llama")
        self._add_tokens(backend)
        named = {key: self.tokens[id] for key, name in NAMES.items() if (id := self._token(name)) is not None}
        if "bos_token" in named and self._get("add_bos_token", adds_bos):
            bos = {"id": "BOS", "ids": [self._token("bos")], "tokens": [named["bos_token"]]}
            backend.post_processor = processors.TemplateProcessing(single=["BOS:0", "$A:0"], special_tokens=[bos])
        template = self._metadata.get("tokenizer.chat_template")
        return Tokenizer(backend, template if isinstance(template, str) else None, named, self._eos_tokens())

    def _byte_level(self) -> Backend:
        pre = self._get("pre", "default")
        if pre not in PRE_TOKENIZERS:
            raise ValueError(f"GGUF pre-tokenizer {pre!r} is not supported; choose one of {', '.join(PRE_TOKENIZERS)}")
        merges = [tuple(merge.split(" ", 1)) for merge in self._list("merges", str)]
        backend = Backend(_bpe(self.id_of, merges, ignore_merges=pre in WHOLE_WORDS))
        if pre == "qwen2":
            backend.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentencepiece(self) -> Backend:
        unknown = self._token("unknown")
        unk = None if unknown is None else self.tokens[unknown]
        merges = self._merges_from_scores()
        backend = Backend(_bpe(self.id_of, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
        adds_space = self._get("add_space_prefix", True)
        prepend = [normalizers.Prepend("▁")] if adds_space else []
        backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
        strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return backend

    def _merges_from_scores(self) -> list[tuple[str, str]]:
        """Returns BPE merges equal to SentencePiece, which joins the pair whose union has the best score."""
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise ValueError("the GGUF vocabulary does not have one score per token")
        merges = []
        for id, token in enumerate(self.tokens):
            if self.types[id] != 1:
                continue
            for i in range(1, len(token)):
                left, right = self.id_of.get(token[:i]), self.id_of.get(token[i:])
                if left is not None and right is not None:
                    merges.append((-scores[id], id, left, right))
        return [(self.tokens[left], self.tokens[right]) for _, _, left, right in sorted(merges)]

    def _add_tokens(self, backend: Backend) -> None:
        for kind, is_special in ((CONTROL, True), (USER_DEFINED, False)):
            texts = [token for token, type in zip(self.tokens, self.types, strict=True) if type == kind]
            added = [AddedToken(text, normalized=False, special=is_special) for text in texts if text]
            (backend.add_special_tokens if is_special else backend.add_tokens)(added)

    def _eos_tokens(self) -> frozenset[int]:
        declared = {self._token(name) for name in ("eos", "eot", "eom")}
        named = {self.id_of[text] for text in END_TEXTS if text in self.id_of}
        controls = {id for id in named if self.types[id] == CONTROL}
        return frozenset(id for id in declared if id is not None) | controls

    def _token(self, name: str) -> int | None:
        id = self._get(f"{name}_token_id")
        return id if isinstance(id, int) and 0 <= id < len(self.tokens) else None

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _list(self, key: str, kind: type) -> list[Any]:
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
            raise ValueError(f"tokenizer.ggml.{key} is not a list of {kind.__name__}")
        return value


def _bpe(vocab: dict[str, int], merges: list[Any], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab, merges, **options)
    except Exception as error:  # the library raises the bare class
        raise ValueError(f"the GGUF vocabulary and its merges do not fit together ({error})") from error
