"""Whether a server cuts text into the same ids as the reference.

Its vocabulary cannot be hashed from outside. A probe text goes through both: words of many scripts,
code, numbers, runs of spaces and line ends, characters that fall apart into bytes, and the names of
special tokens as text. Equal ids throughout, and no id of the windows past the server's vocabulary
where it says its size, is what can be shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from assay.engines.scoring import Window
from assay.engines.server.candidate import ServerCandidate
from assay.errors import AssayError

PROBE = (
    "The lighthouse keeper's notebook, page 1,024: it isn't 3.14159 × 10⁻⁷, he'd said; \"perhaps\""
    " (not).\n\tdef f(x: dict[str, int]) -> None:\n\t\treturn x['a'] ** 2 != 0xFF  # TODO\r\n\n\n  "
    "  four spaces,  two,     five\u00a0one that does not break\u200b, trailing   \nÜnïcödé façade"
    " naïve Straße ŁÓDŹ İstanbul ﬁne Ⅻ ½ ∑ ∞ ≠ → 𝔘𝔫𝔦 🜁 🦙👩‍👩‍👧‍👦🏳️‍🌈"
    " \U0001f1eb\U0001f1f7\nБыстрая лиса, 敏捷的棕色狐狸跳过懒狗。日本語のテキスト、한국어 문장,"
    " النص العربي, עברית, हिन्दी, ไทย, ქართული\n1234567890 00012 1e-5 2026-11-28T08:46:16Z"
    " https://example.org/a?b=c&d=%20 user@example.org C:\\Temp\\x\nSELECT * FROM t WHERE"
    " a<>'b';{\"k\":[1,null,true]}<div class='x'>&amp;</div> $\\frac{a}{b}$"
    " camelCaseHTTPServer\ne\u0301 o\u0308 \ufffd \u2028 ~~~~~~~~ -------- ======== ........ !!!???"
    " aaaaaaaaaaaaaaaa supercalifragilistic\n"
)


@dataclass(frozen=True)
class Proof:
    """What was shown: how many ids of the probe text agreed, and the server's own word on its
    vocabulary.
    """

    probe_tokens: int
    vocab_size: int | None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"probe_tokens": self.probe_tokens, "vocab_size": self.vocab_size}


def probe_ids(encode: Callable[[str], Sequence[int]]) -> list[int]:
    """The reference's ids of the probe text."""
    return [int(i) for i in encode(PROBE)]


def prove_tokenizer(
    server: ServerCandidate, expected: Sequence[int] | None, windows: Sequence[Window], label: str
) -> Proof:
    """Show that the server cuts text as the reference does; AssayError where it does not, or cannot
    show it.
    """
    if not expected:
        raise AssayError(
            f"the tokenizer of {label} cannot be held against the reference's: nothing of that was"
            " stored",
            finding_id="fidelity.tokenizer_unproven",
            remedy=(
                "compare with the reference's model itself (hf:MODEL …), or store it again with"
                " assay reference"
            ),
        )
    try:
        found = [int(i) for i in server.tokenize(PROBE)]
    except AssayError as error:
        raise AssayError(
            f"{label} cannot show that its tokenizer is the reference's: {error.message}",
            finding_id="fidelity.tokenizer_unproven",
            remedy=(
                "serve it with its page /tokenize (vLLM, SGLang), or run the engine in process"
                " (vllm:MODEL)"
            ),
        ) from error
    first = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    if first is not None or len(found) != len(expected):
        at = min(len(found), len(expected)) if first is None else first
        raise AssayError(
            f"{label} has another tokenizer than the reference: a probe text of {len(expected)} ids"
            f" has {len(found)} there, and differs from id {at} on",
            finding_id="fidelity.tokenizer_mismatch",
            remedy="distributions over different tokens cannot be compared; serve the same model",
            evidence={
                "position": at,
                "reference": list(expected[at : at + 4]),
                "server": found[at : at + 4],
            },
        )
    largest = max(max(w.tokens) for w in windows)
    if server.vocab_size is not None and largest >= server.vocab_size:
        raise AssayError(
            f"{label} has a vocabulary of {server.vocab_size:,} entries, the text has the id"
            f" {largest:,}",
            finding_id="fidelity.tokenizer_mismatch",
            remedy="distributions over different tokens cannot be compared; serve the same model",
        )
    return Proof(len(expected), server.vocab_size)
