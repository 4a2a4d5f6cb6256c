"""`assay doctor`: which setting of a serve command breaks it? Launch, bisect, prove, and say what
to use now.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from assay.engines.machine import free_memory
from assay.errors import AssayError
from assay.options import DoctorOptions
from assay.progress import NO_PROGRESS, Progress
from assay.runs import Kept, cache_dir, source_digest
from assay.serving.command import ServeCommand, Setting
from assay.serving.elsewhere import Answered, Asked, Cluster
from assay.serving.launch import Running, StartFailed, launched, require_disk, tail_of
from assay.serving.search import (
    RATES,
    VARYING,
    Bench,
    Configuration,
    OutOfTime,
    Rates,
    State,
    minimal_failing_set,
    overturned,
    starts_needed,
)
from assay.serving.symptoms import (
    Engaged,
    Measure,
    Observation,
    Seen,
    engaged,
    measure,
    rules_of,
    see,
)
from assay.verdict import Finding, Report, Severity

_FRESH, _SHARED = 24 * 3600.0, 3600.0
"""Seconds for which a start counts again: in an interrupted run of the same command, and in any
other run.
"""
_MOST_KEPT = 200 << 20
"""Bytes of starts that are kept."""
_LOG_KEPT = 30_000
_SPEED = frozenset({"slower", "throughput"})
_KEY_ENV = "ASSAY_DOCTOR_KEY"
"""Where the key that the command itself names is handed to the engine that asks."""


@dataclass(frozen=True)
class Start:
    """One start of one configuration and what it showed."""

    configuration: Configuration
    index: int
    seen: Seen
    observation: Observation
    resumed: bool = False


@dataclass
class Diagnosis:
    """Everything that a doctor found, for the report."""

    command: ServeCommand
    options: DoctorOptions
    baseline: Seen | None = None
    given: Seen | None = None
    given_state: State = "undecided"
    guilty: list[list[str]] = field(default_factory=list)
    proven: bool = True
    cannot_run: dict[str, str] = field(default_factory=dict)
    acquitted: set[str] = field(default_factory=set)
    rules: frozenset[str] = frozenset()
    engaged: dict[str, Engaged] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    rungs: list[tuple[Configuration, Observation]] = field(default_factory=list)
    kept_safe: list[str] = field(default_factory=list)
    """Settings that the baseline keeps, since it does not start without them."""
    checkpoint: list[Report] = field(default_factory=list)
    compared_itself: bool = False
    """A failing baseline was compared with transformers on the same files."""
    seconds: float = 0.0
    out_of_time: bool = False
    interrupted: bool = False
    failed: str = ""
    notices: list[Any] = field(default_factory=list)

    @property
    def all(self) -> Configuration:
        """Every setting of the given command that can run."""
        return frozenset(s.name for s in self.command.settings if s.name not in self.cannot_run)

    def setting(self, name: str) -> Setting:
        """The setting of a name."""
        return next(s for s in self.command.settings if s.name == name)

    def of(self, configuration: Configuration) -> Start | None:
        """The first measured start of a configuration."""
        starts = [
            s for s in self.starts if s.configuration == configuration and not s.observation.failed
        ]
        return starts[0] if starts else None

    @property
    def launches(self) -> int:
        """Servers that this run started."""
        return sum(not s.resumed for s in self.starts)


def start_elsewhere(asked: Asked) -> Answered:
    """Launch and measure one start in this process, for a doctor on another machine."""
    doctor = Doctor(asked.command, asked.options, NO_PROGRESS)
    require_disk(doctor.folder)
    doctor.baseline, doctor.rules, doctor.until = (
        asked.baseline,
        asked.symptom,
        time.monotonic() + asked.left,
    )
    observation = None
    with suppress(OutOfTime):
        observation = doctor._launch(asked.configuration, asked.index, asked.rules, asked.number)
    found = doctor.found
    return Answered(observation, found.checkpoint, found.compared_itself, found.notices)


class Doctor:
    """One run: the clock, what is kept, and the launches."""

    def __init__(self, command: ServeCommand, options: DoctorOptions, progress: Progress) -> None:
        self.options, self.progress = options, progress
        self.found = Diagnosis(command, options)
        self.until = time.monotonic() + 60 * options.budget
        about = [
            command.start,
            command.fixed,
            [(s.name, s.words, s.value) for s in command.settings],
            command.environment,
            _identity(command),
            options.facts(),
            _measured_by(),
        ]
        self.name = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
        self.folder = cache_dir(f"doctor/{self.name}")
        # A start is kept by the command line that was started, so that commands share their
        # baseline.
        how = [options.seconds, options.concurrency, options.seed, options.tools]
        self.kept = Kept(cache_dir("doctor/starts"), [_identity(command), how, _measured_by()])
        self.since = time.time() if options.fresh else 0.0
        self.drafts = any(s.safe.kind == "draft" for s in command.settings)
        self.how = Measure(options.seconds, options.concurrency, options.seed, options.tools)
        self.bench = Bench(self._start, ahead=self._ahead)
        self.rules: frozenset[str] = rules_of(options.symptom)
        self.key_env = options.api_key_env
        if self.key_env is None and (own := _own_key(command)):
            self.key_env = _KEY_ENV
            os.environ[_KEY_ENV] = own
        self.baseline: Observation | None = None
        self.steadied = False
        self.cluster: Cluster | None = None
        self._came: set[tuple[Configuration, int]] = set()
        """Starts that ran ahead of their turn in this run."""
        self.now = ""
        """What is done at the moment, for the table that is shown while the doctor runs."""

    def say(self, line: str) -> None:
        """Tell one line."""
        with self.progress(line, 0):
            pass

    def _start(self, configuration: Configuration, index: int) -> State:
        observation, resumed = self.observe(configuration, index)
        seen = see(observation, self.baseline, self.rules, self.options.slower)
        # The baseline is timed (again) where only speed is bad, or where it was not timed and this
        # start was.
        base, timed = (
            self.baseline,
            len(observation.speeds) >= 3 and "slower" in (self.rules or _SPEED),
        )
        unsure = (
            seen.bad.keys() <= _SPEED
            if seen.bad
            else timed and base is not None and len(base.speeds) < 3
        )
        if base is not None and unsure and not self.steadied:
            self._steady()
            seen = see(observation, self.baseline, self.rules, self.options.slower)
        self._add(Start(configuration, index, seen, observation, resumed))
        what = "; ".join(f"{rule}: {says}" for rule, says in seen.bad.items()) or "as the baseline"
        self.say(
            f"{self.label(configuration)}, start {index + 1}: {seen.state.replace('_', ' ')}"
            f"{' (kept from before)' if resumed else ''}, {what[:160]}; {self.left():.0f} s left"
        )
        return seen.state

    def _add(self, start: Start) -> None:
        """Keep a start; one that was judged before is judged anew, not listed twice."""
        same = [
            s
            for s in self.found.starts
            if (s.configuration, s.index) == (start.configuration, start.index)
        ]
        if same and start.resumed:
            self.found.starts = [s for s in self.found.starts if s is not same[0]]
            start = replace(start, resumed=same[0].resumed)
        self.found.starts.append(start)

    def _steady(self) -> None:
        """Time the baseline once more: what differs between two starts of it is not the fault of a
        setting.
        """
        self.steadied = True
        again, resumed = self.observe(frozenset(), 1, rules=frozenset({"slower"}))
        if self.baseline is None or again.failed:
            return
        both = (*self.baseline.record.timed, *again.record.timed)
        self.baseline = replace(self.baseline, record=replace(self.baseline.record, timed=both))
        self._add(Start(frozenset(), 1, Seen("good"), again, resumed))

    def left(self) -> float:
        """Seconds until the budget is spent."""
        return self.until - time.monotonic()

    def observe(
        self, configuration: Configuration, index: int, rules: Collection[str] | None = None
    ) -> tuple[Observation, bool]:
        """One start: launched and measured, or as it was kept. OutOfTime once the budget is spent."""
        rules = self.rules if rules is None else rules
        if (known := self._known(configuration, index, rules)) is not None:
            ahead = (configuration, index) in self._came
            self._came.discard((configuration, index))
            return known, not ahead
        if self.left() <= 0:
            raise OutOfTime
        require_disk(self.folder)
        self.say(f"{self.label(configuration)}, start {index + 1}: starting")
        self.now = f"{self.label(configuration)}, start {index + 1}: starting"
        if self.cluster:
            observation = self._ask_cluster(configuration, [index], rules)[0]
        else:
            observation = self._launch(configuration, index, rules, len(self.found.starts))
            self._put(configuration, index, rules, observation)
        self.now = ""
        return observation, False

    def _known(
        self, configuration: Configuration, index: int, rules: Collection[str]
    ) -> Observation | None:
        # What was measured for all rules serves for some of them too.
        for wider in (rules, rules_of(self.options.symptom), frozenset()):
            kept = self.kept.get(self._key(configuration, index, wider))
            if kept is not None and self._counts(kept):
                found = Observation.from_json(kept["observation"])
                # A start that was asked for other things may not have been timed, or at another
                # hour.
                if (
                    rules
                    and set(rules) <= _SPEED
                    and wider != rules
                    and (kept["run"] != self.name or not found.speeds)
                ):
                    continue
                return found
        return None

    def _put(
        self, configuration: Configuration, index: int, rules: Collection[str], seen: Observation
    ) -> None:
        kept = {"at": time.time(), "run": self.name, "observation": seen.to_json()}
        self.kept.put(self._key(configuration, index, rules), kept)

    def _ask_cluster(
        self, configuration: Configuration, indices: Sequence[int], rules: Collection[str]
    ) -> list[Observation]:
        """Starts of one configuration at the same time; each is kept as it comes. OutOfTime where
        one had none left.
        """
        assert self.cluster is not None
        found, seen = self.found, list[Observation]()
        asked = [
            Asked(
                found.command, replace(self.options, ray="", workers=0), configuration, index,
                len(found.starts) + place, rules, self.rules, self.baseline, self.left(),
            )
            for place, index in enumerate(indices)
        ]  # fmt: skip
        for index, answered in zip(indices, self.cluster.starts(asked), strict=True):
            if answered.observation is None:
                raise OutOfTime
            self._put(configuration, index, rules, answered.observation)
            found.checkpoint += answered.compared
            found.compared_itself |= answered.compared_itself
            found.notices += answered.notices
            seen.append(answered.observation)
        return seen

    def _ahead(self, configuration: Configuration, index: int, count: int) -> None:
        """Run starts that will be needed at the same time, as many as the cluster takes; their turn
        finds them kept.
        """
        if self.cluster is None or self.left() <= 0:
            return
        wanted = range(index, index + min(count, self.cluster.size))
        todo = [
            number for number in wanted if self._known(configuration, number, self.rules) is None
        ]
        if len(todo) > 1:
            self.now = (
                f"{self.label(configuration)}, starts {todo[0] + 1} to {todo[-1] + 1}: at the same"
                " time"
            )
            self.say(self.now)
            self._ask_cluster(configuration, todo, self.rules)
            self._came |= {(configuration, number) for number in todo}
            self.now = ""

    def _key(self, configuration: Configuration, index: int, rules: Collection[str]) -> list[Any]:
        """What a start is kept by: the command line, and what it was measured for and against."""
        command = self.found.command
        against = None if self.baseline is None else command.words(frozenset(), "PORT")
        # Speed is that of the hour: it is compared within one run.
        own = self.name if rules and set(rules) <= _SPEED else ""
        variables = sorted(command.variables(configuration).items())
        return [command.words(configuration, "PORT"), variables, index, sorted(rules), against, own]

    def _counts(self, kept: Mapping[str, Any]) -> bool:
        """Whether a kept start still counts; a server that did not start may do so the next time."""
        done = self.folder / "done"
        ended = done.stat().st_mtime if done.exists() else 0.0
        if kept["at"] < self.since:
            return False
        if kept["run"] == self.name and kept["at"] > ended:
            return bool(time.time() - kept["at"] < _FRESH)
        return time.time() - kept["at"] < _SHARED and not kept["observation"]["failed"]

    def _launch(
        self, configuration: Configuration, index: int, rules: Collection[str], number: int
    ) -> Observation:
        command, options, label = self.found.command, self.options, self.label(configuration)
        from assay.engines.server.engine import read_key

        digest = hashlib.sha256(repr(sorted(configuration)).encode()).hexdigest()[:8]
        log = self.folder / f"{number:03}-{digest}-{index}.log"
        try:
            timeout = min(options.start_timeout, max(10.0, self.left()))
            with launched(
                command, configuration, log, timeout=timeout, health=options.health,
                api_key=read_key(self.key_env), lock=options.start_lock,
            ) as running:  # fmt: skip
                self.now = (
                    f"{label}, start {index + 1}: asking, it started in {running.seconds:.0f} s"
                )
                seen = self._measure(running, index, rules, configuration)
                died = running.ends() if seen.said else not running.alive()
                if not configuration and not died and see(seen, None, self.rules).state == "bad":
                    self._compare(
                        running.url
                    )  # while it runs: another start would take as long again
                return replace(
                    seen,
                    start_s=running.seconds,
                    log=tail_of(log, _LOG_KEPT, _LOG_KEPT),
                    died=died,
                    said=(
                        seen.said
                        if not died
                        else f"the server ended while it was asked: {seen.said}"
                    ),
                )
        except StartFailed as failed:
            if failed.kind == "silent" and self.left() <= 1 and number:
                raise OutOfTime from failed
            return Observation(failed=failed.kind, said=failed.said, log=tail_of(log, _LOG_KEPT))

    def _measure(
        self, running: Running, index: int, rules: Collection[str], configuration: Configuration
    ) -> Observation:
        # A start that took long is worth a longer look, longer still while it is unclear: another
        # one takes as long again.
        seconds = max(5.0, min(max(self.how.seconds, running.seconds / 2), self.left()))
        how = replace(
            self.how, seconds=seconds, longer=max(0.0, min(running.seconds, self.left() - seconds))
        )
        kinds = {s.safe.kind for s in self._settings(configuration)}
        try:
            return measure(
                running.url,
                how,
                index,
                rules,
                self.baseline,
                kinds=kinds,
                first=self.drafts,
                log=running.log,
                api_key_env=self.key_env,
                model=self.found.command.asked(configuration),
            )
        except AssayError as error:
            if running.ends():
                return Observation(said=error.message)
            return Observation(failed="silent", said=error.message)

    def _settings(self, configuration: Collection[str]) -> list[Setting]:
        return [s for s in self.found.command.settings if s.name in configuration]

    def label(self, configuration: Configuration) -> str:
        """A configuration in a few words."""
        everything = self.found.all
        if not configuration:
            return "baseline"
        if configuration == everything:
            return "given command"
        missing = everything - configuration
        if len(missing) < len(configuration):
            return f"without {', '.join(sorted(missing))}"
        return f"with {', '.join(sorted(configuration))}"

    # What is found out.

    def run(self) -> Diagnosis:
        """Baseline, given command, guilty sets, acquittal, ladder; what was measured stays when it
        is cut off.
        """
        began = time.monotonic()
        self.until = (
            began + 60 * self.options.budget
        )  # not from when it began to wait for another doctor
        try:
            self._examine()
        except OutOfTime:
            self.found.out_of_time = True
        except KeyboardInterrupt:
            self.found.interrupted = True
        except AssayError as error:
            if not self.found.starts:
                raise
            self.found.failed = error.message
            self.found.notices.append(error.to_finding())
        self.found.rules = self.rules
        self._engagement()
        self.found.seconds = time.monotonic() - began
        self.found.notices += self.kept.notices("server")
        decided = not (self.found.out_of_time or self.found.interrupted or self.found.failed)
        if decided and not self.found.notices:
            with suppress(OSError):
                (self.folder / "done").touch()
        self.kept.trim(_MOST_KEPT)
        return self.found

    def _examine(self) -> None:
        found = self.found
        if not self._baseline():
            return
        if found.baseline is None or found.baseline.state == "bad":
            self._checkpoint()
            return
        everything = found.all
        if not everything:
            found.given, found.given_state = found.baseline, "good"
            found.rungs.append((frozenset(), self.baseline or Observation()))
            return
        state = self._given()
        if state == "cannot_run":
            self._find_cannot_run()
            if not found.all:
                return
            state = self._given()
        found.given_state = state
        if state == "bad":
            self._bisect()
        elif state == "good":
            found.acquitted |= found.all
        if state in ("bad", "good"):
            self._climb()

    def _baseline(self) -> bool:
        """Measure the baseline; where it does not start, with what a model may need to load. False
        if nothing starts.
        """
        found = self.found
        observation, resumed = self.observe(frozenset(), 0)
        found.starts.append(
            Start(frozenset(), 0, see(observation, None, self.rules), observation, resumed)
        )
        if observation.failed == "memory":  # another process may have had it for a moment
            observation, resumed = self.observe(frozenset(), 1)
            found.starts.append(
                Start(frozenset(), 1, see(observation, None, self.rules), observation, resumed)
            )
        if observation.failed:
            self.say(f"baseline does not start: {observation.said[:200]}")
            needed = [s.name for s in found.command.settings if s.safe.needed]
            for kept in [[n] for n in needed] + ([needed] if len(needed) > 1 else []):
                again, resumed = self.observe(frozenset(kept), 0)
                found.starts.append(
                    Start(frozenset(kept), 0, see(again, None, self.rules), again, resumed)
                )
                if not again.failed:
                    found.kept_safe = kept
                    self._keep(kept)
                    observation = again
                    break
            else:
                everything = found.all
                given, resumed = self.observe(everything, 0) if everything else (observation, True)
                if everything:
                    found.starts.append(
                        Start(everything, 0, see(given, None, self.rules), given, resumed)
                    )
                if given.failed or not everything:
                    found.failed = (
                        "nothing could be launched:"
                        f" {(given.said if given.failed else observation.said)[:300]}"
                    )
                else:
                    found.given = see(given, None, self.rules)
                    found.failed = ""
                    found.notices.append(_no_baseline(observation.said))
                return False
        self.baseline = None if see(observation, None).state == "bad" else observation
        found.baseline = see(observation, None, self.rules)
        if found.baseline.state == "undecided":
            found.baseline = Seen("good")
            self.baseline = observation
        return True

    def _keep(self, names: Collection[str]) -> None:
        """From here on these settings are a part of the baseline."""
        command = self.found.command
        words = [word for s in command.settings if s.name in names for word in s.words]
        self.found.command = replace(
            command,
            always=(*command.always, *words),
            settings=tuple(s for s in command.settings if s.name not in names),
        )
        self.found.starts = [
            replace(s, configuration=s.configuration - set(names)) for s in self.found.starts
        ]

    def _given(self) -> State:
        """As bad as it looks, or as good as the baseline in as many starts as a fault of the
        declared rate needs.
        """
        found, everything, needed = (
            self.found,
            self.found.all,
            starts_needed(self.options.fault_rate),
        )
        tally_bad = tally_good = cannot = unclear = 0
        while True:
            if tally_good and not tally_bad:  # a good command needs them all, and so far it is one
                self._ahead(everything, self.bench.tallies[everything].starts, needed - tally_good)
            state = self.bench.once(everything)
            last = found.starts[-1]
            if state == "cannot_run":
                cannot += 1
                if cannot >= 2 or last.observation.failed in ("memory", "refused"):
                    return "cannot_run"
            elif state == "bad":
                tally_bad += 1
                found.given = (
                    last.seen if found.given is None or found.given.state != "bad" else found.given
                )
                # One start decides where the evidence is beyond doubt, or the second shows the
                # same.
                if last.seen.certain or tally_bad >= 2:
                    break
            elif state == "good":
                tally_good += 1
                found.given = found.given or last.seen
                if tally_good >= needed and not tally_bad:
                    return "good"
                if tally_good >= 2 * needed:
                    return "undecided"
            else:
                unclear += 1
                found.given = found.given or last.seen
                if unclear >= 3:
                    return "undecided"
        assert found.given is not None
        self.rules = frozenset(found.given.bad)
        if last.seen.certain and self.rules - _SPEED:
            self.rules -= (
                _SPEED  # the speed of text that is broken says nothing, and it varies more
            )
        sure = last.seen.certain and not tally_good
        self.bench.rates = Rates(dict(RATES if sure else VARYING)).after(tally_bad, tally_good)
        self.bench.settled |= {everything: "bad", frozenset(): "good"}
        # Starts of before were judged by all rules; they count again by those that are bad.
        self.bench.tallies = {}
        return "bad"

    def _weight(self, name: str) -> float:
        """How likely a setting is guilty: by the table, by what is bad, and by what is known to
        break.
        """
        setting = self.found.setting(name)
        weight = setting.safe.suspicion
        if self.rules <= {"slower", "speculation"}:
            weight *= 5 if setting.safe.kind == "draft" else 1
        if self.rules & {"prompts"}:
            weight *= 5 if "template" in name or "tokenizer" in name else 1
        return weight

    def _bisect(self) -> None:
        """Minimal failing sets, until what is left is as good as the baseline."""
        found = self.found
        left = set(found.all)
        while left:
            names, proven = minimal_failing_set(sorted(left), self.bench.decide, self._weight)
            try:
                for _ in range(3 if self.options.fault_rate < 1 else 0):
                    if not overturned(self.bench, names):
                        break
                    names, proven = minimal_failing_set(
                        sorted(left), self.bench.decide, self._weight
                    )
            except OutOfTime:
                found.guilty.append(names)
                found.proven = False
                raise
            # Nothing is proven until what is left was found good, or bad on its own account.
            proven, found.proven = found.proven and proven, False
            found.guilty.append(names)
            left -= {max(names, key=self._weight)}
            state = self.bench.decide(frozenset(left)) if left else "good"
            if state in ("good", "bad"):
                found.proven = proven
            if state != "bad":
                break
        accused = {name for names in found.guilty for name in names}
        for configuration, state in self.bench.settled.items():
            if state == "good":
                found.acquitted |= configuration - accused

    def _find_cannot_run(self) -> None:
        """Which settings keep the server from starting: these can be judged on another machine
        only.
        """
        found = self.found
        why = found.starts[-1].observation.said

        def weight(name: str) -> float:
            return self._weight(name) * (100 if _names(name, found.setting(name).words, why) else 1)

        def runs(configuration: Configuration) -> State:
            known = next((s for s in found.starts if s.configuration == configuration), None)
            if known is None:
                self._start(configuration, 0)
                known = found.starts[-1]
            return "bad" if known.observation.failed else "good"

        left = set(found.all)
        while left and runs(frozenset(left)) == "bad":
            names, _ = minimal_failing_set(sorted(left), runs, weight)
            failed = next((s for s in found.starts if s.configuration == frozenset(names)), None)
            for name in names:
                found.cannot_run[name] = failed.observation.said if failed else why
            left -= set(names)
        self.bench.tallies, self.bench.settled = {}, {}

    def _climb(self) -> None:
        """Add the acquitted settings back, one by one, and measure: the fastest that is still
        coherent.
        """
        found = self.found
        safe = self._complement()
        if (
            self.options.ladder
            and self.baseline is not None
            and self.baseline.speed is None
            and self.left() > 30
        ):
            self._steady()
        base = self.baseline or Observation()
        if base.speed is not None:
            found.rungs.append((frozenset(), base))
        wanted = [safe] if safe else []
        if self.options.ladder and safe:
            names = sorted(safe, key=self._weight, reverse=True)
            wanted = [frozenset(names[:n]) for n in range(1, len(names))][-6:] + wanted
            if found.given_state == "good":
                wanted = [safe]
        for configuration in wanted:
            kept = next(
                (
                    s.observation
                    for s in found.starts
                    if s.configuration == configuration
                    and (
                        s.observation.speed or (s.seen.state == "good" and not self.options.ladder)
                    )
                ),
                None,
            )
            if kept is None:
                if self.left() < 30:
                    break
                # All of them together were found as good as the baseline: what is left is to time
                # them.
                index = sum(s.configuration == configuration for s in found.starts)
                kept, resumed = self.observe(configuration, index, rules=_SPEED)
                seen = see(kept, self.baseline, {"throughput"})
                found.starts.append(Start(configuration, index, seen, kept, resumed))
                if seen.state != "good":
                    continue
            found.rungs.append((configuration, kept))

    def _complement(self) -> Configuration:
        """All settings but one of each guilty set: the likeliest culprit of it."""
        dropped = {max(names, key=self._weight) for names in self.found.guilty}
        return self.found.all - dropped

    def _engagement(self) -> None:
        found = self.found
        given = found.of(found.all)
        base = found.of(frozenset())
        if given is None:
            return
        for setting in found.command.settings:
            if setting.name not in found.cannot_run:
                found.engaged[setting.name] = engaged(
                    setting, given.observation, base.observation if base else None
                )

    def _checkpoint(self) -> None:
        """The baseline itself fails: look at the files, then at the numbers."""
        model = self.found.command.model
        path = Path(model).expanduser() if model else None
        if path is None or not path.exists():
            return
        from assay.checkpoint.options import VerifyOptions
        from assay.checkpoint.verify import verify

        self.now = "the baseline fails: verifying the checkpoint"
        self.say(self.now)
        with suppress(AssayError):
            self.found.checkpoint.insert(
                0, verify(str(path), VerifyOptions(values=True, allow_unverified=True))
            )
        if (
            self.cluster
            or self.reference() is None
            or len(self.found.checkpoint) > 1
            or self.left() < 60
        ):
            return
        log = self.folder / "compare.log"
        with (
            suppress(StartFailed),
            launched(
                self.found.command, frozenset(), log, timeout=self.options.start_timeout
            ) as running,
        ):
            self._compare(running.url)

    def reference(self) -> str | None:
        """The model to compare a failing baseline with: the named one, else transformers on the
        same files, if they fit.
        """
        path = Path(self.found.command.model or "").expanduser()
        if self.options.reference_engine or not (path / "config.json").is_file():
            return self.options.reference_engine
        size = sum(f.stat().st_size for f in path.glob("*.safetensors"))
        fits = 0 < 4 * size < free_memory()  # weights in float32, and room to work
        return f"hf:{path}" if fits and find_spec("transformers") and find_spec("torch") else None

    def _compare(self, url: str) -> None:
        """The numbers of a failing baseline beside a trusted engine's."""
        engine = self.reference()
        if engine is None or self.left() < 30:
            return
        from assay.fidelity.compare import run_compare
        from assay.fidelity.plan import plan_from

        self.now = f"the baseline fails: comparing it with {engine}"
        self.say(self.now)
        try:
            plan = plan_from(
                {"reference": engine, "candidates": [url]},
                {"windows": 8, "length": 256, "floors": False},
                where="doctor",
            )
            self.found.checkpoint.append(run_compare(plan, self.progress))
            named = Path(engine.removeprefix("hf:").partition("?")[0]).expanduser()
            own = Path(self.found.command.model or "").expanduser()
            self.found.compared_itself = (
                engine.startswith("hf:") and named.resolve() == own.resolve()
            )
        except AssayError as error:
            self.found.notices.append(replace(error.to_finding(), severity=Severity.WARNING))


