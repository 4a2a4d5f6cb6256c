"""Grades of the replies of one conversation."""

from __future__ import annotations

from collections.abc import Collection

from assay.coherence.conversation import Outcome, answer_text
from assay.coherence.detectors.stutter import stutter_counts
from assay.coherence.grading import Grade, grade
from assay.coherence.options import Plan
from assay.coherence.probes import FIBONACCI, extract_code
from assay.coherence.record import HEAD_CHARS, GradedReply
from assay.coherence.sandbox import run_fibonacci
from assay.engines import EXCERPT, Reply, call_remains, read_calls

# From the worst label to the best; the sample of a conversation of several replies is its worst
# reply.
_WORST_FIRST = ("degenerate", "empty", "truncated_reasoning", "ok")


def grade_outcome(outcome: Outcome, plan: Plan | None = None) -> GradedReply:
    """Grade every reply of a conversation; the worst one is the sample, the checks see them all.

    A plan with `run_code` also runs the code that the Fibonacci probe asked for, in a sandbox.
    """
    task = outcome.task
    checks = task.probe.check(outcome.replies, task.variant)
    if plan is not None and plan.run_code and task.probe.name == FIBONACCI.name:
        code = extract_code(answer_text(outcome.replies[-1]))
        checks = (*checks, run_fibonacci(code, unsafe=plan.run_code_unsafe))
    graded = [(reply, grade_reply(reply)) for reply in outcome.replies]
    forms = (
        [tool_form(reply, outcome.tools) for reply in outcome.replies]
        if outcome.tools
        else [("", "")]
    )
    # A call that came as one counts; a second call after the tool's result is a weak model's, not a
    # broken server's.
    form, call_text = (
        forms[0] if forms[0][0] else min(forms, key=lambda found: _FORMS.index(found[0]))
    )
    said = [stutter_counts(f"{reply.content}\n{reply.reasoning}") for reply in outcome.replies]
    reply, worst = min(graded, key=lambda pair: _WORST_FIRST.index(pair[1].label))
    return GradedReply(
        label=worst.label,
        kind=worst.kind,
        family=worst.family,
        causes=worst.causes_of_others,
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
        tool_form=form,
        tool_text=call_text,
        words=sum(counts.words for counts in said),
        stutters=sum(counts.total for counts in said),
        think_tag=any(bare_reasoning(reply) for reply in outcome.replies),
        stutter_text="; ".join(example for counts in said for example in counts.examples)[
            :HEAD_CHARS
        ],
    )


# From the worst to the best.
_FORMS = ("remains", "unread", "parsed", "")


def tool_form(reply: Reply, names: Collection[str]) -> tuple[str, str]:
    """What became of a call to one of the tools `names`, and the text in which it stands where
    nothing parsed it.
    """
    if reply.tool_calls:
        return "parsed", ""
    if remains := call_remains(reply.content, names):
        # A call that was cut at the length limit is unfinished, not mangled.
        cut = reply.finish_reason == "length" and reply.content.endswith(remains)
        return ("", "") if cut else ("remains", remains)
    return (
        ("unread", reply.content[:EXCERPT]) if read_calls(reply.content, names).calls else ("", "")
    )


def grade_reply(reply: Reply) -> Grade:
    """Grade content, reasoning and tool calls of one reply, each in its own right.

    Many templates open the reasoning in the prompt, so that a server without a reasoning parser
    sends all of it up to `</think>` as content. That is how such a server works, and no broken
    model: the reasoning is graded as reasoning.
    """
    thought = bare_reasoning(reply)
    return grade(
        reply.content.partition(CLOSES)[2] if thought else reply.content,
        reasoning=thought or reply.reasoning or None,
        tool_calls=reply.tool_calls,
        finish_reason=reply.finish_reason,
    )


CLOSES = "</think>"


def bare_reasoning(reply: Reply) -> str:
    """The reasoning in the content that ends with `</think>` and begins without a mark; empty where
    there is none.
    """
    before, closes, after = reply.content.partition(CLOSES)
    return (
        before
        if closes and after.strip() and "<think>" not in before and not reply.reasoning
        else ""
    )


def shown_text(reply: Reply) -> str:
    """What a person is shown of a reply: the content, else the reasoning, else the tool calls."""
    if reply.content:
        return reply.content
    if reply.reasoning:
        return reply.reasoning
    return " ".join(f"{call.name}({call.arguments})" for call in reply.tool_calls)


def received_chars(reply: Reply) -> int:
    """Code points received in all fields, to compare with the tokens that were billed."""
    calls = sum(len(call.name) + len(call.arguments) for call in reply.tool_calls)
    return len(reply.content) + len(reply.reasoning) + calls
