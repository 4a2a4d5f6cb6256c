"""Draw the picture of the README from real checks: `python docs/make_picture.py --demo`, or
`TITLE=URL [TITLE=URL ...]`.

`--demo` runs `assay demo` and draws its two reports. Each URL is a running server; the reports of
several are drawn side by side. The picture is what a terminal shows, so it changes only when the
product does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from terminal_picture import export_comparison_svg, export_svg

from assay.cli.progress import show
from assay.coherence.check import run_check
from assay.coherence.options import CheckOptions
from assay.demo.run import run_demo
from assay.report.console import side_by_side


def main() -> None:
    """Check the servers and write the SVG."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", nargs="*", metavar="TITLE=URL")
    parser.add_argument("--demo", action="store_true", help="draw what `assay demo` finds")
    parser.add_argument("--reference-engine", help="trusted model to compare with: hf:PATH")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "assets" / "verdict.svg"
    )
    parser.add_argument("--width", type=int, default=110, help="columns of the terminal")
    arguments = parser.parse_args()
    options = CheckOptions(reference_engine=arguments.reference_engine)
    reports = run_demo(show)[1] if arguments.demo else []
    for server in arguments.server:
        title, _, url = server.partition("=")
        reports.append((title, run_check(url, options)))
    if not reports:
        parser.error("give --demo, or servers")
    if len(reports) > 1:
        side_by_side(reports)
    if len(reports) == 1:
        picture = export_svg(reports[0][1], arguments.width)
    else:
        picture = export_comparison_svg(
            reports, "assay demo" if arguments.demo else "assay check", arguments.width
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(picture, encoding="utf-8")
    print(f"{arguments.out}: {', '.join(report.verdict for _, report in reports)}")


if __name__ == "__main__":
    main()
