"""Seconds and memory of `assay grade` over shapes of text and sizes: is everything linear?

    python benchmarks/grade/grade_scale.py

Each shape is a hostile or extreme text: floods, rows of digits, blanks and brackets, bodies and
streams that break off, nested and unclosed JSON, logs, prints of Python. Each is written to a file
of every size and graded by a process of its own, which reports its own time and peak memory; a text
passes if its time grows no faster than its size, and the largest stays within the limits of the
page (60 s and 1 GiB for 100 MB).
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

SIZES = (100_000, 1_000_000, 10_000_000, 100_000_000)
MOST_SECONDS, MOST_MIB = 60.0, 1024.0
_SSE = 'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n'


def shapes() -> Mapping[str, str]:
    """A unit of each shape by name; a text is the unit again and again."""
    rng = random.Random(1)
    words = [
        "the",
        "of",
        "harbour",
        "a",
        "in",
        "wind",
        "boat",
        "and",
        "night",
        "slow",
        "water",
        "it",
        "was",
        "ship",
        "light",
    ]
    prose = " ".join(rng.choice(words) for _ in range(4000)) + ". "
    noise = "".join(chr(rng.randrange(33, 127)) for _ in range(4000))
    cjk = "".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(2000))
    units = {f"flood {c!r}": c for c in "1a!-*=A .,|\"'\\{[(<>}])\n\t#~`_/0%&$:;?é猫\u00a0\ufffd"}
    return units | {
        "digits and blanks": "1 2 3 ",
        "digits and breaks": "11\n",
        "digits, dots": "1.1.",
        "meter": " 12 34k 0:00 ",
        "time stamps": "12:00:01 ",
        "k and M": "kMGk ",
        "dashes and digits": "1-1 ",
        "prose": prose,
        "random ASCII": noise,
        "Chinese": cjk,
        "one word": "harbour",
        "words": "harbour ",
        "capitals": "Harbour",
        "names": "snake_case_",
        "humps": "snakeCase",
        "quoted lines": "> said\n",
        "labels": "Answer:\n",
        "label and blanks": "Answer: ",
        "commands": "curl -s http://x\n",
        "backslashes": "\\\n",
        "fences": "```\n",
        "fence and code": "```python\nx = 1\n```\n",
        "JSON lines": '{"text": "the harbour"}\n',
        "JSON lines that break off": '{"text": "the\n',
        "lists within lists": "[",
        "objects within objects": '{"a":',
        "list of numbers": "[1,2,3,4,5,6,7,8,9],\n",
        "long integer": "1234567890",
        "pretty JSON that breaks off": '{\n"a": [\n{"b": 1},\n',
        "strings that break off": '"a\n{"',
        "events": _SSE % "word ",
        "events that break off": 'data: {"choices":[{"delta":\n',
        "halves of pairs": _SSE % "\\ud83d",
        "event names": "event: x\n",
        "comments": ": keep\n\n",
        "AI SDK": '0:"word "\n',
        "printed bytes": "b'data: x'\n",
        "printed dict": "{'a': 1}, ",
        "printed reply": "ChatCompletion(choices=[Choice(message=Message(content='x'))])\n",
        "Completion": "Completion",
        "printed strings": "content='''a",
        "HTTP heads": "HTTP/1.1 200 OK\nA: b\n",
        "chunk sizes": "1f\r\n",
        "special tokens": "<|im_start|>",
        "think tags": "<think>",
        "calls": '<tool_call>{"name": "a"}</tool_call>\n',
        "open calls": "<tool_call>",
        "roles": "user\nassistant\n",
        "table": "| a | b |\n|---|---|\n",
        "addresses": "http://a.b/c?d=e&",
        "hashes": "deadbeef01 ",
        "formulas": "$$ x $$ \\begin{align} ",
        "brackets": "{}[]()",
        "emoji": "\U0001f600",
        "combining": "e\u0301",
        "right to left": "\u05d0\u05d1 ",
        "hashtags": "#harbour ",
        "tone numbers": "ni3 hao3 ",
        "doubled words": "boat boat ",
        "blank lines": "a\n\n\n",
        "NULs": "\0abcdefghijklmnopqrstuvwxyz",
    }


HEADS = {
    "list of numbers": "[",
    "long integer": '{"a": ',
    "printed dict": "[",
    "printed strings": "Completion(",
}


def text_of(name: str, unit: str, size: int) -> bytes:
    """A text of one shape, of about `size` bytes."""
    data = unit.encode("utf-8", "surrogatepass")
    head = HEADS.get(name, "").encode()
    return head + data * max(1, (size - len(head)) // len(data))


CHILD = """
import resource, sys, time
most = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_CPU, (most, most))
begun = time.process_time()
from assay.coherence.grade_files import grade_files
report = grade_files([sys.argv[1]])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(time.process_time() - begun, peak, report.verdict.value)
"""


def measure(path: Path, most_s: float) -> tuple[float | None, float, str]:
    """CPU seconds, peak MiB and verdict of one file; None if it takes longer than `most_s`."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(path), str(round(most_s))],
            capture_output=True,
            text=True,
            timeout=20 * most_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, 0.0, "time"
    if done.returncode == -signal.SIGKILL:
        return None, 0.0, "time"
    if done.returncode:
        return None, 0.0, done.stderr.strip().splitlines()[-1]
    seconds, peak, verdict = done.stdout.split()
    return float(seconds), float(peak), verdict


def main() -> None:
    """Measure all shapes at all sizes, write the rows, and fail if one is beyond the limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "grade_scale.json"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--most", type=float, default=2 * MOST_SECONDS, help="seconds a text")
    parser.add_argument("--part", default="1/1", help="the i-th of n parts of the shapes, as i/n")
    parser.add_argument("--only", default="", help="shapes whose name holds this")
    options = parser.parse_args()
    rows, begun = [], time.monotonic()
    part, parts = map(int, options.part.split("/"))
    for name, unit in list(shapes().items())[part - 1 :: parts]:
        if options.only not in name:
            continue
        row: dict[str, object] = {"shape": name}
        for size in options.sizes:
            with tempfile.NamedTemporaryFile(suffix=".txt") as file:
                file.write(text_of(name, unit, size))
                file.flush()
                seconds, peak, verdict = measure(Path(file.name), options.most)
            row[str(size)] = [seconds and round(seconds, 2), round(peak), verdict]
            if seconds is None:
                break
        rows.append(row)
        print(json.dumps(row), flush=True)
    bad = [row["shape"] for row in rows if _beyond(row, options.sizes)]
    result = {
        "limits": {"seconds": MOST_SECONDS, "mib": MOST_MIB},
        "sizes": options.sizes,
        "columns": ["cpu_seconds", "peak_mib", "verdict"],
        "shapes": rows,
        "beyond": bad,
        "minutes": round((time.monotonic() - begun) / 60, 1),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} shapes, beyond the limits: {bad or 'none'}")
    raise SystemExit(bool(bad))


def _beyond(row: Mapping[str, object], sizes: list[int]) -> bool:
    found = [row.get(str(size)) for size in sizes]
    return any(
        not isinstance(cell, list)
        or cell[0] is None
        or cell[0] > MOST_SECONDS
        or cell[1] > MOST_MIB
        for cell in found
    )


if __name__ == "__main__":
    main()
