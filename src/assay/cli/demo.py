"""`assay demo`: a real server, whole and broken, side by side."""

from __future__ import annotations

import sys

from assay.cli.verb import verb
from assay.errors import AssayError
from assay.verdict import Report


@verb("demo")
def demo() -> Report:
    """Serve a small model on this machine with vLLM, check it, damage a copy of it, and check that.

    The first run installs vLLM's CPU build into a private environment and builds the model (about 4 GB in the cache).
    """
    from assay.cli.progress import show
    from assay.demo.run import run_demo
    from assay.report.console import side_by_side

    report, pair = run_demo(show)
    side_by_side(pair)
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
