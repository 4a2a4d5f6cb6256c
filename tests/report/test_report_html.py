from __future__ import annotations

import json
import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import html5lib
import pytest
from report_samples import STORY, forest, full, healthy

from assay.report import html
from assay.verdict import Chart, Finding, Point, Quote, Report, Series, Severity, Table, Verdict


def tree(report):
    return html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(html.render(report))


def text(element):
    return "".join(element.itertext())


def by_class(root, css):
    return [e for e in root.iter() if isinstance(e.tag, str) and css in e.get("class", "").split()]


def test_the_page_stands_alone():
    page = html.render(full())
    assert "<script" not in page
    assert not re.search(r"\bsrc=|<link|@import|url\(|<iframe|<object|\bon[a-z]+=", page)
    assert "default-src 'none'" in page


def test_the_verdict_comes_first_with_its_sentence():
    root = tree(full())
    assert root.find(".//title").text == "FAIL · assay check"
    assert text(root.find(".//h1")).split() == ["✗", "FAIL"]
    (band,) = by_class(root, "verdict")
    assert band.tag == "header" and "bad" in band.get("class").split()
    assert "14 of 18 texts degenerate; the model itself does so in 1 of 18." in text(band)


@pytest.mark.parametrize(
    ("verdict", "tone"),
    [(Verdict.PASS, "good"), (Verdict.INCONCLUSIVE, "warn"), (Verdict.ERROR, "error")],
)
def test_every_verdict_has_its_colour(verdict, tone):
    (band,) = by_class(tree(Report("check", verdict)), "verdict")
    assert tone in band.get("class").split()


def test_an_invalid_figure_is_deleted_text_with_its_reason():
    root = tree(full())
    (deleted,) = root.iter("del")
    assert deleted.text == "183.2 tok/s"
    (card,) = by_class(root, "invalid")
    assert "Invalid. 14 of 18 timed texts degenerate" in text(card)
    assert [e.text for e in root.iter("strong")] == ["41 ms"]


def test_findings_stand_in_groups_the_gravest_first_with_all_they_say():
    root = tree(full())
    assert [text(e).split() for e in by_class(root, "group")] == [
        ["Errors", "1"],
        ["Warnings", "1"],
        ["Notes", "1"],
    ]
    first = by_class(root, "finding")[0]
    assert [e.text for e in first.iter("h5")] == [
        "Likely causes, the likeliest first",
        "What to do",
        "Evidence",
    ]
    assert [text(e) for e in first.find("ol")] == [
        "a corrupt shard: model-00001-of-00002.safetensors", "a wrong quantisation flag",
    ]  # fmt: skip
    commands = [text(e) for e in by_class(first, "command")]
    assert commands[0] == "assay verify ./SmolLM2-135M"
    assert commands[1].startswith("vllm serve") and "\n" not in commands[1]
    assert dict(zip(map(text, first.iter("dt")), map(text, first.iter("dd")), strict=True)) == {
        "texts": "18", "degenerate": "14", "interval": "0.548, 0.91", "reference.degenerate": "1",
    }  # fmt: skip
    assert [e.get("href") for e in first.iter("a")] == ["https://docs.example.org/coherence"]


def test_only_web_addresses_become_links():
    finding = Finding(
        "server.x",
        Severity.INFO,
        "t",
        references=("javascript:alert(1)", "docs, page 3", "http://x.example"),
    )
    root = tree(Report("check", Verdict.PASS, findings=(finding,)))
    assert [e.get("href") for e in root.iter("a")] == ["http://x.example"]


def test_tables_have_headers_and_tones():
    root = tree(full())
    table = next(root.iter("table"))
    assert [(e.text, e.get("scope")) for e in table.iter("th")] == [
        ("probe", "col"), ("status", "col"), ("degenerate", "col"),
    ]  # fmt: skip
    tones = {e.text: e.get("class") for e in table.iter("td")}
    assert tones["degenerate"] == "bad" and tones["ok"] == "good" and tones["skipped"] == "warn"
    assert tones["4"] == "number "


def test_the_onset_is_marked_where_it_is():
    root = tree(full())
    quoted = by_class(root, "text")[0]
    assert quoted.text == STORY
    assert [(e.tag, e.get("class")) for e in quoted] == [("mark", "onset"), ("span", "after")]
    assert quoted[0].text == "goes wrong at character 219"
    assert quoted[1].text.startswith("the the the")


def test_a_quote_keeps_its_first_newline():
    (quoted,) = by_class(
        tree(Report("check", Verdict.PASS, blocks=(Quote("q", "\n\n  x\n"),))), "text"
    )
    assert quoted.text == "\n\n  x\n"


def test_a_megabyte_of_text_is_cut_visibly_around_its_onset():
    quote = Quote("q", "a" * 500_000 + "b" * 500_000, "degenerate", 500_000)
    page = html.render(Report("check", Verdict.PASS, blocks=(quote,)))
    assert len(page) < 100_000
    root = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)
    assert [e.text for e in by_class(root, "gap")] == [
        "484,000 characters not shown",
        "496,000 characters not shown",
    ]
    assert [e.text for e in by_class(root, "after")] == ["b" * html.AROUND]


