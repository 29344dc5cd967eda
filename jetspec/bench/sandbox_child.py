"""The inside of the sandbox: a script that shuts itself in, then runs a program and its tests; see sandbox.py.

It is run with `-I -S`, so it imports the standard library alone. The order comes on stdin, the verdict goes to the
file descriptor named on the command line.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

NEW_USER, NEW_NET = 0x10000000, 0x40000000
NOBODY = 65534
MB = 1 << 20
MAX_WHY = 300

REFUSED = (
    *("socket.", "subprocess.", "ctypes.", "pty.", "syslog."),
    "os.chdir",  # paths are taken from the folder
    *("os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "signal.pthread_kill"),
)
"""Beginnings of the names of events that are never allowed."""
CHANGES = {
    f"os.{name}"
    for name in ("chflags", "chmod", "chown", "link", "mkdir", "remove", "rename", "rmdir", "symlink", "truncate")
} | {"os.utime", "os.setxattr", "os.removexattr", "sqlite3.connect"}
"""Events whose paths must lie in the folder."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> None:
    order = json.load(sys.stdin)
    pipe = int(sys.argv[1])
    leave_network()
    drop_root()
    set_limits(order)
    sys.addaudithook(make_guard(os.getcwd()))
    passed, why = judge(order["program"], order["tests"])
    verdict = {"password": order["password"], "passed": passed, "why": why[:MAX_WHY]}
    os.write(pipe, f"\n{json.dumps(verdict)}\n".encode())
    os._exit(0)  # what the program left for the interpreter's end is of no interest


def leave_network() -> None:
    """An empty network of its own, where the kernel allows it."""
    if sys.platform == "linux":
        flags = NEW_NET if os.geteuid() == 0 else NEW_NET | NEW_USER
        unshare = getattr(ctypes.CDLL(None), "unshare", None)
        if unshare is not None:
            unshare(flags)


def drop_root() -> None:
    """Root is above the limit on processes and may write everywhere. Stay where nobody could not read the library."""
    if os.geteuid() != 0:
        return
    os.chown(".", NOBODY, NOBODY)
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        with open(os.__file__, "rb"):
            readable = True
    except OSError:
        readable = False
    os.seteuid(0)
    os.setegid(0)
    if readable:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def set_limits(order: dict[str, Any]) -> None:
    seconds = int(order["seconds"]) + 1
    limits = {
        "RLIMIT_CPU": seconds,
        "RLIMIT_AS": order["memory_mb"] * MB,
        "RLIMIT_FSIZE": order["file_mb"] * MB,
        "RLIMIT_NOFILE": order["open_files"],
        "RLIMIT_NPROC": 0,
        "RLIMIT_CORE": 0,
    }
    for name, value in limits.items():
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except (AttributeError, ValueError, OSError):
            continue  # a system that lacks one of them
    signal.setitimer(signal.ITIMER_REAL, order["seconds"])  # by default the alarm ends the process


def make_guard(folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    root, resolve, join, fsdecode = os.path.realpath(folder), os.path.realpath, os.path.join, os.fsdecode

    def is_outside(path: Any) -> bool:
        if isinstance(path, int):
            return False  # open already
        where = resolve(join(root, fsdecode(path)) if fsdecode(path)[:1] != "/" else fsdecode(path))
        return where != root and not where.startswith(root + "/")

    def guard(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open":
            path, mode, flags = args
            if (flags or 0) & WRITES or set(mode or "") & set("wax+"):
                refuse = path is not None and is_outside(path) and path != os.devnull
            else:
                refuse = False
        else:
            refuse = event in CHANGES and any(isinstance(p, str | bytes | os.PathLike) and is_outside(p) for p in args)
        if refuse:
            raise PermissionError(f"{event} outside its folder is not allowed here")

    return guard


def judge(program: str, tests: list[str]) -> tuple[bool, str]:
    """Whether all tests pass, and what went wrong first."""
    module = sys.modules["program"] = ModuleType("program")  # dataclasses look their module up
    names, stage = module.__dict__, "the program"
    try:
        exec(compile(program, "<program>", "exec"), names)
        for number, test in enumerate(tests, start=1):
            stage = f"test {number}"
            exec(compile(test, f"<test {number}>", "exec"), names)
    except BaseException as error:
        return False, f"{stage}: {describe(error)}"
    return True, f"passed {len(tests)} tests"


def describe(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except BaseException:  # the program may have brought its own exception
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    main()
