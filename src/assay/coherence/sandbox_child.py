"""The program inside the sandbox: it confines itself, then runs the code that it was given.

It runs by its path in isolated Python (`-I -S -B`), so it imports the standard library alone. The
arguments are the program to run, the folders that may be read, whether an incomplete sandbox is
accepted, a descriptor that gets what is missing, as JSON, before anything of the model runs, and
the id of the parent (0 under bubblewrap).
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

NOT_RUN = 97
"""Exit status of a sandbox that is incomplete, where that is not accepted."""
MEMORY_BYTES = 512 << 20
OUTPUT_BYTES = 1 << 16
CPU_S = 6

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_NEW_NAMESPACES = {
    "user": 0x10000000,
    "process": 0x20000000,
    "network": 0x40000000,
    "IPC": 0x08000000,
    "host name": 0x04000000,
}
# Landlock: numbers of its system calls on every architecture, access rights by ABI version.
_LANDLOCK = (444, 445, 446)
_READ_FILE, _READ_DIR, _EXECUTE = 1 << 2, 1 << 3, 1 << 0
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""How many access rights an ABI version knows, from that version on."""

# Numbers of the system calls that plain computing needs: of x86-64, and of aarch64.
_ALLOWED = {
    "x86_64": (
        "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 17 18 19 20 21 22 23 24 25 27 28 32 33 34 35 36 37 38"  # noqa: E501
        " 39 60 61 63 72 74 75 77 78 79 80 81 89 95 96 97 98 99 100 102 104 107 108 110 111 115 118"
        " 120 121 124 131 137 138 143 145 146 147 148 186 201 202 204 217 218 219 221 228 229 230 231"  # noqa: E501
        " 247 257 262 267 269 270 271 273 292 293 309 318 324 332 334 439"
    ),
    "aarch64": (
        "17 23 24 43 44 46 48 49 50 56 57 59 61 62 63 64 65 66 67 68 72 73 78 79 80 82 83 93"
        " 94 95 96 98 99 100 101 102 103 113 114 115 120 121 123 124 125 126 127 132 134 135"
        " 136 139 141 148 150 153 155 156 158 160 163 165 166 168 169 172 173 174 175 176 177"
        " 178 179 214 215 216 222 223 226 227 232 233 260 278 283 291 293 439"
    ),
}
_CALLS = {
    "x86_64": {"arch": 0xC000003E, "clone": 56, "clone3": 435, "ioctl": 16, "prlimit": 302},
    "aarch64": {"arch": 0xC00000B7, "clone": 220, "clone3": 435, "ioctl": 29, "prlimit": 261},
}
_FCNTL = {"x86_64": 72, "aarch64": 25}
_FCNTL_ALLOWED = (0, 1, 2, 3, 4, 1030)
"""Duplicate, and read or set the flags of a descriptor: no owner, no lease, no notice."""
_IOCTL_ALLOWED = (0x5401, 0x5450, 0x5451)
"""Ask whether it is a terminal; close on exec."""
_CLONE_THREAD = 0x10000
_EPERM, _ENOSYS = 1, 38

# The interpreter itself refuses what the kernel would refuse too, with words that say why.
_GUARD = """
import os, sys
def _guard(event, arguments, refused=PermissionError,
           prefixes=("os.", "subprocess.", "socket.", "ctypes.", "shutil.", "resource."),
           harmless=("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.putenv", "os.unsetenv"),
           writing=os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & writing:
        raise refused("writing a file is not allowed here")
    if event.startswith(prefixes) and event not in harmless:
        raise refused(event + " is not allowed here")
sys.addaudithook(_guard)
del _guard, os
"""


def main() -> None:
    """Confine this process and run the program."""
    program, readable, accept = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "unsafe"
    report, parent = int(sys.argv[4]), int(sys.argv[5])
    libc = ctypes.CDLL(None, use_errno=True)
    _die_with_parent(libc)
    if parent and os.getppid() != parent:  # it died before this could be asked for
        os._exit(NOT_RUN)
    # Bubblewrap has made the namespaces already where no parent is named.
    missing = [*_namespaces(libc)] if parent else []
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    child = os.fork()  # the first process of the new namespace
    if child:
        os.close(report)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            os.kill(os.getpid(), -code if -code != signal.SIGCHLD else signal.SIGKILL)
        os._exit(code)
    _die_with_parent(libc)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _limit()
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        missing.append("no_new_privs")
    missing += [*_landlock(libc, readable), *_seccomp(libc)]
    os.write(report, json.dumps(missing).encode())
    os.close(report)
    if missing and not accept:
        os._exit(NOT_RUN)
    exec(compile(_GUARD + program, "<sandbox>", "exec"), {"__name__": "__main__"})


