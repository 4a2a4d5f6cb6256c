"""Were the answers right? A wrong one is a warning, unless the reference was always right and this server never."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from assay.coherence.record import CheckRecord, Sample
from assay.stats.intervals import Interval, newcombe, wilson
from assay.verdict import Finding, Severity

# -----------------------------------------------------------------------------
# What one rule says, and how its numbers are written.

State = Literal["good", "bad", "unclear"]


@dataclass(frozen=True)
class Ruling:
    """What one rule says, in one line, with the findings it raises."""

    rule: str
    state: State
    says: str
    findings: tuple[Finding, ...] = ()


def kinds_of(samples: Sequence[Sample]) -> dict[str, int]:
    """How often each kind occurs, the most frequent first."""
    kinds: dict[str, int] = {}
    for sample in samples:
        key = sample.kind or sample.label
        kinds[key] = kinds.get(key, 0) + 1
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))


def interval_json(interval: Interval) -> dict[str, float]:
    """An interval as JSON."""
    return {"value": interval.value, "lo": interval.lo, "hi": interval.hi}


def percent(interval: Interval) -> str:
    """A rate with its interval in words."""
    return f"{interval.value:.0%}, 95 % interval {interval.lo:.0%} to {interval.hi:.0%}"


# -----------------------------------------------------------------------------


def answers(record: CheckRecord, reference: CheckRecord | None) -> list[Ruling]:
    """Wrong answers: a warning, and an error only where the reference answered right every time and this one never."""
    theirs = _tally(reference) if reference is not None else {}
    rulings = []
    for (probe, check), (passed, total, detail) in _tally(record).items():
        if passed == total:
            continue
        rate = wilson(passed, total)
        right, asked, _ = theirs.get((probe, check), (0, 0, ""))
        broken = passed == 0 and total >= 3 and asked >= 3 and right == asked
        says = f"{probe}/{check}: {passed} of {total} right"
        finding = Finding(
            id="coherence.wrong_answer",
            severity=Severity.ERROR if broken else Severity.WARNING,
            title=(
                f"{probe}: {check} never passed ({total} tries); the reference passed {right} of {asked}"
                if broken
                else f"{probe}: {check} passed {passed} of {total} ({percent(rate)})"
            ),
            detail=detail,
            evidence={
                "probe": probe, "check": check, "passed": passed, "total": total, "rate": interval_json(rate),
                "reference_passed": right, "reference_total": asked,
            },
        )  # fmt: skip
        rulings.append(Ruling("answers", "bad" if broken else "good", says, (finding,)))
    return rulings


def _tally(record: CheckRecord) -> dict[tuple[str, str], tuple[int, int, str]]:
    """Per probe and check: how many passed, of how many, and the detail of the last failure."""
    tally: dict[tuple[str, str], tuple[int, int, str]] = {}
    for probe in record.probes:
        for sample in probe.samples:
            for check in sample.checks:
                passed, total, detail = tally.get((probe.name, check.name), (0, 0, ""))
                tally[probe.name, check.name] = (
                    passed + check.passed,
                    total + 1,
                    detail if check.passed else check.detail,
                )
    return tally


# -----------------------------------------------------------------------------
# How well does the model predict plain text, near the start and deep in the context?

SANE_BITS = 2.0
"""Bits per byte of plain English that no sane language model needs."""
BITS_MARGIN = 0.01
"""With a reference: bits per byte that a candidate may lose (paired by passage, lower bound)."""
DEPTH_MARGIN = 0.05
"""Bits per byte by which a passage may become harder to predict when text is put before it (lower bound)."""


def bits(record: CheckRecord, reference: CheckRecord | None) -> Sequence[Ruling]:
    """A model that is whole needs few bits for plain text, and as many as its reference."""
    from assay.stats.cluster import mean_interval

    values = [p.bits_per_byte for p in record.passages]
    if not values:
        return ()
    if len(values) < 2:
        return ()
    absolute = mean_interval(values)
    evidence: dict[str, Any] = {"bits_per_byte": interval_json(absolute), "passages": len(values)}
    says = f"{absolute.value:.3f} bits per byte of plain text over {len(values)} passages"
    if not absolute.lo < SANE_BITS:
        title = f"the model cannot predict plain English: {absolute.value:.2f} bits per byte, a sane one needs well under 2"
        return (Ruling("bits_per_byte", "bad", says, (_bits_finding(title, evidence),)),)
    theirs = {(p.passage, p.depth): p.bits_per_byte for p in reference.passages} if reference else {}
    pairs = [
        (p.bits_per_byte, theirs[p.passage, p.depth])
        for p in record.passages
        if (p.passage, p.depth) in theirs
    ]
    if len(pairs) < 8:
        return (Ruling("bits_per_byte", "good", says),)
    loss = mean_interval([ours - their for ours, their in pairs])
    evidence |= {"difference": interval_json(loss), "paired_passages": len(pairs), "margin": BITS_MARGIN}
    says += f", {loss.value:+.4f} [{loss.lo:+.4f}, {loss.hi:+.4f}] against the reference (n = {len(pairs)})"
    if loss.lo > BITS_MARGIN:
        title = (
            f"the server predicts plain text worse than the model itself: {loss.value:+.3f} bits per byte "
            f"[{loss.lo:+.3f}, {loss.hi:+.3f}]"
        )
        return (Ruling("bits_per_byte", "bad", says, (_bits_finding(title, evidence),)),)
    if loss.hi < -BITS_MARGIN:
        finding = Finding(
            id="coherence.other_model",
            severity=Severity.WARNING,
            title=f"the server predicts plain text better than the reference ({says}): they are not the same model",
            evidence=evidence,
            remedies=("check that server and reference hold the same model and revision",),
        )
        return (Ruling("bits_per_byte", "unclear", says, (finding,)),)
    return (Ruling("bits_per_byte", "good" if loss.hi <= BITS_MARGIN else "unclear", says),)


def _bits_finding(title: str, evidence: Mapping[str, Any]) -> Finding:
    return Finding(id="coherence.bits_per_byte", severity=Severity.ERROR, title=title, evidence=evidence)


def depth(record: CheckRecord, reference: CheckRecord | None) -> Sequence[Ruling]:
    """Text before a passage helps to predict it, or does nothing. Where it harms, the model loses its way at depth."""
    from assay.stats.cluster import mean_interval

    shallow = {p.passage: p.bits_per_byte for p in record.passages if p.depth == 0}
    harm = [p.bits_per_byte - shallow[p.passage] for p in record.passages if p.depth and p.passage in shallow]
    if len(harm) < 4:
        return ()
    interval = mean_interval(harm)
    says = f"{interval.value:+.3f} [{interval.lo:+.3f}, {interval.hi:+.3f}] bits per byte from depth (n = {len(harm)})"
    if interval.lo <= DEPTH_MARGIN:
        return (Ruling("depth", "good", says),)
    if reference is not None and depth(reference, None) and depth(reference, None)[0].state == "bad":
        return (Ruling("depth", "good", f"{says}; the reference does the same"),)
    finding = Finding(
        id="coherence.lost_at_depth",
        severity=Severity.ERROR,
        title=f"the deeper in the context, the worse the prediction: {says}",
        evidence={"difference": interval_json(interval), "passages": len(harm), "margin": DEPTH_MARGIN},
        causes=(
            "rope_theta or rope_scaling differs from what the model was trained with",
            "the KV cache loses too much (fp8 without scales, low-bit cache)",
            "a sliding window is missing or wrong",
        ),
    )
    return (Ruling("depth", "bad", says, (finding,)),)


# -----------------------------------------------------------------------------
# Did the server itself count corrupted answers?


def counters(record: CheckRecord) -> Sequence[Ruling]:
    """A counter of corrupted requests that moved during the run."""
    moved = {name: value for name, value in record.counters.items() if value > 0}
    if not moved:
        return ()
    text = ", ".join(f"{name} +{value:g}" for name, value in sorted(moved.items()))
    finding = Finding(
        id="coherence.corrupted_requests",
        severity=Severity.ERROR,
        title=f"the server itself counted corrupted answers during the run: {text}",
        evidence={"counters": moved},
        causes=("NaN in the logits: overflow in float16, a corrupt shard, a faulty kernel",),
    )
    return (Ruling("server_counters", "bad", text, (finding,)),)


# -----------------------------------------------------------------------------
# Does the server build the same prompts from the same messages as the reference?

_LATER_TURNS = frozenset({"second_turn", "tool_call"})
"""Probes whose last prompt holds the model's own first answer."""


