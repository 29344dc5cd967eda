"""The sandbox: right programs pass, and nothing a program does makes a wrong one pass or reaches beyond it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import sandbox
from benchmarks.sandbox import CHILD, Limits, run_tests
from benchmarks.sandbox_child import READ_ALL, landlock_version

TEST = "assert f(1) == 2"
RIGHT = "\ndef f(x): return x + 1"
BRIEF = Limits(seconds=0.5, memory_mb=256)


def test_the_test_that_failed_is_named() -> None:
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
        "import tempfile\nwith tempfile.TemporaryDirectory() as d: open(d + '/a', 'w').close()",
        "open('/dev/null', 'w').write('x')",
        "import zoneinfo, sqlite3, random, hashlib, datetime\nsqlite3.connect(':memory:')",
        "if __name__ == '__main__': input()",
    ],
)
def test_common_code_is_allowed(program: str) -> None:
    assert run_tests(program + RIGHT, [TEST]).passed


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import os\nwhile True: os.fork()", "os.fork"),
        ("import os; os.system('true')", "not allowed"),
        ("x = bytearray(1 << 32)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytes(1 << 20))", "MemoryError"),
        ("import socket; socket.socket()", "socket"),
        ("import urllib.request as u; u.urlopen('http://127.0.0.1')", "not allowed"),
        ("import ctypes; ctypes.CDLL(None)", "not allowed"),
        ("import os; os.kill(os.getppid(), 9)", "not allowed"),
        ("open('big', 'w').write('x' * (1 << 24))", "File too large"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("def f(x): __import__('os')._exit(0)", "ended before the tests did, with status 0"),
        ("def f(x", "SyntaxError"),
        ("class E(Exception):\n    def __str__(self): raise self\nraise E", "E"),
    ],
)
def test_failures_are_contained_and_named(program: str, why: str) -> None:
    verdict = run_tests(f"{program}\n", [TEST], Limits(seconds=30, memory_mb=256))
    assert not verdict.passed and why in verdict.why


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_a_slow_program_is_ended(program: str) -> None:
    assert "took more than 0.5 s" in run_tests(f"{program}\n", [TEST], BRIEF).why


WALLED = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("child", {child!r})
child = importlib.util.module_from_spec(spec)
spec.loader.exec_module(child)
os.chdir({folder!r})
import pathlib, shutil
{wall}
{attempt}
"""
INTERPRETER = "child.guard_interpreter('.', 100)"
WALLS = [
    pytest.param(INTERPRETER, id="interpreter"),
    pytest.param(
        "assert child.wall_files('.')",
        id="kernel",
        marks=pytest.mark.skipif(landlock_version() < 1, reason="this kernel has no Landlock"),
    ),
]
"""Each holds on its own, without the other and with the rights of the user who runs the tests."""


