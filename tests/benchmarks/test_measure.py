"""Measurement: every method answers the same questions, no row is lost or measured twice."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import measure
from benchmarks import run as run_command
from benchmarks.measure import Bench
from benchmarks.methods import EngineMethod, Method, Reply, Timed, UnequalConditions, open_method
from benchmarks.recipe import BenchConfig, MethodConfig
from benchmarks.results import ROWS_FILE, RUN_FILE
from benchmarks.rows import RowsFile, read_rows
from jetspec.engine.llm import LLM
from jetspec.settings import from_dict
from tests.benchmarks.tiny_bench import Change, make_bench, meddle, results_of, without_times, write_questions
from tests.train.tiny_model import CONTEXT, END_TOKEN

ROOT = Path(__file__).parent.parent.parent


def all_methods(folder: Path) -> list[Any]:
    heads = {"dflash": "bidirectional", "ddtree": "bidirectional", "jetspec": "causal", "jetspec-edge": "edge"}
    heads["jetspec-paper"] = "causal"
    ours = [f"{name}={folder / head}" for name, head in heads.items()]
    return ["ngram", *ours, "transformers", {"name": "transformers-lookup", "batches": [1]}]


def test_every_method_writes_what_plain_decoding_writes(folder: Path, llm: LLM) -> None:
    options: dict[str, Any] = {"tasks": ["talk"], "temperatures": [0, 1], "batches": [2]}
    bench = make_bench(folder, "all", llm, methods=all_methods(folder), repeats=1, max_tokens=6, **options)
    cells = results_of(bench)["cells"]
    assert len(cells) == 2 * (8 + 2), "plain decoding comes in the batch size of prompt lookup, too"
    for cell in cells:
        compared = cell["lossless"]
        can_compare = cell["method"] != "plain" and (cell["temperature"] == 0 or "transformers" not in cell["method"])
        assert (compared is not None) == can_compare
        if compared:
            assert compared["identical"] == compared["compared"] == 2
            assert compared["check"] == ("greedy tokens" if cell["temperature"] == 0 else "seeded tokens")
        rounds = sum(cell["accepted"])
        assert cell["tokens"] == rounds + sum(kept * count for kept, count in enumerate(cell["accepted"]))
        assert cell["tokens_per_round"]["mean"] == pytest.approx(cell["tokens"] / rounds)
        assert cell["tokens_per_s"]["mean"] > 0 and cell["prefill_s"]["mean"] > 0
        assert (cell["budget"] is None) == ("transformers" in cell["method"])


def test_a_killed_run_resumes_and_gives_the_same_table(folder: Path, llm: LLM) -> None:
    options: dict[str, Any] = {"tasks": ["sums", "talk"], "temperatures": [1]}
    flags = ["--tasks", "sums,talk", "-r", "2", "-t", "1", "-n", "8", "--budgets", "6", "--methods", "ngram"]
    flags += ["--data-dir", str(folder / "eval"), "--out", str(folder / "killed"), "--device", "cpu"]
    rows = folder / "killed" / ROWS_FILE
    command = [sys.executable, "-m", "benchmarks", "run", "--model", str(folder / "model"), *flags]
    alike = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}  # only the same hardware goes on
    child = subprocess.Popen(command, cwd=ROOT, env=alike, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (rows.exists() and rows.read_bytes().count(b"\n") >= 4):
            assert child.poll() is None, "it ended before it could be killed"
            time.sleep(0.005)
        child.send_signal(signal.SIGKILL)
    finally:
        child.wait()
    whole = rows.read_bytes().rpartition(b"\n")[0]
    with rows.open("ab") as file:  # a kill may also cut a line in half
        file.write(b'{"cell": {"method": "pl')

    killed = make_bench(folder, "killed", llm, **options, warmup=16)
    done = killed.run()
    undisturbed = make_bench(folder, "undisturbed", llm, **options, warmup=16)
    assert without_times(results_of(killed, done)) == without_times(results_of(undisturbed))
    after = rows.read_bytes()
    assert after.startswith(whole) and len(whole) < len(after)
    assert after.count(b"\n") == len(done) == len(read_rows(rows))


def test_failed_groups_are_measured_again_on_request(folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is then the one of a run in which nothing failed, and what went well was left alone."""

    def break_once(reply: Reply) -> Reply | str:
        return "out of luck" if next(luck) == 2 else reply

    luck = count()
    options: dict[str, Any] = {"methods": ["ngram"], "batches": [2], "repeats": 2}
    with monkeypatch.context() as patch:
        meddle(patch, break_once)
        broken = results_of(make_bench(folder, "retried", llm, **options))["cells"]
    assert [len(cell["errors"]) for cell in broken] == [0, 1] and broken[1]["speedup"] is None
    path = folder / "retried" / ROWS_FILE
    before = path.read_bytes()
    make_bench(folder, "retried", llm, **options).run()
    assert path.read_bytes() == before, "nothing is asked again in silence"

    bench = make_bench(folder, "retried", llm, **options)
    retried = results_of(bench, bench.run(retry_failed=True))
    after = path.read_bytes()
    assert after.startswith(before) and after.count(b"\n") == before.count(b"\n") + 1
    assert without_times(retried) == without_times(results_of(make_bench(folder, "lucky", llm, **options)))
    bench.run(retry_failed=True)
    assert path.read_bytes() == after


