"""A running server: two scrapes of its counters and the window between them, and a race against
another server.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from assay.engines import Capability, Request
from assay.errors import AssayError
from assay.speculation.benefit import Measured
from assay.speculation.read import Reading
from assay.speculation.record import Evidence, Kind, Observation, combine, fell, subtract
from assay.speculation.scan import looks_like_metrics, parse_samples, parsed_json
from assay.stats import mean_interval
from assay.verdict import Finding, Report, Severity, Table, Verdict, worst

if TYPE_CHECKING:
    from assay.engines.server.engine import ServerEngine
    from assay.engines.server.http import Transport


PROMPTS: tuple[str, ...] = (
    "The lighthouse keeper had not spoken to anyone for three weeks when the boat finally",
    'def merge_sorted(left, right):\n    """Merge two sorted lists into one."""\n',
    "Rivers shape the land in two ways. First, they",
    "The recipe for a simple vegetable soup begins with",
    'class Stack:\n    """A stack backed by a list."""\n\n    def __init__(self):\n',
    "In the spring of that year the town council decided to",
    "To explain why the sky is blue, one has to start with",
    "SELECT customers.name, SUM(orders.total)\nFROM customers\n",
)
MAX_TOKENS = 128


@dataclass(frozen=True)
class Sent:
    """Requests that were answered, and the completion tokens that the server says it sent for them."""

    requests: int
    tokens: int


def send(engine: ServerEngine, requests: int, concurrency: int = 2, first: int = 0) -> Sent:
    """Send greedy requests over prose and code, and count the tokens that come back."""
    numbers = range(first, first + requests)
    wanted = [
        Request(prompt=PROMPTS[i % len(PROMPTS)], max_tokens=MAX_TOKENS, seed=i) for i in numbers
    ]
    with ThreadPoolExecutor(concurrency) as pool:
        replies = list(pool.map(engine.generate, wanted))
    return Sent(len(replies), sum(r.completion_tokens or 0 for r in replies))


def race(engine: ServerEngine, rival: ServerEngine, requests: int) -> tuple[Sent, Measured]:
    """The speed of `engine` over that of `rival` for the same requests, asked in turn, so that each
    round's quotient is taken under one load; with Student's interval over the rounds' logarithms.
    The first round warms both up.
    """
    sent = send(engine, 2)
    send(rival, 2)
    logs = []
    for round_ in range(max(2, requests // 2)):
        paces = {}
        for own in (engine, rival) if round_ % 2 else (rival, engine):
            began = time.perf_counter()
            got = send(own, 2, first=2 * round_)
            paces[own] = max(got.tokens, 1) / max(time.perf_counter() - began, 1e-9)
            if own is engine:
                sent = Sent(sent.requests + got.requests, sent.tokens + got.tokens)
        logs.append(math.log(paces[engine] / paces[rival]))
    interval = mean_interval(logs)
    return sent, Measured(math.exp(interval.value), math.exp(interval.lo), math.exp(interval.hi))


_PAGE = re.compile(r"(?:/prometheus)?/metrics/?$")
ENOUGH_DRAFTS = 50
"""A window with fewer drafts is judged together with everything since the server started."""
_SWITCHES = (
    "switch the page on (llama.cpp: --metrics; SGLang: --enable-metrics; TensorRT-LLM:"
    " enable_iter_perf_stats), or give the log"
)


@dataclass(frozen=True)
class Live:
    """What two scrapes showed. `evidence` is the window's, or the lifetime's where the window is
    too thin.
    """

    reading: Reading
    evidence: Evidence
    window: Evidence
    lifetime: Evidence
    seconds: float
    judged: str
    reset: bool
    sent: Sent | None
    other_tokens: int | None
    findings: Sequence[Finding]
    race: Measured | None = None

    def to_json(self) -> dict[str, Any]:
        """The object `results.live`."""
        return {
            "interval_s": self.seconds,
            "judged": self.judged,
            "counters_reset": self.reset,
            "window": self.window.record,
            "lifetime": self.lifetime.record,
            "own_requests": None if self.sent is None else self.sent.requests,
            "own_tokens": None if self.sent is None else self.sent.tokens,
            "other_tokens": self.other_tokens,
            "race": self.race,
        }


def watch(
    url: str,
    interval: float = 10.0,
    requests: int = 0,
    rival: str | None = None,
    api_key_env: str | None = None,
    timeout: float = 120.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Live:
    """Scrape, let `interval` seconds pass or send requests of our own (to `rival` too, in turn),
    scrape again.

    AssayError where the server cannot be reached at either scrape.
    """
    from assay.engines.server.engine import ServerEngine, default_limits, read_key
    from assay.engines.server.http import Transport, parse_url

    with ExitStack() as held:

        def connect(at: str) -> ServerEngine:
            engine = held.enter_context(
                ServerEngine.connect(at, api_key_env=api_key_env, timeout=timeout)
            )
            engine.capabilities.require(Capability.COMPLETIONS, "--requests")
            return engine

        transport = Transport(
            parse_url(_PAGE.sub("", url)), key=read_key(api_key_env), limits=default_limits(timeout)
        )
        held.callback(transport.close)
        # The probes of these connections send requests too, which must not fall between the
        # scrapes.
        engine = connect(url) if requests else None
        other = connect(rival) if rival else None
        before = _page(transport)
        began = time.monotonic()
        sent, measured = None, None
        if engine is not None and other is not None:
            sent, measured = race(engine, other, requests)
        elif engine is not None:
            sent = send(engine, requests)
        # The counters follow the last token by a moment.
        sleep(interval if sent is None else min(1.0, interval))
        after = _page(transport)
    return replace(between(before, after, time.monotonic() - began, sent), race=measured)


def _page(transport: Transport) -> str:
    """The metrics of a server as text: Prometheus, or TensorRT-LLM's array of iterations where it
    has nothing else.
    """
    root = transport.endpoint.root
    try:
        text = transport.get(f"{root}/metrics").decode("utf-8", "replace")
    except AssayError as error:
        if error.finding_id == "server.not_found":
            error.remedy = _SWITCHES
        raise
    iterations = _json_array(text)
    if iterations is None and not parse_samples(text):
        raise AssayError(
            f"{root}/metrics is not a metrics page",
            finding_id="speculation.source_not_metrics",
            remedy="name the inference server itself, not a proxy or a web page",
        )
    if iterations is None:
        return text
    try:
        other = transport.get(f"{root}/prometheus/metrics").decode("utf-8", "replace")
    except AssayError:
        return text
    return other if looks_like_metrics(other) else text


def _reading(page: str) -> Reading:
    reading = Reading(kinds=["metrics"])
    iterations = _json_array(page)
    if iterations is None:
        reading.metrics(page)
    else:  # those since the last look, so the second page holds the window
        reading.document(iterations)
    return reading


def _json_array(text: str) -> list[Any] | None:
    """The JSON array that `text` is; None if it is anything else."""
    value = parsed_json(text) if text.lstrip().startswith("[") else None
    return value if isinstance(value, list) else None


def between(before: str, after: str, seconds: float, sent: Sent | None = None) -> Live:
    """What two pages of one server say about the time between them."""
    first, second = (_reading(page) for page in (before, after))
    old = {(o.replica, o.stream, o.definition): o for o in first.settled()}
    window: list[Observation] = []
    reset = False
    for o in second.settled():
        last = old.get((o.replica, o.stream, o.definition))
        if o.kind is not Kind.TOTAL:
            window.append(o)
        elif last is not None and fell(last, o):
            reset = True
            window.append(replace(o, kind=Kind.WINDOW))
        else:
            # An engine that is new on the page has counted all it has since the first scrape.
            window.append(replace(o if last is None else subtract(o, last), kind=Kind.WINDOW))
    short, lifetime = combine(window), combine(second.settled())
    thin = (
        short.record.drafts or short.record.drafted or 0
    ) < ENOUGH_DRAFTS and short.record.counts
    other = None
    if sent is not None and short.record.generated is not None:
        other = max(0, short.record.generated - sent.tokens)
    live = Live(
        second, lifetime if thin and not reset else short, short, lifetime, seconds,
        "since start" if thin and not reset else "window", reset, sent, other, (),
    )  # fmt: skip
    return replace(live, findings=_findings(live, thin))


def _findings(live: Live, thin: bool) -> list[Finding]:
    found = []
    if live.reset:
        found.append(
            Finding(
                "speculation.counter_reset",
                Severity.WARNING,
                "the counters fell between the two scrapes: the server restarted; only what"
                " followed is counted",
                evidence={"interval_s": live.seconds},
                remedies=("run again once the server is up",),
            )
        )
    elif thin and (live.lifetime.record.drafted or 0) > 0:
        found.append(
            Finding(
                "speculation.note",
                Severity.INFO,
                f"{live.window.record.drafts or 0} drafts in {live.seconds:.0f} s are too few, so"
                " everything since start is judged",
                remedies=("a longer --interval, or --requests N to send some",),
            )
        )
    if live.sent is not None and live.other_tokens and live.other_tokens > 0.02 * live.sent.tokens:
        found.append(
            Finding(
                "speculation.other_traffic",
                Severity.INFO,
                f"{live.other_tokens:,} tokens of other requests are in the figures, beside"
                f" {live.sent.tokens:,} of ours",
                evidence={"own_tokens": live.sent.tokens, "other_tokens": live.other_tokens},
            )
        )
    return found


# Does speculation change the text? Two servers of the same model, one with it and one without.
#
# Byte equality is the wrong question: two runs of the *same* server may part where two tokens are a
# hair apart, since another batch shape rounds otherwise. So (1) greedy texts are compared up to
# where they part, and the gap between the two candidate tokens is held against the noise of the
# log-probabilities that both servers give to the tokens they agree on; (2) sampled texts are
# compared as distributions, by permuting which server they came from.


# Where two greedy texts part, and whether the two tokens there are closer than the engine's own
# noise.

NOISE_FACTOR = 4.0
"""A gap of up to this many times the noise is a tie."""
NOISE_FLOOR = 1e-3
"""Log-probabilities (nats) closer than this are one value in 16-bit arithmetic."""


@dataclass(frozen=True)
class Tokens:
    """A greedy text token by token: its log-probabilities and the alternatives at each place."""

    texts: tuple[str, ...]
    logprobs: tuple[float, ...]
    top: tuple[Mapping[str, float], ...]

    @classmethod
    def from_completion(cls, body: Mapping[str, Any]) -> Tokens:
        """Tokens of an OpenAI completion response with `logprobs`."""
        try:
            logprobs = body["choices"][0]["logprobs"]
            texts, values = (
                tuple(logprobs["tokens"]),
                tuple(float(v) for v in logprobs["token_logprobs"]),
            )
            top = tuple(dict(t or {}) for t in logprobs.get("top_logprobs") or [{}] * len(texts))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise AssayError(
                "the server returns no log-probabilities with its completions",
                finding_id="server.missing_capability",
                remedy="--lossless needs /v1/completions with logprobs",
            ) from error
        return cls(texts, values, top)


@dataclass(frozen=True)
class Parting:
    """The first token at which two texts differ (`at` is None where they never do).

    `gap` is the distance, in nats, between the two tokens as the server without speculation sees
    them; None where the other token is not among its alternatives.
    """

    at: int | None
    on: str = ""
    off: str = ""
    gap: float | None = None
    real: bool = False


def part(on: Tokens, off: Tokens, noise: float) -> Parting:
    """Where `on` leaves `off`. A parting is real if the gap exceeds what the noise can bridge."""
    at = _first_difference(on, off)
    if at is None:
        return Parting(None)
    a, b = _at(on.texts, at), _at(off.texts, at)
    other = off.top[at].get(a) if at < len(off.top) and a else None
    own = off.logprobs[at] if at < len(off.logprobs) else None
    gap = None if other is None or own is None else max(0.0, own - other)
    limit = max(NOISE_FLOOR, NOISE_FACTOR * noise)
    # A token outside the alternatives is further away than the last of them.
    return Parting(at, a, b, gap, real=gap is None or gap > limit)


def noise_of(pairs: Iterable[tuple[Tokens, Tokens]]) -> float:
    """The 99th percentile of |difference| of log-probabilities over tokens that both texts agree
    on.
    """
    differences = sorted(
        abs(x - y)
        for a, b in pairs
        for x, y in zip(a.logprobs[: _agreed(a, b)], b.logprobs[: _agreed(a, b)], strict=True)
    )
    return (
        differences[min(len(differences) - 1, int(0.99 * len(differences)))] if differences else 0.0
    )


def _agreed(a: Tokens, b: Tokens) -> int:
    at = _first_difference(a, b)
    return min(len(a.texts), len(b.texts)) if at is None else at


def _first_difference(a: Tokens, b: Tokens) -> int | None:
    for i, (x, y) in enumerate(zip(a.texts, b.texts, strict=False)):
        if x != y:
            return i
    return None if len(a.texts) == len(b.texts) else min(len(a.texts), len(b.texts))


def _at(texts: tuple[str, ...], i: int) -> str:
    return texts[i] if i < len(texts) else ""


# Do two samples of texts come from one distribution? A permutation test over token positions.


def permutation_p(
    a: Sequence[Sequence[str]], b: Sequence[Sequence[str]], rounds: int = 2000, seed: int = 0
) -> float:
    """p-value for texts `a` and `b` having one distribution.

    Statistic: Σ over positions and tokens of (n_a / |a| − n_b / |b|)² / (n_a + n_b), a
    chi-square-like distance of the token counts at each position. Its null distribution comes from
    permuting which side a text is on, so texts, not tokens, are what is exchanged. (1 + at least as
    extreme) / (1 + rounds), Phipson and Smyth (2010).
    """
    texts = [*a, *b]
    width = max((len(t) for t in texts), default=0)
    columns = []
    for i in range(width):
        present = [t[i] if i < len(t) else None for t in texts]
        columns += [
            np.array([p == token for p in present], dtype=float) for token in dict.fromkeys(present)
        ]
    if not columns:
        return 1.0
    counts = np.array(columns)  # (position · token, text)
    weight = 1 / counts.sum(axis=1)
    side = np.array([1 / len(a)] * len(a) + [-1 / len(b)] * len(b))

    def distance(order: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
        return float((weight * (counts @ order) ** 2).sum())

    observed = distance(side)
    rng = np.random.default_rng(seed)
    extreme = sum(distance(rng.permutation(side)) >= observed - 1e-12 for _ in range(rounds))
    return (1 + extreme) / (1 + rounds)


# Raw completions with the alternatives of every token, which the engine protocol does not carry.

TOP = 5
"""Alternatives a token; servers allow at least this many."""


class Completions:
    """`/v1/completions` of one server and its first model."""

    def __init__(self, transport: Transport, model: str) -> None:
        self._transport = transport
        self._model = model

    @classmethod
    def connect(
        cls, url: str, api_key_env: str | None = None, timeout: float = 120.0
    ) -> Completions:
        """Connect to the server at `url`; AssayError where it cannot be reached or lists no model."""
        from assay.engines.server.discovery import choose_model, list_models
        from assay.engines.server.engine import default_limits, read_key
        from assay.engines.server.http import Transport, parse_url

        endpoint = parse_url(url)
        transport = Transport(endpoint, key=read_key(api_key_env), limits=default_limits(timeout))
        try:
            card, _ = choose_model(
                list_models(transport), None, endpoint.api, list_is_complete=True
            )
        except BaseException:
            transport.close()
            raise
        return cls(transport, card.id)

    def complete(self, prompt: str, max_tokens: int, temperature: float, seed: int) -> Tokens:
        """One completion, token by token."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "logprobs": TOP,
        }
        return Tokens.from_completion(
            self._transport.post_json(f"{self._transport.endpoint.api}/completions", body)
        )

    def __enter__(self) -> Completions:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._transport.close()


