"""`python -m assay.cli.prepare`: install and build what demo and tests need, so that neither waits for it later."""

from __future__ import annotations

import sys

from assay.cli.progress import show
from assay.demo.models import build_smollm2
from assay.demo.vllm_env import vllm_python
from assay.errors import AssayError


def main() -> int:
    """Build the cache; returns the exit code."""
    try:
        vllm_python(show)
        build_smollm2(show)
    except AssayError as error:
        print(f"assay: {error.message}\n  {error.remedy}", file=sys.stderr)
        return error.verdict.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
