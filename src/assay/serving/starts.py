"""Starts of a serve command: each configuration is launched and measured, and kept so that it
counts again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.errors import AssayError
from assay.options import DoctorOptions
from assay.progress import Progress
from assay.runs import Kept, cache_dir, source_digest
from assay.serving.command import ServeCommand, Setting
from assay.serving.diagnosis import Diagnosis
from assay.serving.launch import Running, StartFailed, launched, require_disk, tail_of
from assay.serving.remote import Cluster, StartRequest
from assay.serving.search import Configuration, OutOfTime
from assay.serving.symptoms import Measure, Observation, measure, rules_of, see

_FRESH, _SHARED = 24 * 3600.0, 3600.0
"""Seconds for which a start counts again: in an interrupted run of the same command, and in any
other run.
"""
_MOST_KEPT = 200 << 20
"""Bytes of starts that are kept."""
_LOG_KEPT = 30_000
SPEED = frozenset({"slower", "throughput"})
"""Rules that are about speed alone."""
_KEY_ENV = "ASSAY_DOCTOR_KEY"
"""Where the key that the command itself names is handed to the engine that asks."""


class Starts:
    """Launches and measures the starts of one run, within its budget.

    `rules` and `baseline` are what a start is measured for and against; the doctor sets them as it
    learns more. `bad_baseline(url)` is called while a baseline that fails still runs.
    """

    def __init__(
        self, found: Diagnosis, progress: Progress, bad_baseline: Callable[[str], None]
    ) -> None:
        command, options = found.command, found.options
        self.found, self.options, self.progress = found, options, progress
        self.bad_baseline = bad_baseline
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
        self.rules: frozenset[str] = rules_of(options.symptom)
        self.baseline: Observation | None = None
        self.key_env = _key_variable(options, command)
        self.cluster: Cluster | None = None
        self._came: set[tuple[Configuration, int]] = set()
        """Starts that ran ahead of their turn in this run."""
        self.now = ""
        """What is done at the moment, for the table that is shown while the doctor runs."""

    def require_room(self) -> None:
        """AssayError where the disk has no room for logs."""
        require_disk(self.folder)

    def close(self, decided: bool) -> None:
        """Mark a run that was decided as done, and let old starts go."""
        if decided:
            with suppress(OSError):
                (self.folder / "done").touch()
        self.kept.trim(_MOST_KEPT)

    def say(self, line: str) -> None:
        """Tell one line."""
        with self.progress(line, 0):
            pass

    def left(self) -> float:
        """Seconds until the budget is spent."""
        return self.until - time.monotonic()

    def observe(
        self, configuration: Configuration, index: int, rules: Collection[str] | None = None
    ) -> tuple[Observation, bool]:
        """One start: launched and measured, or as it was kept. OutOfTime once the budget
        is spent.
        """
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
            observation = self.launch(configuration, index, rules, len(self.found.starts))
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
                    and set(rules) <= SPEED
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
            StartRequest(
                found.command,
                replace(self.options, ray="", workers=0),
                configuration,
                index,
                len(found.starts) + place,
                rules,
                self.rules,
                self.baseline,
                self.left(),
            )
            for place, index in enumerate(indices)
        ]
        for index, answered in zip(indices, self.cluster.starts(asked), strict=True):
            if answered.observation is None:
                raise OutOfTime
            self._put(configuration, index, rules, answered.observation)
            found.checkpoint += answered.compared
            found.compared_itself |= answered.compared_itself
            found.notices += answered.notices
            seen.append(answered.observation)
        return seen

    def ahead(self, configuration: Configuration, index: int, count: int) -> None:
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
        own = self.name if rules and set(rules) <= SPEED else ""
        variables = sorted(command.variables(configuration).items())
        return [command.words(configuration, "PORT"), variables, index, sorted(rules), against, own]

    def _counts(self, kept: Mapping[str, Any]) -> bool:
        """Whether a kept start still counts; a server that did not start may do so the
        next time.
        """
        done = self.folder / "done"
        ended = done.stat().st_mtime if done.exists() else 0.0
        if kept["at"] < self.since:
            return False
        if kept["run"] == self.name and kept["at"] > ended:
            return bool(time.time() - kept["at"] < _FRESH)
        return time.time() - kept["at"] < _SHARED and not kept["observation"]["failed"]

    def launch(
        self, configuration: Configuration, index: int, rules: Collection[str], number: int
    ) -> Observation:
        """Start a configuration, measure it, and end it.

        Args:
            configuration: Names of the settings that the command has.
            index: Which start of this configuration it is, from 0.
            rules: What it is asked for.
            number: Which start of the run it is; the log is named after it.

        Raises:
            OutOfTime: The server had no time left to answer.
        """
        command, options, label = self.found.command, self.options, self.label(configuration)
        from assay.engines.server.engine import read_key

        digest = hashlib.sha256(repr(sorted(configuration)).encode()).hexdigest()[:8]
        log = self.folder / f"{number:03}-{digest}-{index}.log"
        try:
            timeout = min(options.start_timeout, max(10.0, self.left()))
            with launched(
                command,
                configuration,
                log,
                timeout=timeout,
                health=options.health,
                api_key=read_key(self.key_env),
                lock=options.start_lock,
            ) as running:
                self.now = (
                    f"{label}, start {index + 1}: asking, it started in {running.seconds:.0f} s"
                )
                seen = self._measure(running, index, rules, configuration)
                died = running.ends() if seen.said else not running.alive()
                if not configuration and not died and see(seen, None, self.rules).state == "bad":
                    # while it runs: another start would take as long again
                    self.bad_baseline(running.url)
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


def _own_key(command: ServeCommand) -> str | None:
    words = [*command.start, *command.fixed, *command.port_words]
    return words[words.index("--api-key") + 1] if "--api-key" in words[:-1] else None


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


def _key_variable(options: DoctorOptions, command: ServeCommand) -> str | None:
    """The environment variable with the server's key: the named one, or one made of `--api-key`."""
    if options.api_key_env is None and (own := _own_key(command)):
        os.environ[_KEY_ENV] = own
        return _KEY_ENV
    return options.api_key_env