def test_long_tables_and_lists_are_cut_visibly():
    table = Table("t", ("path",), tuple((f"f{i}",) for i in range(html.MAX_ROWS + 7)))
    chart = Chart(
        "c", "line", (Series("s", tuple(Point(i, i) for i in range(html.MAX_LISTED + 5))),)
    )
    page = text(tree(Report("verify", Verdict.PASS, blocks=(table, chart))))
    assert "7 more rows not shown." in page
    assert "5 more points not listed." in page


def test_a_chart_has_its_picture_its_numbers_and_what_is_missing():
    root = tree(Report("check", Verdict.PASS, blocks=(forest(),)))
    figure = next(root.iter("figure"))
    assert figure.find(".//{http://www.w3.org/2000/svg}svg") is not None
    assert figure.find("figcaption").text.strip() == "1 point not drawn: not a finite number."
    rows = [[td.text for td in tr.iter("td")] for tr in figure.iter("tr")][1:]
    assert rows == [
        ["this server", "capital", "0.1 [0, 0.49]"], ["this server", "story", "1 [0.51, 1]"],
        ["reference", "capital", "0 [0, 0.49]"],
    ]  # fmt: skip
    empty = Report(
        "check",
        Verdict.PASS,
        blocks=(Chart("c", "bar", (Series("s", (Point("x", float("nan")),)),)),),
    )
    assert "Nothing to draw." in text(tree(empty))


def test_charts_of_one_page_have_ids_of_their_own():
    root = tree(Report("check", Verdict.PASS, blocks=(forest(), forest())))
    ids = [e.get("id") for e in root.iter() if isinstance(e.tag, str) and e.get("id")]
    assert len(ids) == len(set(ids))


def test_the_record_is_the_json_of_the_report():
    record = next(e for e in by_class(tree(full()), "json"))
    assert json.loads(record.text) == full().to_json()


def test_headings_do_not_skip_a_level():
    levels = [
        int(e.tag[1])
        for e in tree(full()).iter()
        if isinstance(e.tag, str) and re.fullmatch("h[1-6]", e.tag)
    ]
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_the_same_report_gives_the_same_page():
    assert html.render(healthy()) == html.render(healthy())


def test_the_svg_inside_is_valid_xml():
    svg = re.search(r"<svg.*?</svg>", html.render(full()), re.DOTALL).group()
    ET.fromstring(svg)


def test_a_detail_may_hold_a_command():
    finding = Finding(
        "server.x", Severity.INFO, "t", "first `vllm serve m`, then wait", {}, ("`assay check x`",)
    )
    root = tree(Report("check", Verdict.PASS, findings=(finding,)))
    assert [text(e) for e in by_class(root, "command")] == ["vllm serve m", "assay check x"]


def test_the_subject_is_named_at_the_top_and_told_in_full_at_the_end():
    subject = {
        "url": "http://x.example",
        "model": None,
        "server": {"kind": "vllm", "version": "0.32.0"},
    }
    root = tree(Report("check", Verdict.PASS, subject))
    (top,) = by_class(root, "subject")
    assert [(e.find("dt").text, e.find("dd").text) for e in top.iter("div")] == [
        ("url", "http://x.example"),
        ("engine", "vllm 0.32.0"),
    ]
    (record,) = by_class(root, "record")
    assert "server.version" in text(record) and "0.32.0" in text(record)


def test_a_table_that_the_next_one_shows_in_full_is_not_shown_twice() -> None:
    columns = ("rule", "state")
    short = Table("What decides", columns, [("text", "ok")])
    whole = Table("All rules", columns, [("text", "ok"), ("speed", "ok")], detail=True)
    other = Table("Speed", ("n", "s"), [("1", "2")], detail=True)
    page = Report("check", Verdict.PASS, blocks=[short, whole, other]).to_html()
    assert "What decides" not in page.partition("<details>")[0]
    assert "All rules" in page and "Speed" in page
    alone = Report("check", Verdict.PASS, blocks=[short, other]).to_html()
    assert "What decides" in alone


def test_code_fences_keep_their_lines() -> None:
    detail = "the call was\n```json\n{\n  <a>: `1`\n}\n```\nand more"
    found = Finding("server.x", Severity.INFO, "x", detail=detail)
    page = Report("check", Verdict.PASS, findings=[found]).to_html()
    assert '<pre class="command"><code>{\n  &lt;a&gt;: `1`\n}</code></pre>' in page
    assert "```" not in page.partition("<details>")[0]


def test_the_version_of_the_engine_is_on_the_page() -> None:
    subject = {"model": "m", "server": {"kind": "vllm", "version": "0.32.0"}}
    page = Report("check", Verdict.PASS, subject=subject).to_html()
    assert "<dt>engine</dt><dd>vllm 0.32.0</dd>" in page
