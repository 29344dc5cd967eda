"""The sandbox: right programs pass, and nothing a program does makes a wrong one pass or reaches beyond it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from jetspec.bench.sandbox import Limits, run_tests

TEST = "assert f(1) == 2"
RIGHT = "\ndef f(x): return x + 1"
BRIEF = Limits(seconds=0.5, memory_mb=256)


def test_a_right_program_passes_and_a_wrong_one_says_which_test_failed() -> None:
    assert run_tests(RIGHT, [TEST, "assert f(2) == 3"]).passed
    verdict = run_tests(RIGHT, [TEST, "assert f(2) == 4"])
    assert not verdict.passed and verdict.why.startswith("test 2: AssertionError")


@pytest.mark.parametrize(
    "program",
    [
        "from collections import namedtuple\nnamedtuple('P', 'a b')",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int",
        "import math, re, itertools, functools, heapq, typing",
        "print('x' * (1 << 24))",
        "open('inside.txt', 'w').write('x')\nassert open('inside.txt').read() == 'x'",
        "if __name__ == '__main__': input()",
    ],
)
def test_what_solutions_commonly_do_is_allowed(program: str) -> None:
    assert run_tests(program + RIGHT, [TEST]).passed


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("while True: pass", "took more than 0.5 s"),
        ("import time; time.sleep(60)", "took more than 0.5 s"),
        ("import os\nwhile True: os.fork()", "os.fork"),
        ("import subprocess; subprocess.run(['true'])", "not allowed"),
        ("import os; os.system('true')", "not allowed"),
        ("x = bytearray(1 << 32)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytes(1 << 20))", "MemoryError"),
        ("import socket; socket.socket()", "socket"),
        ("import urllib.request as u; u.urlopen('http://127.0.0.1')", "not allowed"),
        ("import ctypes; ctypes.CDLL(None)", "not allowed"),
        ("import os; os.kill(os.getppid(), 9)", "not allowed"),
        ("open('big', 'w').write('x' * (1 << 24))", "File too large"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; os._exit(0)", "ended before the tests did, with status 0"),
        ("def f(x):\n    import os\n    os._exit(0)", "ended before the tests did, with status 0"),
        ("def f(x", "SyntaxError"),
        ("class E(Exception):\n    def __str__(self): raise self\nraise E", "E"),
    ],
)
def test_what_goes_wrong_is_contained_and_named(program: str, why: str) -> None:
    began = time.monotonic()
    verdict = run_tests(f"{program}\n", [TEST], BRIEF)
    assert not verdict.passed and why in verdict.why
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "attempt",
    [
        "open({path!r}, 'w').write('x')",
        "import os; os.open({path!r}, os.O_CREAT | os.O_WRONLY)",
        "import os; os.mkdir({path!r})",
        "import os; os.symlink('/', 'out'); open('out' + {path!r}, 'w')",
        "import os; os.chdir('/'); open({path!r}[1:], 'w')",
        "open('a', 'w').close(); import os; os.rename('a', {path!r})",
        "import pathlib; pathlib.Path({path!r}).write_text('x')",
        "import shutil; open('a', 'w').close(); shutil.copy('a', {path!r})",
    ],
)
def test_nothing_is_written_outside_the_folder(attempt: str, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    path = tmp_path / "escaped"
    verdict = run_tests(attempt.format(path=str(path)) + RIGHT, [TEST], BRIEF)
    assert not verdict.passed and not path.exists()


def test_a_file_outside_is_not_removed(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    kept = tmp_path / "kept"
    kept.write_text("x")
    assert not run_tests(f"import os; os.remove({str(kept)!r})" + RIGHT, [TEST], BRIEF).passed
    assert kept.exists()


def leaves_network() -> bool:
    words = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--user"]), "true"]
    return shutil.which("unshare") is not None and subprocess.run(words, capture_output=True).returncode == 0


@pytest.mark.skipif(not leaves_network(), reason="this system gives no process a network of its own")
def test_the_kernel_shows_no_network() -> None:
    program = "devices = [line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]]"
    assert run_tests(program, ["assert devices in ([], ['lo']), devices"]).passed


def test_a_verdict_without_the_password_does_not_count() -> None:
    forged = '{"password": "x", "passed": true, "why": ""}'
    for descriptor in range(1, 12):
        program = f"import os\ntry: os.write({descriptor}, b'{forged}\\n')\nexcept OSError: pass\nos._exit(0)"
        assert not run_tests(program, [TEST], BRIEF).passed


def test_nothing_of_the_environment_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    assert run_tests("import os", ["assert 'SECRET' not in os.environ", "assert os.listdir('.') == []"]).passed