def prompts(record: CheckRecord, reference: CheckRecord | None) -> Sequence[Ruling]:
    """The same messages must become the same number of prompt tokens: else template or tokenizer differ."""
    if reference is None:
        return ()
    ours, theirs = _prompt_tokens(record), _prompt_tokens(reference)
    shared = sorted(ours.keys() & theirs.keys())
    if len(shared) < 3:
        return ()
    other = {key: (ours[key], theirs[key]) for key in shared if ours[key] != theirs[key]}
    says = f"{len(shared) - len(other)} of {len(shared)} prompts have the reference's number of tokens"
    if len(other) <= len(shared) / 2:
        return (Ruling("prompts", "good", says),)
    examples = {
        f"{probe} {variant}".strip(): list(counts) for (probe, variant), counts in list(other.items())[:5]
    }
    finding = Finding(
        id="coherence.prompt_mismatch",
        severity=Severity.ERROR,
        title=f"the server builds other prompts from the same messages than the reference: {says}",
        evidence={"prompts": len(shared), "different": len(other), "tokens_server_and_reference": examples},
        causes=(
            "the chat template is not the model's own",
            "the tokenizer is another, or does not add the start token (BOS) that the model was trained with",
        ),
        remedies=(
            "compare chat_template, tokenizer.json and bos_token of the served checkpoint with the original",
        ),
    )
    return (Ruling("prompts", "bad", says, (finding,)),)


