"""Speed of a server, timed on text that is then graded.

Decode speed of one stream (the inverse of TPOT, the time per output token) is
(n - tokens in the first chunk) / (t_last - t_first), with n from the server's usage: a speculating
server sends several tokens in one chunk, so chunks are not tokens. Prompts differ from their first
word on, so that a prefix cache does not answer for the model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from assay.coherence.conversation import TEMPERATURE, TOP_P, in_order, user
from assay.coherence.record import HEAD_CHARS, TimedText
from assay.coherence.replies import grade_reply, received_chars, shown_text
from assay.engines import Engine, Reply, Request

TOKENS = 160
"""Tokens of one timed text at most: enough for a loop to show, short enough to repeat."""
_SUBJECTS = (
    "how a lighthouse works",
    "why leaves change colour in autumn",
    "how bread rises",
    "what a librarian does all day",
    "how a bicycle stays upright",
    "why the sea is salty",
    "how a letter travels to another country",
    "what happens inside a beehive in winter",
    "how glass is made",
    "why cities have parks",
    "how a piano makes sound",
    "what a glacier leaves behind",
    "how people kept time before clocks",
    "why bridges need joints",
    "how a seed becomes a tree",
    "what makes a good map",
)


def timed_requests(count: int, seed: int, chat: bool) -> list[Request]:
    """`count` requests for short prose with different beginnings, recorded seeds and the usual
    sampling.
    """
    rng = random.Random(f"throughput/{seed}")
    requests = []
    for index in range(count):
        subject = _SUBJECTS[index % len(_SUBJECTS)]
        number = rng.randint(10_000, 99_999)
        question = f"Note {number}: write about 150 words on {subject}."
        prompt = f"Note {number}\n\nA short article on {subject}.\n\n"
        requests.append(
            Request(
                messages=(user(question),) if chat else None,
                prompt=None if chat else prompt,
                max_tokens=TOKENS,
                temperature=TEMPERATURE,
                top_p=TOP_P,
                seed=seed + index,
            )
        )
    return requests


def time_round(
    engine: Engine, requests: Sequence[Request], round_: int, deadline: float = float("inf")
) -> list[TimedText]:
    """Stream all `requests` at once and grade what came by `deadline`; a reply whose tokens the
    server does not count is left out.
    """
    replies = in_order(engine.stream, requests, len(requests), deadline)
    return [
        to_timed_text(reply, round_)
        for reply in replies
        if reply.timing is not None and reply.completion_tokens is not None
    ]


def to_timed_text(reply: Reply, round_: int = 0) -> TimedText:
    """Grade and speed of one reply; without a speed where nothing was timed, as on the reference
    side.
    """
    timing, tokens = reply.timing, reply.completion_tokens or 0
    grade = grade_reply(reply)
    text = TimedText(
        label=grade.label,
        kind=grade.kind,
        onset_char=grade.onset_char,
        text_head=shown_text(reply)[:HEAD_CHARS],
        text_chars=received_chars(reply),
        coherent_chars=grade.coherent_chars,
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=tokens,
        round=round_,
    )
    if timing is None:
        return text
    return replace(
        text,
        ttft_s=timing.ttft,
        e2e_s=(timing.finished or timing.last_token) - timing.started,
        itl_s=timing.time_per_output_token(tokens),
        decode_tokens_per_s=timing.decode_tokens_per_s(tokens),
        first_chunk_source=timing.first_chunk_source,
    )


def prefill_speed(engine: Engine, prompts: Sequence[str], chat: bool) -> float | None:
    """Median of prompt tokens / TTFT over long prompts, in tokens a second; None where it cannot be
    known.
    """
    speeds = []
    for prompt in prompts:
        reply = engine.stream(
            Request(
                messages=(user(prompt),) if chat else None,
                prompt=None if chat else prompt,
                max_tokens=1,
            )
        )
        if reply.timing is not None and reply.prompt_tokens and reply.timing.ttft > 0:
            speeds.append(reply.prompt_tokens / reply.timing.ttft)
    return median(speeds) if speeds else None


def summary(values: Sequence[float | None]) -> dict[str, float | None]:
    """Median, minimum and maximum of the values that are there."""
    known = [value for value in values if value is not None]
    if not known:
        return {"median": None, "min": None, "max": None}
    return {"median": median(known), "min": min(known), "max": max(known)}


def aggregate_tokens_per_s(texts: Sequence[TimedText]) -> float | None:
    """Tokens of all streams of a round over the time of its longest one, median over rounds."""
    rounds: dict[int, list[TimedText]] = {}
    for text in texts:
        rounds.setdefault(text.round, []).append(text)
    speeds = [
        sum(t.completion_tokens for t in batch) / longest
        for batch in rounds.values()
        if (longest := max(t.e2e_s or 0.0 for t in batch)) > 0
    ]
    return median(speeds) if speeds else None
