"""No report, however odd its text and numbers, makes a writer raise, and no text of it is obeyed by
a reader.
"""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import html5lib
import terminal_picture as picture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from prometheus_client.parser import text_string_to_metric_families
from report_samples import ATTACKS, reports

from assay.report import console, html, junit, markdown, prometheus
from assay.report import console as beside
from assay.verdict import Finding, Quote, Report, Severity, Verdict

EVERY = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])

TAGS = frozenset(
    [
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "header",
        "div",
        "p",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "span",
        "main",
        "section",
        "dl",
        "dt",
        "dd",
        "ul",
        "ol",
        "li",
        "strong",
        "del",
        "b",
        "a",
        "article",
        "code",
        "pre",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "figure",
        "figcaption",
        "details",
        "summary",
        "mark",
        "svg",
        "desc",
        "text",
        "rect",
        "circle",
        "path",
        "line",
        "polyline",
        "polygon",
    ]
)
ATTRIBUTES = frozenset(
    [
        "lang",
        "charset",
        "http-equiv",
        "content",
        "name",
        "class",
        "id",
        "aria-hidden",
        "aria-label",
        "aria-labelledby",
        "tabindex",
        "role",
        "scope",
        "href",
        "rel",
        "viewbox",
        "xmlns",
        "x",
        "y",
        "x1",
        "y1",
        "x2",
        "y2",
        "cx",
        "cy",
        "r",
        "rx",
        "d",
        "points",
        "width",
        "height",
        "text-anchor",
    ]
)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: list[str] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {key for key, _ in attrs}
        self.links += [value or "" for key, value in attrs if key == "href"]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check_page(page: str) -> Tags:
    html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert not tags.open
    assert tags.tags <= TAGS
    assert tags.attributes <= ATTRIBUTES
    assert all(link.startswith(("https://", "http://")) for link in tags.links)
    assert not OBEYED.search(page)
    return tags


@EVERY
@given(reports())
def test_html_is_well_formed_and_holds_no_foreign_markup(report):
    page = html.render(report)
    page.encode("utf-8")
    record = "".join(check_page(page).text)
    start = record.index('{\n  "schema"')
    assert json.loads(record[start : record.rindex("}") + 1]) == report.to_json()


@EVERY
@given(
    reports(),
    st.sampled_from([20, 40, 80, 120]),
    st.sampled_from(["utf-8", "ascii", "latin-1", "cp437"]),
    st.booleans(),
)
def test_piped_console_output_is_plain_text(report, width, encoding, verbose):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    console.print_report(report, stream, width, verbose=verbose)
    beside.side_by_side([("one", report), ("two", report)], stream, width)
    stream.flush()
    assert not OBEYED.search(raw.getvalue().decode(encoding))


@EVERY
@given(reports(), st.sampled_from([20, 60, 120]), st.booleans())
def test_terminal_output_holds_no_sequences_but_our_colours(report, width, verbose):
    stream = Terminal()
    console.print_report(report, stream, width, verbose=verbose)
    beside.side_by_side([("one", report), ("two", report)], stream, width)
    assert not OBEYED.search(COLOURS.sub("", stream.getvalue()))


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@EVERY
@given(reports())
def test_markdown_is_inert(report):
    text = markdown.render(report)
    text.encode("utf-8")
    assert not OBEYED.search(text.replace("\u200b", ""))
    for token in flat(MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)):
        assert token.type not in (
            "html_block",
            "html_inline",
            "image",
            "hr",
            "blockquote_open",
            "code_block",
        )
        if token.type == "link_open":
            assert token.attrs["href"] in {r.strip() for f in report.findings for r in f.references}
        if token.type == "text":
            assert not re.search(r"@\w|#\d|\bGH-\d", token.content), token.content
        if token.type == "heading_open":
            assert token.tag in ("h2", "h3", "h4")


def flat(tokens):
    for token in tokens:
        yield token
        yield from flat(token.children or ())


@EVERY
@given(reports())
def test_junit_is_valid_xml_that_counts_right(report):
    text = junit.render(report)
    suites = ET.fromstring(text.encode("utf-8"))
    errors = sum(f.severity is Severity.ERROR for f in report.findings)
    red = int(suites.get("failures")) + int(suites.get("errors"))
    assert red >= errors
    assert (red > 0) == (errors > 0 or report.verdict is not Verdict.PASS)


@EVERY
@given(reports())
def test_prometheus_text_parses(report):
    families = list(text_string_to_metric_families(prometheus.render(report)))
    verdicts = next(f for f in families if f.name == "assay_verdict")
    assert {s.labels["verdict"] for s in verdicts.samples if s.value == 1} == {report.verdict.value}
    assert all(f.name.startswith("assay_") for f in families)


@settings(deadline=None, max_examples=6)
@given(reports())
def test_picture_is_valid_xml_and_loads_nothing(report):
    for picture_text in (
        picture.export_svg(report, 60),
        picture.export_comparison_svg([("a", report)], width=60),
    ):
        root = ET.fromstring(picture_text.encode("utf-8"))
        assert root.tag.endswith("svg")
        styles = "".join(e.text or "" for e in root.iter() if e.tag.endswith("style"))
        assert "url(" not in styles and "@import" not in styles and "@font-face" not in styles
        assert not any(
            e.tag.endswith(("script", "image", "foreignObject", "}a")) for e in root.iter()
        )


def test_every_attack_is_shown_as_text_in_the_page():
    quotes = tuple(Quote(f"attack {i}", text) for i, text in enumerate(ATTACKS))
    finding = Finding(
        "coherence.x", Severity.ERROR, ATTACKS[0], ATTACKS[1], {ATTACKS[3]: ATTACKS[2]}, ATTACKS[:3]
    )
    page = html.render(
        Report("check", Verdict.FAIL, {"model": ATTACKS[0]}, (finding,), blocks=quotes)
    )
    shown = "".join(check_page(page).text)
    for text in ("<script>alert(1)</script>", "</pre></details></main><h1>PASS</h1>", "⟨ESC⟩[31mred", "nul⟨NUL⟩bell⟨BEL⟩",  # noqa: E501
                 "⟨U+202E⟩gnol", "{{ 7*7 }}", "日本語のテキスト", "👩‍👩‍👧‍👦"):  # fmt: skip
        assert text in shown
    assert "<script" not in page
    assert "alert(1)</script>" not in page
