"""Where two greedy texts part, and whether the two tokens there are closer than the
engine's noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from assay.errors import AssayError

NOISE_FACTOR = 4.0
"""A gap of up to this many times the noise is a tie."""

NOISE_FLOOR = 1e-3
"""Log-probabilities (nats) closer than this are one value in 16-bit arithmetic."""


@dataclass(frozen=True)
class Tokens:
    """A greedy text token by token: its log-probabilities and the alternatives at each place."""

    texts: tuple[str, ...]
    logprobs: tuple[float, ...]
    top: tuple[Mapping[str, float], ...]

    @classmethod
    def from_completion(cls, body: Mapping[str, Any]) -> Tokens:
        """Tokens of an OpenAI completion response with `logprobs`."""
        try:
            logprobs = body["choices"][0]["logprobs"]
            texts, values = (
                tuple(logprobs["tokens"]),
                tuple(float(v) for v in logprobs["token_logprobs"]),
            )
            top = tuple(dict(t or {}) for t in logprobs.get("top_logprobs") or [{}] * len(texts))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise AssayError(
                "the server returns no log-probabilities with its completions",
                finding_id="server.missing_capability",
                remedy="--lossless needs /v1/completions with logprobs",
            ) from error
        return cls(texts, values, top)


@dataclass(frozen=True)
class Parting:
    """The first token at which two texts differ (`at` is None where they never do).

    `gap` is the distance, in nats, between the two tokens as the server without speculation sees
    them; None where the other token is not among its alternatives.
    """

    at: int | None
    on: str = ""
    off: str = ""
    gap: float | None = None
    real: bool = False


def part(on: Tokens, off: Tokens, noise: float) -> Parting:
    """Where `on` leaves `off`. A parting is real if the gap exceeds what the noise can bridge."""
    at = _first_difference(on, off)
    if at is None:
        return Parting(None)
    a, b = _at(on.texts, at), _at(off.texts, at)
    other = off.top[at].get(a) if at < len(off.top) and a else None
    own = off.logprobs[at] if at < len(off.logprobs) else None
    gap = None if other is None or own is None else max(0.0, own - other)
    limit = max(NOISE_FLOOR, NOISE_FACTOR * noise)
    # A token outside the alternatives is further away than the last of them.
    return Parting(at, a, b, gap, real=gap is None or gap > limit)


def noise_of(pairs: Iterable[tuple[Tokens, Tokens]]) -> float:
    """The 99th percentile of |difference| of log-probabilities over tokens that both texts agree
    on.
    """
    differences = sorted(
        abs(x - y)
        for a, b in pairs
        for x, y in zip(a.logprobs[: _agreed(a, b)], b.logprobs[: _agreed(a, b)], strict=True)
    )
    return (
        differences[min(len(differences) - 1, int(0.99 * len(differences)))] if differences else 0.0
    )


def _agreed(a: Tokens, b: Tokens) -> int:
    at = _first_difference(a, b)
    return min(len(a.texts), len(b.texts)) if at is None else at


def _first_difference(a: Tokens, b: Tokens) -> int | None:
    for i, (x, y) in enumerate(zip(a.texts, b.texts, strict=False)):
        if x != y:
            return i
    return None if len(a.texts) == len(b.texts) else min(len(a.texts), len(b.texts))


def _at(texts: tuple[str, ...], i: int) -> str:
    return texts[i] if i < len(texts) else ""
