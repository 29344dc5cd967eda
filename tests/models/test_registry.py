"""The registry of published heads, and the choice of one for a model. Repositories are folders of a made-up cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jetspec.models import heads, registry
from jetspec.models.decoder import DecoderConfig, RopeConfig
from jetspec.models.head_folder import CARD_FILE, kind_of
from jetspec.models.head_format import MAX_BLOCK, read_config, save_head
from jetspec.models.heads import FORMATS, choose_head
from jetspec.models.hub import DEFAULT_MODEL, check_name, local_head, shipped_head
from jetspec.models.registry import ORDER, KnownHead, base_name, heads_of, known_heads
from tests.engine.tiny import tiny_decoder, tiny_head

KINDS = {kind for format in FORMATS for kind in format.kinds}
TARGET = tiny_decoder().config
MODEL = "maker/Tiny-1B"
GOOD, BETTER, NEWEST = (
    KnownHead(f"maker/{name}", (MODEL,), "DFlash", tokens_per_round=figure)
    for name, figure in (("good", 2.0), ("better", 3.0), ("newest", 4.0))
)

Publish = Callable[..., None]


# -- rows


@pytest.mark.parametrize("head", known_heads(), ids=lambda head: head.name)
def test_every_row_can_be_read(head: KnownHead) -> None:
    assert head.kind in KINDS
    for name in (head.name, *head.targets):
        check_name(name)
    assert head.targets and len(set(head.targets)) == len(head.targets)
    assert (head.block_size is None) if "agle" in head.kind.lower() else 2 <= (head.block_size or 2) <= MAX_BLOCK
    assert (head.tokens_per_round is None) == (head.measured is None)
    assert head.tokens_per_round is None or 1 < head.tokens_per_round <= MAX_BLOCK
    assert head.size_gb is None or head.size_gb > 0


def test_heads_and_kinds_are_listed_once() -> None:
    names = [head.name.lower() for head in known_heads()]
    assert len(set(names)) == len(names) > 30
    assert sorted(ORDER) == sorted(KINDS)


def test_shipped_head_is_a_row() -> None:
    (head,) = heads_of(DEFAULT_MODEL)
    folder = shipped_head(head.name)
    assert folder is not None and local_head(head.name) == folder
    assert (head.kind, head.block_size) == (kind_of(folder), read_config(folder).block_size)
    card = (folder / CARD_FILE).read_text().splitlines()
    assert f" {head.tokens_per_round} " in next(line for line in card if line.startswith("| gsm8k |"))


# -- names


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("other/Qwen3-8B-GGUF", "qwen3-8b"),
        ("/models/Qwen3-8B-Q4_K_M.gguf", "qwen3-8b"),
        ("Qwen3-30B-A3B-Instruct-2507-UD-Q4_K_XL.gguf", "qwen3-30b-a3b-instruct-2507"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", DEFAULT_MODEL),
        ("Llama-3.1-8B-Instruct-bf16", "llama-3.1-8b-instruct"),
        ("Qwen/Qwen3-8B-FP8", "qwen3-8b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b-base"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b-instruct-2507"),
    ],
)
def test_copies_and_quantisations_have_one_name(name: str, base: str) -> None:
    assert base_name(name) == base


def test_published_figures_come_first_then_the_order_of_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        *(KnownHead(f"maker/{i}", (MODEL,), kind) for i, kind in enumerate(("EAGLE-3", "DFlash", "DSpark"))),
        *(GOOD, BETTER, KnownHead("maker/foreign", ("maker/Other",), "DFly", tokens_per_round=9.0)),
    )
    monkeypatch.setattr(registry, "known_heads", lambda: rows)
    assert [head.name.split("/")[1] for head in heads_of(MODEL)] == ["better", "good", "2", "1", "0"]


# -- choice


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """A function that sets the rows of the registry, the heads in the cache and those that can be downloaded."""
    cache, remote = tmp_path / "cache", tmp_path / "remote"
    fitting = tiny_head(tiny_decoder(layers=4), block=4)
    save_head(fitting, tmp_path / "head")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))

    def folder(root: Path, head: KnownHead) -> Path:
        return root / f"models--{head.name.replace('/', '--')}" / "snapshots" / "1"

    def set_up(*rows: KnownHead, cached: tuple[KnownHead, ...] = (), online: tuple[KnownHead, ...] = ()) -> None:
        for root, some in ((cache, cached), (remote, online)):
            for head in some:
                shutil.copytree(tmp_path / "head", folder(root, head))
                (folder(root, head).parents[1] / "refs").mkdir()
                (folder(root, head).parents[1] / "refs" / "main").write_text("1")
        by_name = {head.name: head for head in online}

        def download(name: str, *files: str, **_: object) -> str:
            if not online:
                raise ConnectionError("no route")
            if name not in by_name:
                raise KeyError(f"no repository {name}")
            source = folder(remote, by_name[name])
            for file in files or [path.name for path in source.iterdir()]:
                place = folder(cache, by_name[name])
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(source / file, place / file)
            (place.parents[1] / "refs").mkdir(exist_ok=True)
            (place.parents[1] / "refs" / "main").write_text("1")
            return str(place / files[0] if files else place)

        monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        for each in (registry, heads):
            monkeypatch.setattr(each, "known_heads", lambda: rows)

    return set_up


FITS = replace(TARGET, num_layers=5)


def test_nothing_is_downloaded_unasked(publish: Publish) -> None:
    publish(GOOD, BETTER, cached=(GOOD,), online=(GOOD, BETTER))
    choice = choose_head(MODEL, FITS)
    assert choice.name == GOOD.name and choice.folder == local_head(GOOD.name)
    assert GOOD.name in choice.reason and "\n" not in choice.reason
    (hint,) = choice.hints
    assert BETTER.name in hint and "--head auto" in hint and local_head(BETTER.name) is None


def test_best_head_is_downloaded_when_asked(publish: Publish) -> None:
    publish(GOOD, BETTER, NEWEST, cached=(GOOD,), online=(BETTER,))
    choice = choose_head(MODEL, FITS, fetch=True)
    assert choice.name == BETTER.name and choice.folder == local_head(BETTER.name) and not choice.hints
    assert NEWEST.name in choice.reason, "the newest one is gone"


def test_offline_the_cache_is_used_and_named(publish: Publish) -> None:
    publish(GOOD, BETTER, cached=(GOOD,))
    choice = choose_head(MODEL, FITS, fetch=True)
    assert choice.name == GOOD.name and "offline" in choice.reason and BETTER.name in choice.reason
    publish(BETTER)
    choice = choose_head(MODEL, FITS, fetch=True)
    assert choice.folder is None and "offline" in choice.reason and "\n" not in choice.reason


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_half_a_head_counts_as_missing(publish: Publish, file: str) -> None:
    publish(GOOD, BETTER, cached=(GOOD, BETTER))
    folder = local_head(BETTER.name)
    assert folder is not None
    (folder / file).unlink()
    assert local_head(BETTER.name) is None and choose_head(MODEL, FITS).name == GOOD.name
    assert choose_head(MODEL, FITS, fetch=True).name == GOOD.name, "offline"


def test_part_of_a_sharded_head_counts_as_missing(publish: Publish) -> None:
    publish(GOOD, cached=(GOOD,))
    folder = local_head(GOOD.name)
    assert folder is not None
    for index in ('{"weight_map": {"a": "model.safetensors", "b": "more"}}', '{"weight_map": [3]}', "[]", "{"):
        (folder / "model.safetensors.index.json").write_text(index)
        assert local_head(GOOD.name) is None
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors", "b": "more"}}')
    (folder / "more").touch()
    assert local_head(GOOD.name) == folder


def test_heads_that_do_not_fit_are_passed_over(publish: Publish) -> None:
    publish(GOOD, BETTER, cached=(GOOD, BETTER))
    folder = local_head(BETTER.name)
    assert folder is not None
    config = (folder / "config.json").read_text()
    for broken in (config.replace('"hidden_size"', '"louder"'), '{"architectures": ["Gemma4DSparkModel"]}', "{}", "{"):
        (folder / "config.json").write_text(broken)
        assert choose_head(MODEL, FITS).name == GOOD.name
    assert choose_head(MODEL, replace(FITS, hidden_size=64)).name is None


def test_only_the_config_of_a_head_that_does_not_fit_is_downloaded(publish: Publish) -> None:
    publish(GOOD, BETTER, online=(GOOD, BETTER))
    assert choose_head(MODEL, replace(FITS, vocab_size=9), fetch=True).folder is None
    assert local_head(GOOD.name) is None and local_head(BETTER.name) is None


def test_model_of_another_name_is_told_of_a_head_of_its_shape(publish: Publish) -> None:
    publish(GOOD, BETTER, cached=(GOOD,))
    choice = choose_head("mine", FITS)
    assert choice.name is None and choice.folder is None and GOOD.name in choice.hints[0]
    for other in (replace(FITS, max_len=99), replace(FITS, rope=RopeConfig(5e5)), replace(FITS, vocab_size=9)):
        assert not choose_head("mine", other).hints
    assert not choose_head("mine", FITS, fetch=True).folder


def test_shipped_head_is_found_by_name_and_by_shape() -> None:
    """By shape such as for a file of the default model under a name of its own."""
    shape = DecoderConfig(
        *("llama", 49152, 576, 30), num_heads=9, num_kv_heads=3, head_dim=64, inner_size=1536, max_len=8192
    )
    default = replace(shape, rope=RopeConfig(1e5))
    for name in (DEFAULT_MODEL, "HuggingFaceTB/SmolLM2-135M-Instruct", "models/SmolLM2-135M-Instruct.Q8_0.gguf"):
        choice = choose_head(name, default)
        assert choice.name == DEFAULT_MODEL and choice.folder == shipped_head(DEFAULT_MODEL)
    mine = choose_head("mine.gguf", default)
    assert mine.name is None and DEFAULT_MODEL in mine.hints[0] and not choose_head("mine.gguf", shape).hints
