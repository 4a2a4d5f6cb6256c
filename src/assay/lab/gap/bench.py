"""Runs configurations and keeps what they came to, so that an interrupted decomposition goes on where it stopped.

One engine is open at a time. Everything measured is compared with a stored run without codec, its *anchor*: final
states of one engine by one path, scored once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assay.engines.scoring import Engagement, ScoreJob, ScoringEngine, ScoringPath, TokenizerFacts, Window
from assay.engines.specs import open_scorer
from assay.environment import describe
from assay.fidelity.metrics import statistics_device, window_statistics
from assay.fidelity.plan import label_of
from assay.fidelity.reference import hash_of, plan_windows, store_states, tokenizer_check
from assay.fidelity.score import WindowObservation, engaged, load, observation, observe, require_path
from assay.fidelity.store import Store, open_store
from assay.lab.gap.plan import Configuration, GapPlan
from assay.lab.kv.accounting import CacheBytes, measured_bytes
from assay.lab.kv.calibration import read_calibration
from assay.progress import Progress
from assay.runs import Claims, cache_dir, write_atomically

_DONE = "done.json"
"""Written last: what stands in its folder is whole."""


@dataclass(frozen=True)
class Measured:
    """What one configuration came to against its anchor. `windows` are the numbers of those that the hook looked at."""

    seen: Sequence[WindowObservation]
    engagement: Engagement
    bytes: CacheBytes | None = None
    windows: tuple[int, ...] = ()


class Bench:
    """Windows, stored runs and one open engine. Use as a context manager; `forget` drops what was kept."""

    def __init__(self, plan: GapPlan, progress: Progress) -> None:
        self.plan = plan
        self.progress = progress
        self.facts: dict[str, Mapping[str, Any]] = {}
        self._engine: ScoringEngine | None = None
        self._open: tuple[str, bool] | None = None
        self._check: Callable[[TokenizerFacts, str], None] | None = None
        self.used: set[Path] = set()
        self._claims = Claims()
        self.measured: dict[str, Measured] = {}
        self.windows: dict[str, list[Window]] = {}
        self.text: dict[str, Any] = {}

    def __enter__(self) -> Bench:
        try:
            self._read_text()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._claims.release()

    def close(self) -> None:
        """Close the engine that is open."""
        if self._engine:
            self._engine.close()
        self._engine = self._open = None

    def forget(self) -> None:
        """Delete everything that this run has kept."""
        for folder in self.used:
            shutil.rmtree(folder, ignore_errors=True)

    def _read_text(self) -> None:
        tokenizer = self.engine(self.plan.reference).tokenizer
        windows, facts = plan_windows(self.plan.comparison(self.plan.base_mode), tokenizer)
        # What is decomposed comes first; what is left of the text is fresh.
        main = min(self.plan.windows, len(windows))
        self.windows = {"main": windows[:main], "fresh": windows[main:]}
        self.text = facts
        hashes = [w.sha256 for w in windows]
        for path in filter(None, (self.plan.calibration, self.plan.other_calibration)):
            read_calibration(Path(path)).check_text(facts, hashes)
        self._check = tokenizer_check(tokenizer.sha256, tokenizer.vocab_size)

    def engine(self, spec: str, again: bool = False) -> ScoringEngine:
        """The engine, opened where it is not; whatever else is open is closed first.

        An independent run (`again`) never shares an opened engine with the others.
        """
        if self._open != (spec, again) or self._engine is None:
            self.close()
            with self.progress(f"opening {label_of(spec)}", 1) as advance:
                self._engine = open_scorer(spec)
                advance()
            self._open = (spec, again)
            if self._check:
                self._check(self._engine.tokenizer, label_of(spec))
            self.facts.setdefault(spec, self._engine.describe())
        return self._engine

    def job(self, config: Configuration) -> ScoreJob:
        """How a configuration is scored, without its hook."""
        job = self.plan.comparison(config.mode).job
        other = config.again or config.other_batch
        return replace(job, batch=self.plan.other_batch) if other else job

    def anchor(self, config: Configuration, windows: str = "main") -> Store:
        """The stored states of an engine without codec, by the path of the configuration's mode."""
        plain = config.plain
        folder = self._folder("anchor", plain, windows)
        done = folder / _DONE
        if done.exists():
            self.facts.setdefault(plain.engine, json.loads(done.read_text(encoding="utf-8")))
            return open_store(folder)
        plan = replace(self.plan.comparison(plain.mode), reference=plain.engine, batch=self.job(plain).batch)
        engine = self.engine(plain.engine, plain.again)
        require_path(engine, plan.job)
        store = store_states(plan, engine, self._ordered(plain, windows), self.text, folder, self.progress)
        write_atomically(done, json.dumps(engine.describe()))
        return store

    def between(self, anchor: Configuration, other: Configuration) -> Measured:
        """One stored run against another: two engines without codec."""
        stores = [self.anchor(config) for config in (anchor, other)]
        windows, device = self.windows["main"], statistics_device()
        seen = [
            observation(a.window, a.first, window_statistics(a, b.to(device)))
            for a, b in zip(*(store.rows(windows) for store in stores), strict=True)
        ]
        return Measured(seen, Engagement())

    def measure(self, config: Configuration, anchor: Configuration, windows: str = "main") -> Measured:
        """Score a configuration against the anchor of another (or of itself). In the order of the windows.

        AssayError where the codec took no part in the numbers.
        """
        folder = self._folder("seen", config, windows, anchor.plain)
        self._folder("anchor", anchor.plain, windows)  # part of this run, whether or not it is read again
        done = folder / _DONE
        chosen = self._ordered(config, windows)
        if not done.exists():
            self._score(config, anchor, windows, folder)
        kept = json.loads(done.read_text(encoding="utf-8"))
        engagement = _from_json(kept)
        size = measured_bytes(engagement, self.plan.length - 1) if config.codec else None
        seen = [load(folder / f"{w.index:06d}.npz") for w in sorted(chosen, key=lambda w: w.index)]
        found = Measured(seen, engagement, size, tuple(kept["windows"]))
        self.measured[f"{config.label} | against {anchor.plain.label}"] = found
        return found

    def try_out(self, config: Configuration) -> None:
        """Score one window and forget it; AssayError where the engine does not take the codec."""
        for _ in self.engine(config.engine).score_windows(self.windows["main"][:1], self._hooked(config)):
            pass

    def _score(self, config: Configuration, anchor: Configuration, windows: str, folder: Path) -> None:
        """Score the windows that are not kept yet; AssayError where the codec took no part."""
        rows = self.anchor(anchor, windows)
        chosen = self._ordered(config, windows)
        todo = [w for w in chosen if not (folder / f"{w.index:06d}.npz").exists()]
        if not todo:  # interrupted before what the engine counted was kept
            for window in chosen:
                (folder / f"{window.index:06d}.npz").unlink()
            todo = chosen
        job = self._hooked(config)
        engine = self.engine(config.engine, config.again)
        with self.progress(f"scoring {config.label}", len(chosen)) as advance:
            seen = observe(rows, engine, chosen, job, keep_in=folder, advance=advance)
        found = engine.engagement()
        if not config.lossless:
            engaged(seen, found, path=ScoringPath(job.path), hooked=True, same=False, label=config.label)
        looked_at = [w.index for w in todo[: config.measured]]
        write_atomically(folder / _DONE, json.dumps(_to_json(found) | {"windows": looked_at}))

    def _hooked(self, config: Configuration) -> ScoreJob:
        return config.hooked(self.job(config), self.plan.length, self.plan.seed)

    def _ordered(self, config: Configuration, windows: str) -> list[Window]:
        chosen = self.windows[windows]
        return chosen[::-1] if config.again else chosen

    def _folder(
        self, kind: str, config: Configuration, windows: str, anchor: Configuration | None = None
    ) -> Path:
        """The folder of a result: by configuration, anchor, windows and what runs here."""
        parts = [hash_of(self.windows[windows]), str(self.job(config)), json.dumps(describe()["packages"])]
        if anchor:
            parts.append(anchor.key())
        folder = self._claims.folder(cache_dir("gap") / f"{kind}-{config.key(chr(10).join(parts))}")
        self.used.add(folder)
        return folder


def _to_json(engagement: Engagement) -> dict[str, Any]:
    return {
        "fires": engagement.fires,
        "bytes_read": engagement.bytes_read,
        "per_layer": {str(k): v for k, v in engagement.per_layer.items()},
        "notes": dict(engagement.notes),
    }


def _from_json(kept: Mapping[str, Any]) -> Engagement:
    return Engagement(
        kept["fires"], kept["bytes_read"], {int(k): v for k, v in kept["per_layer"].items()}, kept["notes"]
    )