def _prompt_tokens(record: CheckRecord) -> dict[tuple[str, str], int]:
    """Prompt tokens by probe and variant, for the prompts that do not depend on an earlier answer."""
    return {
        (probe.name, sample.variant): sample.prompt_tokens
        for probe in record.probes
        for sample in probe.samples
        if probe.name not in _LATER_TURNS and sample.prompt_tokens is not None
    }


# -----------------------------------------------------------------------------
# Do tool calls come as calls?


def tool_form(record: CheckRecord, reference: CheckRecord | None) -> Sequence[Ruling]:
    """Tools were offered, nothing was parsed, and parts of a call stand in the text: a client gets them as an answer."""
    offered, theirs = _offered(record), _offered(reference) if reference else []
    if not offered:
        return ()
    broken = [s for s in offered if s.tool_form == "remains"]
    unread = [s for s in offered if s.tool_form == "unread"]
    parsed = sum(s.tool_form == "parsed" for s in offered)
    says = (
        f"{parsed} of {len(offered)} answers to offered tools hold a parsed call, {len(broken)} parts of one as text, "
        f"{len(unread)} a whole one as text"
    )
    if not broken and not unread:
        return (Ruling("tool_form", "good", says),)
    their_broken = sum(s.tool_form == "remains" for s in theirs)
    evidence: dict[str, Any] = {
        "answers": len(offered), "parsed": parsed, "broken": len(broken), "unread": len(unread),
        "texts": [s.tool_text for s in (broken or unread)[:3]], "reference_answers": len(theirs), "reference_broken": their_broken,
    }  # fmt: skip
    if not broken:
        finding = Finding(
            id="coherence.tool_form",
            severity=Severity.WARNING,
            title=f"the server's tool parser does not read the calls that the model writes: {len(unread)} of {len(offered)} came as text",
            detail=unread[0].tool_text,
            evidence=evidence,
            causes=("the model writes its calls without the marks that the parser looks for",),
            remedies=(
                "choose the --tool-call-parser that reads this form, or give the model's own --chat-template",
            ),
        )
        return (Ruling("tool_form", "good", says, (finding,)),)
    # The model itself may be too weak to write a call: then the reference leaves parts of them as often.
    weak = bool(theirs) and newcombe(len(broken), len(offered), their_broken, len(theirs)).lo <= 0
    own = (weak and their_broken > 0) or len(broken) == 1 < len(offered)
    finding = Finding(
        id="coherence.tool_form",
        severity=Severity.WARNING if own else Severity.ERROR,
        title=f"tool calls come as broken text: {len(broken)} of {len(offered)} answers hold parts of a call, and nothing was parsed",
        detail=broken[0].tool_text,
        evidence=evidence,
        causes=(
            "the model writes broken calls: a KV cache with too few bits, wrong weights or scales",
            "the tool parser does not belong to the model, or the chat template asks for another form",
        ),
        remedies=(
            "ask the same with --kv-cache-dtype auto, and with the model's own tool parser and template",
        ),
    )
    return (Ruling("tool_form", "good" if own else "bad", says, (finding,)),)


def _offered(record: CheckRecord) -> list[Sample]:
    return [s for probe in record.probes if probe.name == "tool_call" for s in probe.samples]


