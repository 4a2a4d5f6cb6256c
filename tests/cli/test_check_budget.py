"""`assay check` ends within its budget, whatever the server does in whichever stage."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from check_servers import Sane, serving

from stub_server import Exchange, hang

BUDGET_S = 9.0


def streams(e: Exchange) -> bool:
    return bool(e.body.get("stream"))


def scores(e: Exchange) -> bool:
    return "prompt_logprobs" in e.body or bool(e.body.get("echo"))


def tools(e: Exchange) -> bool:
    return bool(e.body.get("tools"))


def turns(e: Exchange) -> bool:
    return len(e.body.get("messages", ())) > 2


def every_answer(e: Exchange) -> bool:
    return bool(e.body)


def checked(stalls: Callable[[Exchange], bool], *more: str) -> tuple[int, dict[str, Any]]:
    def behaviour(e: Exchange) -> None:
        (hang() if stalls(e) else Sane())(e)

    with serving(behaviour) as stub:
        words = ["check", stub.url, "--json", "--budget", str(BUDGET_S / 60), "--timeout", "300"]
        done = subprocess.run(
            [sys.executable, "-m", "assay", *words, *more],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_stage_that_stalls_is_given_up() -> None:
    code, report = checked(turns)
    assert report["results"]["time"]["seconds"] < 1.15 * BUDGET_S
    assert code in (0, 3) and report["verdict"] in ("pass", "inconclusive")
    assert any(probe["samples"] for probe in report["results"]["probes"])


def test_half_way_it_says_what_it_would_say() -> None:
    with serving(lambda e: (time.sleep(0.3), Sane()(e))) as stub:
        done = subprocess.run(
            [sys.executable, "-m", "assay", "check", stub.url, "--budget", "0.1", "--all"],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert "half of the time is spent: " in done.stderr
    assert "so far, by " in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stalls", "more"),
    [(every_answer, ()), (streams, ()), (scores, ()), (tools, ("--suite", "tools"))],
    ids=("every answer", "streams", "scores", "tools"),
)
def test_what_stalls_while_the_server_is_looked_at_is_given_up_too(
    stalls: Callable[[Exchange], bool], more: tuple[str, ...]
) -> None:
    code, report = checked(stalls, *more)
    assert code in (2, 3)
    assert report["verdict"] in ("error", "inconclusive")
