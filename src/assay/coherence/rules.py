"""The rules of a check: each looks at one kind of evidence and says good, bad, unclear, or that it
was not examined.

A rule compares with a reference where there is one. Intervals are two-sided; their confidence
depends on how often the verdict has been asked for (`assay.stats.equivalence.confidence_of_look`),
so that asking again does not make an accident more likely.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from assay.coherence.detectors.stutter import HEALTHY, TIMES, Counts, judge_stutter
from assay.coherence.probes import LEAST_TEXTS
from assay.coherence.record import CheckRecord, Sample, ToolLevel
from assay.coherence.tools import paired
from assay.stats import Interval, cluster_mean, interval_json, mean_interval, newcombe, wilson
from assay.stats.equivalence import confidence_of_look
from assay.verdict import Finding, Severity

State = Literal["good", "bad", "unclear", "not_examined"]


@dataclass(frozen=True)
class Ruling:
    """What one rule says, in one line, with the findings it raises."""

    rule: str
    state: State
    says: str
    findings: tuple[Finding, ...] = ()


Rulings = Ruling | list[Ruling] | None
"""What a rule returns: one ruling, several, or none where it has nothing to say."""


def _finding(
    id_: str, severity: Severity, title: str, evidence: Mapping[str, Any], **more: Any
) -> Finding:
    return Finding(id=f"coherence.{id_}", severity=severity, title=title, evidence=evidence, **more)


def percent(interval: Interval) -> str:
    """A rate with its interval in words."""
    return f"{interval.value:.0%} [{interval.lo:.0%}, {interval.hi:.0%}]"


# Are the texts degenerate, empty, cut off, or billed and never received?

HARD_RATE = 0.05
"""Without a reference: the rate of floods, salads and empty answers must not lie above this (lower
bound).
"""
HARD_MARGIN = 0.02
"""With a reference: so much above its rate (lower bound of the difference); a whole weak model
writes one in forty.
"""
MAJORITY = 0.5
"""Without a reference: more degenerate texts than this (lower bound) is a failure, whatever their
kind.
"""
TOLERATED = 1 / 3
"""A subject passes without a reference if its degenerate rate stays below this (upper bound)."""
RATE_MARGIN = 0.10
"""With a reference: so much more degenerate than the reference (lower bound of the difference) is a
failure.
"""
RATE_CLEAR = 0.25
"""If the rate of hard texts, or the difference to the reference, may be larger than this (upper
bound), it is unclear.
"""
HIDDEN_TOKENS = 20
"""Tokens that must have been billed before missing text is held against the server."""
_LOOPS_BY_NAME = frozenset(
    {"the_the_the", "a_a_a", "few_words", "repeated_tool_call", "recycled_tail", "copied_tail"}
)
_HARD_LOOPS = frozenset({"newline_loop", "delimiter_loop"})
"""Loops of nothing but blanks and marks: no model that is whole ends there, so they count as
floods.
"""


def is_loop(kind: str | None) -> bool:
    """Whether a kind is a loop, which a small healthy model writes too, rather than a flood or a
    salad.
    """
    return (
        kind is not None and ("loop" in kind or kind in _LOOPS_BY_NAME) and kind not in _HARD_LOOPS
    )


def is_hard(sample: Sample) -> bool:
    """Whether the text is one that no sane model writes at any size: a flood, a salad, nothing at
    all.
    """
    return sample.degenerate and not is_loop(sample.kind)


def hard_texts(record: CheckRecord, reference: CheckRecord | None, confidence: float) -> Rulings:
    """Floods, salads and empty answers: no model that is whole writes them."""
    n = len(record.samples)
    if not n:
        return Ruling("hard_texts", "not_examined", "no text was graded")
    hard = [sample for sample in record.samples if is_hard(sample)]
    rate = wilson(len(hard), n, confidence)
    says = f"{len(hard)} of {n} are floods, salads or empty"
    evidence = _rate_evidence("hard", hard, n, rate)
    if reference is not None and reference.samples:
        theirs = sum(map(is_hard, reference.samples))
        difference = newcombe(len(hard), n, theirs, len(reference.samples), confidence)
        evidence |= {"reference_hard": theirs, "difference": interval_json(difference)}
        says += (
            f", of the reference {theirs} of {len(reference.samples)}: difference"
            f" {percent(difference)}"
        )
        bad, open_ = difference.lo > HARD_MARGIN, difference.hi > RATE_CLEAR
    else:
        says += f": {percent(rate)}"
        bad, open_ = rate.lo > HARD_RATE, rate.hi > RATE_CLEAR
    if not (bad and len(hard) >= 3):
        return Ruling("hard_texts", "unclear" if open_ else "good", says)
    title = (
        f"the server writes text that no sane model writes: {len(hard)} of {n} texts,"
        f" {percent(rate)}"
    )
    return Ruling(
        "hard_texts", "bad", says, (_finding("degenerate", Severity.ERROR, title, evidence),)
    )


def _rate_evidence(name: str, bad: Sequence[Sample], n: int, rate: Interval) -> dict[str, Any]:
    kinds = Counter(sample.kind or sample.label for sample in bad)
    return {
        "texts": n,
        name: len(bad),
        "rate": interval_json(rate),
        "kinds": dict(kinds.most_common()),
    }


def degenerate_rate(
    record: CheckRecord, reference: CheckRecord | None, confidence: float
) -> Rulings:
    """All degenerate texts, loops included; a weak model loops too, so only a large share or a
    difference counts.
    """
    n = len(record.samples)
    if not n:
        return Ruling("degenerate_rate", "not_examined", "no text was graded")
    bad = [sample for sample in record.samples if sample.degenerate]
    rate = wilson(len(bad), n, confidence)
    evidence = _rate_evidence("degenerate", bad, n, rate)
    if reference is not None and reference.samples:
        return _rate_against(record, reference, confidence, len(bad), evidence)
    says = f"{len(bad)} of {n} texts: {percent(rate)}"
    if rate.lo > MAJORITY:
        finding = _finding(
            "degenerate", Severity.ERROR, f"most texts are degenerate: {says}", evidence
        )
        return Ruling("degenerate_rate", "bad", says, (finding,))
    if rate.hi > TOLERATED:
        compare = (
            "compare with the model itself: --reference-engine hf:PATH, or --reference run.json"
            " from a healthy server"
        )
        return Ruling("degenerate_rate", "unclear", says, (_thin(says, evidence, compare),))
    title = f"{len(bad)} of {n} texts are degenerate; a small model does that on its own"
    findings = (_finding("degenerate", Severity.WARNING, title, evidence),) if bad else ()
    return Ruling("degenerate_rate", "good", says, findings)


def _rate_against(
    record: CheckRecord,
    reference: CheckRecord,
    confidence: float,
    bad: int,
    evidence: dict[str, Any],
) -> Ruling:
    """The rate of degenerate texts against the reference's; where it is too coarse, equal fixed
    texts decide.

    Where they are equal no weight is damaged, and a model that loops at every other text differs
    from itself now and then: there a higher rate fails only with the confidence of the second look.
    """
    n, m = len(record.samples), len(reference.samples)
    theirs = sum(sample.degenerate for sample in reference.samples)
    difference = newcombe(bad, n, theirs, m, confidence)
    evidence |= {
        "reference_texts": m,
        "reference_degenerate": theirs,
        "difference": interval_json(difference),
    }
    says = f"{bad} of {n} texts, of the reference {theirs} of {m}: difference {percent(difference)}"
    loss = _bit_loss(record, reference, confidence)
    equal = loss is not None and -BITS_MARGIN <= loss.lo <= loss.hi <= BITS_EQUAL
    fixed = (
        f"the fixed texts lose nothing ([{loss.lo:+.4f}, {loss.hi:+.4f}] bits per byte)"
        if loss and equal
        else ""
    )
    certain = (
        newcombe(bad, n, theirs, m, max(confidence, confidence_of_look(2))) if equal else difference
    )
    if certain.lo > RATE_MARGIN:
        title = (
            f"the server degenerates more than the model itself does: {bad} of {n} texts against"
            f" {theirs} of {m}"
        )
        return Ruling(
            "degenerate_rate",
            "bad",
            says,
            (_finding("degenerate", Severity.ERROR, title, evidence),),
        )
    if difference.hi <= RATE_CLEAR and difference.lo <= RATE_MARGIN:
        return Ruling("degenerate_rate", "good", says)
    if difference.lo <= 0 and equal:
        return Ruling("degenerate_rate", "good", f"{says}; {fixed}, and they resolve more")
    if difference.lo > RATE_MARGIN:
        says += f"; {fixed}, so that further texts decide"
    return Ruling("degenerate_rate", "unclear", says, (_thin(says, evidence),))


def _thin(says: str, evidence: Mapping[str, Any], *remedies: str) -> Finding:
    title = f"too few texts to tell a weak model from a broken server: {says}"
    more = (*remedies, "give it more time (--budget), or more --samples")
    return _finding("unclear", Severity.WARNING, title, evidence, remedies=more)


def hidden_tokens(record: CheckRecord, reference: CheckRecord | None, confidence: float) -> Rulings:
    """Tokens that were billed, and no text that was received: special tokens, stripped on their way
    out.
    """
    hidden = [s for s in record.samples if _is_hidden(s)]
    if len(hidden) < 2 or wilson(len(hidden), len(record.samples), confidence).lo <= HARD_RATE / 2:
        return None
    if reference is not None and sum(map(_is_hidden, reference.samples)) >= len(hidden):
        return None
    billed = sum(s.completion_tokens or 0 for s in hidden)
    received = sum(s.text_chars for s in hidden)
    title = (
        f"{billed} tokens were billed in {len(hidden)} answers, {received} characters of text were"
        " received"
    )
    finding = _finding(
        "empty",
        Severity.ERROR,
        title,
        {"answers": len(hidden), "tokens_billed": billed, "chars_received": received},
        causes=(
            (
                "the model emits special or reserved tokens only, which the server strips from the"
                " text"
            ),
            "a reasoning or tool parser swallows the text",
        ),
        remedies=(
            "ask one question with skip_special_tokens=false and look at the raw tokens",
            "start the server without --reasoning-parser and --tool-call-parser, and ask again",
        ),
    )
    return Ruling("hidden_tokens", "bad", title, (finding,))


def _is_hidden(sample: Sample) -> bool:
    tokens = sample.completion_tokens or 0
    return tokens >= HIDDEN_TOKENS and sample.text_chars < tokens / 4


def think_tag(record: CheckRecord, reference: CheckRecord | None) -> Rulings:
    """Reasoning in the content up to a bare `</think>`: the way of a server without a reasoning
    parser, not a fault of form.
    """
    told = sum(s.think_tag for s in record.samples)
    if not told or (reference is not None and any(s.think_tag for s in reference.samples)):
        return None
    says = f"{told} of {len(record.samples)} answers hold the reasoning up to </think>"
    finding = _finding(
        "think_tag", Severity.WARNING, f"{says}: users read it as the answer", {"answers": told},
        remedies=("start the server with the --reasoning-parser of this model",),
    )  # fmt: skip
    return Ruling("think_tag", "good", says, (finding,))


def truncated(record: CheckRecord) -> Rulings:
    """Answers that ended inside their reasoning say nothing about the answer."""
    cut = [s for s in record.samples if s.label == "truncated_reasoning"]
    if not cut:
        return None
    says = f"{len(cut)} of {len(record.samples)} answers ended inside their reasoning"
    finding = _finding(
        "truncated_reasoning", Severity.WARNING, f"{says}: the answer itself was never seen",
        {"truncated": len(cut), "texts": len(record.samples)},
        causes=(
            "the model reasons longer than the probe allows",
            "the reasoning parser missed the end of the reasoning",
        ),
        remedies=("run again with --token-budget 4, or switch reasoning off with --no-thinking",),
    )  # fmt: skip
    return Ruling(
        "truncated_reasoning",
        "unclear" if len(cut) > len(record.samples) / 3 else "good",
        says,
        (finding,),
    )


def unfinished(record: CheckRecord) -> Rulings:
    """Steps that the server can do and did not finish leave the verdict open."""
    steps = [
        ("coherence.probe", f"the probe {p.name}", p.failed, len(p.samples)) for p in record.probes
    ]
    steps += [
        ("coherence.scores", "scoring fixed texts", record.passages_failed, len(record.passages)),
        ("throughput.", "timing", record.timed_failed, len(record.timed)),
    ]
    steps += [
        (
            "coherence.tools",
            f"the tools suite with {v.concurrency} at a time",
            v.error,
            len(v.answers),
        )
        for v in record.tools
    ]
    return [
        Ruling(
            "unfinished",
            "unclear",
            f"{step}: {reason}",
            (_unfinished(area, step, reason, samples),),
        )
        for area, step, reason, samples in steps
        if reason
    ]


def _unfinished(area: str, step: str, reason: str, samples: int) -> Finding:
    id_ = f"{area}unfinished" if area.endswith(".") else f"{area}_unfinished"
    title = f"{step} could not be finished: {reason}"
    return Finding(id_, Severity.WARNING, title, evidence={"step": step, "samples": samples})


def timed_too_bad(record: CheckRecord, reference: CheckRecord | None) -> bool:
    """More than a third of the timed texts are degenerate, and more than those of the reference."""
    if not record.timed:
        return False
    share = sum(text.degenerate for text in record.timed) / len(record.timed)
    allowed = TOLERATED
    if reference is not None and reference.timed:
        allowed = max(
            allowed, sum(text.degenerate for text in reference.timed) / len(reference.timed)
        )
    return share > allowed


def throughput(record: CheckRecord, reference: CheckRecord | None, confidence: float) -> Rulings:
    """The speed does not count where its text is not sane."""
    n, bad = len(record.timed), sum(text.degenerate for text in record.timed)
    if not n:
        return Ruling("throughput", "not_examined", record.timed_skipped or "nothing was timed")
    says = f"{bad} of {n} timed texts are degenerate"
    if not timed_too_bad(record, reference):
        return Ruling("throughput", "good", says)
    rate = wilson(bad, n, confidence)
    certain = (reference is not None and bool(reference.timed)) or rate.lo > TOLERATED
    finding = Finding(
        id="throughput.invalid",
        severity=Severity.ERROR if certain else Severity.WARNING,
        title=f"the speed does not count: {says}",
        evidence={"timed": n, "degenerate": bad, "rate": interval_json(rate)},
    )
    return Ruling("throughput", "bad" if certain else "unclear", says, (finding,))


def stutter(record: CheckRecord, reference: CheckRecord | None, confidence: float) -> Rulings:
    """Doubled words and syllables over all texts of a run, at many times the rate of healthy
    models, or of the reference.

    Texts that are degenerate otherwise are left out: loops say things twice too.
    """
    counts = _stutter_counts(record)
    theirs = judge_stutter(_stutter_counts(reference)) if reference is not None else None
    own_rate = theirs.rate if theirs is not None and theirs.words else 0.0
    healthy = max(HEALTHY, own_rate)
    rate = judge_stutter(counts, healthy, confidence)
    if not rate.words:
        return Ruling("stutter", "not_examined", "no prose was written")
    says = (
        f"{rate.stutters} of {rate.words:,} words are said twice, {1000 * rate.rate:.1f} in 1,000"
    )
    says += (
        f", of the reference {1000 * own_rate:.1f}" if theirs is not None and theirs.words else ""
    )
    # Few words leave most rates open; only one that is as high as a fault's, in two texts or more,
    # asks for more of them.
    high = rate.rate > TIMES * healthy and sum(c.total > 0 for c in counts) > 1
    state: State = "unclear" if rate.verdict == "unclear" and high else "good"
    if rate.verdict != "bad":
        return Ruling("stutter", state, says)
    examples = [s.stutter_text for s in record.samples if s.stutter_text and s.words]
    finding = _finding(
        "stutter",
        Severity.ERROR,
        f"words and syllables double at {rate.rate / healthy:.0f} times the rate of a healthy"
        f" model: {says}",
        {
            "words": rate.words,
            "stutters": rate.stutters,
            "healthy_rate": healthy,
            "rate": {"value": rate.rate, "lo": rate.lo, "hi": rate.hi},
        },
        detail="; ".join(examples[:5])[:300],
        causes=(
            (
                "a KV cache with too few bits (fp8 without scales; models with large key biases,"
                " such as Qwen2.5, suffer most)"
            ),
            "weights that lost too much in quantisation",
        ),
        remedies=("serve with --kv-cache-dtype auto and check again",),
    )
    return Ruling("stutter", "bad", says, (finding,))


def _stutter_counts(record: CheckRecord) -> list[Counts]:
    sane = (s for s in record.samples if not s.degenerate or s.kind == "stutter")
    return [Counts(words=s.words, doubled_words=s.stutters) for s in sane]


# Were the answers right?


def answers(record: CheckRecord, reference: CheckRecord | None) -> Rulings:
    """Wrong answers: a warning, and an error only where the reference answered right every time and
    this one never.
    """
    theirs = _tally(reference) if reference is not None else {}
    rulings = []
    for (probe, check), (passed, total, detail) in _tally(record).items():
        if passed == total:
            continue
        rate = wilson(passed, total)
        right, asked, _ = theirs.get((probe, check), (0, 0, ""))
        broken = passed == 0 and total >= 3 and asked >= 3 and right == asked
        title = f"{probe}: {check} passed {passed} of {total}, {percent(rate)}"
        if broken:
            title = (
                f"{probe}: {check} never passed ({total} tries); the reference passed {right} of"
                f" {asked}"
            )
        evidence = {
            "probe": probe,
            "check": check,
            "passed": passed,
            "total": total,
            "rate": interval_json(rate),
            "reference_passed": right,
            "reference_total": asked,
        }
        severity = Severity.ERROR if broken else Severity.WARNING
        finding = _finding("wrong_answer", severity, title, evidence, detail=detail)
        says = f"{probe}/{check}: {passed} of {total} right"
        rulings.append(Ruling("answers", "bad" if broken else "good", says, (finding,)))
    return rulings


def _tally(record: CheckRecord) -> dict[tuple[str, str], tuple[int, int, str]]:
    """Per probe and check: how many passed, of how many, and the detail of the last failure."""
    tally: dict[tuple[str, str], tuple[int, int, str]] = {}
    for probe in record.probes:
        for check in (check for sample in probe.samples for check in sample.checks):
            passed, total, detail = tally.get((probe.name, check.name), (0, 0, ""))
            detail = detail if check.passed else check.detail
            tally[probe.name, check.name] = (passed + check.passed, total + 1, detail)
    return tally


LEAST_CHARS = 20
"""Shorter answers can be the same by chance: a word found in a long text, a yes."""
LEAST_QUESTIONS = 4
"""So many different questions must have got the same answer."""


def same_answers(record: CheckRecord, reference: CheckRecord | None) -> Rulings:
    """One answer to most questions is no model's work: a page in between, a stuck prompt, requests
    that mix.

    A warning alone, since every single text may be sane; an error where a reference told the
    questions apart.
    """
    questions, shared, text = _most_shared(record)
    if not shared:
        return None
    says = f"{shared} of {questions} different questions got the same answer, word for word"
    told_apart = (
        reference is not None and bool(reference.samples) and not _most_shared(reference)[1]
    )
    finding = _finding(
        "same_answer",
        Severity.ERROR if told_apart else Severity.WARNING,
        says,
        {"questions": questions, "same_answer": shared},
        detail=text,
        causes=(
            "something between here and the model answers: a proxy, a cache, a page of an error",
            (
                "the chat template drops the question, or requests that run together get each"
                " other's answers"
            ),
        ),
        remedies=(
            "ask two different questions by hand, and compare the prompt_tokens of both answers",
        ),
    )
    return Ruling("same_answers", "bad" if told_apart else "good", says, (finding,))


def _most_shared(record: CheckRecord) -> tuple[int, int, str]:
    """How many questions there were, how many of them got the answer that most got (0 if too few),
    and its head.
    """
    asked: dict[tuple[str, int], set[tuple[str, str]]] = defaultdict(set)
    questions = {(probe.name, s.variant) for probe in record.probes for s in probe.samples}
    for probe in record.probes:
        for sample in probe.samples:
            # Degenerate texts are held against the server elsewhere, and loops of one kind look
            # alike.
            if sample.label == "ok" and sample.text_chars >= LEAST_CHARS:
                asked[sample.text_head, sample.text_chars].add((probe.name, sample.variant))
    if not asked:
        return len(questions), 0, ""
    (text, _), who = max(asked.items(), key=lambda item: len(item[1]))
    enough = len(who) >= LEAST_QUESTIONS and len(who) > len(questions) / 2
    return len(questions), len(who) if enough else 0, text


# Do tool calls come as calls, and as the right ones?


def tool_form(record: CheckRecord, reference: CheckRecord | None, confidence: float) -> Rulings:
    """Tools were offered, nothing was parsed, and parts of a call stand in the text: a client gets
    them as an answer.
    """
    offered, theirs = _offered(record), _offered(reference) if reference else []
    if not offered:
        probe = record.probe("tool_call")
        return Ruling(
            "tool_form", "not_examined", (probe and probe.skipped) or "no tool was offered"
        )
    broken = [text for form, text in offered if form == "remains"]
    unread = [text for form, text in offered if form == "unread"]
    parsed = sum(form == "parsed" for form, _ in offered)
    says = f"{parsed} of {len(offered)} calls were parsed, {len(broken)} came as broken text"
    says += f", {len(unread)} as whole ones in the text" if unread else ""
    if not broken and not unread:
        return Ruling("tool_form", "good", says)
    their_broken = sum(form == "remains" for form, _ in theirs)
    evidence: dict[str, Any] = {
        "answers": len(offered),
        "parsed": parsed,
        "broken": len(broken),
        "unread": len(unread),
        "texts": (broken or unread)[:3],
        "reference_answers": len(theirs),
        "reference_broken": their_broken,
    }
    if not broken:
        finding = _finding(
            "tool_form",
            Severity.WARNING,
            f"the server's tool parser does not read the model's calls: {len(unread)} of"
            f" {len(offered)} came as text",
            evidence,
            detail=unread[0],
            causes=("the model writes its calls without the marks that the parser looks for",),
            remedies=(
                (
                    "choose the --tool-call-parser that reads this form, or the model's own"
                    " --chat-template"
                ),
            ),
        )
        return Ruling("tool_form", "good", says, (finding,))
    # The model itself may be too weak to write a call: then the reference leaves parts of them as
    # often.
    alike = (
        bool(theirs)
        and newcombe(len(broken), len(offered), their_broken, len(theirs), confidence).lo <= 0
    )
    often = len(broken) > 1 and wilson(len(broken), len(offered), confidence).lo > HARD_RATE
    state: State = "bad" if often else "unclear" if 2 * len(broken) >= len(offered) else "good"
    state = "good" if alike and their_broken > 0 else state
    finding = _finding(
        "tool_form",
        Severity.ERROR if state == "bad" else Severity.WARNING,
        f"tool calls come as broken text: {len(broken)} of {len(offered)} answers hold parts of"
        " one, and nothing was parsed",
        evidence,
        detail=broken[0],
        causes=(
            "the model writes broken calls: a KV cache with too few bits, wrong weights or scales",
            (
                "the tool parser does not belong to the model, or the chat template asks for"
                " another form"
            ),
        ),
        remedies=(
            (
                "ask the same with --kv-cache-dtype auto, and with the model's own tool parser and"
                " template"
            ),
        ),
    )
    return Ruling("tool_form", state, says, (finding,))


def _offered(record: CheckRecord) -> list[tuple[str, str]]:
    """Form and text of every answer for which a tool was offered."""
    probes = [
        (s.tool_form, s.tool_text)
        for p in record.probes
        if p.name == "tool_call"
        for s in p.samples
    ]
    suite = [a for level in record.tools for a in level.answers if a.case.startswith("call")]
    return probes + [(answer.form, answer.text_head) for answer in suite]


TOOLS_LEVEL = 0.01
"""Level of each test of the tools suite: three concurrencies, against the reference and against one
request at a time.
"""


def tools(record: CheckRecord, reference: CheckRecord | None) -> Rulings:
    """The tools suite: as many right answers as the reference, and as many under load as one at a
    time.
    """
    levels = [level for level in record.tools if level.answers]
    if not levels:
        return (
            Ruling("tools", "not_examined", record.tools_skipped) if record.tools_skipped else None
        )
    says = ", ".join(
        f"{v.count('right')} of {len(v.answers)} right at {v.concurrency}" for v in levels
    )
    findings = []
    if reference is not None and reference.tools:
        theirs = reference.tools[0]
        says += f"; of the reference {theirs.count('right')} of {len(theirs.answers)}"
        findings += _worse(levels, theirs, under_load=False)
    alone = next((level for level in levels if level.concurrency == 1), None)
    if alone is not None:
        findings += _worse(
            [level for level in levels if level.concurrency > 1], alone, under_load=True
        )
    if findings:
        return Ruling("tools", "bad", says, tuple(findings))
    if reference is None and not any(level.count("right") for level in levels):
        title = (
            "no answer of the tools suite is right: the model is too weak for it, or the server is"
            f" broken ({says})"
        )
        compare = ("compare with the model itself: --reference-engine hf:PATH",)
        return Ruling(
            "tools",
            "unclear",
            says,
            (_finding("unclear", Severity.WARNING, title, {}, remedies=compare),),
        )
    return Ruling("tools", "good", says)


def _worse(levels: Sequence[ToolLevel], other: ToolLevel, *, under_load: bool) -> list[Finding]:
    """A finding where cases are wrong at some level that `other` answered right, more than chance
    makes them.
    """
    compared = [(level, *paired(level, other)) for level in levels]
    worse = [row for row in compared if row[2] > row[1] and row[3] < TOOLS_LEVEL]
    if not worse:
        return []
    level, gained, lost, p = worse[0]
    right = {answer.case for answer in other.answers if answer.right}
    cases = [answer for answer in level.answers if answer.case in right and not answer.right]
    evidence = {
        "levels": [
            {"concurrency": v.concurrency, "gained": a, "lost": b, "p_value": q}
            for v, a, b, q in compared
        ],
        "cases": [answer.case for answer in cases],
    }
    counts = (
        f"with {level.concurrency} at a time {lost} cases are lost and {gained} gained (p ="
        f" {p:.2g})"
    )
    shown = "; ".join(f"{answer.case}: {answer.text_head[:80]}" for answer in cases[:3])
    if under_load:
        title = (
            f"the server breaks calls and objects under load that are right one at a time: {counts}"
        )
        causes = (
            "batching: attention kernel, CUDA graphs or scheduler mix up requests",
            "the KV cache is evicted or overwritten when it is full",
        )
        remedy = (
            "run the suite with --enforce-eager, without prefix caching, and with --max-num-seqs 1"
        )
        id_ = "tools_under_load"
    else:
        title = f"the server gives fewer right calls and objects than the model itself: {counts}"
        causes = (
            "a KV cache with too few bits, wrong weights or scales",
            "the tool parser or the chat template is not the model's own",
        )
        remedy, id_ = "run the suite with --kv-cache-dtype auto", "tools_wrong"
    return [
        _finding(
            id_, Severity.ERROR, title, evidence, detail=shown, causes=causes, remedies=(remedy,)
        )
    ]


# How well does the model predict plain text, near the start and deep in the context?

SANE_BITS = 2.0
"""Bits per byte of plain English that no sane language model needs."""
BITS_MARGIN = 0.01
"""With a reference: bits per byte that a candidate may lose (paired by text, lower bound)."""
BITS_EQUAL = BITS_MARGIN / 5
"""A loss that lies below this (upper bound) outweighs rates of few texts; rounding of another
engine is under 0.0015.
"""
DEPTH_MARGIN = 0.05
"""Bits per byte by which a text may become harder to predict when text is put before it (lower
bound).
"""


def bits(record: CheckRecord, reference: CheckRecord | None, confidence: float) -> Rulings:
    """A model that is whole needs few bits for plain text, and as many as its reference."""
    values = [p.bits_per_byte for p in record.passages if not p.depth]
    if len(values) < 2:
        return Ruling(
            "bits_per_byte", "not_examined", record.passages_skipped or "no fixed text was scored"
        )
    confidence = _of_fixed_texts(confidence)
    absolute = mean_interval(values, confidence)
    evidence: dict[str, Any] = {
        "bits_per_byte": interval_json(absolute),
        "passages": len(record.passages),
    }
    says = f"{absolute.value:.3f} bits per byte"
    loss = _bit_loss(record, reference, confidence)
    title = ""
    if not absolute.lo < SANE_BITS:
        title = (
            f"the model cannot predict plain English: {absolute.value:.2f} bits per byte, a sane"
            " one needs well under 2"
        )
    elif loss is None:
        return Ruling("bits_per_byte", "good", f"{says} of plain text over {len(values)} texts")
    else:
        between = f"{loss.value:+.4f} [{loss.lo:+.4f}, {loss.hi:+.4f}]"
        says += f", {between} against the reference"
        evidence |= {"difference": interval_json(loss), "margin": BITS_MARGIN}
        if loss.lo > BITS_MARGIN:
            title = (
                f"the server predicts plain text worse than the model itself: {between} bits per"
                " byte"
            )
    if title:
        return Ruling(
            "bits_per_byte",
            "bad",
            says,
            (_finding("bits_per_byte", Severity.ERROR, title, evidence),),
        )
    if loss is not None and loss.hi < -BITS_MARGIN:
        title = (
            f"the server predicts plain text better than the reference ({says}): they are not the"
            " same model"
        )
        remedy = ("check that server and reference hold the same model and revision",)
        finding = _finding("other_model", Severity.WARNING, title, evidence, remedies=remedy)
        return Ruling("bits_per_byte", "unclear", says, (finding,))
    return Ruling(
        "bits_per_byte", "unclear" if loss is not None and loss.hi > BITS_MARGIN else "good", says
    )


BEYOND_LOOKS = 0.9995
"""Confidence that no look after the plan has (`confidence_of_look`); a run that may end early is
judged above it.
"""


def _of_fixed_texts(confidence: float) -> float:
    """The confidence at which scores of fixed texts are judged: that of the first look, unless the
    plan is not done yet.

    Extensions of a run add no fixed texts, so later looks see the same scores again and spend no
    error on them.
    """
    return confidence if confidence > BEYOND_LOOKS else confidence_of_look(1)


def _bit_loss(
    record: CheckRecord, reference: CheckRecord | None, confidence: float
) -> Interval | None:
    """Bits per byte that the server loses, clustered by text; None where too few texts were scored
    on both sides.
    """
    confidence = _of_fixed_texts(confidence)
    theirs = (
        {(p.passage, p.depth): p.bits_per_byte for p in reference.passages} if reference else {}
    )
    losses: dict[str, list[float]] = defaultdict(list)
    for p in record.passages:
        if (p.passage, p.depth) in theirs:
            losses[p.passage].append(p.bits_per_byte - theirs[p.passage, p.depth])
    return (
        cluster_mean(list(losses.values()), confidence).interval
        if len(losses) >= LEAST_TEXTS
        else None
    )


def depth(record: CheckRecord, reference: CheckRecord | None, confidence: float) -> Rulings:
    """Text before a text helps to predict it, or does nothing. Where it harms, the model loses its
    way at depth.
    """
    harm = _harm(record, confidence)
    if harm is None:
        return Ruling(
            "depth",
            "not_examined",
            record.passages_skipped or "no text was scored deep in a context",
        )
    says = f"{harm.value:+.3f} [{harm.lo:+.3f}, {harm.hi:+.3f}] bits per byte from depth"
    if harm.lo <= DEPTH_MARGIN:
        return Ruling("depth", "good", says)
    their_harm = _harm(reference, confidence) if reference is not None else None
    if their_harm is not None and their_harm.lo > DEPTH_MARGIN:
        return Ruling("depth", "good", f"{says}; the reference does the same")
    finding = _finding(
        "lost_at_depth",
        Severity.ERROR,
        f"the deeper in the context, the worse the prediction: {says}",
        {"difference": interval_json(harm), "margin": DEPTH_MARGIN},
        causes=(
            "rope_theta or rope_scaling differs from what the model was trained with",
            "the KV cache loses too much (fp8 without scales, low-bit cache)",
            "a sliding window is missing or wrong",
        ),
    )
    return Ruling("depth", "bad", says, (finding,))


def _harm(record: CheckRecord, confidence: float) -> Interval | None:
    """Bits per byte by which texts are harder in a context than by themselves, clustered by text."""
    confidence = _of_fixed_texts(confidence)
    alone = {p.passage: p.bits_per_byte for p in record.passages if p.depth == 0}
    harm: dict[str, list[float]] = defaultdict(list)
    for p in record.passages:
        if p.depth and p.passage in alone:
            harm[p.passage].append(p.bits_per_byte - alone[p.passage])
    return cluster_mean(list(harm.values()), confidence).interval if len(harm) >= 4 else None


# What the server counts itself, and the prompts that it builds.


def counters(record: CheckRecord) -> Rulings:
    """A counter of corrupted requests that moved during the run."""
    if not record.counters:
        return Ruling("server_counters", "not_examined", "the server counts no corrupted answers")
    moved = {name: value for name, value in record.counters.items() if value > 0}
    if not moved:
        return Ruling("server_counters", "good", "the server's counters did not move")
    text = ", ".join(f"{name} +{value:g}" for name, value in sorted(moved.items()))
    title = f"the server itself counted corrupted answers during the run: {text}"
    causes = ("NaN in the logits: overflow in float16, a corrupt shard, a faulty kernel",)
    finding = _finding(
        "corrupted_requests", Severity.ERROR, title, {"counters": moved}, causes=causes
    )
    return Ruling("server_counters", "bad", text, (finding,))


_LATER_TURNS = frozenset({"second_turn", "tool_call"})
"""Probes whose last prompt holds the model's own first answer."""