def _die_with_parent(libc: ctypes.CDLL) -> None:
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _limit() -> None:
    for limit, value in {
        resource.RLIMIT_CPU: CPU_S,
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_FSIZE: OUTPUT_BYTES,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }.items():
        resource.setrlimit(limit, (value, value))


def _namespaces(libc: ctypes.CDLL) -> Iterator[str]:
    """Enter new namespaces; yields the names of those that the kernel refuses."""
    if libc.unshare(sum(_NEW_NAMESPACES.values())) == 0:
        return
    why = os.strerror(ctypes.get_errno())
    refused = []
    for name, flag in _NEW_NAMESPACES.items():
        if libc.unshare(flag) != 0:
            refused.append(name)
    needed = [name for name in refused if name in ("process", "network")]
    if needed:
        yield f"{' and '.join(needed)} namespaces ({why})"


def _landlock(libc: ctypes.CDLL, readable: list[str]) -> Iterator[str]:
    """Let no file be opened but those under `readable`, and those only to read."""
    create, add, restrict = _LANDLOCK
    libc.syscall.restype = ctypes.c_long
    abi = libc.syscall(create, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if abi < 1:
        yield f"Landlock ({os.strerror(ctypes.get_errno())})"
        return
    if abi < 3:
        yield "Landlock that holds truncation (Linux 6.2)"
    rights = max(count for version, count in _FILE_RIGHTS.items() if version <= abi)
    handled = struct.pack(
        "=QQQ", (1 << rights) - 1, 0b11 if abi >= 4 else 0, 0b11 if abi >= 6 else 0
    )[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = libc.syscall(create, handled, ctypes.c_size_t(len(handled)), ctypes.c_uint(0))
    if ruleset < 0:
        yield f"Landlock ({os.strerror(ctypes.get_errno())})"
        return
    for path in readable:
        try:
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        allowed = _READ_FILE | (_READ_DIR | _EXECUTE if Path(path).is_dir() else 0)
        rule = struct.pack("=Qi", allowed, folder)
        if libc.syscall(add, ruleset, ctypes.c_int(1), rule, ctypes.c_uint(0)) != 0:
            yield f"Landlock for {path} ({os.strerror(ctypes.get_errno())})"
        os.close(folder)
    if libc.syscall(restrict, ruleset, ctypes.c_uint(0)) != 0:
        yield f"Landlock ({os.strerror(ctypes.get_errno())})"
    os.close(ruleset)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def _seccomp(libc: ctypes.CDLL) -> Iterator[str]:
    """Allow the system calls of plain computing alone."""
    machine = platform.machine()
    if machine not in _CALLS:
        yield f"a list of system calls for {machine}"
        return
    code = filter_of(machine)
    program = _Program(len(code) // 8, code)
    if libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0) != 0:
        yield f"seccomp ({os.strerror(ctypes.get_errno())})"


def filter_of(machine: str) -> bytes:
    """The seccomp program (classic BPF) of one architecture."""
    calls = _CALLS[machine]
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill = 0x7FFF0000, 0x80000000
    refuse = 0x00050000 | _EPERM
    number, arch, low = 0, 4, 16  # offsets: the call, the architecture, its first argument

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value)

    def arguments(call: int, offset: int, values: tuple[int, ...]) -> bytes:
        """Allow `call` where the low half of an argument is one of `values`."""
        checks = b"".join(step(equal, value, 0, 1) + step(end, allow) for value in values)
        body = step(load, offset) + checks + step(end, refuse)
        return step(equal, call, 0, len(body) // 8) + body

    steps = step(load, arch) + step(equal, calls["arch"], 1, 0) + step(end, kill)
    steps += step(load, number)
    if machine == "x86_64":  # the calls of x32 have other numbers
        steps += step(at_least, 0x40000000, 0, 1) + step(end, kill)
    steps += step(equal, calls["clone3"], 0, 1) + step(end, 0x00050000 | _ENOSYS)
    thread = step(load, low) + step(any_bit, _CLONE_THREAD, 0, 1) + step(end, allow)
    thread += step(end, refuse)
    steps += step(equal, calls["clone"], 0, len(thread) // 8) + thread
    # Limits may be read, not set: the pointer to new ones, in both halves, is null.
    read = step(load, low + 16) + step(equal, 0, 0, 3) + step(load, low + 20)
    read += step(equal, 0, 0, 1) + step(end, allow) + step(end, refuse)
    steps += step(equal, calls["prlimit"], 0, len(read) // 8) + read
    steps += arguments(calls["ioctl"], low + 8, _IOCTL_ALLOWED)
    steps += arguments(_FCNTL[machine], low + 8, _FCNTL_ALLOWED)
    for call in sorted(map(int, _ALLOWED[machine].split())):
        if call not in (*calls.values(), _FCNTL[machine]):
            steps += step(equal, call, 0, 1) + step(end, allow)
    return steps + step(end, refuse)


if __name__ == "__main__":
    main()