GREEDY_TOKENS = 96
SAMPLED_TOKENS = 12
ALPHA = 0.01
MIN_SAMPLES = 8


@dataclass(frozen=True)
class Lossless:
    """Where greedy texts part and why, and how likely the sampled texts are if both servers are the
    same.
    """

    partings: tuple[Parting, ...]
    own_partings: int
    noise: float
    p_value: float | None
    samples: int

    @property
    def real(self) -> list[Parting]:
        """Partings that no noise explains."""
        return [p for p in self.partings if p.real]

    @property
    def verdict(self) -> Verdict:
        """fail where a difference is real, inconclusive where noise may explain what was seen, else
        pass.
        """
        if self.real or (self.p_value is not None and self.p_value < ALPHA):
            return Verdict.FAIL
        parted = any(p.at is not None for p in self.partings)
        return Verdict.INCONCLUSIVE if parted else Verdict.PASS

    def to_json(self) -> dict[str, Any]:
        """The object `results.lossless`."""
        return {
            "verdict": self.verdict.value,
            "prompts": len(self.partings),
            "identical": sum(p.at is None for p in self.partings),
            "ties": sum(p.at is not None and not p.real for p in self.partings),
            "real": len(self.real),
            "own_partings": self.own_partings,
            "noise": self.noise,
            "sampled_p_value": self.p_value,
            "samples": self.samples,
            "partings": self.partings,
        }