def test_questions_may_be_passed_over(folder: Path, llm: LLM) -> None:
    def asked(**options: Any) -> list[str]:
        return [prompt.id for prompt in make_bench(folder, "skipped", llm, **options).questions["sums"]]

    assert asked(skip={"sums": 3}) == asked(skip=3) and asked(skip={"gsm8k": 3}) == asked()
    assert asked(skip=3) == ["sums-3", "sums-4"] and asked(skip=1, limit=2) == ["sums-1", "sums-2"]
    with pytest.raises(ValueError, match="sums has 5 questions, none of them behind the first 5"):
        asked(skip=5)


def test_rows_of_other_settings_are_not_mixed_in(folder: Path, llm: LLM) -> None:
    make_bench(folder, "settings", llm).run()
    wide: dict[str, Any] = {"methods": [{"name": "ngram", "width": 2}]}
    for changes in ({"max_tokens": 9}, {"seed": 1}, {"warmup": 3}, {"limit": 3}, wide):
        with pytest.raises(ValueError, match="choose another --out"):
            make_bench(folder, "settings", llm, **changes).run()


@pytest.mark.parametrize(
    ("old", "new", "other"),
    [
        ('"draft_temperature"', '"heat"', None),  # as older versions spelled it
        ('"shortlist_parents"', '"likely"', None),
        ('"torch": "', '"torch": "0.', "versions"),
        ('"width": ', '"width": 1', "tree of plain 1"),
    ],
)
def test_rows_of_other_packages_or_trees_are_not_mixed_in(
    folder: Path, llm: LLM, old: str, new: str, other: str | None, tmp_path: Path
) -> None:
    bench = make_bench(folder, str(tmp_path / "run"), llm, limit=1, repeats=1)
    rows, path = bench.run(), tmp_path / "run" / RUN_FILE
    text = path.read_text().replace(old, new)
    assert text != path.read_text()
    path.write_text(text)
    if other is None:
        assert bench.run() == rows
        return
    with pytest.raises(ValueError, match=f"another {other}; choose another --out"):
        bench.run()


def test_a_record_tells_which_weights_were_measured_and_how_heads_were_trained(folder: Path, llm: LLM) -> None:
    trained = shutil.copytree(folder / "edge", folder / "trained" / "head")
    (trained / "README.md").write_text(
        "# A head\n\n## Origin\n\n| | |\n|---|---|\n| command | `train me` |\n| commit | abc |\n"
    )
    methods = [f"jetspec-edge={trained}", f"jetspec={folder / 'causal'}", "ngram"]
    record = results_of(make_bench(folder, "weights", llm, methods=methods, limit=1, repeats=1))
    settings = json.loads((folder / "weights" / RUN_FILE).read_text())["settings"]
    assert record["weights"] == settings["weights"]
    edge, causal = ({"weights": settings[f"head of {name}"]} for name in ("jetspec-edge", "jetspec"))
    assert record["heads"] == {"jetspec-edge": {**edge, "command": "train me", "commit": "abc"}, "jetspec": causal}
    names = {method["name"]: method["head"] for method in record["recipe"]["methods"] if "head" in method}
    assert names == {"jetspec-edge": "trained/head", "jetspec": f"{folder.name}/causal"}


