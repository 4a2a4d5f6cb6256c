"""Is the text sane? `grade` labels a finished output, `StreamingGrader` watches one while it is
written.

`grading` asks the `detectors` about a `text`; `unpacking` takes files of output apart with
`stream_decoder` and `api_formats`, for `grade_files`. `check` asks a server: `run` measures the
`stages` of a plan into a `record`, `judge` asks the `rules`, `diagnosis` names causes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assay.coherence.grade_files import grade_completion
    from assay.coherence.grading import Grade, Label, grade
    from assay.coherence.streaming import StreamingGrader

_HOMES = {
    "Grade": "grading",
    "Label": "grading",
    "StreamingGrader": "streaming",
    "grade": "grading",
    "grade_completion": "grade_files",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command line starts without the detectors."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = ["Grade", "Label", "StreamingGrader", "grade", "grade_completion"]
