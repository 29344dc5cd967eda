"""Sandbox for graded code: runs a model's program against tests in a restricted child process.

No maintained Python package does this: others limit the language (RestrictedPython), or need root or containers.

- The kernel, on every POSIX system: limits on time, memory, file size, open files and processes; an empty working
directory and environment, and a session that is killed as a whole. macOS does not enforce the memory limit. On Linux
root becomes the user `nobody`, and the child leaves the network where user namespaces are allowed or it runs as root.
With Landlock (Linux 5.13) it can read only its folder and Python's files, and write only in its folder.
- The interpreter: an audit hook, which Python code cannot remove, refuses sockets, processes, signals, native
libraries, reading and changing files outside the folder, and too many changes inside.
- The verdict counts only with a password that is sent after the last test: a program that exits early has not passed.

It is made for code that fails, not for code that attacks its grader: both share a process.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

CHILD = Path(__file__).with_name("sandbox_child.py")
MAX_VERDICT = 1 << 16
"""Bytes read from the child; the capacity of a pipe."""
START_S = 5.0
"""Time for the interpreter to start on a busy machine."""


@dataclass(frozen=True)
class Limits:
    """Resources of a program."""

    seconds: float = 10.0
    memory_mb: int = 1024
    file_mb: int = 1
    """Size of one file."""
    changes: int = 100
    """Files opened for writing, folders made, and all else that changes the folder. With `file_mb` it limits the disk
    space that a program can fill."""
    open_files: int = 64


@dataclass(frozen=True)
class Verdict:
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
    for line in said.splitlines():
        with suppress(ValueError, TypeError, KeyError):
            verdict = json.loads(line)
            if verdict["password"] == password:
                break
    else:
        return Verdict(False, ended)
    if "unsafe" in verdict:
        raise ValueError(f"programs are not run here: {verdict['unsafe']}")
    return Verdict(bool(verdict["passed"]), str(verdict["why"]))


def _run_child(order: str, folder: str, limits: Limits) -> tuple[str, str]:
    """Output of the child's pipe, and the reason of its end."""
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
        status = -signal.SIGALRM
        try:
            child.communicate(order.encode(), timeout=limits.seconds + START_S)
            status = child.returncode
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()
            child.wait()
        os.set_blocking(reader, False)
        said = b""
        with suppress(BlockingIOError):
            said = os.read(reader, MAX_VERDICT)
    finally:
        os.close(reader)
    ended = f"ended before the tests did, with status {status}"
    if status < 0:
        ended = f"was ended by {signal.Signals(-status).name}"
    if status in (-signal.SIGALRM, -signal.SIGXCPU):
        ended = f"took more than {limits.seconds:g} s"
    return said.decode("utf-8", "replace"), ended
