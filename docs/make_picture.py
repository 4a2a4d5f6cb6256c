"""Draw the picture of the README from real checks: `python docs/make_picture.py TITLE=URL [TITLE=URL ...]`.

Each URL is a running server; the reports of several are drawn side by side. The picture is what a terminal shows,
so it changes only when the product does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from terminal_picture import export_comparison_svg, export_svg

from assay.coherence.check import CheckOptions, run_check


def main() -> None:
    """Check the servers and write the SVG."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", nargs="+", metavar="TITLE=URL")
    parser.add_argument("--reference-engine", help="trusted model to compare with: hf:PATH")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "assets" / "verdict.svg")
    parser.add_argument("--width", type=int, default=110, help="columns of the terminal")
    arguments = parser.parse_args()
    options = CheckOptions(reference_engine=arguments.reference_engine)
    titled = [server.partition("=")[::2] for server in arguments.server]
    reports = [(title, run_check(url, options)) for title, url in titled]
    if len(reports) == 1:
        picture = export_svg(reports[0][1], arguments.width)
    else:
        picture = export_comparison_svg(reports, "assay check", arguments.width)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(picture, encoding="utf-8")
    print(f"{arguments.out}: {', '.join(report.verdict for _, report in reports)}")


if __name__ == "__main__":
    main()
