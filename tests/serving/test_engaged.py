"""Did a setting take effect? On lines that real engines wrote, and on what a failing baseline is
held against.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from assay.options import DoctorOptions
from assay.serving.command import read_command
from assay.serving.conclusion import fault_of
from assay.serving.diagnosis import Diagnosis
from assay.serving.report import build_report
from assay.serving.symptoms import Observation, Seen, engaged
from assay.verdict import Finding, Report, Severity, Verdict

# vLLM 0.32, on a CPU and on a GPU.
CPU = "(Worker pid=1) INFO 11-29 [cpu.py:178] Cannot use FLASH_ATTN backend on CPU."
GPU = "(EngineCore pid=2) INFO 11-29 [cuda.py:446] Using FLASH_ATTN backend."


@pytest.mark.parametrize(
    ("log", "took"), [(CPU, False), (GPU, True), ("Using TRITON_ATTN backend.", None), ("", None)]
)
def test_an_attention_backend_is_taken_refused_or_not_named(log: str, took: bool | None) -> None:
    command = read_command(["vllm", "serve", "m", "--attention-backend", "FLASH_ATTN"])
    assert engaged(command.settings[0], Observation(log=log), None).yes is took


@pytest.mark.parametrize(
    ("line", "ignored"),
    [
        ("INFO [model.py:1] using hf_overrides from the command line", False),
        ("WARNING [model.py:1] hf_overrides is ignored for this model", True),
        ("WARNING [vllm.py:1727] Inductor compilation was disabled by user settings", False),
    ],
)
def test_an_option_with_override_in_its_name_is_not_ignored_for_that(
    line: str, ignored: bool
) -> None:
    command = read_command(
        [
            "vllm",
            "serve",
            "m",
            "--enforce-eager",
            "--no-enable-prefix-caching",
            "--hf-overrides",
            "{}",
        ]
    )
    assert engaged(command.settings[0], Observation(log=line), None).yes is (
        False if ignored else None
    )


@pytest.mark.parametrize(
    ("facts", "took", "says"),
    [
        ({"prefix_hits": 640.0, "prefix_same": True}, True, "took 640 tokens from the prefix cache and got the same answer"),  # noqa: E501
        ({"prefix_hits": 0.0, "prefix_same": True}, False, "took 0 tokens"),
        ({}, None, "nothing"),
    ],
)  # fmt: skip
def test_a_prompt_that_is_asked_twice_shows_the_prefix_cache(
    facts: dict[str, object], took: bool | None, says: str
) -> None:
    command = read_command(["vllm", "serve", "m", "--enforce-eager", "--enable-prefix-caching"])
    (setting,) = command.settings
    assert setting.safe.kind == "prefix"
    found = engaged(setting, Observation(facts=facts), None)
    assert found.yes is took and says in found.evidence


@pytest.mark.parametrize(
    ("verify", "grade", "itself", "fault"),
    [
        (Verdict.FAIL, None, False, "checkpoint"),
        (Verdict.FAIL, "REJECT", True, "checkpoint"),
        (Verdict.PASS, "ACCEPT", True, "checkpoint"),
        (Verdict.PASS, "REJECT", True, "engine"),
        (
            Verdict.PASS,
            "REJECT",
            False,
            "",
        ),  # another model was named: it tells that they differ, not whose fault it is
        (Verdict.PASS, None, False, ""),
    ],
)
def test_a_failing_baseline_is_laid_to_the_checkpoint_or_to_the_engine(
    verify: Verdict, grade: str | None, itself: bool, fault: str
) -> None:
    command = read_command(["vllm", "serve", "m", "--max-num-seqs", "8"])
    found = Diagnosis(command, DoctorOptions(), baseline=Seen("bad", {"prompts": "no language"}))
    error = (Finding("checkpoint.truncated", Severity.ERROR, "it does not hold"),)
    found.checkpoint = [Report("verify", verify, findings=error if verify is Verdict.FAIL else ())]
    if grade:
        worst = Verdict.FAIL if grade == "REJECT" else Verdict.PASS
        found.checkpoint.append(
            Report(
                "compare",
                worst,
                findings=error,
                results={"grade": grade, "dppl_pct": {"value": 0.25}},
            )
        )
        found.compared_itself = itself
    assert fault_of(found) == fault
    report = build_report(found)
    (finding,) = (f for f in report.findings if f.id == "server.baseline_fails")
    named = {"checkpoint": "checkpoint is at fault", "engine": "engine is at fault"}
    assert named.get(fault, "checkpoint, or the engine, is at fault") in report.summary
    assert report.results["fault"] == (fault or None) and finding.evidence["fault"] == (
        fault or None
    )
    if grade:
        assert f"compare with transformers: {grade}, perplexity +0.25 %" in finding.detail


def test_a_command_is_read_without_what_asks_a_server(tmp_path: Path) -> None:
    code = (
        "import sys, assay; assay.doctor(['vllm', 'serve', sys.argv[1], '--kv-cache-dtype', 'fp8'],"
        " lint=True); slow = ('torch', 'transformers', 'httpx', 'assay.coherence',"
        " 'assay.engines.server', 'assay.serving.doctor'); print([name for name in slow if name in"
        " sys.modules])"
    )
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_failing_baseline_is_compared_with_its_own_files_where_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from assay.serving import baseline_fault

    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    command = read_command(["vllm", "serve", str(tmp_path), "--max-num-seqs", "8"])
    found = Diagnosis(command, DoctorOptions())
    monkeypatch.setattr(baseline_fault, "free_memory", lambda: 5000)
    assert baseline_fault.reference_of(found) == f"hf:{tmp_path}"
    monkeypatch.setattr(baseline_fault, "free_memory", lambda: 3000)
    assert baseline_fault.reference_of(found) is None
    found = Diagnosis(command, DoctorOptions(reference_engine="hf:other"))
    assert baseline_fault.reference_of(found) == "hf:other"
