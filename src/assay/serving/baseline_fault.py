"""Why a baseline fails: its files are verified, and its numbers compared with a trusted
engine's.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from assay.engines.device import free_memory
from assay.errors import AssayError
from assay.progress import Progress
from assay.serving.diagnosis import Diagnosis
from assay.verdict import Severity


def reference_of(found: Diagnosis) -> str | None:
    """The model to compare a failing baseline with: the named one, else transformers on the same
    files, if they fit.
    """
    path = Path(found.command.model or "").expanduser()
    if found.options.reference_engine or not (path / "config.json").is_file():
        return found.options.reference_engine
    size = sum(f.stat().st_size for f in path.glob("*.safetensors"))
    fits = 0 < 4 * size < free_memory()  # weights in float32, and room to work
    return f"hf:{path}" if fits and find_spec("transformers") and find_spec("torch") else None


def verify_files(found: Diagnosis) -> bool:
    """Verify the checkpoint of the command and add the report to what was found.

    Returns:
        Whether there is a checkpoint on this machine.
    """
    model = found.command.model
    path = Path(model).expanduser() if model else None
    if path is None or not path.exists():
        return False
    from assay.checkpoint.options import VerifyOptions
    from assay.checkpoint.verify import verify

    with suppress(AssayError):
        options = VerifyOptions(values=True, allow_unverified=True)
        found.checkpoint.insert(0, verify(str(path), options))
    return True


def compare_numbers(found: Diagnosis, url: str, progress: Progress) -> None:
    """Compare the server at `url` with the trusted engine and add the report to what was found; an
    error becomes a notice.
    """
    engine = reference_of(found)
    if engine is None:
        return
    from assay.fidelity.compare import run_compare
    from assay.fidelity.plan_file import plan_from

    try:
        plan = plan_from(
            {"reference": engine, "candidates": [url]},
            {"windows": 8, "length": 256, "floors": False},
            where="doctor",
        )
        found.checkpoint.append(run_compare(plan, progress))
        named = Path(engine.removeprefix("hf:").partition("?")[0]).expanduser()
        own = Path(found.command.model or "").expanduser()
        found.compared_itself = engine.startswith("hf:") and named.resolve() == own.resolve()
    except AssayError as error:
        found.notices.append(replace(error.to_finding(), severity=Severity.WARNING))
