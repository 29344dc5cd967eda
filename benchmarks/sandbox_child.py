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
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType
from typing import Any

NEW_USER, NEW_NET = 0x10000000, 0x40000000
NO_NEW_PRIVILEGES, KEEP_CAPABILITIES = 38, 8
"""Options of prctl."""
MAY_READ_ALL = 1 << 2
"""The capability to read files of any mode, alone."""
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


class Unsafe(Exception):
    """A program must not run here."""


def main() -> None:
    order = json.load(sys.stdin)
    pipe, write, encode = int(sys.argv[1]), os.write, json.JSONEncoder().encode

    def say(verdict: dict[str, Any]) -> None:
        write(pipe, f"\n{encode({'password': order['password'], **verdict})}\n".encode())

    leave = os._exit  # without the program's exit handlers
    try:
        shut_in(order)
    except (Unsafe, OSError) as error:
        say({"unsafe": str(error)})
        leave(0)
    passed, why = judge(order["program"], order["tests"])
    say({"passed": passed, "why": why[:MAX_WHY]})
    leave(0)


def shut_in(order: dict[str, Any]) -> None:
    """Apply all restrictions, then test that Python's library is readable, which programs need."""
    leave_network()
    is_nobody = drop_root()
    is_walled = wall_files(".")
    if not is_nobody and not is_walled:
        where = f"other users cannot read Python in {sys.base_prefix}, and this kernel has no Landlock"
        raise Unsafe(f"root would run them as root: {where}; run as another user, or with a Python that all may read")
    set_limits(order)
    guard = make_guard(os.getcwd(), order["changes"])
    remove_functions_without_event()
    sys.addaudithook(guard)
    with open(os.__file__, "rb"):
        pass


def leave_network() -> None:
    """Enter an empty network namespace, where the kernel allows it."""
    if sys.platform == "linux":
        flags = NEW_NET if os.geteuid() == 0 else NEW_NET | NEW_USER
        unshare = getattr(ctypes.CDLL(None), "unshare", None)
        if unshare is not None:
            unshare(flags)


def drop_root() -> bool:
    """Become the user `nobody` if root, to whom limits do not apply. False: root stays, without capabilities."""
    if os.geteuid() != 0:
        return True
    try:
        become_nobody()
    except OSError:
        set_capabilities(0)
        return False
    return True


def become_nobody() -> None:
    """Change to the user `nobody`; where it cannot read Python's library, keep the capability to read."""
    keeps = not is_library_open_to_nobody()
    if keeps and not get_capabilities() & MAY_READ_ALL:
        raise PermissionError
    os.chown(".", NOBODY, NOBODY)
    if keeps:
        ctypes.CDLL(None).prctl(KEEP_CAPABILITIES, 1, 0, 0, 0)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    if keeps:
        set_capabilities(MAY_READ_ALL)


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


CAPABILITIES = struct.pack("=Ii", 0x20080522, 0)
"""Version of the interface, and this process."""
CAPABILITY_SETS = "=6I"
"""Effective, permitted and inheritable sets, the low halves first."""


def get_capabilities() -> int:
    """Low half of the permitted set; 0 where the system has none."""
    sets = ctypes.create_string_buffer(struct.calcsize(CAPABILITY_SETS))
    capget = getattr(ctypes.CDLL(None), "capget", None)
    if capget is None or capget(ctypes.create_string_buffer(CAPABILITIES), sets) != 0:
        return 0
    return int(struct.unpack_from(CAPABILITY_SETS, sets)[1])


def set_capabilities(kept: int) -> None:
    capset = getattr(ctypes.CDLL(None), "capset", None)
    sets = struct.pack(CAPABILITY_SETS, kept, kept, 0, 0, 0, 0)
    if capset is not None and capset(ctypes.create_string_buffer(CAPABILITIES), sets) != 0:
        raise Unsafe("the rights of root cannot be given up")


class Landlock:
    """Landlock rules: file accesses without a rule are refused to this process for good, even to root.

    They cover opening, creating, renaming and removing, not changes of a file's mode, owner or times.
    """

    CREATE, ADD, RESTRICT = 444, 445, 446
    """Numbers of system calls, the same on all processors."""
    READ = 1 << 2 | 1 << 3
    """Read files and folders."""
    WRITE = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 13 | 1 << 14
    """Write, remove, create folders, files and links, rename, truncate: no devices, pipes or sockets."""
    OF_FILES = 1 << 1 | 1 << 2 | 1 << 14
    """Rights of a regular file."""
    KNOWN = (0, 13, 14, 15, 15, 16)
    """Number of rights in each version from 0 on; later ones have all."""

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None)
        self.version = self.call(self.CREATE, None, 0, 1) if sys.platform == "linux" else 0

    def call(self, number: int, *args: Any) -> int:
        """System call; negative: refused."""
        whole = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
        return int(self.libc.syscall(ctypes.c_long(number), *whole))

    def open(self) -> int:
        """Create a rule set that allows nothing: no file, no TCP, no signal or socket to other processes."""
        self.handled = (1 << self.KNOWN[min(self.version, len(self.KNOWN) - 1)]) - 1
        tcp, others = (3 if self.version >= 4 else 0), (3 if self.version >= 6 else 0)
        return self.call(self.CREATE, struct.pack("=QQQ", self.handled, tcp, others), 24, 0)

    def allow(self, rules: int, path: str, rights: int) -> bool:
        """Allow rights on a path, if it exists."""
        try:
            place = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return True
        rights &= self.handled if os.path.isdir(path) else self.OF_FILES & self.handled
        refused = self.call(self.ADD, rules, 1, struct.pack("=Qi", rights, place), 0)
        os.close(place)
        return refused == 0

    def enforce(self, rules: int) -> bool:
        is_final = self.libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
        return is_final and self.call(self.RESTRICT, rules, 0) == 0


def wall_files(folder: str) -> bool:
    """Allow writing in the folder, reading there and in Python's folders. False: this kernel has no Landlock."""
    wall = Landlock()
    if wall.version < 1:
        return False
    rules = wall.open()
    allowed = dict.fromkeys((*READABLE, *READABLE_FILES), wall.READ)
    allowed |= {folder: wall.READ | wall.WRITE, os.devnull: wall.READ | wall.WRITE}
    added = [wall.allow(rules, path, rights) for path, rights in allowed.items()]
    stands = rules >= 0 and all(added) and wall.enforce(rules)
    if rules >= 0:
        os.close(rules)
    return stands


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
            continue  # not on this system
    signal.setitimer(signal.ITIMER_REAL, order["seconds"])  # by default the alarm ends the process


def remove_functions_without_event() -> None:
    for name in NO_EVENT:
        for module in (os, posix):
            vars(module).pop(name, None)


def make_guard(folder: str, max_changes: int) -> Callable[[str, tuple[Any, ...]], None]:
    """Audit hook. It holds references to the functions that it calls, as the program may replace those names.

    No event names the `dir_fd` of `os.open`. So `os.open` opens nothing outside, and every `dir_fd` is inside.
    """
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

    return guard


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
    try:
        text = " ".join(str(error).split())
    except BaseException:  # of an exception class of the program
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    main()
