"""Ask a server for the fingerprint of its model."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any

from assay.coherence.conversation import side_by_side, user
from assay.coherence.differences import STATISTICS
from assay.coherence.fingerprint import (
    CUTS,
    STRANGE_TEXTS,
    WIDTH,
    Fingerprint,
    Item,
    prompts,
    texts_digest,
)
from assay.coherence.passages import passages
from assay.engines import Capability, Request
from assay.engines.server.engine import ServerEngine
from assay.errors import AssayError
from assay.progress import NO_PROGRESS, Progress

PARALLEL = 8


def take_fingerprint(
    engine: ServerEngine, progress: Progress = NO_PROGRESS, *, noise: bool = False
) -> Fingerprint:
    """Ask a server for its fingerprint: 144 single tokens, eight at once, and twelve scores; twice
    for its `noise`.
    """
    able = engine.capabilities
    route = "completions" if Capability.COMPLETIONS in able else "chat"
    first = Fingerprint(
        engine.model,
        f"{engine.identity.kind} {engine.identity.version or ''}".strip(),
        engine.identity.kind,
        route,
        strange=tuple(engine.tokenize(t) for t in STRANGE_TEXTS)
        if Capability.TOKENIZE in able
        else (),
        texts=texts_digest(),
    )
    passes = 2 if noise else 1
    with progress("greedy tokens inside fixed texts", passes * len(passages()) * CUTS) as advance:
        # One after another for the noise: alone and in a batch is the largest difference that one
        # server makes.
        both = [
            ask_items(engine, route, advance, parallel)
            for parallel in ((PARALLEL, 1) if noise else (PARALLEL,))
        ]
    scores: list[tuple[float, ...]] = [()] * passes
    if Capability.SCORE in able:
        with progress("scores of fixed texts", passes * len(passages())) as advance:
            for n in range(passes):
                for text in passages():
                    scores[n] += (engine.score(text).nll,)
                    advance()
    found = replace(first, items=both[0], nats=scores[0])
    if not noise:
        return found
    again = replace(found, items=both[1], nats=scores[1])
    values = {name: statistic(found, again) for name, statistic in STATISTICS.items()}
    means = {
        name: fmean(x for group in groups for x in group)
        for name, groups in values.items()
        if groups
    }
    return replace(found, noise=means)


def ask_items(
    engine: ServerEngine, route: str, advance: Any, parallel: int
) -> tuple[tuple[Item, ...], ...]:
    """Ask for the next token after every prompt, `parallel` at once; items by text and cut."""

    def ask(text: int, cut: int) -> tuple[int, int, Item | AssayError]:
        prompt = prompts()[text][cut]
        request = Request(prompt=prompt, max_tokens=1, seed=0)
        if route == "chat":
            asked = user(f"Continue this text, without repeating it: {prompt}")
            request = Request(messages=(asked,), max_tokens=1, seed=0)
        try:
            reply, top = engine.generate_with_top(request, WIDTH)
        except AssayError as error:
            return text, cut, error
        said = reply.content or reply.reasoning
        return (
            text,
            cut,
            Item(top[0].text if top else said, reply.prompt_tokens, top[0].likely if top else {}),
        )

    rows: dict[tuple[int, int], Item] = {}
    work = [lambda t=t, c=c: ask(t, c) for t in range(len(passages())) for c in range(CUTS)]
    for text, cut, item in side_by_side(work, parallel):
        if isinstance(item, AssayError):
            raise item
        rows[text, cut] = item
        advance()
    return tuple(tuple(rows[t, c] for c in range(CUTS)) for t in range(len(passages())))
