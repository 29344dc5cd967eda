"""Run a model's program against tests, in a child process that can do little harm.

Three walls, each for what the others let through:

- The kernel, on every POSIX system: limits on time, memory, file size, open files and processes; an empty folder as the
  working directory, an empty environment, a session of its own that is killed as a whole. macOS does not enforce the
  memory limit. On Linux root turns into nobody, and the child leaves the network where user namespaces are allowed or
  it runs as root. With Landlock (Linux 5.13) it can open nothing but its folder and what Python is made of,
  and write in the folder only.
- The interpreter, everywhere: an audit hook, which Python code cannot take off again, refuses sockets, processes,
  signals, native libraries, reading and changing files outside the folder, and too many changes inside.
- The verdict counts only with a password that the tests' end sends, so a program that ends early, whatever its
  exit status, has not passed.

It is made for code that goes wrong, not for code that attacks its grader: both share a process.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("sandbox_child.py")
MAX_VERDICT = 1 << 16
"""Bytes read of what the child says; a pipe holds as many."""
START_S = 5.0
"""For the interpreter to start on a busy machine, before the program's own time begins."""


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    seconds: float = 10.0
    memory_mb: int = 1024
    file_mb: int = 1
    """Of one file."""
    changes: int = 100
    """Files opened for writing, folders made, and all else that changes the folder. With `file_mb` it limits the disk
    space that a program can fill."""
    open_files: int = 64


@dataclass(frozen=True)
class Verdict:
    """Whether a program passed all tests, and if not, why."""

    passed: bool
    why: str


def run_tests(program: str, tests: Sequence[str], limits: Limits = Limits()) -> Verdict:  # noqa: B008
    """Run a program, then every test in the same namespace, in order, up to the first that fails."""
    if os.name != "posix":
        raise ValueError("programs can be graded on Linux and macOS only")
    if not tests:
        return Verdict(False, "there are no tests")
    password = secrets.token_hex(16)
    order = {"program": program, "tests": list(tests), "password": password, **asdict(limits)}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        said, ended = _run_child(json.dumps(order), folder, limits)
    verdict = _find_verdict(said, password)
    if verdict is None:
        return Verdict(False, ended)
    if "unsafe" in verdict:
        raise ValueError(f"programs are not run here: {verdict['unsafe']}")
    return Verdict(bool(verdict["passed"]), str(verdict["why"]))


def _find_verdict(said: str, password: str) -> Mapping[str, Any] | None:
    """The line with the password."""
    for line in said.splitlines():
        with suppress(ValueError, TypeError, KeyError):
            verdict: Mapping[str, Any] = json.loads(line)
            if verdict["password"] == password:
                return verdict
    return None


def _run_child(order: str, folder: str, limits: Limits) -> tuple[str, str]:
    """What the child wrote to its pipe, and how it ended."""
    reader, writer = os.pipe()
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(CHILD), str(writer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            pass_fds=(writer,),
            start_new_session=True,
        )
        os.close(writer)
        try:
            child.communicate(order.encode(), timeout=limits.seconds + START_S)
            ended = _how_it_ended(child.returncode, limits)
        except subprocess.TimeoutExpired:
            ended = _how_it_ended(-signal.SIGALRM, limits)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()
            child.wait()
        os.set_blocking(reader, False)
        try:
            return os.read(reader, MAX_VERDICT).decode("utf-8", "replace"), ended
        except BlockingIOError:
            return "", ended
    finally:
        os.close(reader)


def _how_it_ended(status: int, limits: Limits) -> str:
    if status in (-signal.SIGALRM, -signal.SIGXCPU):
        return f"took more than {limits.seconds:g} s"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended before the tests did, with status {status}"
