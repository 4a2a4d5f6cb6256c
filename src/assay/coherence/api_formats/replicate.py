"""Predictions of Replicate and of Cog containers."""

from __future__ import annotations

from assay.coherence.answers import Assembly, Value, finish, has, string
from assay.coherence.api_formats.single_texts import RESULT_TEXTS


def replicate(value: Value, out: Assembly) -> bool:
    """A prediction of Replicate or of a Cog container, alone, in a list of them, or as their
    webhook sends it.
    """
    listed = value.get("results")
    if (
        isinstance(listed, list)
        and listed
        and all(has(v, ("status",)) for v in listed)
        and "next" in value
    ):
        return all(replicate(prediction, out) for prediction in listed)
    status, output = value.get("status"), value.get("output")
    if status not in _PREDICTION or not set(value) <= _PREDICTION_KEYS:
        return False
    if status in ("starting", "processing"):
        out.errors.append(f"the prediction is {status}")
    elif status != "succeeded":
        out.errors.append(str(value.get("error") or f"the prediction is {status}"))
    pieces = output if isinstance(output, list) else [output]
    if not all(
        piece is None or isinstance(piece, str) or has(piece, RESULT_TEXTS) for piece in pieces
    ):
        out.textless += 1
    elif output or status == "succeeded":
        answer = out.answer("prediction", value.get("id") or len(out.answers) + 1)
        answer.content.append(string(pieces))
        finish(answer, "stop" if status == "succeeded" else None)
    return True


_PREDICTION = ("starting", "processing", "succeeded", "failed", "canceled", "aborted")
_PREDICTION_KEYS = {
    "id",
    "model",
    "version",
    "input",
    "output",
    "status",
    "error",
    "logs",
    "metrics",
    "urls",
    "created_at",
    "started_at",
    "completed_at",
    "data_removed",
    "source",
    "webhook",
    "webhook_events_filter",
    "stream",
    "deployment",
    "deadline",
    "output_file_prefix",
}
