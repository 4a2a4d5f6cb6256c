"""What an engine said at start about its draft head: the evidence that counts alone cannot give."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

_HEAD_NAMES = r"(?:mtp|nextn|eagle|draft|medusa|eh_proj|enorm|hnorm|shared_head|pre_fc_norm|fc\.)"


@dataclass(frozen=True)
class Clue:
    """One kind of message, how often it came, and the first of them."""

    id: str
    text: str
    count: int = 1


@dataclass
class Found:
    """Clues of one source, and the speeds that its lines print."""

    clues: list[Clue] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)


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
_WORDS = re.compile(r"version|engine|weight|params_dict|MTP|draft|vocab|speculative|build:|throughput")
_LONGEST = 8192
"""Characters of a line that are looked at; configurations are printed on lines of a few thousand."""


def read(text: str) -> Found:
    """Clues in the start of a log. Speeds are those of intervals in which requests ran."""
    found = Found()
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for whole in text.splitlines():
        line = whole[:_LONGEST]
        if not _WORDS.search(line):
            continue
        speed = _SPEED.search(line)
        if speed and float(speed[1]) > 0 and int(speed[2]):
            found.speeds.append(float(speed[1]))
        for name, pattern in _PATTERNS.items():
            match = pattern.search(line)
            if match:
                counts[name] += 1
                quote = match[1] if pattern.groups else line
                first.setdefault(name, " ".join(quote.split())[:300])
    found.clues = [Clue(name, quote, counts[name]) for name, quote in first.items()]
    return found
