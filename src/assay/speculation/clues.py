"""What an engine said at start about its draft head: the evidence that counts alone cannot give."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_HEAD_NAMES = r"(?:mtp|nextn|eagle|draft|medusa|eh_proj|enorm|hnorm|shared_head|pre_fc_norm|fc\.)"


@dataclass(frozen=True)
class Clue:
    """One kind of message, how often it came, and the first of them."""

    id: str
    text: str
    count: int = 1


@dataclass(frozen=True)
class Found:
    """Clues of one source, and the speeds that its lines print."""

    clues: list[Clue]
    speeds: list[float]


# id: what to look for in a line. The first group, where there is one, is what is quoted, else the line.
_PATTERNS: dict[str, re.Pattern[str]] = {
    "version": re.compile(
        r"(vLLM API server version \S+|Initializing a V\d LLM engine \(v[^)]+\)|sglang[ _]version[=:]\s*\S+"
        r"|build: \d+ \(\w+\))",
        re.I,
    ),
    "weights_skipped": re.compile(rf"{_HEAD_NAMES}.*not found in params_dict", re.I),
    "weights_uninitialised": re.compile(rf"weights? .*(?:were|was) not initialized.*{_HEAD_NAMES}", re.I),
    "weights_cast": re.compile(
        rf"(Attempted to load weight \S*{_HEAD_NAMES}\S* with dtype \S+ into parameter with dtype \S+)", re.I
    ),
    "weights_missing": re.compile(r"(?:MTP|nextn|speculative) (?:layer \S+ )?weights? missing", re.I),
    "layer_reused": re.compile(
        r"(num_speculative_tokens > 1 will run multiple times of forward on same MTP layer)"
    ),
    "draft_context": re.compile(r"(Overriding draft model max model len from \d+ to \d+)"),
    "draft_vocab": re.compile(
        r"(?:draft|target).*vocab.*(?:not compatible|incompatible|mismatch|must match)", re.I
    ),
    "speculation_on": re.compile(
        r"(speculative_config=SpeculativeConfig\([^)]*\)|speculative_algorithm='[^']+'|creating MTP draft context)"
    ),
    "speculation_off": re.compile(r"(speculative_config=None|speculative_algorithm=None)"),
    "quantization": re.compile(r"\b(quantization='?(?!None)[\w-]+)'?[,)\s]"),
    "kv_cache_dtype": re.compile(r"\b(kv_cache_dtype='?[\w-]+)'?[,)\s]"),
}
_SPEED = re.compile(r"Avg generation throughput:\s*([\d.]+) tokens/s, Running: (\d+) reqs")
_NEEDLES = (
    "version", "llm engine (", "build: ", "params_dict", "not initialized", "attempted to load weight", "weights missing",
    "weight missing", "same mtp layer", "overriding draft", "vocab", "speculative_", "quantization=", "kv_cache_dtype=",
    "mtp draft context",
)  # fmt: skip
_LONGEST = 8192
"""Characters of a line that are looked at; configurations are printed on lines of a few thousand."""


def read(text: str) -> Found:
    """Clues in the start of a log. Speeds are those of intervals in which requests ran."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for line in _candidates(text):
        for name, pattern in _PATTERNS.items():
            match = pattern.search(line)
            if match:
                counts[name] += 1
                quote = match[1] if pattern.groups else line
                first.setdefault(name, " ".join(quote.split())[:300])
    speeds = [float(speed) for speed, running in _SPEED.findall(text) if float(speed) > 0 and int(running)]
    return Found([Clue(name, quote, counts[name]) for name, quote in first.items()], speeds)


def _candidates(text: str) -> list[str]:
    """Lines that hold a needle, in order and each once; found with `find`, since the start of a log is megabytes."""
    lowered = text.lower()
    if len(lowered) != len(text):  # a letter whose lower case is longer would shift the offsets
        lowered = text
    spans: set[tuple[int, int]] = set()
    for needle in _NEEDLES:
        at = lowered.find(needle)
        while at >= 0:
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            spans.add((text.rfind("\n", 0, at) + 1, end))
            at = lowered.find(needle, end)
    return [text[start : min(end, start + _LONGEST)] for start, end in sorted(spans)]
