"""Cards: figures with intervals, the Hub's format read by two independent parsers, a badge that no
text can break.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

import assay
from assay.errors import UsageError
from assay.gates.card import (
    BEGIN,
    END,
    CardOptions,
    badge,
    card,
    eval_results,
    read_report,
    run_card,
)
from assay.gates.figures import figures, short
from assay.report.text import visible
from assay.verdict import Verdict
from cli.check_servers import run

yaml = pytest.importorskip("yaml")
SVG = "{http://www.w3.org/2000/svg}"

# A result of `assay compare` with the keys that a card reads.
FIGURES = {
    "ACCEPT": ((0.0012, 0.0010, 0.0014), (0.10, -0.10, 0.30), (98.7, 98.1, 99.2)),
    "MARGINAL": ((0.0150, 0.0140, 0.0160), (1.50, 1.20, 1.80), (95.5, 95.2, 95.9)),
    "REJECT": ((0.1200, 0.1100, 0.1300), (9.00, 7.50, 10.5), (80.0, 78.0, 82.0)),
    "INCONCLUSIVE": ((0.0100, 0.0050, 0.0150), (0.90, -0.50, 2.30), (95.5, 94.0, 97.0)),
}
VERDICTS = {"ACCEPT": "pass", "MARGINAL": "fail", "REJECT": "fail", "INCONCLUSIVE": "inconclusive"}
CODES = {"pass": 0, "fail": 1, "inconclusive": 3, "error": 2}
BOUNDS = {"ACCEPT": (0.01, 1.0, 95.0), "MARGINAL": (0.03, 3.0, 85.0)}


def compared(grade: str = "ACCEPT", **results: Any) -> dict[str, Any]:
    kld, dppl, top1 = (dict(zip(("value", "lo", "hi"), x, strict=True)) for x in FIGURES[grade])
    changed = {
        "value": 100 - top1["value"],
        "lo": 100 - top1["hi"],
        "hi": 100 - top1["lo"],
        "kind": "exact",
    }
    margins = [
        {"metric": metric, "grade": name, "bound": bound, "p": 0.01, "p_holm": 0.02}
        for name, bounds in BOUNDS.items()
        for metric, bound in zip(("kld", "dppl_pct", "top1_pct"), bounds, strict=True)
    ]
    error = {
        "id": "fidelity.reject",
        "severity": "error",
        "title": "not the same <b>distribution</b> | @everyone",
    }
    return {
        "schema": "assay/1",
        "command": "compare",
        "verdict": VERDICTS[grade],
        "exit_code": CODES[VERDICTS[grade]],
        "subject": {
            "reference": "hf:/home/somebody/models/qwen",
            "candidates": ["hf:/home/somebody/models/qwen-int4"],
            "plan": {
                "reference": "hf:/home/somebody/models/qwen",
                "candidates": ["hf:/home/somebody/models/qwen-int4"],
                "text": ["/home/somebody/wiki.txt"],
                "windows": 32,
                "length": 1024,
                "margin_ppl": 0.02,
                "floors": False,
                "batch": 0,
                "path": "prefill",
                "seed": 0,
            },
        },
        "findings": [error] if grade == "REJECT" else [],
        "results": {
            "grade": grade,
            "windows": 32,
            "tokens": 32_736,
            "candidate": "hf:qwen-int4",
            "kld": {"mean": kld.pop("value"), **kld, "kind": "exact"},
            "dppl_pct": dppl,
            "top1_pct": {"value": 90.0, "lo": 89.0, "hi": 91.0},
            "top1_beyond_rounding_pct": changed,
            "margins": margins,
            "self_test": False,
            **results,
        },
        "environment": {"assay": "0.2.0", "packages": {"torch": "2.13.0"}},
    }


def stored(folder: Path, data: dict[str, Any], name: str = "result.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_card_has_every_figure_its_sizes_and_the_command(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(here, compared())
    code, report = run(capsys, "card", "result.json", "--out", "card", "--name", "Qwen [int4]")
    assert code == 0
    assert report["results"]["badge"] == "ACCEPT top-1 ≥ 98.1 margin 95 %"
    text = (here / "card" / "card.md").read_text()
    assert "Qwen \\[int4\\]" in text
    text = text.replace("\\", "")
    for expected in (
        (
            "| mean KL | 0.0012 nats | 0.001 to 0.0014 (95 %) | ≤ 0.01 nats | 32 windows, 32,736"
            " tokens |"
        ),
        "ACCEPT",
    ):
        assert expected in text
    command = next(line for line in text.splitlines() if line.startswith("Repeat it:"))
    assert shlex.split(command.split("`")[1]) == [
        "assay",
        "compare",
        "hf:qwen",
        "hf:qwen-int4",
        "--text",
        "wiki.txt",
        "--windows",
        "32",
        "--no-floors",
        "--margin-ppl",
        "2%",
    ]
    written = {str(p.relative_to(here / "card")) for p in (here / "card").rglob("*") if p.is_file()}
    assert written == {"badge.svg", "card.md", ".eval_results/assay-compare.yaml"}
    assert all("somebody" not in (here / "card" / name).read_text() for name in written)


def test_the_hub_reads_its_results(here: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    if not hasattr(hub, "parse_eval_result_entries"):
        pytest.skip("this huggingface_hub knows no .eval_results")
    stored(here, compared())
    assay.card("result.json", out="card", dataset="me/fidelity", source="https://example.com/run")
    entries = yaml.safe_load((here / "card" / ".eval_results" / "assay-compare.yaml").read_text())
    parsed = hub.parse_eval_result_entries(entries)
    assert {(e.dataset_id, e.task_id): e.value for e in parsed} == {
        ("me/fidelity", "kld"): 0.0012,
        ("me/fidelity", "dppl_pct"): 0.1,
        ("me/fidelity", "top1_pct"): pytest.approx(98.7),
    }
    assert {e.source_url for e in parsed} == {"https://example.com/run"}
    assert "[0.001, 0.0014] (95 %); 32 windows, 32,736 tokens" in parsed[0].notes
    assert "repeat: assay compare" in parsed[0].notes
    assert hub.eval_result_entries_to_yaml(parsed) == entries


@pytest.mark.parametrize("grade", list(FIGURES))
def test_the_badge_says_the_grade_and_what_decides(here: Path, grade: str) -> None:
    report = assay.card(str(stored(here, compared(grade))), out="card")
    svg = ET.parse(here / "card" / "badge.svg").getroot()
    says = [text.text for text in svg.iter(f"{SVG}text")]
    assert says == ["assay", report.results["badge"]]
    assert (
        report.results["badge"]
        == {
            "ACCEPT": "ACCEPT top-1 ≥ 98.1 margin 95 %",
            "MARGINAL": "MARGINAL Δppl within ±1.8 of 3 %",
            "REJECT": "REJECT KL ≥ 0.11 of 0.03",
            "INCONCLUSIVE": "INCONCLUSIVE Δppl within ±2.3 of 3 %",
        }[grade]
    )
    assert report.exit_code == 0


def test_findings_and_model_text_are_inert(here: Path) -> None:
    assay.card(str(stored(here, compared("REJECT"))), out="card")
    text = (here / "card" / "card.md").read_text()
    assert "<b>" not in text.replace("\\<b", "")
    assert "@everyone" not in text


def test_what_did_not_pass_is_never_shown_as_accepted(here: Path) -> None:
    good = stored(here, compared(), "good.json")
    spec = {
        **compared(),
        "command": "spec",
        "verdict": "fail",
        "exit_code": 1,
        "subject": {"sources": ["/x/vllm.log"]},
        "results": {
            "record": {"drafted": 100},
            "evidence": {"acceptance": {"value": 0.01, "lo": 0.0, "hi": 0.05}},
        },
    }
    bad = stored(here, spec, "spec.json")
    assert assay.card(good, bad, out="card").results["badge"] == "FAIL spec"
    cut = stored(here, compared() | {"exit_code": 130}, "cut.json")
    assert assay.card(cut, out="card").results["reports"][0]["verdict"] == "inconclusive"
    failed = stored(here, compared() | {"verdict": "error", "exit_code": 2}, "error.json")
    assert assay.card(failed, out="card").results["badge"].startswith("ERROR")
    itself = stored(here, compared(self_test=True), "self.json")
    assert assay.card(itself, out="card").results["badge"].startswith("SELF-TEST")
    assert assay.card(good, cut, out="card").results["badge"].startswith("INCONCLUSIVE")


def test_a_gate_is_shown_part_by_part(here: Path) -> None:
    one = compared()
    part = {
        "name": "compare",
        "verdict": "pass",
        "subject": one["subject"],
        "results": one["results"],
    }
    logs = {
        "name": "spec",
        "verdict": "pass",
        "subject": {"sources": ["a.log"]},
        "limits": [{"name": "min_acceptance", "limit": 60.0, "verdict": "pass"}],
        "results": {
            "record": {"drafted": 100},
            "evidence": {"acceptance": {"value": 0.7, "lo": 0.65, "hi": 0.75}},
        },
    }
    gate = {
        "schema": "assay/1",
        "command": "gate",
        "verdict": "pass",
        "exit_code": 0,
        "subject": {},
        "findings": [],
        "results": {"contract": {"file": "assay.toml", "sha256": "ab" * 32}, "parts": [part, logs]},
    }
    report = assay.card(stored(here, gate), out="card")
    assert report.results["badge"] == "ACCEPT top-1 ≥ 98.1 margin 95 %"
    text = (here / "card" / "card.md").read_text()
    assert "assay gate --contract assay.toml" in text
    assert "| accepted draft tokens | 70 % | 65 to 75 (95 %) | ≥ 60 % | 100 draft tokens |" in text
    gate["results"]["parts"] = []
    with pytest.raises(UsageError, match="examined nothing"):
        assay.card(stored(here, gate), out="card")
    gate["results"]["parts"] = [part]
    gate |= {"verdict": "fail", "exit_code": 1}
    assert assay.card(stored(here, gate), out="card").results["grade"] == "FAIL"


def test_one_of_several_candidates_is_named(here: Path) -> None:
    several = compared()
    both = [{**compared(g)["results"], "candidate": f"hf:{g}"} for g in ("ACCEPT", "REJECT")]
    several["results"] = {"candidates": both}
    path = stored(here, several)
    with pytest.raises(UsageError, match="several candidates"):
        assay.card(path)
    assert assay.card(path, candidate="hf:REJECT").results["grade"] == "REJECT"
    assert assay.card(path, candidate="hf:ACCEPT").results["grade"] == "ACCEPT"


@pytest.mark.parametrize(
    "content",
    ["", "3", "{}", "[" * 100_000, '{"schema": "assay/2"}', '{"schema": "assay/1", "command": "demo"}',  # noqa: E501
     '{"schema": "assay/1", "command": "compare", "verdict": "fine", "exit_code": 0, "results": {}, "subject": {}}',  # noqa: E501
     '{"schema": "assay/1", "command": "compare", "verdict": "pass", "exit_code": 0, "results": 3, "subject": {}}'],  # noqa: E501
)  # fmt: skip
def test_what_is_no_report_is_refused_in_one_line(here: Path, content: str) -> None:
    (here / "result.json").write_text(content)
    with pytest.raises(UsageError, match="is no report that a card can show") as caught:
        assay.card("result.json", out="card")
    assert "\n" not in caught.value.message
    assert not (here / "card").exists()
    with pytest.raises(UsageError, match="cannot read the report"):
        assay.card("none.json")


def test_the_section_of_a_readme_is_put_and_replaced(here: Path) -> None:
    readme = here / "README.md"
    readme.write_bytes(b"---\r\nlicense: mit\r\n---\r\n# Model\r\n")
    result = stored(here, compared())
    assay.card(result, out="card", readme=readme)
    first = readme.read_bytes()
    assert first.startswith(b"---\r\nlicense: mit\r\n---\r\n# Model\n\n" + BEGIN.encode())
    assay.card(result, out="card", readme=readme)
    assert readme.read_bytes() == first
    readme.write_text(readme.read_text() + "After.\n")
    assay.card(stored(here, compared("REJECT")), out="card", readme=readme)
    text = readme.read_text()
    assert "REJECT" in text
    assert "ACCEPT top" not in text
    assert text.endswith("After.\n")
    assert "(<card/badge.svg>)" in text
    for broken in (BEGIN, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"):
        readme.write_text(broken)
        with pytest.raises(UsageError, match="no single pair"):
            assay.card(result, out="card", readme=readme)
        assert readme.read_text() == broken


def test_a_folder_that_cannot_be_written_is_one_line(here: Path) -> None:
    (here / "card").write_text("a file")
    with pytest.raises(assay.AssayError, match="cannot write"):
        assay.card(stored(here, compared()), out="card")


# Any text, any number


NO_NUL = st.characters(exclude_characters="\0")  # an option refuses it


@given(
    st.text(max_size=40),
    st.text(NO_NUL, max_size=40),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_text_and_number_is_yaml(label: str, dataset: str, value: float) -> None:
    data = compared(candidate=label)
    data["results"]["kld"]["mean"] = value
    (measured,) = read_report_of(data)
    text = eval_results(measured, CardOptions(dataset=dataset or "a/b"))
    entries = yaml.safe_load(text)
    assert entries[0]["value"] == value
    assert isinstance(entries[0]["value"], float)
    assert entries[0]["dataset"]["id"] == visible(" ".join((dataset or "a/b").split()))
    assert all(entry.keys() <= {"dataset", "value", "notes"} for entry in entries)


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_text_is_a_well_formed_badge(grade: str, margin: str) -> None:
    root = ET.fromstring(badge(grade, margin))
    assert root.tag == f"{SVG}svg"
    assert {child.tag for child in root} == {f"{SVG}title", f"{SVG}rect", f"{SVG}text"}
    assert len(list(root.iter())) == 6
    assert not {
        name for child in root.iter() for name in child.attrib if name.lower().startswith("on")
    }


@given(st.text(max_size=60))
def test_any_label_stays_in_its_line_of_the_card(label: str) -> None:
    (measured,) = read_report_of(compared(candidate=label))
    text = card([measured], CardOptions(), "badge.svg")
    assert len(text.splitlines()) == len(
        card([*read_report_of(compared(candidate="x"))], CardOptions(), "badge.svg").splitlines()
    )


def read_report_of(data: dict[str, Any]) -> list[Any]:
    from assay.gates.card import _measured

    return list(_measured(data, None, "result.json"))


@given(st.floats(-1e9, 1e9))
def test_a_shortened_number_is_the_number(value: float) -> None:
    assert float(short(value)) == pytest.approx(value, rel=5.1e-3, abs=1e-300)


def test_top1_is_agreement_in_a_real_report(here: Path) -> None:
    """The keys of `Summary.to_json` itself: `top1_beyond_rounding_pct` is the share of tokens that
    differ.
    """
    for changed, agrees in (
        ((0.2, 0.0, 0.4), (99.8, 99.6, 100.0)),
        ((None, 0.0, 30.0), (90.0, 89.0, 91.0)),
    ):
        data = compared()
        data["results"]["top1_beyond_rounding_pct"] = dict(
            zip(("value", "lo", "hi"), changed, strict=True)
        )
        figure = next(f for f in figures("compare", data["results"]) if f.key == "top1_pct")
        assert (figure.value, figure.lo, figure.hi) == pytest.approx(agrees)


def test_a_codec_is_shown_with_its_ratio_and_its_command(here: Path) -> None:
    plan = {"model": "/home/somebody/qwen", "codec": "int(bits=4)", "windows": 8, "length": 512}
    kv = compared("REJECT", codec="int(bits=4)", bytes={"ratio": 3.9}) | {
        "command": "kv eval", "subject": {"model": "/home/somebody/qwen", "plan": plan},
    }  # fmt: skip
    (measured,) = read_report(stored(here, kv))
    assert measured.label == "qwen with int(bits=4)"
    assert {f.key: f.value for f in measured.figures}["kv_ratio"] == 3.9
    words = shlex.split(measured.repeat)
    assert words[:6] == ["assay", "kv", "eval", "qwen", "--codec", "int(bits=4)"]
    assert words[words.index("--windows") + 1] == "8"


def test_a_report_need_not_be_a_file(here: Path) -> None:
    report = assay.Report(
        "spec", Verdict.INCONCLUSIVE, {"sources": ["a.log"]}, results={"record": {}}
    )
    assert run_card([report], CardOptions(out=Path("card"))).results["badge"] == "INCONCLUSIVE spec"
    assert read_report(report)[0].label == "a.log"
