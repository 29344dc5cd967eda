"""`jetspec vllm serve` over HTTP: vLLM's server processes load the plugin through its entry point."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs an environment with vLLM; make test-vllm makes one")

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tests.jetspec_vllm.tiny import VOCAB, random_prompts, write_head, write_target

pytestmark = pytest.mark.vllm

ROOT, START_TIMEOUT_S = Path(__file__).parents[2], 600
PLUGINS = """[vllm.general_plugins]
cpu = tests.jetspec_vllm.cpu:register
jetspec = jetspec_vllm:register
[jetspec.commands]
vllm = jetspec_vllm.command:commands
"""


def write_tokenizer(folder: Path) -> None:
    """A tokenizer with one word per token."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def served(target: Path, head: Path, site: Path) -> Iterator[str]:
    """Address of a running server with trees."""
    info, port = site / "plugins-0.dist-info", free_port()
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 0\n")
    (info / "entry_points.txt").write_text(PLUGINS)
    words = f"--port {port} {target} --head {head} --budget 16 --host 127.0.0.1 --dtype float32 --enforce-eager"
    sizes = "--max-model-len 160 --max-num-seqs 4 --max-num-batched-tokens 48 --block-size 32"
    settings = {"PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    program = [sys.executable, "-m", "jetspec", "vllm", "serve", *words.split(), *sizes.split()]
    with (site / "log").open("w") as log:
        server = subprocess.Popen(program, env={**os.environ, **settings}, cwd=ROOT, stdout=log, stderr=log)
    try:
        address, end = f"http://127.0.0.1:{port}", time.monotonic() + START_TIMEOUT_S
        while not is_up(address):
            assert server.poll() is None and time.monotonic() < end, (site / "log").read_text()[-4000:]
            time.sleep(0.3)
        yield address
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(120)


def is_up(address: str) -> bool:
    try:
        return requests.get(f"{address}/health", timeout=5).ok
    except requests.ConnectionError:
        return False


def test_server_answers_with_plain_text_and_counts_drafts(tmp_path: Path) -> None:
    target, prompt = write_target(tmp_path / "target"), random_prompts((12,))[0]
    write_tokenizer(target)
    model = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    alone = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    asked: dict[str, Any] = {
        "model": str(target),
        "prompt": prompt,
        "max_tokens": 20,
        "temperature": 0,
        "ignore_eos": True,
    }
    with served(target, write_head(tmp_path / "head"), tmp_path / "site") as address:
        answer = requests.post(f"{address}/v1/completions", json=asked, timeout=60).json()
        filtered = requests.post(f"{address}/v1/completions", json={**asked, "min_p": 0.1}, timeout=60)
        metrics = requests.get(f"{address}/metrics", timeout=60).text
    assert answer["choices"][0]["text"].split() == [f"w{token}" for token in alone[0, len(prompt) :].tolist()]
    assert filtered.ok, "the plugin has not reached the process that takes requests"
    drafts = re.search(r"^vllm:spec_decode_num_drafts_total\S* (\S+)", metrics, re.MULTILINE)
    assert drafts and 0 < float(drafts[1]) <= 40