def _names(name: str, words: Sequence[str], said: str) -> bool:
    """Whether the engine names an option, in the form that the command has, in what it says."""
    return any(
        re.search(rf"(?<![\w-]){re.escape(form)}(?![\w-])", said) for form in {name, *words[:1]}
    )


def _own_key(command: ServeCommand) -> str | None:
    words = [*command.start, *command.fixed, *command.port_words]
    return words[words.index("--api-key") + 1] if "--api-key" in words[:-1] else None


def _no_baseline(said: str) -> Any:
    return Finding(
        "server.no_baseline",
        Severity.WARNING,
        "the baseline cannot run on this machine, so nothing can be compared with it",
        detail=said[:400],
        remedies=(
            "name a machine with more memory",
            "assay check the running server with --reference-engine",
        ),
    )


def _measured_by() -> str:
    """Hash of the source that launches and asks: what it measured before may be another thing."""
    return source_digest("coherence", "serving/symptoms.py", "serving/launch.py")


def _identity(command: ServeCommand) -> list[Any]:
    """What tells whether program and model are still the same: times and sizes of their files."""
    found: list[Any] = []
    for name in (*map(shutil.which, command.start), command.model):
        path = Path(name).expanduser() if name else None
        if path and path.exists():
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            found += [
                [f.name, f.stat().st_size, int(f.stat().st_mtime)] for f in files if f.is_file()
            ][:200]
    return found
