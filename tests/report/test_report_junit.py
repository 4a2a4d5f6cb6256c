"""The JUnit document, against the shape that Jenkins' and GitLab's readers require."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
from report_samples import full, healthy

from assay.report import junit
from assay.verdict import Finding, Report, Severity, Verdict

# element: (required attributes, allowed attributes, allowed children)
SHAPE = {
    "testsuites": ({"name"}, {"name", "tests", "failures", "errors", "skipped"}, {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors", "skipped"},
        {"name", "tests", "failures", "errors", "skipped"},
        {"properties", "testcase"},
    ),
    "properties": (set(), set(), {"property"}),
    "property": ({"name", "value"}, {"name", "value"}, set()),
    "testcase": (
        {"name", "classname"},
        {"name", "classname"},
        {"failure", "error", "skipped", "system-out"},
    ),
    "failure": ({"type", "message"}, {"type", "message"}, set()),
    "error": ({"type", "message"}, {"type", "message"}, set()),
    "skipped": ({"message"}, {"message"}, set()),
    "system-out": (set(), set(), set()),
}


def parsed(report, **options):
    root = ET.fromstring(junit.render(report, **options).encode("utf-8"))
    check(root)
    return root


def check(element):
    required, allowed, children = SHAPE[element.tag]
    assert required <= set(element.keys()) <= allowed
    assert {child.tag for child in element} <= children
    if element.tag == "testcase":
        assert len([c for c in element if c.tag != "system-out"]) <= 1
    if element.tag == "testsuite":
        cases = element.findall("testcase")
        assert int(element.get("tests")) == len(cases)
        assert len({(c.get("classname"), c.get("name")) for c in cases}) == len(cases)
        for attribute, tag in (
            ("failures", "failure"),
            ("errors", "error"),
            ("skipped", "skipped"),
        ):
            assert int(element.get(attribute)) == sum(c.find(tag) is not None for c in cases)
    for child in element:
        check(child)


def cases(root):
    return {c.get("name"): [child.tag for child in c] for c in root.iter("testcase")}


def test_a_failing_report():
    root = parsed(full())
    assert cases(root) == {
        "coherence.degenerate": ["failure"],
        "coherence.needle": ["system-out"],
        "server.no_tools": ["system-out"],
        "tools": ["skipped"],
    }
    failure = next(root.iter("failure"))
    assert (
        failure.get("message") == "14 of 18 texts degenerate; the model itself does so in 1 of 18"
    )
    assert "to do: verify the checkpoint: `assay verify ./SmolLM2-135M`" in failure.text
    assert next(root.iter("skipped")).get("message") == "the server answers 400 to `tools`"
    properties = {p.get("name"): p.get("value") for p in root.iter("property")}
    assert properties["decode speed"] == "183.2 tok/s (invalid: 14 of 18 timed texts degenerate)"


def test_a_passing_report_has_one_passed_case():
    assert cases(parsed(healthy())) == {"verdict": ["system-out"]}


def test_what_could_not_be_examined_is_an_error_and_not_a_failure():
    finding = Finding("server.unreachable", Severity.ERROR, "connection refused")
    root = parsed(Report("check", Verdict.ERROR, findings=(finding,)))
    assert cases(root) == {"server.unreachable": ["error"]}
    assert cases(parsed(Report("check", Verdict.ERROR))) == {"verdict": ["error"]}


@pytest.mark.parametrize(("inconclusive", "tag"), [("error", "error"), ("skipped", "skipped")])
def test_an_inconclusive_verdict_is_red_or_yellow_but_never_green(inconclusive, tag):
    finding = Finding("coherence.thin", Severity.WARNING, "too few samples")
    root = parsed(
        Report("check", Verdict.INCONCLUSIVE, findings=(finding,)), inconclusive=inconclusive
    )
    assert cases(root) == {"verdict": [tag], "coherence.thin": ["system-out"]}


def test_findings_of_one_kind_are_cases_of_their_own():
    finding = Finding("checkpoint.digest_mismatch", Severity.ERROR, "differs")
    root = parsed(Report("verify", Verdict.FAIL, findings=(finding, finding)))
    assert list(cases(root)) == ["checkpoint.digest_mismatch", "checkpoint.digest_mismatch (2)"]


def test_what_xml_cannot_hold_is_replaced():
    odd = "a\x00b\x1bc\ufffe\uffff\ud800d <&>\"' ]]>"
    finding = Finding("server.x", Severity.ERROR, odd, odd, {odd: odd}, (odd,), (odd,), (odd,))
    text = junit.render(
        Report(
            odd, Verdict.FAIL, {odd: odd}, (finding,), {"p": [{"status": "skipped", "name": odd}]}
        )
    )
    root = ET.fromstring(text.encode("utf-8"))
    assert "a⟨NUL⟩b⟨ESC⟩c" in next(root.iter("failure")).get("message")
    assert "<&>\"' ]]>" in next(root.iter("failure")).text


def test_skipped_steps_are_found_at_any_depth():
    results = {
        "a": [{"b": {"status": "skipped", "note": "why"}}, {"path": "f", "status": "verified"}]
    }
    assert list(junit.skipped(results)) == [("results.a[0].b", "why")]
