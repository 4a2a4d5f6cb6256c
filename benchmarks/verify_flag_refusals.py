"""How many commands that vLLM refuses at start does `assay verify --serve-args` refuse?

    python benchmarks/verify_flag_refusals.py MODEL --vllm PYTHON_OF_VLLM [--count 200] [--seed 1]

Mutates ordinary `vllm serve` commands and asks both. vLLM's part parses the command, checks it and
makes the engine's configuration; it loads no weights and needs no GPU. MODEL is a small checkpoint.
Results: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

from assay.checkpoint.flags.command import parse
from assay.checkpoint.flags.lint import Target, lint
from assay.checkpoint.flags.table import options
from assay.checkpoint.kv_cache import kv_cache
from assay.checkpoint.mtp import examine_checkpoint
from assay.checkpoint.opening import open_checkpoint
from assay.checkpoint.schemes.registry import parse as declared_in
from assay.errors import AssayError
from assay.verdict import Severity

PLAIN = (
    "--max-model-len 1024 --gpu-memory-utilization 0.8",
    "--enable-auto-tool-choice --tool-call-parser hermes",
    "--dtype bfloat16 --max-num-seqs 8 --enforce-eager",
    "--port 8001 --host 127.0.0.1 --served-model-name m",
    "--tensor-parallel-size 1 --enable-prefix-caching",
    "--max-num-batched-tokens 2048 --max-num-seqs 16 --seed 3",
    "--kv-cache-dtype auto --block-size 32",
    '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 3}\'',
)
WRONG = {
    "int": ("x", "1.5", "-5", "0", "99999999"), "float": ("x", "-1", "2.5", "0"),
    "size": ("x", "-5", "1.5K", "0"), "size or auto": ("x", "1.5K", "99999999"),
    "json": ("{", "nosuch", "[1"), "text": ("nosuch", "/no/such/path"),
    "text or json": ("{oops",),
}  # fmt: skip
LEFT_OUT = frozenset({"--help", "-h", "--config", "--model", "--version"})
"""Options that end or replace the command."""

PROBE = """
import json, sys, os
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
out = []
for words in json.load(sys.stdin):
    try:
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
        args.model = args.model_tag or args.model
        validate_parsed_serve_args(args)
        if args.tool_call_parser:
            ToolParserManager.get_tool_parser(args.tool_call_parser)
        if args.reasoning_parser:
            ReasoningParserManager.get_reasoning_parser(args.reasoning_parser)
        AsyncEngineArgs.from_cli_args(args).create_engine_config()
        out.append("")
    except (Exception, SystemExit) as error:
        out.append(f"{type(error).__name__}: {error}"[:200] or "refused")
print("ANSWER" + json.dumps(out))
"""


def mutations(count: int, seed: int) -> list[str]:
    """Commands with one change each: a value, a slip in a name, an option of another engine."""
    chosen = random.Random(seed)
    known = [n for n in options() if n.startswith("--") and n not in LEFT_OUT]
    commands: list[str] = []
    while len(commands) < count:
        plain, kind = chosen.choice(PLAIN), chosen.random()
        name = chosen.choice(known)
        option = options()[name]
        if kind < 0.15:
            at = chosen.randrange(3, len(name))
            commands.append(f"{plain} {name[:at]}{chosen.choice('qxz')}{name[at:]} 1")
        elif option.takes == "switch":
            if kind > 0.6:
                commands.append(f"{plain} {name}")
        else:
            kinds = ("nosuch", "int8") if option.choices else WRONG[option.type]
            commands.append(f"{plain} {name} {shlex.quote(chosen.choice(kinds))}")
    return commands


def refused_here(model: str, command: str) -> str:
    """The first error of assay's, empty if it has none."""
    checkpoint = open_checkpoint(model).checkpoint
    declared = declared_in(checkpoint)
    cache, mtp = kv_cache(checkpoint, declared), examine_checkpoint(checkpoint, declared)
    try:
        target = Target(checkpoint, declared, cache, mtp, parse(command), None)
        errors = [f.title for f in lint(target) if f.severity is Severity.ERROR]
    except AssayError as error:
        return str(error)
    return errors[0] if errors else ""


def main() -> None:
    """Ask both and print what they say."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("model")
    asked.add_argument("--vllm", type=Path, required=True)
    asked.add_argument("--count", type=int, default=200)
    asked.add_argument("--seed", type=int, default=1)
    given = asked.parse_args()
    commands = mutations(given.count, given.seed)
    words = [[given.model, *shlex.split(command)] for command in commands]
    done = subprocess.run(
        [str(given.vllm), "-c", PROBE], input=json.dumps(words), capture_output=True, text=True,
        check=False, cwd="/",
    )  # fmt: skip
    if "ANSWER" not in done.stdout:
        sys.exit(done.stderr[-2000:])
    theirs = json.loads(done.stdout.rpartition("ANSWER")[2])
    tally: Counter[tuple[bool, bool]] = Counter()
    for command, their in zip(commands, theirs, strict=True):
        own = refused_here(given.model, f"vllm serve {shlex.quote(given.model)} {command}")
        tally[bool(their), bool(own)] += 1
        if bool(their) != bool(own):
            who = "vLLM" if their else "assay"
            print(f"{who} alone: {command}\n    {(their or own)[:160]}")
    refused = tally[True, True] + tally[True, False]
    print(f"vLLM refuses {refused} of {len(commands)}, assay {tally[True, True]} of these")
    print(f"vLLM takes {len(commands) - refused}, assay refuses {tally[False, True]} of these")


if __name__ == "__main__":
    main()