def run_walled(wall: str, attempt: str, folder: Path) -> bool:
    """Run code behind one restriction. True: it got to its end."""
    inside = folder / "inside"
    inside.mkdir()
    script = WALLED.format(child=str(CHILD), folder=str(inside), wall=wall, attempt=attempt)
    ended = subprocess.run([sys.executable, "-I", "-S", "-B", "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0 or "PermissionError" in ended.stderr or "no attribute" in ended.stderr, ended.stderr
    return ended.returncode == 0


ATTEMPTS = [
    "open({path!r}, 'w').write('x')",
    "os.open({path!r}, os.O_CREAT | os.O_WRONLY)",
    "os.mkdir({path!r})",
    "os.mkfifo({path!r})",
    "os.symlink('/', 'out'); open('out' + {path!r}, 'w')",
    "os.chdir('/'); open({path!r}[1:], 'w')",
    "open('a', 'w').close(); os.rename('a', {path!r})",
    "os.open('escaped', os.O_CREAT | os.O_WRONLY, dir_fd=os.open({parent!r}, os.O_RDONLY))",
    "os.mkdir('escaped', dir_fd=os.open({parent!r}, os.O_RDONLY))",
    "os.remove('kept', dir_fd=os.open({parent!r}, os.O_RDONLY))",
    "os.truncate({kept!r}, 0)",
    "os.rename({kept!r}, 'mine')",
    "shutil.rmtree({parent!r}, ignore_errors=True)",
    "open({kept!r}).read()",
]


def words_of(folder: Path) -> dict[str, str]:
    """Names for attempts, of a folder with a file."""
    (folder / "kept").write_text("x")
    return {"path": str(folder / "escaped"), "kept": str(folder / "kept"), "parent": str(folder)}


@pytest.mark.parametrize("wall", WALLS)
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_files_outside_are_neither_read_nor_changed(attempt: str, wall: str, tmp_path: Path) -> None:
    ended = run_walled(wall, attempt.format(**words_of(tmp_path)), tmp_path)
    assert ended == ("ignore_errors" in attempt)
    assert (tmp_path / "kept").read_text() == "x" and not (tmp_path / "escaped").exists()


@pytest.mark.parametrize(
    "attempt",
    [
        "os.open(sys.base_prefix, os.O_RDONLY)",
        "f = open(os.__file__)\nos.chmod(f.fileno(), 0o777)",
        "f = open(os.__file__)\nos.utime(f.fileno())",
    ],
)
def test_the_library_is_read_alone(attempt: str, tmp_path: Path) -> None:
    """Events do not tell where paths start from: in a folder of the library they would be taken for ones inside."""
    assert not run_walled(INTERPRETER, attempt, tmp_path)
    os.rmdir(tmp_path / "inside")
    assert run_walled(INTERPRETER, "os.open('.', os.O_RDONLY); open(os.__file__).read()", tmp_path)


@pytest.mark.parametrize("attempt", [ATTEMPTS[0], ATTEMPTS[8], "import shutil; shutil.rmtree({parent!r})"])
def test_all_restrictions_apply_to_a_program(attempt: str, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    program = attempt.format(**words_of(tmp_path))
    os.chmod(tmp_path / "kept", 0o666)
    verdict = run_tests(f"import os\n{program}{RIGHT}", [TEST], BRIEF)
    assert not verdict.passed and "not allowed" in verdict.why
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("change", ["open(name, 'w').write('x' * 1000)", "os.mkdir(name)", "os.symlink('a', name)"])
def test_a_program_cannot_fill_the_disk_with_small_files(change: str) -> None:
    program = f"import os\nfor name in map(str, range({{}})): {change}{RIGHT}"
    assert run_tests(program.format(5), [TEST], Limits(changes=5)).passed
    verdict = run_tests(program.format(6), [TEST], Limits(changes=5))
    assert not verdict.passed and "more than 5 changes" in verdict.why


def can_leave_root() -> bool:
    rights = re.search(r"CapPrm:\s*(\w+)", Path("/proc/self/status").read_text())
    return os.geteuid() != 0 or (rights is not None and bool(int(rights[1], 16) & READ_ALL))


@pytest.mark.skipif(
    sys.platform != "linux" or not can_leave_root(),
    reason="root that may not give its right to read to another user stays root, behind Landlock alone",
)
def test_a_program_is_not_root_and_starts_nothing() -> None:
    assert run_tests("import os", ["assert os.geteuid() == os.getuid() != 0"]).passed
    verdict = run_tests("import _thread\n_thread.start_new_thread(print, ())", ["pass"])
    assert not verdict.passed and "can't start new thread" in verdict.why, "root is above that limit"


def test_no_program_runs_without_restrictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root that cannot change its user, on a kernel without Landlock."""
    helpless = CHILD.read_text().replace(
        'if __name__ == "__main__":', "drop_root = wall_files = lambda *_: False\nif 1:"
    )
    (tmp_path / "child.py").write_text(helpless)
    monkeypatch.setattr(sandbox, "CHILD", tmp_path / "child.py")
    with pytest.raises(ValueError, match=r"programs are not run here: .*; run as another user"):
        run_tests(RIGHT, [TEST])


def leaves_network() -> bool:
    words = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--user"]), "true"]
    return shutil.which("unshare") is not None and subprocess.run(words, capture_output=True).returncode == 0


@pytest.mark.skipif(not leaves_network(), reason="this system gives no process a network of its own")
def test_the_kernel_shows_no_network() -> None:
    program = "import socket\ndevices = [name for _, name in socket.if_nameindex()]"
    assert run_tests(program, ["assert devices in ([], ['lo']), devices"]).passed


def test_a_verdict_without_the_password_does_not_count() -> None:
    forged = '{"password": "x", "passed": true, "why": ""}'
    for descriptor in range(1, 12):
        program = f"import os\ntry: os.write({descriptor}, b'{forged}\\n')\nexcept OSError: pass\nos._exit(0)"
        assert not run_tests(program, [TEST], BRIEF).passed


CLEARS = """
import sys
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        if isinstance(value, list): value.clear()
    frame = frame.f_back
"""


@pytest.mark.parametrize(
    "program",
    [
        CLEARS,
        "import builtins\nbuiltins.exec = builtins.compile = lambda *_: None",
        "import json, os\njson.dumps = json.JSONEncoder.encode = lambda *_: '{}'",
        "import builtins\nbuiltins.tuple = builtins.enumerate = builtins.len = lambda *_: ()",
    ],
)
def test_a_wrong_program_does_not_pass_by_changing_what_judges_it(program: str) -> None:
    verdict = run_tests(program, [TEST])
    assert not verdict.passed and "test 1: NameError" in verdict.why


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    assert run_tests("import os", ["assert 'SECRET' not in os.environ", "assert os.listdir('.') == []"]).passed
