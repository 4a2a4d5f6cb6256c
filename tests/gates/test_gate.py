"""The gate: every part is run and judged, exit codes follow, nothing passes that was not
examined.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from gate_servers import CONTRACT, Right, deployment
from hypothesis import given
from hypothesis import strategies as st

import assay
import assay.gates.gate as gates
from assay.errors import UsageError
from assay.gates.figures import Figure, _median, figures
from assay.gates.gate import direction
from assay.gates.limits import rule
from assay.verdict import Verdict
from cli.check_servers import Sane, run, serving
from stub_server import StubServer, healthy, models

Gate = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with serving(Right(Sane())) as server:
        yield server


@pytest.fixture
def gate(here: Path, stub: StubServer, capsys: pytest.CaptureFixture[str]) -> Gate:
    """Run `assay gate` on a contract."""

    def hold(contract: str = CONTRACT, *arguments: str) -> tuple[int, dict[str, Any]]:
        deployment(here, stub, contract)
        return run(capsys, "gate", *arguments)

    return hold


def parts(report: dict[str, Any]) -> dict[str, Any]:
    return {part["name"]: part for part in report["results"]["parts"]}


def verdicts(report: dict[str, Any]) -> dict[str, str]:
    return {name: part["verdict"] for name, part in parts(report).items()}


def test_a_deployment_that_keeps_its_contract_passes(gate: Gate) -> None:
    code, report = gate()
    assert (code, report["verdict"]) == (0, "pass")
    assert verdicts(report) == {"spec": "pass", "check": "pass", "tools": "pass"}
    limits = {
        limit["name"]: limit["figure"]
        for part in parts(report).values()
        for limit in part["limits"]
    }
    assert limits["min_acceptance"]["value"] == pytest.approx(70)
    assert limits["min_schema_valid"]["value"] == 100
    assert limits["min_tokens_per_s"]["lo"] <= limits["min_tokens_per_s"]["value"]
    assert report["results"]["contract"]["sections"] == ["spec", "check", "tools"]


@pytest.mark.parametrize(
    ("old", "new", "part", "verdict", "code"),
    [
        ('min_acceptance = "60%"', 'min_acceptance = "80%"', "spec", "fail", 1),
        ('min_acceptance = "60%"', 'min_acceptance = "70%"', "spec", "inconclusive", 3),
        ("min_tokens_per_s = 5", "min_tokens_per_s = 1e9", "check", "fail", 1),
        ("max_ttft_s = 30", "max_ttft_s = 0", "check", "fail", 1),
        ("max_ttft_s = 30", "max_ttft_s = 30\nno_throughput = true", "check", "inconclusive", 3),
        ("max_ttft_s = 30", "max_ttft_s = 30\nrepeats = 3", "check", "inconclusive", 3),
        ('min_schema_valid = "90%"', 'min_schema_valid = "99%"', "tools", "inconclusive", 3),
        ('logs = ["vllm.log"]', 'logs = ["none.log"]', "spec", "error", 2),
    ],
)
def test_one_part_that_does_not_hold_decides(
    gate: Gate, old: str, new: str, part: str, verdict: str, code: int
) -> None:
    assert old in CONTRACT
    found, report = gate(CONTRACT.replace(old, new))
    assert found == code
    assert verdicts(report)[part] == verdict
    assert {v for name, v in verdicts(report).items() if name != part} == {"pass"}
    assert parts(report)[part]["findings"]
    about = [f for f in report["findings"] if f["evidence"].get("part") == part]
    assert any(
        f["severity"] == ("warning" if verdict == "inconclusive" else "error") for f in about
    )


def test_tools_that_fail_their_schema_break_the_limit(gate: Gate, stub: StubServer) -> None:
    stub.on("POST /v1/chat/completions", Right(Sane(), spoilt=12))
    code, report = gate()
    assert code == 1
    assert parts(report)["tools"]["limits"][0]["figure"]["value"] == pytest.approx(75)


def test_a_server_without_tools_does_not_pass_the_tools_part(gate: Gate, stub: StubServer) -> None:
    refuses = frozenset({"tools"})
    for route in ("POST /v1/chat/completions", "POST /v1/completions"):
        stub.on(route, Sane(refuses=refuses))
    code, report = gate('[subject]\nserver = "{url}"\n[tools]\n')
    assert (code, verdicts(report)) == (3, {"tools": "inconclusive"})


def test_a_server_that_is_not_there_is_an_error_and_the_logs_are_still_read(
    here: Path, gate: Gate
) -> None:
    code, report = gate(CONTRACT, "--server", "http://127.0.0.1:9")
    assert code == 2
    assert verdicts(report) == {"spec": "pass", "check": "error", "tools": "error"}


def test_speed_of_nonsense_is_no_speed(gate: Gate, stub: StubServer) -> None:
    stub.on("POST /v1/chat/completions", healthy(chunks=("the",) + (" the",) * 300, scores=False))
    _, report = gate('[subject]\nserver = "{url}"\n[check]\nsamples = 1\nmin_tokens_per_s = 1\n')
    assert report["verdict"] == "fail"
    assert parts(report)["check"]["limits"][0]["verdict"] == "inconclusive"
    assert "decode_tokens_per_s" not in parts(report)["check"]["figures"]


def test_a_section_with_a_missing_reference_is_an_error(gate: Gate, here: Path) -> None:
    contract = '[subject]\nserver = "{url}"\n[reference]\nengine = "run:none"\n[compare]\n'
    code, report = gate(contract)
    assert code == 2
    assert "none" in report["findings"][0]["title"]


def test_identity_and_determinism_are_parts_of_their_own(
    gate: Gate, here: Path, stub: StubServer
) -> None:
    contract = (
        '[subject]\nserver = "{url}"\n[reference]\nidentity ='
        ' "none.json"\n[identity]\n[determinism]\n'
    )
    code, report = gate(contract)
    assert code == 2
    assert verdicts(report) == {"identity": "error", "determinism": "pass"}
    assert parts(report)["determinism"]["results"]["determinism"]["decision"] == "same"


def test_two_servers_behind_one_address_are_not_judged(gate: Gate, stub: StubServer) -> None:
    numbers = itertools.count()
    stub.on("GET /version", lambda e: e.json({"version": f"0.3{next(numbers) % 2}.0"}))
    code, report = gate()
    assert code == 3
    assert "server.changed" in {f["id"] for f in report["findings"]}
    assert len(report["results"]["servers"]) == 2


def test_a_server_that_changes_its_model_in_between_is_not_judged(
    gate: Gate, stub: StubServer
) -> None:
    seen = itertools.count()
    stub.on("GET /v1/models", lambda e: models("day" if next(seen) < 4 else "night")(e))
    for route in ("POST /v1/chat/completions", "POST /v1/completions"):
        sane = stub.behaviour(route)
        stub.on(route, lambda e, sane=sane: sane(_as_any_model(e)))
    code, report = gate('[subject]\nserver = "{url}"\n[tools]\n[check]\nsamples = 1\n')
    assert code == 3
    changed = next(f for f in report["findings"] if f["id"] == "server.changed")
    assert changed["evidence"]["model"] == ["day", "night"]


def _as_any_model(e: Any) -> Any:
    e.body.pop("model", None)
    return e


@pytest.mark.parametrize("at", ["spec", "check", "tools"])
def test_an_interrupted_gate_shows_what_it_has_and_does_not_pass(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(gates._RUN, at, interrupt)  # type: ignore[attr-defined]
    code, report = gate()
    assert (code, report["verdict"]) == (130, "inconclusive")
    order = ["spec", "check", "tools"]
    assert verdicts(report) == dict.fromkeys(order[: order.index(at)], "pass") | {
        at: "inconclusive"
    }
    assert report["results"]["not_run"] == order[order.index(at) + 1 :]


# Against the last good run.


def test_the_baseline_says_what_changed(gate: Gate, stub: StubServer, here: Path) -> None:
    _, good = gate(CONTRACT)
    (here / "good.json").write_text(json.dumps(good))
    stub.on("GET /version", lambda e: e.json({"version": "0.33.0"}))
    stub.on("POST /v1/chat/completions", Right(Sane(), spoilt=24))
    code, report = gate(CONTRACT.replace("60%", "65%"), "--baseline", "good.json")
    assert code == 1
    changed = {(c["part"], c["what"]): c for c in report["results"]["baseline"]["changes"]}
    assert changed["", "the contract"]["direction"] == "changed"
    assert changed["tools", "verdict"]["direction"] == "worse"
    assert changed["check", "server version"]["now"] == "0.33.0"
    assert changed["tools", "follow their schema"]["direction"] == "worse"
    assert changed["spec", "accepted draft tokens"]["direction"] == "the same within the intervals"
    assert "coherence.worse_than_baseline" in {f["id"] for f in report["findings"]}


def test_the_same_again_is_no_change(gate: Gate, here: Path) -> None:
    contract = '[subject]\nlogs = ["vllm.log"]\n[spec]\n'
    _, good = gate(contract)
    (here / "good.json").write_text(json.dumps(good))
    code, report = gate(contract, "--baseline", "good.json")
    assert code == 0
    directions = {c["direction"] for c in report["results"]["baseline"]["changes"]}
    assert directions <= {"the same", "the same within the intervals"}


def test_a_part_that_is_no_longer_examined_is_named(gate: Gate, here: Path) -> None:
    _, good = gate()
    (here / "good.json").write_text(json.dumps(good))
    _, report = gate('[subject]\nlogs = ["vllm.log"]\n[spec]\n', "--baseline", "good.json")
    gone = {
        c["part"] for c in report["results"]["baseline"]["changes"] if c["now"] == "not examined"
    }
    assert gone == {"check", "tools"}


def test_a_contract_that_asks_for_less_than_the_last_good_one_is_named(
    gate: Gate, here: Path
) -> None:
    logs = '[subject]\nlogs = ["vllm.log"]\n[spec]\n'
    _, good = gate(f'{logs}min_acceptance = "60%"\n')
    (here / "good.json").write_text(json.dumps(good))
    for contract, said in (
        (logs, "[spec] min_acceptance is gone, it was 60"),
        (f'{logs}min_acceptance = "40%"\n', "[spec] min_acceptance is 40, it was 60"),
    ):
        code, report = gate(contract, "--baseline", "good.json")
        (finding,) = [f for f in report["findings"] if f["id"] == "server.contract_weaker"]
        assert (code, finding["severity"]) == (0, "warning")
        assert said in finding["title"]
    _, report = gate(f'{logs}min_acceptance = "65%"\n', "--baseline", "good.json")
    assert "server.contract_weaker" not in {f["id"] for f in report["findings"]}


@pytest.mark.parametrize(
    "content",
    ["", "3", "[]", "{}", '{"schema": "assay/1", "command": "check"}',
     '{"schema": "assay/1", "command": "gate", "results": {"parts": [{"name": "check"}]}}',
     '{"schema": "assay/1", "command": "gate", "results": {"parts": 3}}', "[" * 100_000],
)  # fmt: skip
def test_a_baseline_that_is_none_is_refused_before_anything_is_run(
    gate: Gate, here: Path, stub: StubServer, content: str
) -> None:
    (here / "good.json").write_text(content)
    code, report = gate(CONTRACT, "--baseline", "good.json")
    assert (code, len(report["findings"])) == (2, 1)
    assert "is no result of assay gate" in report["findings"][0]["title"]
    assert stub.exchanges == []


# What is written.


def test_lint_reads_the_contract_and_asks_nobody(gate: Gate, stub: StubServer) -> None:
    code, report = gate(CONTRACT, "--lint")
    assert (code, stub.exchanges) == (0, [])
    assert report["results"]["not_run"] == ["spec", "check", "tools"]
    assert gate(CONTRACT.replace("[spec]", "[spce]"), "--lint")[0] == 2


def test_the_screen_the_summary_and_junit_name_every_part(
    here: Path, stub: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    from assay.cli.main import invoke

    deployment(here, stub, CONTRACT.replace("60%", "80%"))
    (here / "summary.md").write_text("before\n")
    more = ("--html", "gate.html", "--prometheus", "gate.prom", "--markdown", "gate.md")
    assert invoke(["gate", "--summary", "summary.md", "--junit", "gate.xml", *more]) == 1
    assert all((here / name).stat().st_size for name in more[1::2])
    screen = capsys.readouterr().out
    assert len(screen.splitlines()) <= 40
    assert (
        "spec does not hold; check and tools hold; not in the contract: verify, identity,"
        " determinism, compare." in " ".join(screen.split())
    )
    text = (here / "summary.md").read_text()
    assert text.startswith("before\n## ✗ assay gate: FAIL")
    assert "accepted draft tokens ≥ 80 %" in text
    assert len(text.splitlines()) < 60
    suite = ET.parse(here / "gate.xml").getroot().find("testsuite")
    assert suite is not None
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert cases["check"].find("system-out") is not None
    assert cases["speculation.below_contract"].find("failure") is not None


def test_the_function_is_the_command(here: Path, stub: StubServer) -> None:
    path = deployment(here, stub)
    report = assay.gate(path, lint=True)
    assert report.verdict is Verdict.PASS
    with pytest.raises(UsageError, match="nearest is 'baseline'"):
        assay.gate(path, base_line="x")


# Figures and limits.


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_the_interval_of_a_median_holds_it_and_needs_five_values(values: list[float]) -> None:
    found = _median(values)
    if len(values) < 5:
        assert found["lo"] is None
    else:
        lo, value, hi = (found[name] for name in ("lo", "value", "hi"))
        assert lo is not None and value is not None and hi is not None
        assert lo <= value <= hi


def test_the_interval_of_a_median_is_that_of_the_tables() -> None:
    """Order statistics for one-sided 95 %: n = 5 → 1, 8 → 2, 11 → 3, 20 → 6 (binomial tables, P(X <
    k) ≤ 0.05).
    """
    for n, k in ((5, 1), (7, 1), (8, 2), (11, 3), (20, 6)):
        assert _median(list(range(1, n + 1)))["lo"] == k


def test_a_limit_is_judged_by_the_whole_interval() -> None:
    figure = Figure("acceptance", "accepted draft tokens", 70, 65, 75, "%")
    assert rule("min_acceptance", 0.60, [figure]).verdict is Verdict.PASS
    assert rule("min_acceptance", 0.70, [figure]).verdict is Verdict.INCONCLUSIVE
    assert rule("min_acceptance", 0.80, [figure]).verdict is Verdict.FAIL
    assert rule("min_acceptance", 0.10, []).verdict is Verdict.INCONCLUSIVE


@given(*[st.floats(-1e3, 1e3)] * 4, st.sampled_from(["higher", "lower", "zero"]))
def test_directions_are_opposite_when_the_runs_change_places(
    a: float, b: float, wide_a: float, wide_b: float, better: Any
) -> None:
    old = Figure("x", "x", a, a - abs(wide_a), a + abs(wide_a), better=better)
    new = Figure("x", "x", b, b - abs(wide_b), b + abs(wide_b), better=better)
    pair = direction(old, new), direction(new, old)
    if "same" in pair[0]:
        assert pair[0] == pair[1]
    elif abs(a) != abs(b):
        assert set(pair) == {"better", "worse"}


@pytest.mark.parametrize(
    "command", ["compare", "check", "tools", "spec", "verify", "kv eval", "none"]
)
def test_results_with_nothing_in_them_give_no_figures(command: str) -> None:
    assert figures(command, {}) == []
