from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import terminal_picture as picture
from report_samples import full, healthy


def words(svg):
    root = ET.fromstring(svg.encode("utf-8"))
    lines: dict[str, str] = {}
    for element in root.iter("{http://www.w3.org/2000/svg}text"):
        lines[element.get("y")] = lines.get(element.get("y"), "") + "".join(element.itertext())
    return "\n".join(lines.values()).replace("\xa0", " ")


def test_the_picture_shows_the_verdict_the_struck_figure_and_the_onset():
    svg = picture.export_svg(full())
    text = words(svg)
    assert "✗ FAIL" in text and "183.2 tok/s" in text and "goes wrong at character 219" in text
    assert "assay check" in text
    struck = re.search(r"\.(assay-r\d+) \{[^}]*line-through", svg).group(1)
    assert re.search(rf'class="{struck}"[^>]*>183\.2', svg)


def test_the_comparison_shows_both_verdicts_in_their_colours():
    svg = picture.export_comparison_svg([("healthy", healthy()), ("corrupt", full())])
    text = words(svg)
    assert "✓ PASS" in text and "✗ FAIL" in text and "not measured" in text
    colours = {
        word: re.search(rf'class="(assay-r\d+)"[^>]*>[^<]*{word}', svg).group(1)
        for word in ("PASS", "FAIL")
    }
    assert colours["PASS"] != colours["FAIL"]


def test_the_picture_does_not_depend_on_the_environment(monkeypatch):
    before = picture.export_svg(full())
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "dumb")
    assert picture.export_svg(full()) == before
