"""The figures of a report by the verb that made it: each with its interval and its sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb
from statistics import median
from typing import Any, Literal

Better = Literal["higher", "lower", "zero"]


@dataclass(frozen=True)
class Figure:
    """One number with its interval; `lo` and `hi` are None where nothing is known of its error."""

    key: str
    title: str
    value: float
    lo: float | None
    hi: float | None
    unit: str = ""
    better: Better = "higher"
    sizes: str = ""
    """What it rests on: `64 windows, 65,472 tokens`."""
    level: str = "95 %"
    """Confidence of the interval; `95 % a side` where each bound has that by itself."""

    def text(self) -> str:
        """`+0.83 % [+0.50, +1.16]`, the numbers as exact as they are different."""
        sign = "+" if self.better == "zero" else ""
        shown = [short(x, sign) for x in (self.value, self.lo, self.hi) if x is not None]
        bounds = "" if self.lo is None or self.hi is None else f" [{shown[1]}, {shown[2]}]"
        return f"{shown[0]}{f' {self.unit}' if self.unit else ''}{bounds}"

    def to_json(self) -> dict[str, Any]:
        """The number, its interval and its sizes."""
        return {
            "value": self.value,
            "lo": self.lo,
            "hi": self.hi,
            "unit": self.unit,
            "title": self.title,
            "sizes": self.sizes,
            "level": self.level,
        }


def short(x: float | None, sign: str = "") -> str:
    """Three significant digits without an exponent where that is readable; nothing for None."""
    if x is None:
        return ""
    if x and not 1e-4 <= abs(x) < 1e6:
        return f"{x:{sign}.3g}"
    digits = max(0, 2 - math.floor(math.log10(abs(x)))) if x else 0
    text = f"{x:{sign}.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def figures(command: str, results: Mapping[str, Any]) -> list[Figure]:
    """The figures of one report by the verb that made it; those that were not measured, or do not
    count, are left out.
    """
    reader = _READERS.get(command)
    return [] if reader is None else [f for f in reader(results) if f is not None]


def _compare(results: Mapping[str, Any]) -> Iterator[Figure | None]:
    sizes = f"{results.get('windows')} windows, {results.get('tokens') or 0:,} tokens"
    kld, top1 = results.get("kld") or {}, results.get("top1_pct") or {}
    changed = (
        results.get("top1_beyond_rounding_pct") or {}
    )  # what the grade rests on: the share that differs
    bound = ", a lower bound" if kld.get("kind", "exact") != "exact" else ""
    yield _of("kld", f"mean KL{bound}", kld | {"value": kld.get("mean")}, "nats", "lower", sizes)
    yield _of(
        "control",
        "mean KL above the control's",
        _difference(results.get("control")),
        "nats",
        "lower",
        sizes,
    )
    yield _of("dppl_pct", "Δppl", results.get("dppl_pct"), "%", "zero", sizes)
    if None in (value := [_number(changed.get(name)) for name in ("value", "lo", "hi")]):
        yield _of("top1_pct", "top-1 agreement", top1, "%", "higher", sizes)
    else:
        point, lo, hi = (100 - x for x in value if x is not None)
        same = {"value": point, "lo": hi, "hi": lo}
        yield _of("top1_pct", "top-1 agreement up to rounding", same, "%", "higher", sizes)


def _difference(control: Any) -> Mapping[str, Any]:
    """The paired difference that `--control` measured."""
    return {**control, "value": control.get("difference")} if isinstance(control, Mapping) else {}


def _check(results: Mapping[str, Any]) -> Iterator[Figure | None]:
    yield from _speed(results)
    bits = results.get("bits_per_byte") or {}
    sizes = f"{sum(not p.get('depth') for p in bits.get('passages', ()))} fixed texts"
    yield _of(
        "bits_per_byte",
        "plain English",
        {"value": bits.get("mean")},
        "bits per byte",
        "lower",
        sizes,
    )
    yield from _tools(results)


def _speed(results: Mapping[str, Any]) -> Iterator[Figure | None]:
    """Speeds of coherent text only: those of a server that writes nonsense are no figures."""
    speed = results.get("throughput") or {}
    if not speed.get("valid"):
        return
    sizes = f"{speed.get('samples')} timed texts, {speed.get('concurrency')} at a time"
    figures: tuple[tuple[str, str, str, Better], ...] = (
        ("decode_tokens_per_s", "coherent tokens a second", "tok/s", "higher"),
        ("ttft_s", "time to first token", "s", "lower"),
    )
    for key, title, unit, better in figures:
        rounds: dict[
            Any, list[float]
        ] = {}  # texts that were timed together are one piece of evidence
        for text in speed.get("texts") or ():
            if (value := _number(text.get(key))) is not None:
                rounds.setdefault(text.get("round"), []).append(value)
        found = _of(key, title, _median([median(v) for v in rounds.values()]), unit, better, sizes)
        yield found and replace(found, level="95 % a side")


def _median(values: Sequence[float]) -> Mapping[str, float | None]:
    """The median and its distribution-free interval, each bound at 95 % one-sided confidence.

    The k-th smallest of n values exceeds the median with probability P(X < k), X binomial (n, ½); k
    is the largest for which that is at most 5 % (Conover, Practical Nonparametric Statistics, 3.2).
    Fewer than five values bound nothing.
    """
    n, ordered = len(values), sorted(values)
    if not n:
        return {}
    tail, k = 0.0, 0
    while k < n and (tail := tail + comb(n, k) / 2**n) <= 0.05:
        k += 1
    bounds = (ordered[k - 1], ordered[n - k]) if k else (None, None)
    return {"value": median(ordered), "lo": bounds[0], "hi": bounds[1]}


def _tools(results: Mapping[str, Any]) -> Iterator[Figure | None]:
    """Shares of the tools suite at the concurrency where they are worst."""
    levels = [level for level in results.get("tools") or () if level.get("asked")]
    for key, title in (
        ("schema_valid", "follow their schema"),
        ("right", "right tool calls and objects"),
    ):
        if not levels:
            return
        worst = min(levels, key=lambda level: level[key] / level["asked"])
        sizes = f"{worst['asked']} questions, {worst['concurrency']} at once"
        yield _of(key, title, _percent(worst[f"{key}_rate"]), "%", "higher", sizes)


def _spec(results: Mapping[str, Any]) -> Iterator[Figure | None]:
    record = results.get("record") or {}
    pooled = (results.get("evidence") or {}).get("acceptance")
    sizes = f"{record.get('drafted') or 0:,} draft tokens"
    yield _of("acceptance", "accepted draft tokens", _percent(pooled or {}), "%", "higher", sizes)
    length = {"value": record.get("mean_acceptance_length")}
    yield _of("mean_acceptance_length", "tokens per step", length, "", "higher", sizes)


def _kv(results: Mapping[str, Any]) -> Iterator[Figure | None]:
    yield from _compare(results)
    stored = results.get("bytes") or {}
    yield _of("kv_ratio", "KV cache compression", {"value": stored.get("ratio")}, "×", "higher", "")


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Figure | None]]] = {
    "compare": _compare,
    "rerun": _compare,
    "check": _check,
    "tools": _check,
    "spec": _spec,
    "kv eval": _kv,
}


def _of(
    key: str, title: str, found: Mapping[str, Any] | None, unit: str, better: Better, sizes: str
) -> Figure | None:
    value, lo, hi = (_number((found or {}).get(name)) for name in ("value", "lo", "hi"))
    if value is None:
        return None
    if lo is None or hi is None:
        lo = hi = None
    return Figure(key, title, value, lo, hi, unit, better, sizes)


def _percent(found: Mapping[str, Any]) -> Mapping[str, float | None]:
    values = {name: _number(found.get(name)) for name in ("value", "lo", "hi")}
    return {name: None if value is None else 100 * value for name, value in values.items()}


def _number(value: Any) -> float | None:
    real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if real else None
