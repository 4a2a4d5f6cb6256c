"""`assay demo`: a real server, whole and broken, side by side."""

from __future__ import annotations

from assay.cli.verb import verb
from assay.verdict import Report


@verb("demo")
def command() -> Report:
    """Serve a small model on this machine with vLLM, check it, damage a copy of it, and check that.

    The first run installs vLLM's CPU build into a private environment and builds the model (about 4 GB in the cache).
    """
    from assay.cli.progress import show
    from assay.demo.run import run_demo
    from assay.report.beside import side_by_side

    report, pair = run_demo(show)
    side_by_side(pair)
    return report
