"""assay: prove that a fast LLM is still the same model.

Each verb of the command line is a function here, with the same options by the same names. Each
returns a `Report`: a subject that fails is a report whose verdict is `fail`. Where nothing could be
examined (an unreachable server, a missing file) AssayError is raised, and UsageError, which is one,
for an option that makes no sense.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assay.api import (
        bundle_show,
        bundle_verify,
        card,
        check,
        compare,
        diff,
        doctor,
        gate,
        grade,
        grade_files,
        reference,
        reference_pack,
        rerun,
        spec,
        table,
        verify,
        watch,
    )
    from assay.coherence.grading import Grade
    from assay.coherence.streaming import StreamingGrader
    from assay.environment import VERSION as __version__
    from assay.errors import AssayError, UsageError
    from assay.verdict import Finding, Report, Severity, Verdict

__all__ = [
    "AssayError",
    "Finding",
    "Grade",
    "Report",
    "Severity",
    "StreamingGrader",
    "UsageError",
    "Verdict",
    "__version__",
    "bundle_show",
    "bundle_verify",
    "card",
    "check",
    "compare",
    "diff",
    "doctor",
    "gate",
    "grade",
    "grade_files",
    "reference",
    "reference_pack",
    "rerun",
    "spec",
    "table",
    "verify",
    "watch",
]

_HOMES = {
    "AssayError": "assay.errors:AssayError",
    "Finding": "assay.verdict:Finding",
    "Grade": "assay.coherence.grading:Grade",
    "Report": "assay.verdict:Report",
    "Severity": "assay.verdict:Severity",
    "StreamingGrader": "assay.coherence.streaming:StreamingGrader",
    "UsageError": "assay.errors:UsageError",
    "Verdict": "assay.verdict:Verdict",
    "__version__": "assay.environment:VERSION",
}
"""Where the names are that are not functions of `assay.api`."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES.get(name, f"assay.api:{name}").partition(":")
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """What is public."""
    return sorted(__all__)
