"""`assay check --reference FILE` and `--reference-engine`: what is compared, and what is no
reference.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from check_servers import Sane, answering, check, ids, save, serving, words

from assay.coherence import reference as reference_module
from assay.coherence.measure import Measurement
from assay.coherence.options import Plan
from assay.engines import GIVEN_UP, Capability, CapabilityReport, Reply, Request
from assay.engines import specs as packages
from assay.errors import AssayError
from stub_server import StubServer

LONDON = words("The capital of France is London, a large city on the river Thames.")
LOOP = words("I am sure that " + "the name of " * 60)
FULL = ("--samples", "3", "--no-throughput")


def test_a_server_passes_against_its_own_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with serving(Sane()) as stub:
        _, first = check(capsys, stub.url, "--samples", "5")
        code, again = check(
            capsys,
            stub.url,
            "--samples",
            "5",
            "--reference",
            str(save(tmp_path / "run.json", first)),
        )
    assert (code, again["findings"]) == (0, [])
    assert again["results"]["reference"]["origin"] == {
        "source": "run", "model": "stub-model", "verdict": "pass",
    }  # fmt: skip
    assert next(r for r in again["results"]["rules"] if r["rule"] == "prompts")["state"] == "good"


def test_london_is_a_warning_alone_and_an_error_against_one_who_knew(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with serving(Sane()) as stub:
        _, knew = check(capsys, stub.url, *FULL)
    reference = save(tmp_path / "run.json", knew)
    only = (*FULL, "--probe", "france")
    with answering(LONDON, scores=False, echo=False) as stub:
        alone_code, alone = check(capsys, stub.url, *only)
        code, against = check(capsys, stub.url, *only, "--reference", str(reference))
    assert alone_code != 1
    assert "coherence.wrong_answer" in ids(alone, "warning")
    assert ids(alone, "error") == set()
    assert code == 1
    assert ids(against, "error") == {"coherence.wrong_answer"}


def test_loops_count_against_a_reference_that_wrote_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with serving(Sane()) as stub:
        _, sane = check(capsys, stub.url, *FULL)
    with answering(LOOP, finish_reason="length", scores=False, echo=False) as stub:
        code, report = check(
            capsys, stub.url, *FULL, "--reference", str(save(tmp_path / "run.json", sane))
        )
    assert code == 1
    assert "coherence.degenerate" in ids(report, "error")


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"not json",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b'{"command": "grade", "results": {}}',
        b'{"command": "check", "results": {}}',
        b'{"command": "check", "results": {"probes": []}}',
        (
            b'{"command": "check", "results": {"probes": [{"name": "france", "samples": [{"label":'
            b' "ok"}]}]}}'
        ),
        b'{"command": "check", "results": {"probes": 3}}',
    ],
)
def test_a_reference_that_is_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None
) -> None:
    reference = tmp_path / "run.json"
    if content is not None:
        reference.write_bytes(content)
    code, report = check(capsys, "http://127.0.0.1:9", "--reference", str(reference))
    assert (code, ids(report)) == (2, {"coherence.reference"})
    assert "run.json" in report["findings"][0]["title"]
    assert str(tmp_path) not in json.dumps(report)


@pytest.mark.parametrize("verdict", ["fail", "error"])
def test_a_run_that_did_not_hold_is_no_reference(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verdict: str
) -> None:
    with serving(Sane()) as stub:
        _, report = check(capsys, stub.url, "--probe", "france", "--no-throughput")
    path = save(tmp_path / "run.json", report | {"verdict": verdict})
    code, report = check(capsys, "http://127.0.0.1:9", "--reference", str(path))
    assert (code, ids(report)) == (2, {"coherence.reference"})
    assert verdict in report["findings"][0]["title"]


@pytest.mark.parametrize(
    ("engine", "finding"),
    [
        ("gguf:model", "server.usage"),
        ("hf:", "server.usage"),
        ("hf:no-such-folder", "coherence.reference"),
        ("hf:.?dtype=int3", "server.usage"),
    ],
)
def test_an_engine_that_can_be_no_reference_is_refused_before_the_server_is_asked(
    capsys: pytest.CaptureFixture[str], engine: str, finding: str
) -> None:
    with StubServer() as stub:
        code, report = check(capsys, stub.url, "--reference-engine", engine)
        assert stub.exchanges == []
    assert (code, ids(report)) == (2, {finding})


def test_a_folder_that_holds_no_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(
        AssayError, match=r"model is no checkpoint: the folder holds no config\.json"
    ):
        reference_module.reference_folder(f"hf:{tmp_path}/model")
    (tmp_path / "model" / "config.json").touch()
    assert (
        reference_module.reference_folder(f"hf:{tmp_path}/model?dtype=float32")
        == tmp_path / "model"
    )


def test_a_missing_package_is_named_before_the_server_is_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with StubServer() as stub:
        code, report = check(capsys, stub.url, "--reference-engine", f"hf:{tmp_path}")
        assert stub.exchanges == []
    assert (code, ids(report)) == (2, {"fidelity.engine_missing"})
    assert "torch" in report["findings"][0]["title"]


def test_what_was_measured_stays_where_the_reference_cannot_be_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object) -> None:
        raise AssayError("the model does not fit into memory", finding_id="fidelity.engine_load")

    (tmp_path / "config.json").touch()
    monkeypatch.setattr(packages, "find_spec", lambda name: object())
    monkeypatch.setattr(reference_module.EngineReference, "_measurement", out_of_memory)
    with serving(Sane()) as stub:
        code, report = check(
            capsys, stub.url, "--samples", "3", "--reference-engine", f"hf:{tmp_path}"
        )
    assert (code, report["verdict"], ids(report)) == (2, "error", {"fidelity.engine_load"})
    assert all(p["samples"] for p in report["results"]["probes"])
    assert report["results"]["throughput"]["samples"] == 3


class Slow:
    """A reference in this process that writes nothing until the deadline, and everything where
    there is none.
    """

    capabilities = CapabilityReport(frozenset({Capability.GENERATE, Capability.CHAT}), {})

    def generate_batch(
        self, requests: list[Request], *, deadline: float = float("inf")
    ) -> list[Reply]:
        if deadline < float("inf"):
            time.sleep(max(0.0, deadline - time.monotonic()) + 0.01)
            return [Reply("The capital", GIVEN_UP) for _ in requests]
        return [Reply("The capital of France is Paris, on the Seine.", "stop") for _ in requests]

    def close(self) -> None:
        pass


def test_a_budget_ends_a_slow_reference_and_what_it_did_not_say_is_not_kept_as_its_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(packages, "find_spec", lambda name: object())
    monkeypatch.setattr(
        reference_module.EngineReference,
        "_measurement",
        lambda self: Measurement(Slow(), Plan()),  # type: ignore[arg-type]
    )
    asked = (
        "--samples",
        "1",
        "--probe",
        "france",
        "--no-throughput",
        "--reference-engine",
        f"hf:{tmp_path}",
    )
    with serving(Sane()) as stub:
        began = time.monotonic()
        code, report = check(capsys, stub.url, *asked, "--budget", "0.05")
        assert time.monotonic() - began < 20
        _, whole = check(capsys, stub.url, *asked)
    assert code in (0, 3)
    assert "coherence.left_out" in ids(report)
    assert (
        "reference"
        in next(f for f in report["findings"] if f["id"] == "coherence.left_out")["evidence"][
            "stages"
        ]
    )
    assert whole["results"]["reference"]["probes"]["france"]["samples"] == 2, whole["results"][
        "reference"
    ]
