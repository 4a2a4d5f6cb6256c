"""The page in a real browser: what is seen, in which colours, without scripts and without a
network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from report_samples import full, healthy

from assay.report import html
from assay.verdict import Band, Chart, Metric, Point, Report, Series, Verdict

Image = pytest.importorskip("PIL.Image")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

WIDTH, HEIGHT = 1000, 900
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
PAPER, INK, BLUE = (255, 255, 255), (26, 29, 35), (37, 99, 235)
BANDS = {
    Verdict.PASS: (21, 115, 71), Verdict.FAIL: (192, 38, 55), Verdict.INCONCLUSIVE: (154, 101, 0),
    Verdict.ERROR: (122, 47, 168),
}  # fmt: skip

Colour = tuple[int, int, int]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run the browser with these arguments, in a fresh profile, and return what it printed."""
    found = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if found is None:
        reason = "chromium is not installed (apt-get install chromium)"
        if os.environ.get("ASSAY_REQUIRE_CHROMIUM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    profile = tmp_path_factory.mktemp("chromium")

    def run(*arguments: str) -> str:
        command = [found, *FLAGS, f"--user-data-dir={profile}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run


@pytest.fixture
def shoot(chromium: Callable[..., str], tmp_path: Path) -> Callable[..., object]:
    def picture(report: Report, *arguments: str, height: int = HEIGHT):
        page, shot = tmp_path / "report.html", tmp_path / "report.png"
        page.write_text(html.render(report), encoding="utf-8")
        chromium(
            f"--window-size={WIDTH},{height}", f"--screenshot={shot}", *arguments, page.as_uri()
        )
        image = Image.open(shot).convert("RGB")
        assert image.size == (WIDTH, height)
        return image

    return picture


def near(a: Colour, b: Colour, tolerance: int = 6) -> bool:
    return all(abs(x - y) <= tolerance for x, y in zip(a, b, strict=True))


def places(image, colour: Colour, tolerance: int = 6) -> list[tuple[int, int]]:
    found = (np.abs(np.asarray(image, dtype=int) - colour) <= tolerance).all(axis=2)
    return [(int(x), int(y)) for y, x in np.argwhere(found)]


def band_bottom(image, colour: Colour) -> int:
    """The height of the band: rows from the top whose outermost pixels have its colour."""
    y = 0
    while (
        y < image.height
        and near(image.getpixel((2, y)), colour)
        and near(image.getpixel((WIDTH - 3, y)), colour)
    ):
        y += 1
    return y


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.ERROR])
def test_the_band_has_the_colour_of_the_verdict_and_white_words(shoot, verdict):
    image = shoot(Report("check", verdict, {"model": "m"}))
    bottom = band_bottom(image, BANDS[verdict])
    assert 100 < bottom < 250
    assert len(places(image.crop((0, 0, WIDTH, bottom)), PAPER)) > 1500
    body = image.crop((0, bottom, WIDTH, HEIGHT))
    assert len(places(body, PAPER)) > 0.9 * body.width * body.height
    assert len(places(body, INK, 60)) > 100


def test_a_failing_page_shows_its_figures_and_findings(shoot):
    image = shoot(full(), height=2400)
    bottom = band_bottom(image, BANDS[Verdict.FAIL])
    assert 100 < bottom < 250
    # No screenful is blank: each has ink.
    for top in range(bottom, 1800, 300):
        assert len(places(image.crop((0, top, WIDTH, top + 300)), INK, 60)) > 300, top
    # The struck-out figure has a red line across its text, on its own red-tinted card.
    card = places(image.crop((0, bottom, WIDTH, 700)), (253, 235, 237), 2)
    assert len(card) > 5000
    rows: dict[int, int] = {}
    for _, y in places(image.crop((0, bottom, 500, 700)), BANDS[Verdict.FAIL]):
        rows[y] = rows.get(y, 0) + 1
    assert sum(count > 80 for count in rows.values()) >= 2


def test_bars_are_drawn_to_scale_in_the_colour_of_their_series(shoot):
    series = Series("accepted", (Point("first", 0.8), Point("second", 0.4), Point("third", 0.2)))
    chart = Chart(
        "Acceptance", "bar", (series,), "position", "share", (Band("dense code", 0.2, 0.5),)
    )
    image = shoot(Report("spec", Verdict.PASS, blocks=(chart,)))
    rows: dict[int, list[int]] = {}
    for x, y in places(image, BLUE):
        rows.setdefault(y, []).append(x)
    lengths = sorted({max(xs) - min(xs) + 1 for xs in rows.values() if len(xs) > 20}, reverse=True)
    groups = [lengths[0]]
    for length in lengths:
        if length < groups[-1] - 12:
            groups.append(length)
    assert len(groups) == 3
    assert groups[1] / groups[0] == pytest.approx(0.5, abs=0.03)
    assert groups[2] / groups[0] == pytest.approx(0.25, abs=0.03)
    # The band is a wash of green behind the bars.
    assert len(places(image, (217, 237, 227), 5)) > 2000


def test_a_line_and_its_ribbon_are_drawn(shoot):
    points = tuple(Point(k, 2.0**k, 2.0**k * 0.8, 2.0**k * 1.25) for k in range(8))
    chart = Chart("Growth", "line", (Series("s", points),), "depth", "NLL", log_y=True)
    image = shoot(Report("compare", Verdict.PASS, blocks=(chart,)))
    blue = places(image, BLUE, 10)
    assert max(x for x, _ in blue) - min(x for x, _ in blue) > 700
    left, right = min(blue), max(blue)
    assert left[1] > right[1] + 150
    assert len(places(image, (220, 230, 252), 5)) > 5000


def test_dark_mode_has_dark_paper_and_light_ink(shoot):
    image = shoot(healthy(), "--blink-settings=preferredColorScheme=0")
    assert band_bottom(image, (20, 104, 63)) > 100
    assert len(places(image, (20, 23, 28))) > 0.5 * WIDTH * HEIGHT
    assert len(places(image, (230, 233, 238), 40)) > 300


def test_a_narrow_window_cuts_nothing_off(shoot):
    image = shoot(
        Report("check", Verdict.PASS, {"path": "x" * 300}, headline=(Metric("speed", "9" * 80),))
    )
    # The right margin stays free of ink: nothing runs out of the page.
    bottom = band_bottom(image, BANDS[Verdict.PASS])
    assert not places(image.crop((WIDTH - 16, bottom, WIDTH, HEIGHT)), INK, 60)


def test_the_page_looks_the_same_without_scripts(shoot):
    with_scripts, without = shoot(full()), shoot(full(), "--blink-settings=scriptEnabled=false")
    assert with_scripts.tobytes() == without.tobytes()


def test_the_browser_reads_the_text_of_the_page(chromium, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(html.render(full()), encoding="utf-8")
    dom = chromium("--dump-dom", page.as_uri())
    assert dom.count("<h1>") == 1
    for words in (
        "FAIL",
        "14 of 18 texts degenerate",
        "goes wrong at character 219",
        "Share of degenerate texts",
    ):
        assert words in dom