def test_a_fresh_run_that_cannot_be_measured_deletes_nothing(folder: Path, llm: LLM) -> None:
    make_bench(folder, "kept", llm).run()
    before = {path.name: path.read_bytes() for path in (folder / "kept").iterdir()}
    for wrong in ("server=http://127.0.0.1:9/v1", f"jetspec={folder / 'edge'}", f"jetspec={folder / 'nowhere'}"):
        with pytest.raises(ValueError):
            make_bench(folder, "kept", llm, methods=[wrong]).run(fresh=True)
    with (
        closing(RowsFile(folder / "kept" / ROWS_FILE)),
        pytest.raises(ValueError, match="another run is writing"),
    ):
        make_bench(folder, "kept", llm).run(fresh=True)
    assert {path.name: path.read_bytes() for path in (folder / "kept").iterdir()} == before


def test_a_question_that_fails_is_reported_and_the_others_are_answered(folder: Path, llm: LLM) -> None:
    write_questions(folder, "long", [["short"], ["x" * CONTEXT], ["short as well"]])
    bench = make_bench(folder, "long", llm, tasks=["long"], batches=[1, 3], max_tokens=4)
    for cell in results_of(bench)["cells"]:
        assert cell["questions"] == 3 and cell["speedup"] is not None
        assert {error["id"] for error in cell["errors"]} == {"long-1"}
        assert all("the context holds" in error["error"] for error in cell["errors"])
        assert cell["lossless"] is None or cell["lossless"]["compared"] == 2


def test_a_method_without_memory_is_reported_and_can_be_repeated(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_no_room(llm: LLM, method: MethodConfig, budget: int | None, *args: Any, **options: Any) -> Method:
        if budget == 6:
            raise RuntimeError("out of memory")
        return open_method(llm, method, budget, *args, **options)

    bench = make_bench(folder, "room", llm, methods=["ngram"], budgets=[4, 6, 8], limit=2, repeats=1)
    with monkeypatch.context() as without_room:
        without_room.setattr(measure, "open_method", find_no_room)
        cells = {cell["budget"]: cell for cell in results_of(bench)["cells"] if cell["method"] == "ngram"}
    assert [error["error"] for error in cells[6]["errors"]] == ["RuntimeError: out of memory"] * 2
    assert cells[4]["tokens"] and cells[8]["tokens"] and not cells[4]["errors"] + cells[8]["errors"]
    rows = bench.run(retry_failed=True)
    assert all(answer["error"] is None for row in rows.values() for answer in row["answers"])


def test_a_lost_gpu_ends_the_run_and_leaves_what_was_measured(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object) -> Reply:
        raise RuntimeError("an illegal memory access")

    meddle(monkeypatch, lose)
    monkeypatch.setattr(measure, "check_alive", lose)
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        make_bench(folder, "lost", llm, repeats=1).run()
    rows = read_rows(folder / "lost" / ROWS_FILE)
    assert {cell.method for cell, _, _ in rows} == {"plain"} and len(rows) == 5


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda r: replace(r, num_tokens=99), "wrote 99 tokens"),
        (lambda r: replace(r, finish="length", token_ids=r.token_ids[:1], num_tokens=1), "stopped for its length"),
        (lambda r: replace(r, token_ids=[END_TOKEN, *r.token_ids[1:]]), "went on after an end token"),
        (lambda r: replace(r, finish="content_filter"), "ended by 'content_filter'"),
        (lambda r: replace(r, finish="stop", token_ids=[1], num_tokens=1), "stopped without an end token"),
        (lambda r: replace(r, num_read=r.num_read + 1), "tokens of a prompt of"),
    ],
)
def test_other_rules_are_refused(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: Change, why: str
) -> None:
    meddle(monkeypatch, change)
    with pytest.raises(UnequalConditions, match=why):
        make_bench(folder, str(tmp_path / "rules"), llm).run()


def test_other_prompts_are_refused(folder: Path, llm: LLM) -> None:
    bench = make_bench(folder, "other", llm)
    bench.run()
    path = folder / "other" / ROWS_FILE
    *lines, last = path.read_text().splitlines()
    row = json.loads(last)
    row["prompts"][0][0] = "0" * 16
    path.write_text("\n".join([*lines, json.dumps(row)]) + "\n")
    with pytest.raises(UnequalConditions, match="read different prompts"):
        bench.run()