def check_lossless(report: Report, url: str, other: str, *options: Any) -> Report:
    """`report` with the comparison of its server with the one without speculation. `options` are
    those of `measure`.
    """
    answer = measure(url, other, *options)
    return replace(
        report,
        verdict=worst([report.verdict, answer.verdict]),
        findings=[*_exactness(answer), *report.findings],
        results={**report.results, "lossless": answer.to_json()},
        blocks=[*report.blocks, _table(answer)],
    )


def measure(
    url: str,
    other: str,
    prompts: int = 6,
    samples: int = 48,
    api_key_env: str | None = None,
    timeout: float = 120.0,
) -> Lossless:
    """Compare the server at `url` (speculation on) with `other` (off)."""
    with ExitStack() as held:
        on, off = (
            held.enter_context(Completions.connect(u, api_key_env, timeout)) for u in (url, other)
        )
        texts = [PROMPTS[i % len(PROMPTS)] for i in range(prompts)]
        first, second, again = (
            [e.complete(text, GREEDY_TOKENS, 0.0, 0) for text in texts] for e in (on, off, off)
        )
        drawn = [_sampled(e, samples) for e in (on, off)]
    return judge_texts(first, second, again, (drawn[0], drawn[1]))


def judge_texts(
    on: Sequence[Tokens],
    off: Sequence[Tokens],
    again: Sequence[Tokens],
    drawn: tuple[Sequence[tuple[str, ...]], ...],
) -> Lossless:
    """Greedy texts with speculation, without, and without once more; `drawn` are sampled texts
    (with, without).
    """
    noise = noise_of([*zip(on, off, strict=True), *zip(again, off, strict=True)])
    partings = tuple(part(a, b, noise) for a, b in zip(on, off, strict=True))
    own = sum(part(a, b, noise).at is not None for a, b in zip(again, off, strict=True))
    samples = len(drawn[0])
    p_value = permutation_p(drawn[0], drawn[1]) if samples >= MIN_SAMPLES else None
    return Lossless(partings, own, noise, p_value, samples)


