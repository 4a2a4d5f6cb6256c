"""Fuzz the readers of documents from outside: no exit 70, no hang over 10 s, no process over 2 GB.

    python tests/fuzz/fuzz.py --seconds 600 --seed 1 [--keep FOLDER]

Documents are grown from real ones: JSON values are replaced by hostile ones, bytes are cut, doubled
and spliced. Each is given to the command line of its reader in this process. What breaks a rule is
kept in the folder, and the exit code is 1. `rerun` is left out: a plan that names a model imports
torch, which takes longer than a reader may.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import lzma
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from assay.cli.main import invoke
from assay.runs import tar_of

ROOT = Path(__file__).parents[2]
MOST_SECONDS, MOST_BYTES = 10, 2 << 30
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1e308,
    10**400,
    "",
    "\ud800",
    "\x00",
    "\x1b]0;x\x07",
    "1" * 500,
    [],
    {},
    [[]],
    "the " * 300,
    "<script>",
    float("nan"),
    float("inf"),
    {"a": {"a": {}}},
    "9" * 401,
)
REPORT = {
    "schema": "assay/1",
    "command": "compare",
    "verdict": "pass",
    "exit_code": 0,
    "subject": {"plan": {"reference": "none:a", "candidates": ["none:b"]}},
    "findings": [{"id": "fidelity.x", "severity": "warning", "title": "t", "evidence": {}}],
    "results": {"grade": "ACCEPT", "kld": {"mean": 0.1, "lo": 0.0, "hi": 0.2}, "windows": 8},
    "environment": {"packages": {"numpy": "2"}},
}
CHAT = {
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {
                "role": "assistant",
                "content": "Paris is the capital of France.",
                "tool_calls": [
                    {"id": "a", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
                ],
            },
        }
    ],
    "usage": {"completion_tokens": 7},
}
STREAM = "".join(
    f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': word}}]})}\n\n"
    for word in ("Par", "is is ", "the cap", "ital.")
)
BUNDLE = {
    "report.json": {**REPORT, "command": "doctor"},
    "starts.json": {
        "starts": [{"settings": [], "index": 0, "state": "good", "bad": {}, "observation": {}}],
        "rules": [],
        "slower": 0.1,
        "all": [],
    },
}
CONTRACT = """[subject]
server = "http://127.0.0.1:1"
logs = ["a.log"]
[spec]
min_acceptance = "60%"
[check]
samples = 3
min_tokens_per_s = 5
"""


def texts(folder: Path, pattern: str) -> list[bytes]:
    return [p.read_bytes()[:20_000] for p in sorted(folder.rglob(pattern)) if p.is_file()][:60]


def readers() -> dict[str, tuple[list[bytes], Callable[[str], list[str]]]]:
    """Each reader: real documents, and the command that reads one."""
    logs = texts(ROOT / "tests" / "speculation" / "data", "*")
    config = {"model_type": "llama", "num_hidden_layers": 2, "rope_scaling": {"type": "yarn"}}
    return {
        "grade": (
            [json.dumps(CHAT).encode(), STREAM.encode(), b"the " * 60, b"1" * 900],
            lambda f: ["grade", f],
        ),
        "spec": (logs or [b"drafted 900 tokens, accepted 640\n"], lambda f: ["spec", f]),
        "gate": ([CONTRACT.encode()], lambda f: ["gate", "--lint", "--contract", f]),
        "card": ([json.dumps(REPORT).encode()], lambda f: ["card", f, "--out", f"{f}.card"]),
        "diff": ([json.dumps(REPORT).encode()], lambda f: ["diff", f, f]),
        "verify": (
            [json.dumps(config).encode()],
            lambda f: ["verify", f, "--hash", "none", "--allow-unverified"],
        ),
        "bundle": ([json.dumps(BUNDLE).encode()], lambda f: ["bundle", "verify", f]),
    }


def changed(value: Any, rng: random.Random) -> Any:
    """A JSON value with one part replaced, doubled, dropped or nested deeper."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(sorted(value))
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: changed(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value * rng.choice((2, 50))
        return [*value[:at], changed(value[at], rng), *value[at + 1 :]]
    if rng.random() < 0.05:
        for _ in range(rng.choice((50, 900))):
            value = [value]
        return value
    return rng.choice(HOSTILE)


def mutated(document: bytes, rng: random.Random) -> bytes:
    """A document grown from a real one."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        try:
            value = json.loads(document) if rng.random() < 0.8 else None
        except (ValueError, RecursionError):
            value = None
        if value is not None:
            with contextlib.suppress(ValueError, RecursionError):
                document = json.dumps(changed(value, rng)).encode("utf-8", "surrogatepass")
            continue
        at, to = sorted(rng.randrange(len(document) + 1) for _ in "ab")
        piece = document[at:to]
        document = rng.choice(
            (
                document[:at] + document[to:],
                document[:to] + piece * rng.choice((1, 3, 40)) + document[to:],
                document[:at] + bytes([rng.randrange(256)]) + document[at:],
                document[:at]
                + rng.choice((b"9" * 401, b"nan", b"\xff", b"{" * 300, b"\n"))
                + document[to:],
            )
        )
    return document[:200_000]


def packed(document: bytes) -> bytes:
    """The bundle whose files a JSON document holds; the document itself where it holds none."""
    try:
        files = {str(n): json.dumps(v).encode() for n, v in json.loads(document).items()}
    except (ValueError, AttributeError, RecursionError):
        return document
    digests = {n: {"sha256": hashlib.sha256(b).hexdigest()} for n, b in files.items()}
    manifest = json.dumps({"format": "assay-bundle/1", "files": digests}).encode()
    return lzma.compress(tar_of({"manifest.json": manifest, **files}), preset=0)


class TooLong(BaseException):
    """A reader took longer than it may."""


def _alarm(*_: object) -> None:
    raise TooLong


def run(words: list[str]) -> str:
    """What a command broke, empty where it keeps the rules."""
    out = io.StringIO()
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = invoke([*words, "--json"])
    except TooLong:
        return f"over {MOST_SECONDS} s"
    except MemoryError:
        return "out of memory"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if code not in (0, 1, 2, 3):
        return f"exit {code}: {out.getvalue()[-300:]}"
    return ""


def fuzz(seconds: float, seed: int, keep: Path, documents: int = 0) -> Iterator[tuple[str, str]]:
    """The reader of each document and what it broke."""
    rng, all_readers = random.Random(seed), readers()
    names = sorted(all_readers)
    corpus = {name: list(documents) for name, (documents, _) in all_readers.items()}
    until, number = time.monotonic() + seconds, 0
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < until and (not documents or number < documents):
            name = names[number % len(names)]
            number += 1
            document = mutated(rng.choice(corpus[name]), rng)
            place = Path(folder) / name
            if name == "verify":
                place.mkdir(exist_ok=True)
                (place / "config.json").write_bytes(document)
            else:
                place.write_bytes(packed(document) if name == "bundle" else document)
            broke = run(all_readers[name][1](str(place)))
            if broke:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{name}_{seed}_{number}").write_bytes(document)
            elif rng.random() < 0.02 and len(corpus[name]) < 500:
                corpus[name].append(document)
            yield name, broke


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--documents", type=int, default=0, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"))
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES * 2, MOST_BYTES * 2))
    signal.signal(signal.SIGALRM, _alarm)
    tried: Counter[str] = Counter()
    broken: Counter[str] = Counter()
    for name, broke in fuzz(given.seconds, given.seed, given.keep, given.documents):
        tried[name] += 1
        if broke:
            broken[name] += 1
            print(f"{name}: {broke}", flush=True)
    for name in sorted(tried):
        print(f"{name:8} {tried[name]:7} documents, {broken[name]} broke a rule")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{sum(tried.values())} documents in all, {sum(broken.values())} broke a rule; {peak} MB")
    return 1 if broken or peak > MOST_BYTES >> 20 else 0


if __name__ == "__main__":
    sys.exit(main())
