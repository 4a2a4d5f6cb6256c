"""How fast is `grade`, and does its time grow in proportion to the text?

    python benchmarks/grade/grade_speed.py

CPU time of this process, best of five, on four kinds of text; the goal is that 100 KB cost at most
12 times 10 KB.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from assay.coherence.grading import grade
from assay.coherence.streaming import StreamingGrader
from legit_texts import stdlib, topics

RESULTS = Path(__file__).parent / "results"
SIZES = (10_000, 100_000, 1_000_000)


def main() -> None:
    prose = "\n\n".join(item.text for item in topics())
    code = "\n\n".join(item.text for item in stdlib())
    texts = {
        "prose": prose,
        "code": code,
        "one line": " ".join(prose.split()),
        "loop": "It was a fine day and the sea was calm. " * 30_000,
        "flood": "!" * 1_000_000,
        "blanks": " \n" * 500_000,
    }
    rows = [measure(name, stretched(text)) for name, text in texts.items()]
    stream = stream_cost(prose)
    RESULTS.mkdir(exist_ok=True)
    result = {"texts": rows, "stream_us_per_token": stream}
    (RESULTS / "grade_speed.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    lines = [
        "# Speed of `grade`",
        "",
        "| text | 10 KB | 100 KB | 1 MB | 100 KB / 10 KB | MB/s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r['text']} | "
        + " | ".join(f"{1000 * s:.1f} ms" for s in r["seconds"])
        + f" | {r['growth']:.1f} | {r['mb_per_s']:.2f} |"
        for r in rows
    ]
    lines += [
        "",
        (
            f"`StreamingGrader`: {stream:.0f} µs of CPU time a token (tokens of about five"
            " characters)."
        ),
    ]
    (RESULTS / "grade_speed.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def stretched(text: str) -> str:
    return (text * (SIZES[-1] // len(text) + 1))[: SIZES[-1]]


def measure(name: str, text: str) -> dict[str, object]:
    seconds = [best(text[:size]) for size in SIZES]
    return {
        "text": name,
        "seconds": seconds,
        "growth": seconds[1] / seconds[0],
        "mb_per_s": 1 / seconds[2],
    }


def best(text: str, repeats: int = 5) -> float:
    grade(text[:1000])  # tables are read once
    times = []
    for _ in range(repeats if len(text) < 500_000 else 2):
        began = time.process_time()
        grade(text)
        times.append(time.process_time() - began)
    return min(times)


def stream_cost(prose: str) -> float:
    tokens = [prose[i : i + 5] for i in range(0, 200_000, 5)]
    grader = StreamingGrader()
    began = time.process_time()
    for token in tokens:
        grader.push(token)
    return 1e6 * (time.process_time() - began) / len(tokens)


if __name__ == "__main__":
    main()
