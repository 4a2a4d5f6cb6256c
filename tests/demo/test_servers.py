"""Servers of the demo: ready when the block begins, gone with all their children when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import httpx
import pytest

from assay import demo
from assay.errors import AssayError

pytestmark = pytest.mark.engine

# Takes llama-server's place: answers /health and a first token, and has a worker that ignores
# SIGTERM.
PROGRAM = """\
#!{python}
import http.server, pathlib, subprocess, sys
arguments = sys.argv[1:]
port = int(arguments[arguments.index("--port") + 1])
worker = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"])
pathlib.Path({pid_file!r}).write_text(str(worker.pid))
print("listening", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{{"data": [{{"id": "tiny"}}]}}')
    def do_POST(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{{"choices": [{{"text": "!"}}]}}')
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""  # noqa: E501


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))


def program(tmp_path: Path, text: str = PROGRAM) -> Path:
    path = tmp_path / "server"
    path.write_text(text.format(python=sys.executable, pid_file=str(tmp_path / "worker.pid")))
    path.chmod(0o755)
    return path


def running(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(pid: int, within: float = 120.0) -> bool:
    deadline = time.monotonic() + within
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not running(pid)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_server_answers_and_ends_with_its_workers(
    tmp_path: Path, error: type[BaseException] | None
) -> None:
    binary = program(tmp_path)
    seen: list[demo.Server] = []

    def use() -> None:
        with demo.llama_server(tmp_path / "tiny.gguf", binary) as server:
            seen.append(server)
            assert httpx.get(f"{server.url}/v1/models").status_code == 200
            assert running(server.pid)
            if error is not None:
                raise error

    if error is None:
        use()
    else:
        with pytest.raises(error):
            use()
    worker = int((tmp_path / "worker.pid").read_text())
    assert gone(seen[0].pid)
    assert gone(worker)
    assert seen[0].model == "tiny"
    assert "listening" in seen[0].log.read_text()


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_program_ends_the_server_too(tmp_path: Path, sign: signal.Signals) -> None:
    binary = program(tmp_path)
    script = textwrap.dedent(f"""
        import signal
        import time
        from pathlib import Path
        from assay import demo
        # A shell has the programs that it starts in the background ignore SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with demo.llama_server(Path("tiny.gguf"), Path({str(binary)!r})) as server:
            print(server.pid, flush=True)
            time.sleep(60)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=dict(os.environ),
    )
    assert process.stdout is not None
    server = int(process.stdout.readline())
    worker = int((tmp_path / "worker.pid").read_text())
    process.send_signal(sign)
    process.wait(timeout=120)
    process.stdout.close()
    try:
        assert gone(server)
        assert gone(worker)
    finally:
        if running(worker):
            os.kill(worker, signal.SIGKILL)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    binary = program(
        tmp_path, "#!{python}\nraise SystemExit('Error: no such model in {pid_file}')\n"
    )
    with (
        pytest.raises(
            AssayError, match="status 1 before it answered: Error: no such model"
        ) as caught,
        demo.llama_server(tmp_path / "tiny.gguf", binary),
    ):
        pass
    assert caught.value.finding_id == "server.start_failed"


def test_the_signal_that_ended_a_server_is_named(tmp_path: Path) -> None:
    """As SIGILL, where a program was built for another processor."""
    binary = program(
        tmp_path,
        "#!{python}\nimport os\nprint('loading {pid_file}', flush=True)\nos.kill(os.getpid(), 4)\n",
    )
    with (
        pytest.raises(AssayError, match="was ended by SIGILL before it answered: loading"),
        demo.llama_server(tmp_path / "tiny.gguf", binary),
    ):
        pass


def test_a_server_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assay.demo.servers.START_SECONDS", 1.0)
    binary = program(
        tmp_path, "#!{python}\nimport time\nprint('loading')\ntime.sleep(60)  # {pid_file}\n"
    )
    with (
        pytest.raises(AssayError, match="is not ready after 1 s"),
        demo.llama_server(tmp_path / "tiny.gguf", binary),
    ):
        pass


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(AssayError, match=r"there is no program .*nothing-here"),
        demo.llama_server(tmp_path / "tiny.gguf", tmp_path / "nothing-here"),
    ):
        pass
