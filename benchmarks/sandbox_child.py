"""The inside of the sandbox: a script that shuts itself in, then runs a program and its tests; see sandbox.py.

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
"""Of prctl."""
MAY_READ_ALL = 1 << 2
"""The capability to read files whatever their mode says, and none other."""
NOBODY = 65534
MB = 1 << 20
MAX_WHY = 300

READABLE = (sys.base_prefix, sys.base_exec_prefix, "/usr", "/lib", "/lib64", "/nix/store")
"""Folders that Python and the libraries which it loads lie in."""
READABLE_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom")

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
NO_EVENT = ("mkfifo", "mknod")
"""What changes files and raises no event: taken away."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Unsafe(Exception):
    """A program must not run here."""


def main() -> None:
    order = json.load(sys.stdin)
    pipe, write, encode = int(sys.argv[1]), os.write, json.JSONEncoder().encode

    def say(verdict: dict[str, Any]) -> None:
        write(pipe, f"\n{encode({'password': order['password'], **verdict})}\n".encode())

    leave = os._exit  # what the program left for the interpreter's end is of no interest
    try:
        shut_in(order)
    except (Unsafe, OSError) as error:
        say({"unsafe": str(error)})
        leave(0)
    passed, why = judge(order["program"], order["tests"])
    say({"passed": passed, "why": why[:MAX_WHY]})
    leave(0)


def shut_in(order: dict[str, Any]) -> None:
    """Every wall there is. What is needed later is tried at the end, so that no program is blamed for its lack."""
    leave_network()
    is_nobody = drop_root()
    is_walled = wall_files(".")
    if not is_nobody and not is_walled:
        where = f"nobody else may read Python in {sys.base_prefix}, and this kernel has no Landlock"
        raise Unsafe(f"root would run them as root: {where}; run as another user, or with a Python that all may read")
    set_limits(order)
    guard = make_guard(os.getcwd(), order["changes"])
    take_away_what_has_no_event()
    sys.addaudithook(guard)
    with open(os.__file__, "rb"):
        pass


def leave_network() -> None:
    """An empty network of its own, where the kernel allows it."""
    if sys.platform == "linux":
        flags = NEW_NET if os.geteuid() == 0 else NEW_NET | NEW_USER
        unshare = getattr(ctypes.CDLL(None), "unshare", None)
        if unshare is not None:
            unshare(flags)


def drop_root() -> bool:
    """Root is above the limit on processes and may write everywhere, so it becomes nobody.

    Where that cannot be, root stays, without any right but those of an owner: False.
    """
    if os.geteuid() != 0:
        return True
    try:
        become_nobody()
    except OSError:
        set_capabilities(0)
        return False
    return True


def become_nobody() -> None:
    """Where nobody could not read Python's library, the right to read goes along."""
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
"""The version of what follows, and whose they are: one's own."""
CAPABILITY_SETS = "=6I"
"""Effective, permitted and inheritable, first the low halves of all three."""


def get_capabilities() -> int:
    """The low half of what may be had; 0 where the system has none."""
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
    """The kernel's own wall around files, for root as well: what no rule allows, this process may never do again.

    It holds back opening, making, moving and removing, not the change of a file's mode, owner or times.
    """

    CREATE, ADD, RESTRICT = 444, 445, 446
    """Numbers of system calls, the same on all processors that Python runs on."""
    READ = 1 << 2 | 1 << 3
    """Files and folders."""
    WRITE = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 13 | 1 << 14
    """Write, remove, make folders, files and links, move, cut: no devices, pipes or sockets."""
    OF_FILES = 1 << 1 | 1 << 2 | 1 << 14
    """Rights that a file can have which is no folder."""
    KNOWN = (0, 13, 14, 15, 15, 16)
    """How many rights each version knows, from 0 on; later ones all of them."""

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None)
        self.version = self.call(self.CREATE, None, 0, 1) if sys.platform == "linux" else 0

    def call(self, number: int, *args: Any) -> int:
        """Below 0: refused."""
        whole = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
        return int(self.libc.syscall(ctypes.c_long(number), *whole))

    def open(self) -> int:
        """A set of rules that allows nothing yet: no file, no TCP, no signal or socket to others."""
        self.handled = (1 << self.KNOWN[min(self.version, len(self.KNOWN) - 1)]) - 1
        tcp, others = (3 if self.version >= 4 else 0), (3 if self.version >= 6 else 0)
        return self.call(self.CREATE, struct.pack("=QQQ", self.handled, tcp, others), 24, 0)

    def allow(self, rules: int, path: str, rights: int) -> bool:
        """Of a path that is not there nothing need be allowed."""
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
    """Write in the folder, read there and where Python lies, nothing else. False: this kernel has no such wall."""
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
            continue  # a system that lacks one of them
    signal.setitimer(signal.ITIMER_REAL, order["seconds"])  # by default the alarm ends the process


def take_away_what_has_no_event() -> None:
    for name in NO_EVENT:
        for module in (os, posix):
            vars(module).pop(name, None)


def make_guard(folder: str, max_changes: int) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook. It keeps what it calls, as the program may put something else under those names.

    No event tells of the folder that `os.open` takes its path from. So `os.open` opens nothing outside, and every
    folder from which a path can be taken lies inside.
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
            of_open_file = isinstance(args[0], int) and event != "os.truncate"  # which may be one of the library
            if of_open_file or any(isinstance(p, str | bytes | os.PathLike) and is_outside(p) for p in args):
                raise PermissionError(f"{event} outside its folder is not allowed here")
            count(event)

    return guard


def judge(program: str, tests: Sequence[str]) -> tuple[bool, str]:
    """Whether all tests pass, and what went wrong first.

    All is compiled beforehand, and run by what `exec` is now: a program may change the list, or the built-in names.
    """
    module = sys.modules["program"] = ModuleType("program")  # dataclasses look their module up
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
    except BaseException:  # the program may have brought its own exception
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    main()
