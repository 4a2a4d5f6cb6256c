"""The options of `vllm serve` and what they take, from vLLM's own parser; runs inside vLLM's
environment.
"""

from __future__ import annotations

import json

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

KINDS = {0: "switch", None: "value", 1: "value", "?": "optional", "+": "many", "*": "many"}
parser = make_arg_parser(FlexibleArgumentParser())
options = {
    option: KINDS.get(action.nargs, "many")
    for action in parser._actions
    for option in action.option_strings
}
print(json.dumps(options))
