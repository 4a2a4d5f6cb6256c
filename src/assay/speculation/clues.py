"""Start-up messages that bear on speculation."""

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


# id: what to look for in a line. The first group, where there is one, is what is quoted, else the
# line.
_PATTERNS: dict[str, re.Pattern[str]] = {
    "version": re.compile(
        r"(vLLM API server version \S+|Initializing a V\d LLM engine \(v[^)]+\)|sglang["
        r" _]version[=:]\s*\S+"
        r"|build: \d+ \(\w+\))",
        re.I,
    ),
    "weights_skipped": re.compile(rf"{_HEAD_NAMES}.*not found in params_dict", re.I),
    "weights_uninitialised": re.compile(
        rf"weights? .{{0,400}}(?:were|was) not initialized.*{_HEAD_NAMES}", re.I
    ),
    "weights_cast": re.compile(
        rf"(Attempted to load weight \S*{_HEAD_NAMES}\S* with dtype \S+ into parameter with dtype"
        r" \S+)",
        re.I,
    ),
    "weights_missing": re.compile(
        r"(?:MTP|nextn|speculative) (?:layer \S+ )?weights? missing", re.I
    ),
    "layer_reused": re.compile(
        r"(num_speculative_tokens > 1 will run multiple times of forward on same MTP layer)"
    ),
    "draft_context": re.compile(r"(Overriding draft model max model len from \d+ to \d+)"),
    "draft_vocab": re.compile(
        r"(?:draft|target).{0,200}vocab.{0,200}(?:not compatible|incompatible|mismatch|must match)",
        re.I,
    ),
    "speculation_on": re.compile(
        r"(speculative_config=SpeculativeConfig\([^)]*\)|speculative_algorithm='[^']+'|creating MTP"
        r" draft context"
        r"|adding speculative implementation '[\w-]+')"
    ),
    "sparse_method": re.compile(
        r"(?:speculative_(?:config|algorithm)|method)\W.{0,80}?\b((?:n-?gram|suffix|prompt_lookup|lookup)\w*)|(?:implementation|statistics)"
        r" '?(ngram[\w-]*)",
        re.I,
    ),
    "speculation_off": re.compile(r"(speculative_config=None|speculative_algorithm=None)"),
    "depth": re.compile(
        r"(?:num_speculative_tokens|num_spec_tokens|speculative_num_steps|--(?:spec-)?draft(?:-n)?-max|--spec-draft-n-max"
        r"|--num[-_]speculative[-_]tokens)['\"]?[=: ]\s*(\d{1,4})\b"
    ),
    "quantization": re.compile(r"\b(quantization='?(?!None)[\w-]+)'?[,)\s]"),
    "temperature": re.compile(
        r"(?:default.{0,40}sampling param|SamplingParams\().{0,400}?['\"]?temperature['\"]?[:=]"
        r" ?([\d.]+)",
        re.I,
    ),
    "kv_cache_dtype": re.compile(r"\b(kv_cache_dtype='?[\w-]+)'?[,)\s]"),
    "replies": re.compile(
        r"(Avg generation throughput: (?!0\.0 )[\d.]+ tokens/s, Running: [1-9]\d* reqs|(?<!prompt"
        r" )\beval time\s{0,20}=.*"
        r"|Decode batch.{0,400}gen throughput.*)"
    ),
}

_SPEED = re.compile(r"Avg generation throughput:\s*([\d.]+) tokens/s, Running: (\d+) reqs")

_NEEDLES = (
    "version",
    "llm engine (",
    "build: ",
    "params_dict",
    "not initialized",
    "attempted to load weight",
    "weights missing",
    "weight missing",
    "same mtp layer",
    "overriding draft",
    "vocab",
    "speculative",
    "num_spec",
    "quantization=",
    "kv_cache_dtype=",
    "mtp draft context",
    "temperature",
    "draft-max",
    "draft-n-max",
)

LONGEST = 8192
"""Characters of a line that are looked at; configurations are printed on lines of a few thousand.
"""


def start_up(text: str) -> tuple[list[Clue], list[float]]:
    """Clues in the start of a log, and the speeds of intervals in which requests ran."""
    first: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for line in _candidates(text):
        for name, pattern in _PATTERNS.items():
            match = pattern.search(line)
            if match:
                seen[name] += 1
                quote = " ".join((match[match.lastindex or 0] if pattern.groups else line).split())[
                    :300
                ]
                if name == "depth" and quote not in first.get(name, quote).split(", "):
                    quote = f"{first.pop(name)}, {quote}"  # two runs, or two roles
                first.setdefault(name, quote)
    replies = _PATTERNS["replies"].search(text)
    if replies:
        first.setdefault("replies", " ".join(replies[1].split())[:300])
    speeds = [
        float(speed)
        for speed, running in _SPEED.findall(text)
        if _positive(speed) and int(running[:9])
    ]
    return [Clue(name, quote, max(1, seen[name])) for name, quote in first.items()], speeds


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < 1e9
    except ValueError:
        return False


def _candidates(text: str) -> list[str]:
    """Lines that hold a needle, in order and each once; found with `find`, since the start of a log
    is megabytes.
    """
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
    return [text[start : min(end, start + LONGEST)] for start, end in sorted(spans)]
