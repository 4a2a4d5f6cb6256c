"""`assay doctor`: which setting of a serve command breaks it? Launch, bisect, prove, and say what
to use now.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from assay.errors import AssayError
from assay.options import DoctorOptions
from assay.progress import NO_PROGRESS, Progress
from assay.serving.baseline_fault import compare_numbers, reference_of, verify_files
from assay.serving.command import ServeCommand
from assay.serving.diagnosis import Diagnosis, Start
from assay.serving.launch import StartFailed, launched
from assay.serving.remote import StartAnswer, StartRequest
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
from assay.serving.starts import SPEED, Starts
from assay.serving.symptoms import Observation, Seen, engaged, see
from assay.verdict import Finding, Severity


def remote_start(asked: StartRequest) -> StartAnswer:
    """Launch and measure one start in this process, for a doctor on another machine."""
    doctor = Doctor(asked.command, asked.options, NO_PROGRESS)
    starts, found = doctor.starts, doctor.found
    starts.require_room()
    starts.baseline, starts.rules = asked.baseline, asked.symptom
    starts.until = time.monotonic() + asked.left
    observation = None
    with suppress(OutOfTime):
        observation = starts.launch(asked.configuration, asked.index, asked.rules, asked.number)
    return StartAnswer(observation, found.checkpoint, found.compared_itself, found.notices)


class Doctor:
    """One run: decides what to start next, and what the starts prove."""

    def __init__(self, command: ServeCommand, options: DoctorOptions, progress: Progress) -> None:
        self.options, self.progress = options, progress
        self.found = Diagnosis(command, options)
        self.starts = Starts(self.found, progress, self._compare)
        self.bench = Bench(self._start, ahead=self.starts.ahead)
        self.steadied = False

    def _start(self, configuration: Configuration, index: int) -> State:
        observation, resumed = self.starts.observe(configuration, index)
        seen = see(observation, self.starts.baseline, self.starts.rules, self.options.slower)
        # The baseline is timed (again) where only speed is bad, or where it was not timed and this
        # start was.
        base, timed = (
            self.starts.baseline,
            len(observation.speeds) >= 3 and "slower" in (self.starts.rules or SPEED),
        )
        unsure = (
            seen.bad.keys() <= SPEED
            if seen.bad
            else timed and base is not None and len(base.speeds) < 3
        )
        if base is not None and unsure and not self.steadied:
            self._steady()
            seen = see(observation, self.starts.baseline, self.starts.rules, self.options.slower)
        self._add(Start(configuration, index, seen, observation, resumed))
        what = "; ".join(f"{rule}: {says}" for rule, says in seen.bad.items()) or "as the baseline"
        self.starts.say(
            f"{self.starts.label(configuration)}, start {index + 1}: {seen.state.replace('_', ' ')}"
            f"{' (kept from before)' if resumed else ''}, {what[:160]}; {self.starts.left():.0f} s left"  # noqa: E501
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
        again, resumed = self.starts.observe(frozenset(), 1, rules=frozenset({"slower"}))
        if self.starts.baseline is None or again.failed:
            return
        both = (*self.starts.baseline.record.timed, *again.record.timed)
        self.starts.baseline = replace(
            self.starts.baseline, record=replace(self.starts.baseline.record, timed=both)
        )
        self._add(Start(frozenset(), 1, Seen("good"), again, resumed))

    def run(self) -> Diagnosis:
        """Baseline, given command, guilty sets, acquittal, ladder; what was measured stays when it
        is cut off.
        """
        began = time.monotonic()
        self.starts.until = (
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
        self.found.rules = self.starts.rules
        self._engagement()
        self.found.seconds = time.monotonic() - began
        self.found.notices += self.starts.kept.notices("server")
        decided = not (self.found.out_of_time or self.found.interrupted or self.found.failed)
        self.starts.close(decided and not self.found.notices)
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
            found.rungs.append((frozenset(), self.starts.baseline or Observation()))
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
        observation, resumed = self.starts.observe(frozenset(), 0)
        found.starts.append(
            Start(frozenset(), 0, see(observation, None, self.starts.rules), observation, resumed)
        )
        if observation.failed == "memory":  # another process may have had it for a moment
            observation, resumed = self.starts.observe(frozenset(), 1)
            found.starts.append(
                Start(
                    frozenset(), 1, see(observation, None, self.starts.rules), observation, resumed
                )
            )
        if observation.failed:
            self.starts.say(f"baseline does not start: {observation.said[:200]}")
            needed = [s.name for s in found.command.settings if s.safe.needed]
            for kept in [[n] for n in needed] + ([needed] if len(needed) > 1 else []):
                again, resumed = self.starts.observe(frozenset(kept), 0)
                found.starts.append(
                    Start(frozenset(kept), 0, see(again, None, self.starts.rules), again, resumed)
                )
                if not again.failed:
                    found.kept_safe = kept
                    self._keep(kept)
                    observation = again
                    break
            else:
                everything = found.all
                given, resumed = (
                    self.starts.observe(everything, 0) if everything else (observation, True)
                )
                if everything:
                    found.starts.append(
                        Start(everything, 0, see(given, None, self.starts.rules), given, resumed)
                    )
                if given.failed or not everything:
                    found.failed = (
                        "nothing could be launched:"
                        f" {(given.said if given.failed else observation.said)[:300]}"
                    )
                else:
                    found.given = see(given, None, self.starts.rules)
                    found.failed = ""
                    found.notices.append(_no_baseline(observation.said))
                return False
        self.starts.baseline = None if see(observation, None).state == "bad" else observation
        found.baseline = see(observation, None, self.starts.rules)
        if found.baseline.state == "undecided":
            found.baseline = Seen("good")
            self.starts.baseline = observation
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
                self.starts.ahead(
                    everything, self.bench.tallies[everything].starts, needed - tally_good
                )
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
        self.starts.rules = frozenset(found.given.bad)
        if last.seen.certain and self.starts.rules - SPEED:
            self.starts.rules -= (
                SPEED  # the speed of text that is broken says nothing, and it varies more
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
        if self.starts.rules <= {"slower", "speculation"}:
            weight *= 5 if setting.safe.kind == "draft" else 1
        if self.starts.rules & {"prompts"}:
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
            and self.starts.baseline is not None
            and self.starts.baseline.speed is None
            and self.starts.left() > 30
        ):
            self._steady()
        base = self.starts.baseline or Observation()
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
                if self.starts.left() < 30:
                    break
                # All of them together were found as good as the baseline: what is left is to time
                # them.
                index = sum(s.configuration == configuration for s in found.starts)
                kept, resumed = self.starts.observe(configuration, index, rules=SPEED)
                seen = see(kept, self.starts.baseline, {"throughput"})
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
        starts, found = self.starts, self.found
        starts.now = "the baseline fails: verifying the checkpoint"
        starts.say(starts.now)
        if not verify_files(found):
            return
        compared = len(found.checkpoint) > 1
        if starts.cluster or compared or reference_of(found) is None or starts.left() < 60:
            return
        log = starts.folder / "compare.log"
        with (
            suppress(StartFailed),
            launched(
                found.command, frozenset(), log, timeout=self.options.start_timeout
            ) as running,
        ):
            self._compare(running.url)

    def _compare(self, url: str) -> None:
        """The numbers of a failing baseline beside a trusted engine's, while there is time."""
        engine = reference_of(self.found)
        if engine is None or self.starts.left() < 30:
            return
        self.starts.now = f"the baseline fails: comparing it with {engine}"
        self.starts.say(self.starts.now)
        compare_numbers(self.found, url, self.progress)


def _names(name: str, words: Sequence[str], said: str) -> bool:
    """Whether the engine names an option, in the form that the command has, in what it says."""
    return any(
        re.search(rf"(?<![\w-]){re.escape(form)}(?![\w-])", said) for form in {name, *words[:1]}
    )


def _no_baseline(said: str) -> Finding:
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
