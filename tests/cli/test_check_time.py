"""`assay check` and time: a budget, an early end, an extension, and what is said of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from check_servers import Sane, answer_to, answering, check, ids, run, save, serving, words

from assay.cli.main import invoke
from stub_server import Exchange, healthy

FLOOD = words("!" * 400)
LOOP = words("I am sure that " + "the name of " * 60)
MANY = ("--timeout", "20", "--samples", "3")


def slow(seconds: float) -> Any:
    """Sane answers, each after a while."""

    def behave(e: Exchange) -> None:
        if e.body.get("max_tokens", 0) > 10:
            time.sleep(seconds)
        Sane()(e)

    return behave


def times(report: dict[str, Any]) -> Any:
    return report["results"]["time"]


@pytest.mark.engine
def test_a_server_that_writes_garbage_is_told_after_its_first_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def garbage(e: Exchange) -> None:
        if e.body.get("max_tokens", 0) > 10:
            time.sleep(0.8)
        healthy(chunks=FLOOD, scores=False, echo=False)(e)

    with serving(garbage) as stub:
        code, report = run(capsys, "check", stub.url, *MANY)
        asked = len(stub.exchanges)
        _, everything = run(capsys, "check", stub.url, *MANY, "--all")
    assert (code, report["verdict"]) == (1, "fail")
    assert "certain" in times(report)["stopped"]
    assert len(stub.exchanges) - asked > asked
    texts = {p["name"]: p for p in report["results"]["probes"]}
    assert {s["label"] for s in texts["burst"]["samples"]} == {"degenerate"}
    assert texts["needle"]["status"] == "skipped" and "certain" in texts["needle"]["reason"]
    assert times(everything)["stopped"] is None
    assert all(p["samples"] for p in everything["results"]["probes"])


def test_a_fast_server_of_garbage_shows_a_text_of_every_tier(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "assay.coherence.run.EVIDENCE_SECONDS", 600.0
    )  # on a busy machine nothing is fast
    with answering(FLOOD, scores=False, echo=False) as stub:
        code, report = run(capsys, "check", stub.url, *MANY)
    shown = {p["name"] for p in report["results"]["probes"] if p["samples"]}
    assert code == 1 and {"france", "story", "fibonacci", "burst"} <= shown


def test_a_budget_ends_the_run_and_names_what_it_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(slow(0.7)) as stub:
        began = time.monotonic()
        code, report = run(capsys, "check", stub.url, *MANY, "--budget", "0.02")
        took = time.monotonic() - began
    assert took < 20
    assert code == 3
    left = times(report)["left_out"]
    assert left and all(item["unknown"] for item in left)
    (finding,) = [f for f in report["findings"] if f["id"] == "coherence.left_out"]
    assert finding["severity"] == "info" and left[0]["stage"] in finding["title"]
    assert {p["status"] for p in report["results"]["probes"]} == {"run", "skipped"}


@pytest.mark.engine
def test_a_server_that_slows_down_tenfold_gets_a_smaller_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answered: list[float] = []

    def tiring(e: Exchange) -> None:
        if e.body.get("max_tokens", 0) > 10:
            answered.append(
                0.0
            )  # as a model does: a token takes its time, and ten times as much later
            time.sleep(len(answer_to(e).split()) * (0.008 if len(answered) <= 16 else 0.08))
        Sane()(e)

    with serving(tiring) as stub:
        began = time.monotonic()
        invoke(["check", stub.url, *MANY, "--parallel", "2", "--budget", "0.35", "--json"])
        took = time.monotonic() - began
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert took < 90  # thrice the budget, on a machine that is busy
    slower = times(report)["slower"]
    assert slower["tokens_per_s"] < slower["tokens_per_s_before"] / 4
    assert "server.slower" in ids(report) and times(report)["left_out"]
    plans = [line for line in captured.err.splitlines() if "expected: about" in line]
    assert (
        len(plans) == 2 and "the server has slowed down" in plans[1] and "shortened: " in plans[1]
    )


def test_a_budget_that_is_long_enough_leaves_nothing_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(Sane()) as stub:
        code, report = run(capsys, "check", stub.url, *MANY, "--budget", "5")
    assert (code, times(report)["left_out"], times(report)["budget_s"]) == (0, [], 300.0)
    assert set(times(report)["expected_s"]) <= set(times(report)["stages_s"])


def test_a_budget_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run(capsys, "check", "http://127.0.0.1:9", "--budget", "0")
    assert (code, ids(report)) == (2, {"server.usage"})


def test_quick_is_a_plan_of_fewer_texts(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Sane()) as stub:
        code, report = run(capsys, "check", stub.url, "--timeout", "20", "--quick")
    counts = {p["name"]: len(p["samples"]) for p in report["results"]["probes"]}
    assert code == 0 and counts["story"] == 2 and times(report)["budget_s"] in (60.0, 180.0)


def test_an_unclear_rate_asks_for_more_texts_until_it_is_decided(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def weak(e: Exchange) -> None:
        """Loops in every story and every piece of code, and in Spanish: the rate of a small model,
        too high to pass.
        """
        text = answer_to(e)
        loops = "Whiskers" in text or "def fib" in text or "agua" in text
        healthy(chunks=LOOP if loops else words(text), scores=False, echo=False)(e)

    with serving(weak) as stub:
        code, report = run(capsys, "check", stub.url, *MANY, "--no-throughput")
        _, small = check(capsys, stub.url, "--no-throughput", "--probe", "story")
    assert times(report)["looks"] > 1
    assert code in (1, 3) and report["results"]["probes"][1]["samples"][-1]["seed"] > 3
    assert times(small)["looks"] == 1


def test_settings_that_differ_from_the_reference_are_findings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with serving(Sane()) as stub:
        _, before = check(capsys, stub.url, "--samples", "3")
        reference = save(tmp_path / "run.json", before)
        stub.on("GET /version", lambda e: e.json({"version": "0.33.0"}))
        page = stub_metrics(stub).replace('cache_dtype="auto"', 'cache_dtype="fp8"')
        stub.on("GET /metrics", lambda e: e.send(page.encode(), kind="text/plain; version=0.0.4"))
        code, report = check(capsys, stub.url, "--samples", "3", "--reference", str(reference))
        _, same = check(
            capsys,
            stub.url,
            "--samples",
            "3",
            "--reference",
            str(save(tmp_path / "b.json", report)),
        )
    changed = {
        f["evidence"]["setting"]: f
        for f in report["findings"]
        if f["id"] == "server.setting_changed"
    }
    assert code == 0 and set(changed) == {"version", "kv_cache_dtype"}
    assert (
        changed["kv_cache_dtype"]["severity"] == "warning"
        and "fp8" in changed["kv_cache_dtype"]["title"]
    )
    assert changed["version"]["severity"] == "info"
    assert "server.setting_changed" not in ids(same)


def stub_metrics(stub: Any) -> str:
    from stub_server import METRICS

    return METRICS


def test_rules_that_were_not_examined_are_named_with_their_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(Sane()) as stub:
        _, report = check(capsys, stub.url, "--samples", "3")
        capsys.readouterr()
        invoke(["check", stub.url, "--samples", "3", "--repeats", "3"])
        shown = capsys.readouterr().out
    states = {r["rule"]: r for r in report["results"]["rules"]}
    assert states["bits_per_byte"]["state"] == "not_examined" and states["bits_per_byte"]["says"]
    assert states["prompts"]["state"] == "not_examined"
    assert "not examined" in shown
    assert len(shown.splitlines()) <= 40 and max(map(len, shown.splitlines())) <= 100


def test_the_expected_time_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Sane()) as stub:
        invoke(["check", stub.url, "--samples", "2", "--repeats", "3", "--json"])
    captured = capsys.readouterr()
    assert "expected: about" in captured.err
    assert json.loads(captured.out)["results"]["time"]["expected_s"]


def test_the_tools_suite(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from assay.coherence.tools import cases

    by_ask = {case.ask: case for case in cases()}

    def right(e: Exchange) -> None:
        asked = str(e.body["messages"][-1]["content"]) if "messages" in e.body else ""
        case = next((c for ask, c in by_ask.items() if asked.startswith(ask)), None)
        if case is None or e.body.get("max_tokens") == 1:
            Sane()(e)
            return
        text = json.dumps(case.expect)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if case.name:
            function = {"name": case.name, "arguments": text}
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": function}],
            }
        usage = {"prompt_tokens": 60, "completion_tokens": 9, "total_tokens": 69}
        e.json(
            {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
        )

    with serving(right) as stub:
        code, report = run(capsys, "check", stub.url, "--suite", "tools", "--timeout", "20")
        reference = save(tmp_path / "tools.json", report)
        again_code, again = run(
            capsys,
            "check",
            stub.url,
            "--suite",
            "tools",
            "--timeout",
            "20",
            "--reference",
            str(reference),
        )
    levels = report["results"]["tools"]
    assert code == 0 and [level["concurrency"] for level in levels] == [1, 8, 32]
    for level in levels:
        assert [level[n] for n in ("asked", "parsed", "schema_valid", "right")] == [48, 48, 48, 48]
        assert (
            level["reference"] is None
            and level["p_value"] is None
            and level["right_rate"]["lo"] > 0.9
        )
    assert again_code == 0
    assert [(level["reference"], level["p_value"]) for level in again["results"]["tools"]] == [
        (48, 1.0)
    ] * 3


def test_the_tools_suite_is_skipped_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def none(e: Exchange) -> None:
        (
            Sane()
            if not e.body.get("tools")
            else lambda x: x.json({"error": {"message": "no tools here"}}, status=400)
        )(e)

    with serving(none) as stub:
        code, report = run(capsys, "check", stub.url, "--suite", "tools", "--timeout", "20")
    assert (code, report["results"]["tools"]) == (3, [])
    assert "no tools here" in report["results"]["tools_skipped"]
    assert "no tools here" in report["findings"][0]["title"]
