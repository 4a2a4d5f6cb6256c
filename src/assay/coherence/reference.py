"""The other side of a check: an earlier healthy run, or a trusted model that is run here."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from assay.coherence.measure import Measurement
from assay.coherence.options import Plan
from assay.coherence.record import CheckRecord, Reference
from assay.coherence.results import record_json
from assay.coherence.settings import settings_of
from assay.coherence.stages import Stage
from assay.engines import full_spec
from assay.environment import VERSION
from assay.errors import AssayError, UsageError
from assay.files import json_of
from assay.progress import NO_PROGRESS, Progress
from assay.runs import cache_dir, keep_value, read_value

_REMEDY = "give the JSON of an earlier run of a healthy server: assay check URL --json > run.json"


def read_reference(path: Path) -> Reference:
    """Read the result of an earlier run; AssayError where it is none, or where that run failed
    itself.
    """
    name = path.name  # a report may be shown to others, so no folder of this machine
    try:
        document = json_of(path)
    except OSError as error:
        raise _unusable(f"cannot read the reference {name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _unusable(f"the reference {name} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("command") != "check":
        raise _unusable(f"the reference {name} is not a result of `assay check --json`")
    if document.get("verdict") in ("fail", "error"):
        raise _unusable(f"the reference {name} is a run with the verdict {document['verdict']}")
    try:
        record = CheckRecord.from_json(document["results"])
    except (KeyError, TypeError, AttributeError) as error:
        raise _unusable(f"the reference {name} lacks what a check result holds: {error}") from error
    if not record.samples and not record.tools:
        raise _unusable(f"the reference {name} holds no graded text")
    subject = document.get("subject") or {}
    plan = document["results"].get("plan") or {}
    origin = {"source": "run", "model": subject.get("model"), "verdict": document.get("verdict")}
    return Reference(record, origin, settings_of(subject, plan))


def _unusable(message: str, remedy: str = _REMEDY) -> AssayError:
    return AssayError(message, finding_id="coherence.reference", remedy=remedy)


_GIVE = "give the folder of a checkpoint: --reference-engine hf:PATH"


def reference_folder(spec: str) -> Path:
    """The folder of the checkpoint in `hf:FOLDER?option=value`; AssayError where there is none to
    read, or nothing to run it.

    Costs nothing, so it can be asked before a server is measured for minutes.
    """
    spec = full_spec(spec)
    if not spec.startswith("hf:"):
        raise UsageError(
            f"--reference-engine {spec!r} is not an engine that can be a reference here",
            remedy="write hf:PATH, with the folder of a trusted checkpoint",
            finding_id="coherence.usage",
        )
    from assay.engines.hf.spec import parse_hf
    from assay.engines.specs import require_packages

    folder = Path(parse_hf(spec).model)
    if not folder.is_dir():
        raise _unusable(
            f"the reference model {folder.name} is not a folder that can be read", _GIVE
        )
    if not (folder / "config.json").is_file():
        raise _unusable(
            f"the reference model {folder.name} is no checkpoint: the folder holds no config.json",
            _GIVE,
        )
    require_packages(f"hf:{folder.name}")
    return folder


class EngineReference:
    """A trusted model in this process, measured stage by stage after the server.

    What it gave for a stage is kept by model files, stage and version of assay, so that a second
    check against the same reference costs nothing; the model is loaded when the first stage is not
    there.
    """

    def __init__(
        self,
        spec: str,
        folder: Path,
        plan: Plan,
        max_model_len: int | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> None:
        self.record = CheckRecord()
        self._spec, self._folder, self._max_model_len = full_spec(spec), folder, max_model_len
        self._plan = replace(plan, run_code=False)
        self._progress = progress
        self._side: Measurement | None = None
        self._loaded = False

    @property
    def origin(self) -> dict[str, Any]:
        """Where its answers come from."""
        return {
            "source": "engine",
            "engine": "hf",
            "model": self._folder.name,
            "cached": not self._loaded,
        }

    def has_kept(self, stage: Stage) -> bool:
        """Whether its answers to a stage are there already."""
        return self._place(stage).exists() or (stage.kind == "tools" and bool(self.record.tools))

    def prepare(self, stage: Stage) -> None:
        """Load the model where it will be needed for a stage, so that the stage's own time can be
        told.
        """
        if not self.has_kept(stage):
            self._measurement()

    def run(self, stage: Stage, server: CheckRecord, deadline: float = float("inf")) -> None:
        """Answer a stage: the probes that the server answered in `server`, the tools suite once for
        all concurrencies.
        """
        if stage.kind == "tools" and (self.record.tools or not server.tools):
            return
        answered = {probe.name for probe in server.probes if probe.samples}
        stage = replace(
            stage, tasks=tuple(task for task in stage.tasks if task.probe.name in answered)
        )
        if (stage.kind == "texts" and not stage.tasks) or (
            stage.kind == "scores" and not server.passages
        ):
            return
        place = self._place(stage)
        if (known := read_value(place)) is not None:
            self.record = self.record.with_(CheckRecord.from_json(known))
            return
        side = self._measurement()
        able = tuple(task for task in stage.tasks if side.skip_reason(task.probe) is None)
        before = self.record
        side.record = CheckRecord()
        try:
            side.run(replace(stage, tasks=able), f"reference: {stage.name}", deadline, untimed=True)
        finally:
            self.record = before.with_(side.record)
        if (
            time.monotonic() <= deadline
        ):  # a stage that was cut would stand for a whole one in later checks
            keep_value(place, record_json(side.record))

    def close(self) -> None:
        """Give back the memory of the model."""
        if self._side is not None:
            self._side.engine.close()

    def _measurement(self) -> Measurement:
        if self._side is None:
            from assay.engines.hf.engine import HfEngine

            with self._progress("reference: loading the model", 1) as advance:
                engine = HfEngine.load(self._spec)
                advance()
            self._side = Measurement(engine, self._plan, self._max_model_len, self._progress)
            self._loaded = True
        return self._side

    def _place(self, stage: Stage) -> Path:
        """The file of a stage: named by all that decides it, the model's files (name, size, time)
        among them.
        """
        try:
            files = sorted(
                (f.name, f.stat().st_size, f.stat().st_mtime_ns)
                for f in self._folder.iterdir()
                if f.is_file()
            )
        except OSError as error:
            message = f"cannot read the reference model {self._folder.name}: {error.strerror}"
            raise _unusable(message, _GIVE) from error
        plan = self._plan
        tasks = [(task.probe.name, task.variant, asdict(task.sampling)) for task in stage.tasks]
        asked = (
            stage.kind,
            tasks,
            stage.texts,
            stage.context,
            stage.repeats,
            plan.seed,
            plan.concurrency,
            plan.token_budget,
        )
        parts = [
            VERSION,
            self._spec.partition("?")[2],
            files,
            asked,
            plan.thinking,
            self._max_model_len,
        ]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
        return cache_dir("references") / f"{digest}.json"
