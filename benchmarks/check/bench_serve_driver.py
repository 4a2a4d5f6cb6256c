"""Runs `vllm bench serve` again and again in one process, so that its start does not separate what
is compared.

Runs under the interpreter that holds vLLM. Every line of stdin is a JSON list of arguments of
`bench serve`; the answer is one line on stdout, the result that it returns. What it prints itself
goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

KEPT = (
    "completed",
    "mean_ttft_ms",
    "mean_tpot_ms",
    "input_lens",
    "output_lens",
    "generated_texts",
    "errors",
)


def serve() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        result = main(parser.parse_args(json.loads(line)))
        print(json.dumps({name: result[name] for name in KEPT}), file=answers, flush=True)


if __name__ == "__main__":
    serve()
