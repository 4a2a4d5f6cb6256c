"""What starting assay costs, and what it must not import."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

from stub_server import StubServer

HEAVY = ("torch", "transformers", "vllm", "safetensors", "accelerate", "huggingface_hub")
SHOWN = ("numpy", "scipy", "httpx", "jinja2", "rich", "prometheus_client")


def loaded_after(program: str, names: tuple[str, ...]) -> list[str]:
    """Those of `names` that a fresh interpreter has loaded after `program`."""
    tail = (
        f"\nimport json, sys\nprint(json.dumps([n for n in {names!r} if n in sys.modules]),"
        " file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program + tail],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    loaded: list[str] = json.loads(done.stderr.splitlines()[-1])
    return loaded


def test_help_answers_within_a_quarter_of_a_second() -> None:
    def seconds() -> float:
        """Time on a core: waiting for one beside other programs says nothing of assay, nor does a
        slow run alone.
        """
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "assay", "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert any(seconds() < 0.25 for _ in range(20))


def test_the_command_line_alone_loads_nothing_heavy() -> None:
    program = "import assay.cli.main as m\nm.build()"
    assert loaded_after(program, (*HEAVY, *SHOWN)) == []


def test_a_whole_check_of_a_server_loads_no_engine() -> None:
    with StubServer() as stub:
        program = (
            f"from assay.cli.main import invoke\ncode = invoke(['check', {stub.url!r}, '--json',"
            " '--samples', '1', '--repeats', '3', '--run-code'])\nassert code in (0, 1, 3), code"
        )
        assert loaded_after(program, HEAVY) == []


def test_grading_loads_no_engine_and_no_client() -> None:
    program = "from assay.coherence import grade\nassert grade('ha ' * 400).label == 'degenerate'"
    assert loaded_after(program, (*HEAVY, "httpx", "rich")) == []


def test_what_needs_no_engine_runs_where_torch_is_forbidden(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The capital of France is Paris.")
    (tmp_path / "vllm.log").write_text("INFO nothing of drafts\n")
    program = (
        "import sys\nfor name in ('torch', 'transformers', 'vllm'): sys.modules[name] = None\nfrom"
        " assay.cli.main import invoke\ncodes = [invoke(a) for a in (['--help'], ['grade',"
        " 'text.txt'], ['spec', 'vllm.log'], ['verify', '.'])]\nassert 70 not in codes, codes\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
