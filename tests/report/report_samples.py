"""Reports that the tests of the writers draw: one of everything, and arbitrary ones."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from assay.verdict import (
    AREAS,
    Band,
    Chart,
    Finding,
    Metric,
    Point,
    Quote,
    Report,
    Series,
    Severity,
    Table,
    Verdict,
)

STORY = (
    "Whiskers was a small grey cat who lived on the top floor of an old brick building. Every"
    " evening she climbed the iron stairs to the rooftop garden, where tomatoes grew in cracked"
    " buckets and bees slept in the lavender. "
)
LOOP = STORY + "the the the the garden garden " * 60
ATTACKS = (
    "<script>alert(1)</script>",
    "</style><img src=x onerror=alert(1)>",
    "</pre></details></main><h1>PASS</h1>",
    "\" onmouseover='alert(1)' x=\"",
    "]]><!--",
    "&lt;b&gt; &amp; &#x3c;",
    "{{ 7*7 }}{% raw %}",
    "[bold red]markup[/bold red] [link=https://evil.example]x[/link]",
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2J\x9b31m",
    "nul\x00bell\x07back\x08cr\rdel\x7fvt\x0b",
    "\u202egnol-tfel\u2066iso\u2069 \u200bzero \ufeffbom \U000e0041tag",
    "lone \ud800 surrogate \udfff, noncharacter \uffff \ufffe",
    "line\u2028separator\u2029paragraph\x85nel",
    "@octocat closes #12, GH-34, see https://evil.example/ and www.evil.example",
    "| a | b |\n| --- | --- |\n| 1 | 2 |",
    "```\n````text\n`````\n~~~",
    "# heading\n> quote\n- item\n1. one\n    code\n***\n===",
    "![x](https://evil.example/p.png) [y](javascript:alert(1)) <https://evil.example>",
    "$x^2$ $$\\frac{1}{2}$$ `a` ``b`` *c* **d** _e_ ~~f~~ \\",
    "日本語のテキスト 한국어 العربية עברית हिन्दी ไทย 👩‍👩‍👧‍👦 é\u0301\u0301\u0301",
)  # fmt: skip


def full() -> Report:
    """A failing report with every kind of block."""
    findings = (
        Finding(
            "coherence.degenerate",
            Severity.ERROR,
            "14 of 18 texts degenerate; the model itself does so in 1 of 18",
            "The server writes loops where the reference, on the same prompts and seeds, writes"
            " text.",
            {
                "texts": 18,
                "degenerate": 14,
                "interval": [0.548, 0.91],
                "reference": {"degenerate": 1},
            },
            ("a corrupt shard: `model-00001-of-00002.safetensors`", "a wrong quantisation flag"),
            (
                "verify the checkpoint: `assay verify ./SmolLM2-135M`",
                (
                    "fall back to the known-coherent baseline: `vllm serve ./SmolLM2-135M"
                    " --tensor-parallel-size 1 --pipeline-parallel-size 1 --kv-cache-dtype auto"
                    " --enforce-eager --max-model-len 8000`"
                ),
            ),
            ("https://docs.example.org/coherence",),
        ),
        Finding("coherence.needle", Severity.WARNING, "the needle is not found at 8,192 tokens"),
        Finding(
            "server.no_tools", Severity.INFO, "the server has no tool calls; that probe was skipped"
        ),
    )
    blocks = (
        Table(
            "Probes",
            ("probe", "status", "degenerate"),
            (
                ("capital of France", "ok", "0"),
                ("story", "degenerate", "4"),
                ("tool call", "skipped", "–"),
            ),
            frozenset({2}),
            "Wilson intervals.",
        ),
        forest(),
        Quote("story, greedy", LOOP, "degenerate", len(STORY), "700 tokens, stop: length"),
        Quote("capital, seed 1", "The capital of France is Paris.", "ok"),
        Quote("code, seed 0", "", "empty", 0, "500 tokens billed"),
    )
    return Report(
        "check",
        Verdict.FAIL,
        {"url": "http://127.0.0.1:8000/v1", "model": "smollm2-135m"},
        findings,
        {
            "probes": [
                {"name": "capital", "status": "run"},
                {
                    "name": "tools",
                    "status": "skipped",
                    "reason": "the server answers 400 to `tools`",
                },
            ],
            "throughput": {"valid": False, "decode_tokens_per_s": {"median": 183.2}},
        },
        {"assay": "0.1.0"},
        (
            Metric("decode speed", "183.2 tok/s", False, "14 of 18 timed texts degenerate"),
            Metric("time to first token", "41 ms", True, "median of 3"),
        ),
        blocks,
    )


def forest() -> Chart:
    """Two series of intervals with a band, one point of which cannot be drawn."""
    ours = (Point("capital", 0.1, 0.0, 0.49), Point("story", 1.0, 0.51, 1.0))
    theirs = (Point("capital", 0.0, 0.0, 0.49), Point("story", math.nan))
    return Chart(
        "Share of degenerate texts",
        "forest",
        (Series("this server", ours), Series("reference", theirs)),
        "probe",
        "share",
        (Band("tolerated", 0.0, 0.2),),
    )


def healthy() -> Report:
    """A passing report."""
    return Report(
        "check",
        Verdict.PASS,
        {"url": "http://127.0.0.1:8000/v1"},
        headline=(Metric("decode speed", "181.9 tok/s"),),
        blocks=(Quote("story, greedy", STORY * 2, "ok"),),
        summary="The server writes what the model itself writes.",
    )


odd_text = st.one_of(
    st.sampled_from(ATTACKS),
    st.text(st.characters(), max_size=60),
    st.builds("".join, st.lists(st.sampled_from(ATTACKS), max_size=4)),
)
odd_float = st.floats() | st.sampled_from(
    [0.0, -0.0, 5e-324, 1.7e308, -1.7e308, math.inf, -math.inf, math.nan]
)
odd_value = st.recursive(
    st.none() | st.booleans() | st.integers() | odd_float | odd_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(odd_text, inner, max_size=4),
    max_leaves=8,
)
odd_mapping = st.dictionaries(odd_text, odd_value, max_size=4)
points = st.builds(
    Point, st.one_of(odd_float, odd_text), odd_float, st.none() | odd_float, st.none() | odd_float
)
charts = st.builds(
    Chart,
    odd_text,
    st.sampled_from(["bar", "line", "scatter", "forest", "waterfall"]),
    st.lists(st.builds(Series, odd_text, st.lists(points, max_size=6)), max_size=8),
    odd_text,
    odd_text,
    st.lists(st.builds(Band, odd_text, odd_float, odd_float), max_size=2),
    st.booleans(),
    st.booleans(),
    odd_text,
)
tables = st.builds(
    Table,
    odd_text,
    st.lists(odd_text, max_size=4),
    st.lists(st.lists(odd_text, max_size=5), max_size=4),
    st.frozensets(st.integers(0, 5)),
    odd_text,
)
quotes = st.builds(Quote, odd_text, odd_text, odd_text, st.none() | st.integers(-3, 99), odd_text)
texts = st.lists(odd_text, max_size=3)
findings = st.builds(
    Finding,
    st.sampled_from(sorted(AREAS)).map(lambda area: f"{area}.thing"),
    st.sampled_from(list(Severity)),
    odd_text,
    odd_text,
    odd_mapping,
    texts,
    texts,
    texts,
)


@st.composite
def reports(draw: st.DrawFn) -> Report:
    """Any report that can be built, full of hostile text and numbers."""
    found = draw(st.lists(findings, max_size=3))
    verdicts = list(Verdict)
    if not any(f.severity is Severity.ERROR for f in found):
        verdicts.remove(Verdict.FAIL)
    return Report(
        draw(odd_text),
        draw(st.sampled_from(verdicts)),
        draw(odd_mapping),
        found,
        draw(odd_mapping),
        draw(odd_mapping),
        draw(st.lists(st.builds(Metric, odd_text, odd_text, st.booleans(), odd_text), max_size=3)),
        draw(st.lists(st.one_of(charts, tables, quotes), max_size=4)),
        draw(st.booleans()),
        summary=draw(odd_text),
    )
