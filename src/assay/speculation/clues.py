"""What an engine said at start about its draft head: the evidence that counts alone cannot give."""

from __future__ import annotations

import re
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


# id: what to look for. The first group, where there is one, is what is quoted.
_PATTERNS: dict[str, re.Pattern[str]] = {
    "version": re.compile(
        r"(vLLM API server version \S+|Initializing a V\d LLM engine \(v[^)]+\)|sglang[ _]version[=:]\s*\S+"
        r"|build: \d+ \(\w+\))",
        re.I,
    ),
    "weights_skipped": re.compile(rf"([^\n]*{_HEAD_NAMES}[^\n]*not found in params_dict[^\n]*)", re.I),
    "weights_uninitialised": re.compile(
        rf"([^\n]*weights? (?:of [^\n]*)?(?:were|was) not initialized[^\n]*{_HEAD_NAMES}[^\n]*)", re.I
    ),
    "weights_cast": re.compile(
        rf"(Attempted to load weight \S*{_HEAD_NAMES}\S* with dtype \S+ into parameter with dtype \S+)", re.I
    ),
    "weights_missing": re.compile(
        r"([^\n]*(?:MTP|nextn|speculative) (?:layer \S+ )?weights? missing[^\n]*)", re.I
    ),
    "layer_reused": re.compile(
        r"(num_speculative_tokens > 1 will run multiple times of forward on same MTP layer)"
    ),
    "draft_context": re.compile(r"(Overriding draft model max model len from \d+ to \d+)"),
    "draft_vocab": re.compile(
        r"([^\n]*(?:draft|target)[^\n]*vocab[^\n]*(?:not compatible|incompatible|mismatch|must match)[^\n]*)",
        re.I,
    ),
    "speculation_on": re.compile(
        r"(speculative_config=SpeculativeConfig\([^)]*\)|speculative_algorithm='[^']+'|speculative-config\S*\s+\{[^}]*\}"
        r"|creating MTP draft context)"
    ),
    "speculation_off": re.compile(r"(speculative_config=None|speculative_algorithm=None)"),
    "quantization": re.compile(r"\bquantization='?([\w-]+)'?[,)\s]"),
    "kv_cache_dtype": re.compile(r"\bkv_cache_dtype='?([\w-]+)'?[,)\s]"),
    "served": re.compile(
        r"(Application startup complete|Avg generation throughput|server is listening|llama_server|Decode batch"
        r"|The server is fired up)"
    ),
}
_SPEED = re.compile(r"Avg generation throughput:\s*([\d.]+) tokens/s, Running: (\d+) reqs")


def read(text: str) -> Found:
    """Clues in the start of a log. Speeds are those of intervals in which requests ran."""
    found = Found()
    for name, pattern in _PATTERNS.items():
        first = pattern.search(text)
        if first is None:
            continue
        counted = len(pattern.findall(text)) if name.startswith("weights") else 1
        found.clues.append(Clue(name, " ".join(first[1].split())[:300], counted))
    found.speeds = [
        float(speed) for speed, running in _SPEED.findall(text) if float(speed) > 0 and int(running)
    ]
    return found