def test_a_group_in_which_a_graph_was_captured_is_decoded_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    method = EngineMethod(llm.with_drafter("ngram"))
    pool, decoded = SimpleNamespace(num_captured=3), iter([Timed([], 5.0, 5.0), Timed([], 1.0, 1.0)])

    def decode(asks: object) -> Timed:
        pool.num_captured = 4
        return next(decoded)

    monkeypatch.setattr(method.llm.engine, "graphs", pool)
    monkeypatch.setattr(method, "_decode", decode)
    assert method.decode([]).decode_s == 1.0


def test_draws_depend_on_question_turn_and_repeat_but_not_on_the_method(folder: Path, llm: LLM) -> None:
    bench = make_bench(folder, "draws", llm, temperatures=[1], repeats=2)
    sampling = bench.config.sampling
    seeds = {sampling(1.0, repeat, id, turn).seed for repeat in (0, 1) for id in "ab" for turn in (0, 1)}
    assert len(seeds) == 8
    drawn: dict[tuple[str, int], list[list[int]]] = {}
    for (cell, repeat, _), row in sorted(bench.run().items(), key=lambda item: item[0][2]):
        drawn.setdefault((cell.method, repeat), []).append(row["answers"][0]["turn_tokens"][0])
    assert all(drawn["plain", repeat] == drawn["ngram", repeat] for repeat in (0, 1))
    assert drawn["plain", 0] != drawn["plain", 1]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"methods": ["jetspec"], "head": "runs/none/head"}, "no head in runs/none/head: there is no such folder"),
        ({"methods": ["jetspec=mine"]}, "no head in mine: it has no config.json; did you mean mine/head?"),
        ({"methods": ["server=http://127.0.0.1:9/v1"]}, "no OpenAI-compatible server answers"),
        ({"methods": [{"name": "transformers-assisted", "assistant": "no/such/model"}]}, "no/such/model"),
        ({"tasks": ["torn"]}, "torn.jsonl:1"),
    ],
    ids=["head of the recipe", "folder of a run", "server", "assistant", "questions"],
)
def test_missing_inputs_are_found_before_the_target_is_loaded(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    def load(*_: Any, **options: Any) -> LLM:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(run_command, "LLM", load)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "head").mkdir(parents=True)
    (tmp_path / "mine" / "head" / "config.json").touch()
    (folder / "eval" / "torn.jsonl").write_text('{"id": 1, "turns": [\n')
    usual: dict[str, Any] = {"tasks": ["sums"], "data_dir": str(folder / "eval")}
    config: BenchConfig = from_dict(BenchConfig, usual | changes, "")
    with pytest.raises(ValueError, match=re.escape(why)):
        run_command.measure(config, tmp_path / "run", fresh=False, retry_failed=False)


def test_a_head_of_another_kind_is_refused(folder: Path, llm: LLM) -> None:
    for method in ("jetspec", "ddtree", "eagle3"):
        with pytest.raises(ValueError, match=f"{method} needs a head of kind .* is of kind edge"):
            make_bench(folder, "kinds", llm, methods=[f"{method}={folder / 'edge'}"]).run()
    with pytest.raises(ValueError, match="needs a head: name it as jetspec=FOLDER"):
        make_bench(folder, "kinds", llm, methods=["jetspec"]).run()


@pytest.mark.parametrize(
    ("head", "method"), [("edge", "jetspec-edge"), ("causal", "jetspec"), ("bidirectional", "ddtree")]
)
def test_the_usual_methods_include_the_head_where_there_is_one(folder: Path, head: str, method: str) -> None:
    def names(bench: Bench) -> list[str]:
        return [method.name for method in bench.methods]

    with_head = LLM(folder / "model", folder / head, device="cpu")
    assert names(make_bench(folder, "usual", with_head, methods=None)) == ["plain", "ngram", method]
    assert names(make_bench(folder, "usual", with_head, methods=["ngram"])) == ["plain", "ngram"]
    assert names(make_bench(folder, "usual", LLM(folder / "model", device="cpu"), methods=None)) == ["plain", "ngram"]