def _sampled(engine: Completions, count: int) -> list[tuple[str, ...]]:
    """Texts drawn at temperature 1, a different seed each, as tuples of tokens."""
    with ThreadPoolExecutor(4) as pool:
        texts = pool.map(
            lambda seed: engine.complete(PROMPTS[0], SAMPLED_TOKENS, 1.0, seed), range(1, count + 1)
        )
        return [t.texts for t in texts]


def _exactness(answer: Lossless) -> list[Finding]:
    figures = {k: v for k, v in answer.to_json().items() if k != "partings"}
    if answer.verdict is Verdict.PASS:
        return [
            Finding(
                "speculation.lossless",
                Severity.INFO,
                "no difference between speculation on and off beyond the engine's own noise",
                evidence=figures,
            )
        ]
    if answer.verdict is Verdict.INCONCLUSIVE:
        return [
            Finding(
                "speculation.lossless_undecided",
                Severity.WARNING,
                "greedy texts part, but only at near ties, which the engine's own noise explains",
                evidence=figures,
                remedies=("bound how far the distributions can be apart: `assay compare`",),
            )
        ]
    return [
        Finding(
            "speculation.not_lossless",
            Severity.ERROR,
            (
                f"{len(answer.real)} of {len(answer.partings)} greedy texts part where no tie"
                " explains it"
                if answer.real
                else f"sampled texts come from different distributions (p = {answer.p_value:.2g})"
            ),
            evidence=figures,
            causes=(
                (
                    "the verification writes wrong state (KV slots, recurrent state) for accepted"
                    " drafts"
                ),
                "the servers do not run the same model or the same sampling settings",
            ),
            remedies=(
                "check that both servers have the same arguments but for speculation",
                "assay compare ON OFF",
            ),
            references=("https://github.com/vllm-project/vllm/issues/46834",),
        )
    ]


def _table(answer: Lossless) -> Table:
    rows = [
        (
            str(i + 1),
            "identical" if p.at is None else f"token {p.at}",
            "" if p.at is None else f"{p.on!r} / {p.off!r}",
            "" if p.gap is None else f"{p.gap:.4f}",
            "" if p.at is None else ("real" if p.real else "tie"),
        )
        for i, p in enumerate(answer.partings)
    ]
    return Table(
        "Speculation on against off, greedy",
        ("prompt", "parts at", "on / off", "gap (nats)", "reading"),
        rows,
        frozenset({3}),
        note=f"noise {answer.noise:.4f} nats; sampled texts: p = {answer.p_value}",
    )
