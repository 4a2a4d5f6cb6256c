"""Windows scored with a codec in the cache, kept as they come, with what took part.

What decides a window's scores is its key (`assay.runs.Kept`), so that an interrupted command goes
on and an equal measurement is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from assay.engines.scoring import Engagement, ScoreJob, ScoringEngine, Window
from assay.fidelity.observation import WindowObservation
from assay.fidelity.score import ReferenceRows, batches, key_of, observe, read_kept
from assay.runs import Kept, cache_path, source_digest
from assay_lab.kv.cache_bytes import NOTE, CacheBytes

MEASURED_BYTES = 2 << 30
"""What kept observations may take on the disk."""


@dataclass(frozen=True)
class Measured:
    """What one configuration came to.

    `bytes` is None where no stream was encoded. `windows` are the numbers of those whose streams
    were, where these are the first ones. `seconds` were spent on fitting and on scoring.
    """

    seen: Sequence[WindowObservation]
    engagement: Engagement = field(default_factory=Engagement)
    bytes: CacheBytes | None = None
    windows: tuple[int, ...] = ()
    seconds: tuple[float, float] = (0.0, 0.0)


def kept_measurements() -> Kept:
    """The folder of kept observations, trimmed."""
    kept = Kept(
        cache_path("measured"), source_digest("engines", "fidelity", Path(__file__).parents[1])
    )
    kept.trim(MEASURED_BYTES)
    return kept


Scoring = tuple[ReferenceRows, ScoringEngine, ScoreJob]
"""A reference that has been scored, and how an engine scores windows against it."""


def measure_kept(
    windows: Sequence[Window],
    batch: int,
    kept: Kept,
    prepare: Callable[[int], Scoring],
    *,
    on_window: Callable[[WindowObservation], Any] = lambda seen: None,
    advance: Callable[[], None] = lambda: None,
    enough: Callable[[], bool] = lambda: False,
) -> Measured:
    """Score windows, of which those that `kept` holds are read; `prepare` is called only if so many
    are left to score.

    What took part is kept in pieces, one for each call that scored something, interrupted ones
    included, with the hashes of its windows: a piece of another text has no part in what is
    measured here.
    """
    pieces: list[dict[str, Any]] = kept.get("pieces", [])
    told = {sha256 for piece in pieces for sha256 in piece["of"]}
    seen: dict[int, WindowObservation] = {}
    todo: list[Window] = []
    for part in batches(windows, batch):
        if not told.issuperset(
            w.sha256 for w in part
        ):  # a run that was killed before it could say what took part
            kept.forget(key_of(part))
        found = read_kept(kept, part)
        todo += [] if found else part
        for window in found or ():
            seen[window.index] = window
            on_window(window)
            advance()
    if todo:
        began = time.perf_counter()
        reference, engine, job = prepare(len(todo))
        fitted, began = time.perf_counter() - began, time.perf_counter()
        new: list[int] = []

        def note(window: WindowObservation) -> None:
            seen[window.index] = window
            new.append(window.index)
            on_window(window)
            advance()

        try:
            observe(reference, engine, todo, job, kept=kept, on_window=note, enough=enough)
        finally:
            if new:
                seconds = [fitted, time.perf_counter() - began]
                of = [w.sha256 for w in todo if w.index in new]
                pieces.append(
                    {**asdict(engine.engagement()), "windows": new, "of": of, "seconds": seconds}
                )
                kept.put("pieces", pieces)
    return joined([seen[w.index] for w in windows if w.index in seen], pieces_of(windows, pieces))


def pieces_of(windows: Sequence[Window], pieces: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pieces in which some of these windows took part."""
    asked = {window.sha256 for window in windows}
    return [piece for piece in pieces if not asked.isdisjoint(piece["of"])]


def joined(seen: Sequence[WindowObservation], pieces: Sequence[Mapping[str, Any]]) -> Measured:
    """What took part in all pieces together."""
    layers: dict[int, int] = {}
    streams: dict[str, list[Any]] = {}
    windows: list[int] = []
    for piece in pieces:
        for layer, fires in piece["per_layer"].items():
            layers[int(layer)] = layers.get(int(layer), 0) + fires
        facts = piece["notes"].get(NOTE, {}).get("streams", {})
        for name, found in facts.items():
            streams.setdefault(name, []).extend(found)
        windows += piece["windows"][: min(map(len, facts.values()), default=0)]
    notes = dict(pieces[-1]["notes"]) if pieces else {}
    if NOTE in notes:
        notes[NOTE] = {**notes[NOTE], "streams": streams}
    counts = ([p[name] for p in pieces if p[name] is not None] for name in ("fires", "bytes_read"))
    fires, read = (sum(found) if found else None for found in counts)
    fit, score = (sum(p["seconds"][i] for p in pieces) for i in (0, 1))
    return Measured(
        seen, Engagement(fires, read, layers, notes), None, tuple(windows), (fit, score)
    )