def prompts(record: CheckRecord, reference: CheckRecord | None) -> Rulings:
    """The same messages must become the same number of prompt tokens: else template or tokenizer
    differ.
    """
    if reference is None:
        return Ruling("prompts", "not_examined", "there is no reference to compare prompts with")
    ours, theirs = _prompt_tokens(record), _prompt_tokens(reference)
    shared = sorted(ours.keys() & theirs.keys())
    if len(shared) < 3:
        return Ruling(
            "prompts",
            "not_examined",
            f"{len(shared)} prompts were counted on both sides, 3 are needed",
        )
    other = {key: (ours[key], theirs[key]) for key in shared if ours[key] != theirs[key]}
    says = (
        f"{len(shared) - len(other)} of {len(shared)} prompts have the reference's number of tokens"
    )
    if len(other) <= len(shared) / 2:
        return Ruling("prompts", "good", says)
    examples = {
        f"{probe} {form}".strip(): list(counts) for (probe, form), counts in list(other.items())[:5]
    }
    finding = _finding(
        "prompt_mismatch",
        Severity.ERROR,
        f"the server builds other prompts from the same messages than the reference: {says}",
        {"prompts": len(shared), "different": len(other), "tokens_server_and_reference": examples},
        causes=(
            "the chat template is not the model's own",
            (
                "the tokenizer is another, or does not add the start token (BOS) that the model was"
                " trained with"
            ),
        ),
        remedies=(
            (
                "compare chat_template, tokenizer.json and bos_token of the served checkpoint with"
                " the original"
            ),
        ),
    )
    return Ruling("prompts", "bad", says, (finding,))


def _prompt_tokens(record: CheckRecord) -> dict[tuple[str, str], int]:
    """Prompt tokens by probe and variant, for the prompts that do not depend on an earlier answer."""
    return {
        (probe.name, sample.variant): sample.prompt_tokens
        for probe in record.probes
        for sample in probe.samples
        if probe.name not in _LATER_TURNS and sample.prompt_tokens is not None
    }
