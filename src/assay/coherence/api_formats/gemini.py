"""Gemini's generateContent."""

from __future__ import annotations

from assay.coherence.answers import Assembly, Value, finish, has, speech


def gemini(value: Value, out: Assembly) -> bool:
    """Gemini's generateContent."""
    candidates, feedback = value.get("candidates"), value.get("promptFeedback")
    if candidates is None and has(feedback, ("blockReason",)):
        out.errors.append(f"the prompt was blocked: {feedback['blockReason']}")
        return True
    if not isinstance(candidates, list) or not all(
        has(c, ("content", "finishReason")) for c in candidates
    ):
        return False
    for place, candidate in enumerate(candidates):
        answer = out.answer(value.get("responseId"), f"candidate {candidate.get('index', place)}")
        content = candidate.get("content")
        speech({"content": content.get("parts")} if has(content) else {}, answer)
        finish(answer, candidate.get("finishReason"))
    return True
