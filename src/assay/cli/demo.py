"""`assay demo`: a real server, whole and broken, side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from assay.cli.verb import check_writable, verb
from assay.errors import AssayError
from assay.verdict import Report


@verb("demo")
def command(
    svg: Annotated[Path | None, typer.Option(help="Write the two verdicts as a picture.")] = None,
) -> Report:
    """Serve a small model on this machine with vLLM, check it, damage a copy of it, and check that.

    The first run installs vLLM's CPU build into a private environment and builds the model (about 4 GB in the cache).
    """
    from assay.cli.progress import show
    from assay.demo.run import run_demo
    from assay.report.console import side_by_side
    from assay.report.picture import export_comparison_svg

    if svg is not None:
        check_writable("svg", svg)
    report, pair = run_demo(show)
    side_by_side(pair)
    if svg is not None:
        svg.write_text(export_comparison_svg(pair), encoding="utf-8")
    return report


def main() -> int:
    """Install and build what demo and tests need, so that neither waits for it later; returns the exit code."""
    from assay.cli.progress import show
    from assay.demo.models import build_smollm2
    from assay.demo.servers import vllm_python

    try:
        vllm_python(show)
        build_smollm2(show)
    except AssayError as error:
        print(f"assay: {error.message}\n  {error.remedy}", file=sys.stderr)
        return error.verdict.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