# -----------------------------------------------------------------------------
# Does the server give one and the same answer to different questions?

LEAST_CHARS = 20
"""Shorter answers can be the same by chance: a word found in a long text, a yes."""
LEAST_QUESTIONS = 4
"""So many different questions must have got the same answer."""


def same_answers(record: CheckRecord, reference: CheckRecord | None) -> list[Ruling]:
    """One answer to most questions is no model's work: a page in between, a stuck prompt, requests that mix.

    A warning alone, since every single text may be sane; an error where a reference told the questions apart.
    """
    questions, shared, text = _most_shared(record)
    if not shared:
        return []
    says = f"{shared} of {questions} different questions got the same answer, word for word"
    told_apart = reference is not None and bool(reference.samples) and not _most_shared(reference)[1]
    finding = Finding(
        id="coherence.same_answer",
        severity=Severity.ERROR if told_apart else Severity.WARNING,
        title=says,
        detail=text,
        evidence={"questions": questions, "same_answer": shared},
        causes=(
            "something between here and the model answers: a proxy, a cache, a page of an error",
            "the chat template drops the question, or requests that run together get each other's answers",
        ),
        remedies=("ask two different questions by hand, and compare the prompt_tokens of both answers",),
    )
    return [Ruling("same_answers", "bad" if told_apart else "good", says, (finding,))]


def _most_shared(record: CheckRecord) -> tuple[int, int, str]:
    """How many questions there were, how many of them got the answer that most got (0 if too few), and its head."""
    asked: dict[tuple[str, int], set[tuple[str, str]]] = defaultdict(set)
    questions = {(probe.name, s.variant) for probe in record.probes for s in probe.samples}
    for probe in record.probes:
        for sample in probe.samples:
            if _counts(sample):
                asked[sample.text_head, sample.text_chars].add((probe.name, sample.variant))
    if not asked:
        return len(questions), 0, ""
    (text, _), who = max(asked.items(), key=lambda item: len(item[1]))
    enough = len(who) >= LEAST_QUESTIONS and len(who) > len(questions) / 2
    return len(questions), len(who) if enough else 0, text


def _counts(sample: Sample) -> bool:
    # Degenerate texts are held against the server elsewhere, and loops of one kind look alike.
    return sample.label == "ok" and sample.text_chars >= LEAST_CHARS


# -----------------------------------------------------------------------------
# Are the texts degenerate, empty, cut off, or billed and never received?

HARD_RATE = 0.05
"""Without a reference: the rate of floods, salads and empty answers must not lie above this (lower bound)."""
MAJORITY = 0.5
"""Without a reference: more degenerate texts than this (lower bound) is a failure, whatever their kind."""
TOLERATED = 1 / 3
"""A subject passes without a reference if its degenerate rate stays below this (upper bound)."""
RATE_MARGIN = 0.10
"""With a reference: so much more degenerate than the reference (lower bound of the difference) is a failure."""
RATE_CLEAR = 0.25
"""With a reference: if the difference may still be larger than this (upper bound), the rate alone is unclear."""
HIDDEN_TOKENS = 20
"""Tokens that must have been billed before missing text is held against the server."""
_LOOPS_BY_NAME = frozenset({"the_the_the", "a_a_a", "few_words", "repeated_tool_call"})
_HARD_LOOPS = frozenset({"newline_loop", "delimiter_loop"})
"""Loops of nothing but blanks and marks: no model that is whole ends there, so they count as floods."""


def is_loop(kind: str | None) -> bool:
    """Whether a kind is a loop, which a small healthy model writes too, rather than a flood or a salad."""
    return kind is not None and ("loop" in kind or kind in _LOOPS_BY_NAME) and kind not in _HARD_LOOPS


def is_hard(sample: Sample) -> bool:
    """Whether the text is one that no sane model writes at any size: a flood, a salad, nothing at all."""
    return sample.degenerate and not is_loop(sample.kind)


