"""The other side of a check: an earlier healthy run, or a trusted model that is run here on the same prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.coherence.measure import Measurement, Plan
from assay.coherence.record import CheckRecord, Reference
from assay.coherence.report import record_json
from assay.engines.base import Engine, full_spec
from assay.environment import VERSION
from assay.errors import AssayError, UsageError
from assay.progress import Progress
from assay.runs import cache_dir, write_atomically

_REMEDY = "give the JSON of an earlier run of a healthy server: assay check URL --json > run.json"


def read_reference(path: Path) -> Reference:
    """Read the result of an earlier run; AssayError where it is none, or where that run failed itself."""
    name = path.name  # a report may be shown to others, so no folder of this machine
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
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
    if not record.samples:
        raise _unusable(f"the reference {name} holds no graded text")
    subject = document.get("subject") or {}
    return Reference(
        record, {"source": "run", "model": subject.get("model"), "verdict": document.get("verdict")}
    )


def _unusable(message: str) -> AssayError:
    return AssayError(message, finding_id="coherence.reference", remedy=_REMEDY)


def measure_reference(
    spec: str, plan: Plan, record: CheckRecord, subject: Mapping[str, Any], progress: Progress
) -> Reference:
    """Run the engine `spec` (`hf:FOLDER`) on the prompts that made `record`.

    Only the probes that the server ran are run. The result is cached by model, plan and version of assay, so a
    second check against the same reference costs nothing.
    """
    folder = reference_folder(spec)
    names = tuple(probe.name for probe in record.probes if probe.samples)
    plan = replace(plan, only=names, throughput=False, run_code=False)
    max_model_len = subject.get("max_model_len")
    from assay.engines.hf.engine import HfEngine

    stored = cache_dir("references") / f"{_key(folder, spec, plan, max_model_len)}.json"
    origin = {"source": "engine", "engine": "hf", "model": folder.name, "cached": stored.exists()}
    if stored.exists():
        return Reference(CheckRecord.from_json(json.loads(stored.read_text(encoding="utf-8"))), origin)
    with HfEngine.load(spec) as engine:
        measured = _measure_engine(engine, plan, max_model_len, progress)
    write_atomically(stored, json.dumps(record_json(measured)))
    return Reference(measured, origin)


def reference_folder(spec: str) -> Path:
    """The folder of the checkpoint in `hf:FOLDER?option=value`; AssayError where there is none to read, or nothing to run it.

    Costs nothing, so it can be asked before a server is measured for minutes.
    """
    spec = full_spec(spec)
    if not spec.startswith("hf:"):
        raise UsageError(
            f"--reference-engine {spec!r} is not an engine that can be a reference here",
            remedy="write hf:PATH, with the folder of a trusted checkpoint",
            finding_id="coherence.usage",
        )
    from assay.engines.hf.spec import parse_spec, require_packages

    folder = Path(parse_spec(spec).model)
    if not folder.is_dir():
        raise AssayError(
            f"the reference model {folder.name} is not a folder that can be read",
            finding_id="coherence.reference",
            remedy="give the folder of a checkpoint: --reference-engine hf:PATH",
        )
    if not (folder / "config.json").is_file():
        raise AssayError(
            f"the reference model {folder.name} is no checkpoint: the folder holds no config.json",
            finding_id="coherence.reference",
            remedy="give the folder of a checkpoint: --reference-engine hf:PATH",
        )
    require_packages(f"hf:{folder.name}")
    return folder


def _measure_engine(engine: Engine, plan: Plan, max_model_len: int | None, progress: Progress) -> CheckRecord:
    def named(what: str, steps: int) -> Any:
        return progress(f"reference: {what}", steps)

    measurement = Measurement(engine, plan, max_model_len, named)
    measurement.run_passages()
    measurement.run_probes()
    measurement.run_timed_texts()
    return measurement.record()


def _key(folder: Path, spec: str, plan: Plan, max_model_len: int | None) -> str:
    """Digest of all that decides a reference: the files (name, size, time), the plan, the version of assay."""
    try:
        files = sorted(
            (f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in folder.iterdir() if f.is_file()
        )
    except OSError as error:
        raise AssayError(
            f"cannot read the reference model {folder.name}: {error.strerror}",
            finding_id="coherence.reference",
            remedy="give the folder of a checkpoint: --reference-engine hf:PATH",
        ) from error
    decides = replace(plan, only=(), parallel=1).facts()
    parts = [VERSION, spec.partition("?")[2], files, decides, sorted(plan.only), max_model_len]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
