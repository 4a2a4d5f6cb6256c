"""A real llama-server held to a contract: exit code, JUnit, Markdown, and what changed since the
last good run.
"""

from __future__ import annotations

import json
import random
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from assay.cli.main import invoke
from assay.demo import llama_server
from assay.demo.models import SMOLLM2, gguf_of
from assay.runs import cache_dir

pytestmark = [pytest.mark.engine, pytest.mark.llama]
BINARY = cache_dir("llama.cpp") / "bin" / "llama-server"
CONTRACT = """\
[subject]
name = "smollm2"
server = "URL"
checkpoint = "model.gguf"

[verify]
hash = "all"
allow_unverified = true

[check]
samples = 1
no_throughput = true
quick = true
only = ["france", "spanish"]
budget = 0.5
"""


def gate(*arguments: str) -> tuple[int, dict[str, dict[str, object]]]:
    code = invoke(
        ["gate", "--json=out.json", "--junit", "gate.xml", "--summary", "summary.md", *arguments]
    )
    report = json.loads(Path("out.json").read_text())
    assert code == {"pass": 0, "fail": 1, "error": 2, "inconclusive": 3}[report["verdict"]]
    return code, {part["name"]: part for part in report["results"]["parts"]}


def test_a_contract_is_held_against_a_real_server_and_broken_by_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not BINARY.exists():
        pytest.skip("no llama-server: bash benchmarks/build/build_llama_cpp.sh")
    monkeypatch.chdir(tmp_path)
    shutil.copy(gguf_of(SMOLLM2), "model.gguf")
    with llama_server(
        Path("model.gguf"), BINARY, max_model_len=1024, streams=8, alias="m"
    ) as server:
        Path("assay.toml").write_text(CONTRACT.replace("URL", server.url))
        code, parts = gate()
    assert code in (0, 3) and list(parts) == ["verify", "check"]
    assert parts["verify"]["verdict"] == "pass"
    suites = ET.parse("gate.xml").getroot()
    assert not suites.findall(".//failure") and (code == 3 or not suites.findall(".//error"))
    assert Path("summary.md").read_text().count("|") > 12
    shutil.copy("out.json", "good.json")

    data = bytearray(Path("model.gguf").read_bytes())
    rng = random.Random(0)
    for n in range(60):
        at = len(data) // 4 + n * (len(data) // 2) // 60
        data[at : at + 4096] = rng.randbytes(4096)
    Path("model.gguf").write_bytes(data)
    Path("summary.md").unlink()
    with llama_server(
        Path("model.gguf"), BINARY, max_model_len=1024, streams=8, alias="m"
    ) as server:
        code, parts = gate("--server", server.url, "--baseline", "good.json")
    assert code == 1 and parts["check"]["verdict"] == "fail"
    changed = json.loads(Path("out.json").read_text())["results"]["baseline"]["changes"]
    assert "file model.gguf" in {c["what"] for c in changed if c["part"] == "verify"}
    assert any(c["part"] == "check" and c["what"] == "verdict" for c in changed)
    assert ET.parse("gate.xml").getroot().findall(".//failure")
    assert "model.gguf" in Path("summary.md").read_text()