def hard_texts(record: CheckRecord, reference: CheckRecord | None) -> Sequence[Ruling]:
    """Floods, salads and empty answers: no model that is whole writes them."""
    n = len(record.samples)
    if not n:
        return ()
    hard = [sample for sample in record.samples if is_hard(sample)]
    rate = wilson(len(hard), n)
    says = f"{len(hard)} of {n} texts are floods, salads or empty ({percent(rate)})"
    evidence: dict[str, Any] = {
        "texts": n,
        "hard": len(hard),
        "rate": interval_json(rate),
        "kinds": kinds_of(hard),
    }
    if reference is not None and reference.samples:
        theirs = [sample for sample in reference.samples if is_hard(sample)]
        difference = newcombe(len(hard), n, len(theirs), len(reference.samples))
        evidence["reference_hard"] = len(theirs)
        evidence["difference"] = interval_json(difference)
        says += f"; reference {len(theirs)} of {len(reference.samples)}"
        bad = len(hard) >= 3 and difference.lo > 0
        unclear = not bad and difference.hi > RATE_CLEAR
    else:
        bad = len(hard) >= 3 and rate.lo > HARD_RATE
        unclear = not bad and rate.hi > RATE_CLEAR
    if not bad:
        return (Ruling("hard_texts", "unclear" if unclear else "good", says),)
    finding = Finding(
        id="coherence.degenerate",
        severity=Severity.ERROR,
        title=f"the server writes text that no sane model writes: {len(hard)} of {n} texts ({percent(rate)})",
        evidence=evidence,
    )
    return (Ruling("hard_texts", "bad", says, (finding,)),)


def degenerate_rate(record: CheckRecord, reference: CheckRecord | None) -> Sequence[Ruling]:
    """All degenerate texts, loops included; a weak model loops too, so only a large share or a difference counts."""
    n = len(record.samples)
    if not n:
        return ()
    bad_texts = [sample for sample in record.samples if sample.degenerate]
    rate = wilson(len(bad_texts), n)
    says = f"{len(bad_texts)} of {n} texts are degenerate ({percent(rate)})"
    evidence: dict[str, Any] = {
        "texts": n,
        "degenerate": len(bad_texts),
        "rate": interval_json(rate),
        "kinds": kinds_of(bad_texts),
    }
    if reference is not None and reference.samples:
        theirs = sum(sample.degenerate for sample in reference.samples)
        difference = newcombe(len(bad_texts), n, theirs, len(reference.samples))
        evidence |= {
            "reference_texts": len(reference.samples),
            "reference_degenerate": theirs,
            "difference": interval_json(difference),
        }
        says += f"; reference {theirs} of {len(reference.samples)}, difference {percent(difference)}"
        if difference.lo > RATE_MARGIN:
            title = (
                f"the server degenerates more than the model itself does: {len(bad_texts)} of {n} texts against "
                f"{theirs} of {len(reference.samples)}"
            )
            return (Ruling("degenerate_rate", "bad", says, (_degenerate(Severity.ERROR, title, evidence),)),)
        if difference.hi > RATE_CLEAR:
            return (Ruling("degenerate_rate", "unclear", says, (_thin(says, evidence, reference),)),)
        return (Ruling("degenerate_rate", "good", says),)
    if rate.lo > MAJORITY:
        title = f"most texts are degenerate: {len(bad_texts)} of {n} ({percent(rate)})"
        return (Ruling("degenerate_rate", "bad", says, (_degenerate(Severity.ERROR, title, evidence),)),)
    if rate.hi > TOLERATED:
        return (Ruling("degenerate_rate", "unclear", says, (_thin(says, evidence, None),)),)
    if bad_texts:
        title = f"{len(bad_texts)} of {n} texts are degenerate; a small model does that on its own"
        return (Ruling("degenerate_rate", "good", says, (_degenerate(Severity.WARNING, title, evidence),)),)
    return (Ruling("degenerate_rate", "good", says),)


def _degenerate(severity: Severity, title: str, evidence: Mapping[str, Any]) -> Finding:
    return Finding(id="coherence.degenerate", severity=severity, title=title, evidence=evidence)


def _thin(says: str, evidence: Mapping[str, Any], reference: CheckRecord | None) -> Finding:
    remedies = ["run again with more --samples"]
    if reference is None:
        remedies.insert(
            0,
            "compare with the model itself: --reference-engine hf:PATH, or --reference run.json from a healthy server",
        )
    return Finding(
        id="coherence.unclear",
        severity=Severity.WARNING,
        title=f"too few texts to tell a weak model from a broken server: {says}",
        evidence=evidence,
        remedies=remedies,
    )


