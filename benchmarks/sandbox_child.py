"""Child process of the sandbox: restricts itself, then runs a program and its tests; see sandbox.py.

It is run with `-I -S`, so it imports the standard library alone. The order comes on stdin, the verdict goes to the
file descriptor named on the command line.
"""

from __future__ import annotations

import ctypes
import json
import os
import posix
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from types import CodeType, ModuleType
from typing import Any

NEW_USER, NEW_NET = 0x10000000, 0x40000000
NO_NEW_PRIVILEGES, KEEP_CAPABILITIES = 38, 8
"""Options of prctl."""
CHANGE_USER, READ_ALL = 1 << 0 | 1 << 6 | 1 << 7, 1 << 2
"""Capabilities: to become another user and give it a folder, and to read files of any mode."""
CAPABILITIES = struct.pack("=Ii", 0x20080522, 0)
"""Version of the interface, and this process."""
NOBODY = 65534
MB = 1 << 20
MAX_WHY = 300

READABLE = (sys.base_prefix, sys.base_exec_prefix, "/usr", "/lib", "/lib64", "/nix/store")
"""Folders of Python and the libraries that it loads."""
READABLE_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom")

REFUSED = (
    *("socket.", "subprocess.", "ctypes.", "pty.", "syslog."),
    "os.chdir",  # paths are relative to the folder
    *("os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "signal.pthread_kill"),
)
"""Prefixes of audit events that are never allowed."""
CHANGES = {
    f"os.{name}"
    for name in ("chflags", "chmod", "chown", "link", "mkdir", "remove", "rename", "rmdir", "symlink", "truncate")
} | {"os.utime", "os.setxattr", "os.removexattr", "sqlite3.connect"}
"""Audit events whose paths must be in the folder."""
NO_EVENT = ("mkfifo", "mknod")
"""Functions that change files without an audit event: removed."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> None:
    order = json.load(sys.stdin)
    pipe, write, encode = int(sys.argv[1]), os.write, json.JSONEncoder().encode

    def say(verdict: dict[str, Any]) -> None:
        write(pipe, f"\n{encode({'password': order['password'], **verdict})}\n".encode())

    leave = os._exit  # without the program's exit handlers
    try:
        shut_in(order)
    except OSError as error:
        say({"unsafe": str(error)})
        leave(0)
    passed, why = judge(order["program"], order["tests"])
    say({"passed": passed, "why": why[:MAX_WHY]})
    leave(0)


def shut_in(order: dict[str, Any]) -> None:
    """Apply all restrictions, then test that Python's library is readable, which programs need.

    OSError: a program must not run here.
    """
    if sys.platform == "linux":  # an empty network namespace, where the kernel allows it
        ctypes.CDLL(None).unshare(NEW_NET if os.geteuid() == 0 else NEW_NET | NEW_USER)
    is_nobody = drop_root()
    is_walled = wall_files(".")
    if not is_nobody and not is_walled:
        where = f"other users cannot read Python in {sys.base_prefix}, and this kernel has no Landlock"
        raise OSError(f"root would run them as root: {where}; run as another user, or with a Python that all may read")
    limits = {
        "RLIMIT_CPU": int(order["seconds"]) + 1,
        "RLIMIT_AS": order["memory_mb"] * MB,
        "RLIMIT_FSIZE": order["file_mb"] * MB,
        "RLIMIT_NOFILE": order["open_files"],
        "RLIMIT_NPROC": 0,
        "RLIMIT_CORE": 0,
    }
    for name, value in limits.items():
        with suppress(AttributeError, ValueError, OSError):  # not on this system
            resource.setrlimit(getattr(resource, name), (value, value))
    signal.setitimer(signal.ITIMER_REAL, order["seconds"])  # by default the alarm ends the process
    guard_interpreter(os.getcwd(), order["changes"])
    with open(os.__file__, "rb"):
        pass


def drop_root() -> bool:
    """Become the user `nobody` if root, to whom limits do not apply; where it cannot read Python's library, keep the
    capability to read. False: root stays, without capabilities."""
    if os.geteuid() != 0:
        return True
    try:
        if keeps := not is_library_open_to_nobody():
            set_capabilities(CHANGE_USER | READ_ALL)
            ctypes.CDLL(None).prctl(KEEP_CAPABILITIES, 1, 0, 0, 0)
        os.chown(".", NOBODY, NOBODY)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    except (OSError, AttributeError):  # no such right, or no Linux
        set_capabilities(0)
        return False
    if keeps:
        set_capabilities(READ_ALL)
    return True


def is_library_open_to_nobody() -> bool:
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        with open(os.__file__, "rb"):
            return True
    except OSError:
        return False
    finally:
        os.seteuid(0)
        os.setegid(0)


def set_capabilities(kept: int) -> None:
    """Give up all capabilities but these, which this process must have. Only Linux has any."""
    capset = getattr(ctypes.CDLL(None), "capset", None)
    if capset is not None and capset(CAPABILITIES, struct.pack("=6I", kept, kept, 0, 0, 0, 0)) != 0:
        raise OSError("the rights of root cannot be given up")


CREATE, ADD, RESTRICT = 444, 445, 446
"""System calls of Landlock, whose numbers are the same on all processors."""
READ = 1 << 2 | 1 << 3
"""Read files and folders."""
WRITE = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 13 | 1 << 14
"""Write, remove, create folders, files and links, rename, truncate: no devices, pipes or sockets."""
OF_FILES = 1 << 1 | 1 << 2 | 1 << 14
"""Rights of a regular file."""
KNOWN = (0, 13, 14, 15, 15, 16)
"""Number of rights in each version of Landlock from 0 on; later ones have all."""


def landlock(number: int, *args: Any) -> int:
    """System call; negative: refused."""
    whole = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in (number, *args)]
    return int(ctypes.CDLL(None).syscall(*whole)) if sys.platform == "linux" else -1


def landlock_version() -> int:
    return landlock(CREATE, None, 0, 1)


def wall_files(folder: str) -> bool:
    """Allow this process to write in the folder and to read there and in Python's folders: no other file, no TCP, no
    signal or socket to other processes, for good, even to root. False: this kernel has no Landlock.

    The rules cover opening, creating, renaming and removing, not changes of a file's mode, owner or times.
    """
    if (version := landlock_version()) < 1:
        return False
    handled = (1 << KNOWN[min(version, len(KNOWN) - 1)]) - 1
    tcp, others = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    rules = landlock(CREATE, struct.pack("=QQQ", handled, tcp, others), 24, 0)
    if rules < 0:
        return False
    allowed = dict.fromkeys((*READABLE, *READABLE_FILES), READ) | {folder: READ | WRITE, os.devnull: READ | WRITE}
    refused = 0
    for path, rights in allowed.items():
        try:
            place = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # not on this system
        rights &= handled if os.path.isdir(path) else OF_FILES & handled
        refused |= landlock(ADD, rules, 1, struct.pack("=Qi", rights, place), 0)
        os.close(place)
    refused = refused or ctypes.CDLL(None).prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or landlock(RESTRICT, rules, 0)
    os.close(rules)
    return refused == 0


def guard_interpreter(folder: str, max_changes: int) -> None:
    """Add an audit hook. It holds references to the functions that it calls, as the program may replace those names.

    No event names the `dir_fd` of `os.open`. So `os.open` opens nothing outside, and every `dir_fd` is inside.
    """
    for name, module in product(NO_EVENT, (os, posix)):
        vars(module).pop(name, None)
    resolve, join, fsdecode, devices = os.path.realpath, os.path.join, os.fsdecode, (os.devnull, *READABLE_FILES)
    root, library = resolve(folder), [resolve(path) for path in READABLE]
    left = [max_changes]

    def lies_in(where: str, folders: list[str]) -> bool:
        return any(where == folder or where.startswith(f"{folder}/") for folder in folders)

    def is_outside(path: Any) -> bool:
        return not isinstance(path, int) and not lies_in(resolve(join(root, fsdecode(path))), [root])

    def count(event: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise PermissionError(f"{event}: more than {max_changes} changes of files are not allowed here")

    def guard_open(path: Any, mode: str | None, flags: int | None) -> None:
        if isinstance(path, int | None) or fsdecode(path) in devices:
            return
        writes = (flags or 0) & WRITES or set(mode or "") & set("wax+")
        if is_outside(path) and (writes or mode is None or not lies_in(resolve(fsdecode(path)), library)):
            raise PermissionError("open outside its folder is not allowed here")
        if writes:
            count("open")

    def guard(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open":
            guard_open(*args)
        elif event in CHANGES:
            of_open_file = isinstance(args[0], int) and event != "os.truncate"  # possibly of the library
            if of_open_file or any(isinstance(p, str | bytes | os.PathLike) and is_outside(p) for p in args):
                raise PermissionError(f"{event} outside its folder is not allowed here")
            count(event)

    sys.addaudithook(guard)


def judge(program: str, tests: Sequence[str]) -> tuple[bool, str]:
    """Result of all tests, and the first failure.

    All is compiled first, and run by the present `exec`: a program may change the list, or the built-in names.
    """
    module = sys.modules["program"] = ModuleType("program")  # for dataclasses
    names, run, praise = module.__dict__, exec, f"passed {len(tests)} tests"
    parts = {"the program": program, **{f"test {number}": test for number, test in enumerate(tests, start=1)}}
    codes: list[tuple[str, CodeType]] = []
    stage = ""
    try:
        for stage, text in parts.items():
            codes.append((stage, compile(text, f"<{stage}>", "exec")))
        for stage, code in tuple(codes):  # noqa: B007
            run(code, names)
    except BaseException as error:
        return False, f"{stage}: {describe(error)}"
    return True, praise


def describe(error: BaseException) -> str:
    text = ""
    with suppress(BaseException):  # of an exception class of the program
        text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    main()
