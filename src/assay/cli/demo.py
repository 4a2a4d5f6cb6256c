"""`assay demo`: a real server, whole and broken, side by side."""

from __future__ import annotations

from assay.cli.verb import verb
from assay.verdict import Report


@verb("demo")
def command() -> Report:
    """Serve a small model on this machine, check it, break a copy of it, and check that."""
    from assay.cli.progress import show
    from assay.demo.run import run_demo

    return run_demo(show)