def hidden_tokens(record: CheckRecord, reference: CheckRecord | None) -> Sequence[Ruling]:
    """Tokens that were billed, and no text that was received: special tokens, stripped on their way out."""
    hidden = [s for s in record.samples if _is_hidden(s)]
    if len(hidden) < 2 or wilson(len(hidden), len(record.samples)).lo <= HARD_RATE / 2:
        return ()
    if reference is not None and sum(map(_is_hidden, reference.samples)) >= len(hidden):
        return ()
    billed = sum(s.completion_tokens or 0 for s in hidden)
    received = sum(s.text_chars for s in hidden)
    title = (
        f"{billed} tokens were billed in {len(hidden)} answers, {received} characters of text were received"
    )
    finding = Finding(
        id="coherence.empty",
        severity=Severity.ERROR,
        title=title,
        evidence={"answers": len(hidden), "tokens_billed": billed, "chars_received": received},
        causes=(
            "the model emits special or reserved tokens only, which the server strips from the text",
            "a reasoning or tool parser swallows the text",
        ),
        remedies=(
            "ask one question with skip_special_tokens=false and look at the raw tokens",
            "start the server without --reasoning-parser and --tool-call-parser, and ask again",
        ),
    )
    return (Ruling("hidden_tokens", "bad", title, (finding,)),)


def _is_hidden(sample: Sample) -> bool:
    tokens = sample.completion_tokens or 0
    return tokens >= HIDDEN_TOKENS and sample.text_chars < tokens / 4


def truncated(record: CheckRecord, reference: CheckRecord | None) -> Sequence[Ruling]:
    """Answers that ended inside their reasoning say nothing about the answer."""
    cut = [s for s in record.samples if s.label == "truncated_reasoning"]
    if not cut:
        return ()
    says = f"{len(cut)} of {len(record.samples)} answers ended inside their reasoning"
    finding = Finding(
        id="coherence.truncated_reasoning",
        severity=Severity.WARNING,
        title=f"{says}: the answer itself was never seen",
        evidence={"truncated": len(cut), "texts": len(record.samples)},
        causes=(
            "the model reasons longer than the probe allows",
            "the reasoning parser missed the end of the reasoning",
        ),
        remedies=("run again with --token-budget 4, or switch reasoning off with --no-thinking",),
    )
    state: State = "unclear" if len(cut) > len(record.samples) / 3 else "good"
    return (Ruling("truncated_reasoning", state, says, (finding,)),)


def unfinished(record: CheckRecord) -> Sequence[Ruling]:
    """Steps that the server can do and did not finish leave the verdict open."""
    steps = [
        ("coherence.probe_unfinished", f"the probe {probe.name}", probe.failed, len(probe.samples))
        for probe in record.probes
    ]
    steps += [
        ("coherence.scores_unfinished", "scoring fixed texts", record.passages_failed, len(record.passages)),
        ("throughput.unfinished", "timing", record.timed_failed, len(record.timed)),
    ]
    return [
        Ruling("unfinished", "unclear", f"{step}: {reason}", (_unfinished(id_, step, reason, samples),))
        for id_, step, reason, samples in steps
        if reason
    ]


def _unfinished(id_: str, step: str, reason: str, samples: int) -> Finding:
    return Finding(
        id=id_,
        severity=Severity.WARNING,
        title=f"{step} could not be finished: {reason}",
        evidence={"step": step, "samples": samples},
    )


# -----------------------------------------------------------------------------
# Is the text that was timed sane? Only then the speed counts.


def timed_too_bad(record: CheckRecord, reference: CheckRecord | None) -> bool:
    """More than a third of the timed texts are degenerate, and more than those of the reference."""
    if not record.timed:
        return False
    share = sum(text.degenerate for text in record.timed) / len(record.timed)
    allowed = TOLERATED
    if reference is not None and reference.timed:
        allowed = max(allowed, sum(text.degenerate for text in reference.timed) / len(reference.timed))
    return share > allowed


def throughput(record: CheckRecord, reference: CheckRecord | None) -> list[Ruling]:
    """The speed does not count where its text is not sane."""
    if not timed_too_bad(record, reference):
        return []
    bad = sum(text.degenerate for text in record.timed)
    n = len(record.timed)
    certain = reference is not None or wilson(bad, n).lo > TOLERATED
    says = f"{bad} of {n} timed texts are degenerate"
    finding = Finding(
        id="throughput.invalid",
        severity=Severity.ERROR if certain else Severity.WARNING,
        title=f"the speed does not count: {says}",
        evidence={"timed": n, "degenerate": bad, "rate": interval_json(wilson(bad, n))},
    )
    return [Ruling("throughput", "bad" if certain else "unclear", says, (finding,))]
