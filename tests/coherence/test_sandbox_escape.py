"""Hostile code in the sandbox: nothing is read, written, reached or left behind."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from assay.coherence import sandbox
from assay.coherence.sandbox import (
    SandboxIncomplete,
    _bubblewrap,
    _run,
    require_sandbox,
    run_fibonacci,
    run_python,
)
from assay.coherence.sandbox_child import _CALLS, filter_of

SECRET = "SECRET-CANARY-7f3a"


def confined() -> bool:
    try:
        require_sandbox()
    except SandboxIncomplete:
        return False
    return True


needs_sandbox = pytest.mark.skipif(not confined(), reason="this kernel has no whole sandbox")

READS = {
    "a file": "print(open('{dir}/secret').read())",
    "a file by its number": "import os; print(os.read(os.open('{dir}/secret', 0), 99))",
    "a file mapped": (
        "import mmap, os; print(mmap.mmap(os.open('{dir}/secret', 0), 0, prot=mmap.PROT_READ)[:])"
    ),
    "a file by io": "import io; print(io.FileIO('{dir}/secret').readall())",
    "a file by code": "import _io; print(_io.open_code('{dir}/secret').read())",
    "a file as a module": (
        "import importlib.util as u; s = u.spec_from_file_location('x', '{dir}/secret.py');"
        " m = u.module_from_spec(s); s.loader.exec_module(m); print(m.VALUE)"
    ),
    "a file by linecache": "import linecache; print(linecache.getlines('{dir}/secret'))",
    "a file by sqlite": (
        "import sqlite3; print(sqlite3.connect('{dir}/kept.db').execute('select * from t')"
        ".fetchall())"
    ),
    "a folder": "import os; print(os.listdir('{dir}'))",
    "a folder by scandir": "import os; print([e.name for e in os.scandir('{dir}')])",
    "a folder by glob": "import glob; print(glob.glob('{dir}/*'))",
    "shadow": "print(open('/etc/shadow').read())",
    "passwd": "import pwd; print(pwd.getpwall())",
    "the parent's environment": ("import os; print(open('/proc/{parent}/environ', 'rb').read())"),
    "the parent's memory": "print(open('/proc/{parent}/mem', 'rb').read(1))",
    "the parent's maps": "print(open('/proc/{parent}/maps').read())",
    "the parent's descriptors": "import os; print(os.listdir('/proc/{parent}/fd'))",
    "its own environment": "print(open('/proc/self/environ').read() or 'nothing: {secret}')",
    "a link to a file": "import os; os.chdir('{dir}'); print(open('secret').read())",
    "a path from its own folder": "print(open('../../../../../../..{dir}/secret').read())",
    "a second interpreter's audit": (
        "import _testcapi; _testcapi.run_in_subinterp(\"print(open('{dir}/secret').read())\")"
    ),
    "without the guard": (
        "import gc\n"
        "for f in gc.get_objects():\n"
        "    if getattr(f, '__name__', '') == '_guard': f.__code__ = (lambda *a, **k: 0).__code__\n"
        "print(open('{dir}/secret').read())"
    ),
}
WRITES = {
    "sqlite": "import sqlite3; sqlite3.connect('{dir}/new.db').execute('create table t(a)')",
    "sqlite drops a table": (
        "import sqlite3; c = sqlite3.connect('{dir}/kept.db'); c.execute('drop table t'); c.commit()"  # noqa: E501
    ),
    "sqlite attaches": (
        "import sqlite3; sqlite3.connect(':memory:').execute(\"attach '{dir}/new.db' as n\")"
        ".execute('create table n.t(a)')"
    ),
    "sqlite vacuums into": (
        "import sqlite3; sqlite3.connect(':memory:').execute(\"vacuum into '{dir}/new.db'\")"
    ),
    "ssl key log": ("import ssl; ssl.create_default_context().keylog_filename = '{dir}/keys'"),
    "readline": (
        "import readline; readline.add_history('x'); readline.write_history_file('{dir}/history')"
    ),
    "readline appends": "import readline; readline.append_history_file(0, '{dir}/secret')",
    "mkfifo": "import os; os.mkfifo('{dir}/fifo')",
    "mknod": "import os, stat; os.mknod('{dir}/node', stat.S_IFREG | 0o600)",
    "a device": "import os, stat; os.mknod('{dir}/disk', stat.S_IFBLK | 0o600, os.makedev(8, 0))",
    "shm_open": "import _posixshmem, os; _posixshmem.shm_open('/assay-pwn', os.O_CREAT | os.O_RDWR, 384)",  # noqa: E501
    "a semaphore": (
        "import _multiprocessing as m; m.SemLock(1, 1, 1, '/assay-sem', False); print('escaped')"
    ),
    "dbm": "import dbm.gnu; dbm.gnu.open('{dir}/new.gdbm', 'n')",
    "ndbm": "import dbm.ndbm; dbm.ndbm.open('{dir}/new.ndbm', 'n')",
    "posix": "import posix; posix.unlink('{dir}/secret')",
    "utime": "import os; os.utime('{dir}/secret', (0, 0))",
    "chmod": "import posix; posix.chmod('{dir}/secret', 0o777)",
    "chown": "import posix; posix.chown('{dir}/secret', 65534, 65534)",
    "xattr": "import posix; posix.setxattr('{dir}/secret', 'user.a', b'x')",
    "a link": "import posix; posix.link('{dir}/secret', '{dir}/again')",
    "a symbolic link": "import posix; posix.symlink('{dir}/secret', '{dir}/again')",
    "rename": "import posix; posix.rename('{dir}/secret', '{dir}/other')",
    "truncate": "import posix; posix.truncate('{dir}/secret', 0)",
    "mkdir": "import posix; posix.mkdir('{dir}/folder')",
    "faulthandler": "import faulthandler; faulthandler.enable(open('{dir}/trace', 'w'))",
    "its own folder": "open('here', 'w').write('x')",
}
REACHES = {
    "fork": "import os; print('escaped' if os.fork() >= 0 else 0)",
    "a raw fork": "import posix; print('escaped' if posix.fork() >= 0 else 0)",
    "a shell": "import os; os.system('echo escaped')",
    "posix_spawn": "import posix; posix.posix_spawn('/bin/echo', ['echo', 'escaped'], {{}})",
    "exec": "import posix; posix.execv('/bin/echo', ['echo', 'escaped'])",
    "fork_exec": (
        "import _posixsubprocess, os\n"
        "r, w = os.pipe()\n"
        "_posixsubprocess.fork_exec([b'/bin/sleep', b'41.5'], [b'/bin/sleep'], True, (w,), None,"
        " None, -1, -1, -1, -1, -1, -1, r, w, True, True, -1, None, None, None, -1, None, False)\n"
        "print('escaped')"
    ),
    "a signal": "import posix; posix.kill({parent}, 0); print('escaped')",
    "a signal to all": "import posix; posix.kill(-1, 0); print('escaped')",
    "a pidfd": (
        "import os, signal; signal.pidfd_send_signal(os.pidfd_open({parent}), 0); print('escaped')"
    ),
    "killpg": "import posix; posix.killpg(0, 0); print('escaped')",
    "an owner of a pipe": (
        "import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, {parent});"
        " print('escaped')"
    ),
    "priority": "import posix; posix.setpriority(0, {parent}, 19); print('escaped')",
    "affinity": "import posix; posix.sched_setaffinity({parent}, {{0}}); print('escaped')",
    "its own limits": (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9)); print('escaped')"
    ),
    "a socket": "import _socket; _socket.socket(); print('escaped')",
    "a unix socket": "import _socket; _socket.socket(_socket.AF_UNIX); print('escaped')",
    "a netlink": "import _socket; _socket.socket(16, 3, 0); print('escaped')",
    "a pair of sockets": "import _socket; _socket.socketpair(); print('escaped')",
    "the log": "import syslog; syslog.openlog('x', syslog.LOG_PERROR); raise SystemExit(1)",
    "memfd": "import posix; posix.memfd_create('x'); print('escaped')",
    "eventfd": "import posix; posix.eventfd(0); print('escaped')",
    "chroot": "import posix; posix.chroot('/tmp'); print('escaped')",
    "a user": "import posix; posix.setuid(65534); print('escaped')",
    "a group": "import posix; posix.setgroups([]); print('escaped')",
    "a session": "import posix; posix.setsid(); print('escaped')",
    "the host's name": "import _socket; _socket.sethostname('pwned'); print('escaped')",
    "ptrace": (
        "import ctypes; print('escaped' if ctypes.CDLL(None).ptrace(16, {parent}, 0, 0) == 0 else 0)"  # noqa: E501
    ),
    "ptrace without the guard": (
        "import gc\n"
        "for f in gc.get_objects():\n"
        "    if getattr(f, '__name__', '') == '_guard': f.__code__ = (lambda *a, **k: 0).__code__\n"
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "calls = [libc.ptrace(16, {parent}, 0, 0), libc.unshare(0x10000000), libc.fork(),\n"
        "         libc.socket(2, 1, 0), libc.kill({parent}, 0), libc.mount(b'x', b'/', b't', 0, 0),\n"  # noqa: E501
        "         libc.syscall(425, 1, 0), libc.syscall(321, 0, 0, 0), libc.syscall(250, 0, 0)]\n"
        "print('escaped' if any(c >= 0 for c in calls) else calls); raise SystemExit(1)"
    ),
}


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    folder = tmp_path / "canary"
    folder.mkdir()
    (folder / "secret").write_text(SECRET)
    (folder / "secret.py").write_text(f"VALUE = '{SECRET}'")
    with sqlite3.connect(folder / "kept.db") as kept:
        kept.execute("create table t(a)")
        kept.execute("insert into t values (?)", (SECRET,))
    kept.close()
    return folder


def state(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    return {
        p.name: (p.stat().st_mode, p.stat().st_uid, p.stat().st_mtime_ns, p.read_bytes())
        for p in folder.iterdir()
    }


def written(template: str, folder: Path) -> str:
    return template.format(dir=folder, parent=os.getpid(), secret=SECRET)


@needs_sandbox
@pytest.mark.parametrize("what", READS)
def test_nothing_is_read(what: str, canary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CANARY", SECRET)
    status, output = run_python(written(READS[what], canary), "")
    assert SECRET not in output and "root:" not in output and "secret" not in output.split("'")
    assert status != 0 or output == "[]" or "Permission denied" in output


@needs_sandbox
@pytest.mark.parametrize("what", WRITES)
def test_nothing_is_written(what: str, canary: Path) -> None:
    before = state(canary)
    status, output = run_python(written(WRITES[what], canary), "")
    assert status != 0 and "escaped" not in output
    assert state(canary) == before
    assert not {"assay-pwn", "sem.assay-sem"} & {p.name for p in Path("/dev/shm").iterdir()}


@needs_sandbox
@pytest.mark.parametrize("what", REACHES)
def test_nothing_outside_is_reached(what: str, canary: Path) -> None:
    status, output = run_python(written(REACHES[what], canary), "")
    assert status != 0 and "escaped" not in output


@needs_sandbox
def test_the_environment_is_empty_and_no_process_is_seen() -> None:
    status, output = run_python("import os; print(os.getpid(), os.getppid(), *os.environ)", "")
    assert status == 0 and output.split()[:2] == ["1", "0"]
    assert set(output.split()[2:]) <= {"LC_CTYPE"}


def processes_with(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "cmdline").read_bytes().decode("utf-8", "replace"):
                found.append(int(folder.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def test_what_runs_dies_with_a_killed_assay() -> None:
    mark = f"mark_{os.getpid()}_{time.monotonic_ns()}"
    program = (
        "from assay.coherence.sandbox import run_python\n"
        f"run_python('import time; {mark} = 1; time.sleep(60)', '', 60, unsafe=True)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    end = time.monotonic() + 30
    while len(processes_with(mark)) < 3 and time.monotonic() < end:
        time.sleep(0.05)
    assert len(processes_with(mark)) >= 3  # assay, and both processes of the sandbox
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 30
    while processes_with(mark) and time.monotonic() < end:
        time.sleep(0.05)
    assert processes_with(mark) == []


def test_an_incomplete_sandbox_is_refused_unless_it_is_insisted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = sandbox._run

    def without(
        program: str, stdin: str, timeout: float, unsafe: bool, prefix: tuple[str, ...]
    ) -> tuple[list[str], int, str]:
        if not unsafe:
            return ["Landlock (Function not implemented)"], 97, ""
        return real(program, stdin, timeout, unsafe, prefix)

    monkeypatch.setattr(sandbox, "_run", without)
    with pytest.raises(SandboxIncomplete, match="lacks Landlock") as caught:
        run_fibonacci("def fibonacci(n): return n")
    assert "--run-code=unsafe" in caught.value.remedy
    assert run_python("print(7)", "", unsafe=True) == (0, "7")


@pytest.mark.skipif(not _bubblewrap(), reason="bubblewrap is not installed")
def test_bubblewrap_makes_the_namespaces_where_it_is_installed() -> None:
    missing, status, output = _run("print(7)", "", 20.0, False, _bubblewrap())
    if missing == ["a sandbox that starts"]:
        pytest.skip(f"bubblewrap does not start here: {output}")
    assert (missing, status, output) == ([], 0, "7")


@needs_sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_held_as_well() -> None:
    python = Path("/usr/bin/python3")
    if not python.exists():
        pytest.skip("no Python that another user may run")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        _as_another_user(python, Path(folder))


def _as_another_user(python: Path, canary: Path) -> None:
    """Run the program of the sandbox as nobody, who may read the secret."""
    (canary / "secret").write_text(SECRET)
    child = canary / "child.py"
    child.write_text(Path(sandbox._CHILD).read_text(encoding="utf-8"), encoding="utf-8")
    program = (
        "import os, subprocess, sys, json\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "r, w = os.pipe()\n"
        "code = sys.argv[1]\n"
        f"done = subprocess.run([{str(python)!r}, '-I', '-S', '-B', {str(child)!r}, code,\n"
        "    json.dumps(['/usr/lib', '/lib', '/lib64']), 'safe', str(w), str(os.getpid())],\n"
        "    pass_fds=(w,), env={}, capture_output=True, text=True, cwd='/')\n"
        "os.close(w)\n"
        "print(json.dumps([json.loads(os.read(r, 999)), done.returncode, done.stdout]))"
    )
    for code in (f"print(open({str(canary / 'secret')!r}).read())", "print(7)"):
        done = subprocess.run(
            [str(python), "-c", program, code], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        missing, status, output = json.loads(done.stdout)
        if missing:
            pytest.skip(f"not for this user: {missing}")
        assert SECRET not in output and (output.strip(), status == 0) in (("7", True), ("", False))


@pytest.mark.parametrize("machine", sorted(_CALLS))
def test_the_filter_is_a_whole_program(machine: str) -> None:
    code = filter_of(machine)
    assert len(code) % 8 == 0 and len(code) // 8 < 4096
    # Every jump lands inside, and the last step refuses.
    for at in range(0, len(code), 8):
        yes, no = code[at + 2], code[at + 3]
        assert at // 8 + 1 + max(yes, no) < len(code) // 8 or max(yes, no) == 0
    assert code[-8:-6] == b"\x06\x00"
