"""From the replies of one conversation to one graded sample."""

from __future__ import annotations

from assay.coherence.conversation import Outcome
from assay.coherence.grading import Grade, grade
from assay.coherence.probes.base import answer_text
from assay.coherence.probes.question import FIBONACCI, extract_code
from assay.coherence.record import HEAD_CHARS, Sample
from assay.coherence.sandbox import run_fibonacci
from assay.engines.base import Reply

# From the worst label to the best; the sample of a conversation of several replies is its worst reply.
_WORST_FIRST = ("degenerate", "empty", "truncated_reasoning", "ok")


def to_sample(outcome: Outcome, *, run_code: bool = False) -> Sample:
    """Grade every reply of a conversation; the worst one is the sample, the checks see them all.

    `run_code` also runs the code that the Fibonacci probe asked for, in a sandboxed subprocess.
    """
    task = outcome.task
    checks = task.probe.check(outcome.replies, task.variant)
    if run_code and task.probe.name == FIBONACCI.name:
        checks = (*checks, run_fibonacci(extract_code(answer_text(outcome.replies[-1]))))
    graded = [(reply, grade_reply(reply)) for reply in outcome.replies]
    reply, worst = min(graded, key=lambda pair: _WORST_FIRST.index(pair[1].label))
    return Sample(
        label=worst.label,
        kind=worst.kind,
        onset_char=worst.onset_char,
        finish_reason=reply.finish_reason,
        completion_tokens=reply.completion_tokens,
        text_head=shown_text(reply)[:HEAD_CHARS],
        text_chars=received_chars(reply),
        coherent_chars=worst.coherent_chars,
        temperature=task.sampling.temperature,
        seed=task.sampling.seed,
        prompt_tokens=reply.prompt_tokens,
        checks=checks,
        variant=task.variant,
    )


def grade_reply(reply: Reply) -> Grade:
    """Grade content, reasoning and tool calls of one reply, each in its own right."""
    return grade(
        reply.content,
        reasoning=reply.reasoning or None,
        tool_calls=reply.tool_calls,
        finish_reason=reply.finish_reason,
    )


def shown_text(reply: Reply) -> str:
    """What a person is shown of a reply: the content, else the reasoning, else the tool calls."""
    if reply.content:
        return reply.content
    if reply.reasoning:
        return reply.reasoning
    return " ".join(f"{call.name}({call.arguments})" for call in reply.tool_calls)


def received_chars(reply: Reply) -> int:
    """Code points received in all fields, to hold against the tokens that were billed."""
    calls = sum(len(call.name) + len(call.arguments) for call in reply.tool_calls)
    return len(reply.content) + len(reply.reasoning) + calls
