"""What a pass rests on: the least evidence, what is needed, and the short answer of a probe."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

import assay
from assay.coherence.options import CheckOptions
from assay.coherence.record import CheckRecord, NeedCheck
from assay.coherence.report import _sane
from assay.coherence.run import Check
from assay.errors import AssayError, UsageError
from cli.check_servers import ROUTES, Sane, serving
from coherence.check_records import record, samples
from stub_server import Exchange, StubServer, drip, hang, page, status


@pytest.mark.parametrize("stage", ["streams", "short texts", "long texts", "reference"])
def test_a_pass_without_its_evidence_is_inconclusive(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Check.run

    def cut(self: Check) -> None:
        run(self)
        found = next((s for s, _ in self.left_out if s.name == stage), None)
        assert found is None
        from assay.coherence.stages import Stage

        self.left_out.append((Stage(stage, "texts", "what it says"), "the budget is spent"))

    with serving(Sane()) as stub:
        whole = assay.check(stub.url, quick=True, throughput=False)
        monkeypatch.setattr(Check, "run", cut)
        report = assay.check(stub.url, quick=True, throughput=False)
    assert whole.exit_code == 0 and report.exit_code == 3
    (finding,) = (f for f in report.findings if f.id == "coherence.evidence")
    assert stage in finding.title and finding.remedies


def test_a_headline_does_not_call_degenerate_texts_sane() -> None:
    assert _sane(record(samples(ok=25, loops=4))) == "25 of 29 texts are sane"
    assert _sane(record(samples(ok=29))) == "29 texts are sane"


class Able(Sane):
    """A server that can do all that may be needed, but for what is named."""

    def __init__(self, without: str = "") -> None:
        super().__init__()
        self.without = without

    def __call__(self, e: Exchange) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": "391"}
        if "response_format" in e.body:
            text = '{"city": "Oslo", "population": 700000}'
            message["content"] = "Oslo has many." if self.without == "json" else text
        elif "Think step by step" in str(e.body.get("messages")):
            if self.without != "reasoning":
                message["reasoning_content"] = "17 times 20 is 340, and 51 more is 391."
        elif self.without == "tools" and e.body.get("tools"):
            message["content"] = "I would look out of the window."
        elif self.without == "streaming" and e.body.get("stream"):
            status(400, "no streams")(e)
            return
        else:
            super().__call__(e)
            return
        usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        e.json({"id": "x", "choices": [choice], "usage": usage})


@pytest.mark.parametrize("without", ["", "tools", "streaming", "reasoning", "json"])
def test_a_server_that_cannot_do_what_is_needed_fails(without: str) -> None:
    with serving(Able(without)) as stub:
        report = assay.check(
            stub.url, quick=True, throughput=False, need=("tools,streaming", "reasoning", "json")
        )
    bad = [f.evidence["need"] for f in report.findings if f.id == "coherence.need"]
    assert bad == ([without] if without else [])
    assert report.exit_code == (1 if without else 0)
    kept = CheckRecord.from_json(json.loads(json.dumps(report.to_json()))["results"])
    assert len(kept.needs) == 4 and isinstance(kept.needs[0], NeedCheck)


def test_an_unknown_need_is_named() -> None:
    with pytest.raises(UsageError, match="unknown need 'speech'"):
        CheckOptions(need=("tools,speech",))


def test_a_ready_server_is_told_so_with_three_requests() -> None:
    with serving(Sane()) as stub:
        report = assay.check(stub.url, ready=True)
        assert len(stub.exchanges) <= 3
    assert report.exit_code == 0 and report.results["ready"]["label"] == "ok"


@pytest.mark.parametrize(
    "behave",
    [status(503, "loading"), page(), hang(), drip(b" ", 0.2)],
    ids=["503", "page", "hang", "drip"],
)
def test_a_server_that_is_not_ready_is_told_within_ten_seconds(behave: Any) -> None:
    began = time.monotonic()
    with serving(behave) as stub:
        try:
            code = assay.check(stub.url, ready=True).exit_code
        except AssayError as error:
            code = error.verdict.exit_code
    assert code in (1, 2, 3)
    assert time.monotonic() - began < 20  # ten on a machine with nothing else to do


def test_a_server_of_garbage_is_not_ready() -> None:
    with StubServer() as stub:
        for route in ROUTES:
            from stub_server import healthy

            stub.on(route, healthy(chunks=("!",) * 60))
        report = assay.check(stub.url, ready=True)
    assert report.exit_code == 1 and report.findings[0].id == "server.not_ready"
