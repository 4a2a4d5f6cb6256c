"""What one start of a server shows: the rules of `assay check` against the baseline, speed, and the
draft's health.

The stages are those of a check, in a time of their own. Once it is known which rules the given
command breaks, only the stages that those rules need are measured.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from assay.coherence.judge import judge
from assay.coherence.measure import Measurement
from assay.coherence.options import Plan
from assay.coherence.pace import Pace, fit
from assay.coherence.passages import LEAST_TEXTS, passages
from assay.coherence.probes import NAMES
from assay.coherence.record import CheckRecord, PassageScore
from assay.coherence.results import record_json
from assay.coherence.run import DECIDED_BY_TEXTS, EARLY
from assay.coherence.stages import FIRST, Stage, extension, stages_of
from assay.engines import Capability, Request
from assay.engines.server.engine import ServerEngine, read_key
from assay.errors import AssayError
from assay.options import SLOWER, SYMPTOMS
from assay.progress import NO_PROGRESS
from assay.serving.command import Setting
from assay.serving.search import State
from assay.stats import Interval, mean_interval
from assay.verdict import Severity

_STAGE_KINDS = {
    "bits": {"scores"},
    "tools": {"tools"},
    "speed": {"speed"},
    "speculation": {"speed"},
}
TOOL_STREAMS = 32
_PROBES = tuple(name for name in NAMES if name != "needle")


@dataclass(frozen=True)
class Observation:
    """What one start showed, in plain JSON types but for the record."""

    record: CheckRecord = field(default_factory=CheckRecord)
    health: str = ""
    """Of speculation, by the engine's counters or log; empty where nothing speculates."""
    acceptance: float | None = None
    start_s: float = 0.0
    measure_s: float = 0.0
    failed: str = ""
    """Why the server could not be started: the kind of `StartFailed`."""
    said: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    log: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    died: bool = False

    def to_json(self) -> dict[str, Any]:
        """The form that is kept."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "record"}
        return own | {"record": record_json(self.record), "concurrency": self.record.concurrency}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Observation:
        """Read it back."""
        own = {k: v for k, v in data.items() if k in cls.__dataclass_fields__ and k != "record"}
        return cls(record=CheckRecord.from_json(data["record"]), **own)

    @property
    def speeds(self) -> list[float]:
        """Decode speeds of the timed texts, tokens a second."""
        return [t.decode_tokens_per_s for t in self.record.timed if t.decode_tokens_per_s]

    @property
    def speed(self) -> Interval | None:
        """Median decode speed of one stream, with the interval of the mean around it."""
        return speed_interval(self.speeds)


def speed_interval(speeds: Sequence[float]) -> Interval | None:
    """Geometric mean of speeds with its 95 % interval (Student's, on logarithms); None for fewer
    than two.
    """
    if len(speeds) < 2:
        return None
    logs = mean_interval([math.log(s) for s in speeds])
    return Interval(math.exp(logs.value), math.exp(logs.lo), math.exp(logs.hi))


@dataclass(frozen=True)
class Seen:
    """What an observation amounts to: its state, the rules that are bad and what they say."""

    state: State
    bad: Mapping[str, str] = field(default_factory=dict)
    certain: bool = False
    """Bad beyond doubt: further starts would change the answer with hardly any chance."""
    findings: tuple[Any, ...] = ()


def rules_of(names: Collection[str]) -> frozenset[str]:
    """The rules of symptoms; all of them where none is named."""
    return frozenset().union(*(SYMPTOMS[name] for name in names)) if names else frozenset()


def see(
    seen: Observation,
    baseline: Observation | None,
    rules: Collection[str] = (),
    slower: float = SLOWER,
) -> Seen:
    """Judge an observation against the baseline's, by some rules or by all."""
    if seen.failed:
        return Seen("cannot_run", {"start": seen.said})
    bad: dict[str, str] = {}
    if seen.died:
        bad["died"] = seen.said or "the server ended while it was asked"
    against = baseline.record if baseline is not None else None
    judged = judge(seen.record, against)
    early = {r.rule for r in judge(seen.record, against, EARLY).rulings if r.state == "bad"}
    states = {r.rule: r for r in judged.rulings if not rules or r.rule in rules}
    bad |= {rule: r.says for rule, r in states.items() if r.state == "bad"}
    for rule, says in (_slower(seen, baseline, slower), _health(seen)):
        if says and (not rules or rule in rules):
            bad[rule] = says
    if rules:
        bad = {rule: says for rule, says in bad.items() if rule in rules or rule == "died"}
    if bad:
        findings = tuple(
            f for r in states.values() for f in r.findings if f.severity is Severity.ERROR
        )
        # Fixed texts are scored once, by their own level: no later look spends error on them.
        certain = early | {"died", "speculation", "bits_per_byte"}
        return Seen("bad", bad, bool(certain & bad.keys()), findings)
    unclear = [r for r in states.values() if r.state == "unclear"]
    if rules and set(rules) <= SYMPTOMS["speed"] and (found := _change(seen, baseline)):
        open_ = found[0] - found[1] < math.log(1 - slower)  # the interval allows a loss that counts
        return Seen("undecided" if open_ else "good")
    measured = seen.record.samples or seen.record.tools or seen.record.timed or seen.record.passages
    return Seen("undecided" if unclear or not measured else "good")


def _change(seen: Observation, baseline: Observation | None) -> tuple[float, float] | None:
    """Difference of the mean logarithms of the speeds, and half its 95 % interval; None for fewer
    than three on a side.
    """
    if baseline is None or len(seen.speeds) < 3 or len(baseline.speeds) < 3:
        return None
    ours, theirs = (mean_interval([math.log(s) for s in o.speeds]) for o in (seen, baseline))
    return ours.value - theirs.value, math.hypot(ours.hi - ours.value, theirs.hi - theirs.value)


def _slower(seen: Observation, baseline: Observation | None, least: float) -> tuple[str, str]:
    found = _change(seen, baseline)
    if found is None or baseline is None or sum(found) >= math.log(1 - least):
        return "slower", ""
    change, half = found
    lost, lo, hi = (1 - math.exp(change + d) for d in (0.0, half, -half))
    return (
        "slower",
        (
            f"{lost:.0%} slower [{lo:.0%}, {hi:.0%}]: {median(seen.speeds):.3g} tokens/s, the"
            f" baseline {median(baseline.speeds):.3g}"
        ),
    )


def _health(seen: Observation) -> tuple[str, str]:
    if seen.health not in ("broken", "degraded"):
        return "speculation", ""
    rate = (
        "" if seen.acceptance is None else f", {seen.acceptance:.0%} of the drafted tokens accepted"
    )
    return "speculation", f"speculation is {seen.health}{rate}"


@dataclass(frozen=True)
class Measure:
    """How a start is measured: seconds of questions, `longer` by so many while it is unclear,
    requests at once, first seed.
    """

    seconds: float
    concurrency: int
    seed: int = 0
    tools: bool = True
    timeout: float = 120.0
    longer: float = 0.0

    def plan(self, start: int) -> Plan:
        """The plan of a check; later starts ask with other seeds."""
        return Plan(samples=1, repeats=3, parallel=8, seed=self.seed + 1000 * start, only=_PROBES)


def measure(
    url: str,
    how: Measure,
    start: int,
    rules: Collection[str],
    baseline: Observation | None,
    *,
    kinds: Collection[str],
    first: bool = False,
    log: Path,
    api_key_env: str | None = None,
    model: str | None = None,
) -> Observation:
    """Ask a running server; an answer that cannot be had ends the questions, not the doctor.

    `kinds`: of the settings of this configuration, whose effect is looked for (`draft`, `adapter`,
    `prefix`). `first`: speed is timed right after the burst, as a draft is there for it.

    Raises AssayError where the server cannot be examined at all.
    """
    began, plan = time.monotonic(), how.plan(start)
    with ServerEngine.connect(url, model, api_key_env=api_key_env, timeout=how.timeout) as engine:
        facts = engine.describe()
        wide = replace(plan, concurrency=how.concurrency)
        taken = Measurement(engine, wide, engine.max_model_len, NO_PROGRESS)
        probes, pace = taken.probes, Pace()
        taken.plan = plan
        rest = _stages(stages_of(plan, probes, engine.max_model_len), rules, how, first)
        before = _counters(engine)
        # What a server can do was found out by now, which on a slow one takes as long as the
        # questions.
        asked_since = time.monotonic()
        said, seen = "", Observation()
        # A baseline is what every other start is judged by: it is asked for twice as long where a
        # start takes long.
        limit = how.seconds + (min(how.longer, how.seconds) if baseline is None else 0.0)
        extended, left_out = False, list[Stage]()
        while rest:
            stage, *rest = rest
            left = asked_since + limit - time.monotonic()
            chosen, dropped = fit([stage, *rest], pace, left, lambda stage: True)
            first = (
                not taken.record.samples and not taken.record.timed and not taken.record.passages
            )
            if stage in dropped and not first:
                left_out.append(stage)
            else:
                begun, written = time.monotonic(), taken.record.written_tokens
                try:
                    form = next((s for s in chosen if s.name == stage.name), stage)
                    if stage.kind == "scores" and not stage.context and _by_steps(engine):
                        limit += _score_by_steps(engine, taken, how.seconds)
                    else:
                        taken.run(form, deadline=asked_since + max(limit, 20.0))
                        pace.learn(
                            stage, time.monotonic() - begun, taken.record.written_tokens - written
                        )
                except AssayError as error:
                    said = error.message
                    break
                seen = Observation(record=_without_reasons(taken.record))
                if see(seen, baseline, rules).certain:
                    break
            if rest or baseline is None:
                continue
            unclear = {
                r.rule
                for r in judge(seen.record, baseline.record).rulings
                if r.state == "unclear" and (not rules or r.rule in rules)
            }
            if unclear and left_out and how.longer and limit == how.seconds:
                rest, left_out, limit = left_out, [], how.seconds + how.longer
            elif unclear and unclear <= DECIDED_BY_TEXTS and not extended:
                rest, extended, limit = [extension(plan, probes, 2)], True, how.seconds + how.longer
        if taken.fatal is not None and not taken.record.samples:
            said = said or taken.fatal.message
        health, acceptance = _speculation(url, log) if "draft" in kinds else ("", None)
        told = {
            k: v
            for k, v in facts.get("server", {}).items()
            if isinstance(v, str | int | float | bool)
        }
        if "adapter" in kinds:
            told |= _beside_base(url, model, read_key(api_key_env))
        if "prefix" in kinds:
            told |= _asked_twice(engine)
        after = _counters(engine)
    moved = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return Observation(
        record=_without_reasons(taken.record),
        health=health,
        acceptance=acceptance,
        said=said,
        metrics=moved,
        measure_s=time.monotonic() - began,
        facts=told,
    )


_STEPPED = 100
"""Characters of each fixed text that are scored token by token."""


def _by_steps(engine: ServerEngine) -> bool:
    """Whether the server scores no prompts, but can be made to write a text: llama.cpp's."""
    able = engine.capabilities
    return (
        engine.identity.kind == "llama.cpp"
        and Capability.SCORE not in able
        and Capability.TOKENIZE in able
    )


def _score_by_steps(engine: ServerEngine, taken: Measurement, most: float) -> float:
    """Score the beginnings of the fixed texts token by token; returns the seconds that it took.

    A loss that texts of a few seconds do not show (a KV cache of 4 bits) shows here. It comes on
    top of the time for a start, `most` seconds: a server of 50 tokens a second needs about 4 s for
    the 8 texts that a judgement takes, which may take twice `most`; the others take what is left of
    a third of it.
    """
    began = time.monotonic()
    with suppress(AssayError):
        for number, text in enumerate(passages()):
            share = 2.0 if number < LEAST_TEXTS else 0.3
            if time.monotonic() - began > share * most:
                break
            part = text[:_STEPPED].rpartition(" ")[0]
            score = PassageScore(
                f"beginning of p{number:02d}",
                0,
                -sum(engine.score_by_steps(part)),
                len(part.encode()),
            )
            taken.record = replace(taken.record, passages=(*taken.record.passages, score))
    return time.monotonic() - began


def _stages(
    stages: Sequence[Stage], rules: Collection[str], how: Measure, first: bool
) -> list[Stage]:
    """The stages that the rules need: fixed texts, which decide in seconds where a server scores
    them, to tool calls.
    """
    kinds = {"texts", "scores", "speed"}
    if rules and (
        "died" not in rules or set(rules) >= SYMPTOMS["text"]
    ):  # any question may have made it die
        kinds = set()
        for symptom, own in SYMPTOMS.items():
            if own & set(rules):
                kinds |= _STAGE_KINDS.get(symptom, {"texts"})
    left_out = ("texts in context", "more texts")
    found = [
        s
        for s in stages
        if s.kind in kinds and s.name not in left_out and not s.name.startswith("needles")
    ]
    found = [
        replace(s, prefill=False) for s in found
    ]  # no rule looks at it, and it takes as long as the texts
    order = {"scores": 0, "speed": 2 if first else 3}
    found.sort(key=lambda stage: 1 if stage.name == FIRST else order.get(stage.kind, 3))
    if rules and {"depth"} & set(rules):
        found += [s for s in stages if s.name == "texts in context"]
    if how.tools and (not rules or "tools" in kinds):
        found.append(
            Stage("tools under load", "tools", "whether tool calls hold", streams=TOOL_STREAMS)
        )
    return found


def _without_reasons(record: CheckRecord) -> CheckRecord:
    """A stage that was cut off by the time for a start is thin evidence, not an open verdict."""
    return replace(
        record,
        passages_failed=None,
        timed_failed=None,
        probes=tuple(replace(p, failed=None) if p.samples else p for p in record.probes),
    )


_COUNTED = (
    "spec_decode_num_draft",
    "prefix_cache_hits",
    "prefix_cache_queries",
    "num_preemptions",
    "draft",
    "prompt_tokens_total",
)


def _counters(engine: ServerEngine) -> dict[str, float]:
    """Counters of the metrics page that say whether something took part."""
    with suppress(AssayError):
        found: dict[str, float] = {}
        for family in engine.metrics().families.values():
            for sample in family.samples:
                if any(name in sample.name for name in _COUNTED) and not sample.name.endswith(
                    "_created"
                ):
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found
    return {}


def _asked_twice(engine: ServerEngine) -> dict[str, Any]:
    """A prompt of several blocks of cache, asked twice: tokens of it that were read from the cache,
    and whether the answer stayed.
    """
    prompt = "\n\n".join(passages())[:3000]
    with suppress(AssayError):
        before = _counters(engine)
        texts = [engine.generate(Request(prompt=prompt, max_tokens=8)).content for _ in range(2)]
        moved = {
            n: v - before.get(n, 0.0) for n, v in _counters(engine).items() if "external" not in n
        }
        hits = [v for n, v in moved.items() if "prefix_cache_hits" in n]
        return {"prefix_hits": sum(hits), "prefix_same": texts[0] == texts[1]} if hits else {}
    return {}


_CONTINUED = (
    "The capital of France is",
    "Once upon a time there was a",
    "The three most important rules of cooking are",
    "def add(a, b):",
    "Dear Sir or Madam, I am writing to",
    "Water boils at",
)


def _beside_base(url: str, model: str | None, key: str | None) -> dict[str, int]:
    """How many of a few greedy texts differ between the adapter and the base model of one server;
    {} where it has no both.

    vLLM lists both by name; llama.cpp's server takes the strength of each adapter with a request.
    """
    import httpx

    with (
        suppress(httpx.HTTPError, ValueError, KeyError, TypeError, IndexError),
        httpx.Client(
            base_url=url,
            timeout=60,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            trust_env=False,
        ) as client,
    ):
        names = [entry["id"] for entry in client.get("/v1/models").json()["data"]]
        ours: dict[str, Any] = {"model": model or names[0]}
        theirs = {"model": next((n for n in names if n != model), names[0])}
        if model is None:
            loaded = client.get("/lora-adapters").json()
            theirs["lora"] = [{"id": entry["id"], "scale": 0.0} for entry in loaded]
        texts = [
            [
                client.post(
                    "/v1/completions",
                    json={**which, "prompt": prompt, "max_tokens": 24, "temperature": 0},
                ).json()["choices"][0]["text"]
                for prompt in _CONTINUED
            ]
            for which in (ours, theirs)
        ]
        return {
            "adapter_asked": len(_CONTINUED),
            "adapter_differ": sum(a != b for a, b in zip(*texts, strict=True)),
        }
    return {}


def _speculation(url: str, log: Path) -> tuple[str, float | None]:
    """Health and acceptance rate of the draft since the start, from the counters, else from the
    log.
    """
    from assay.speculation.options import SpecOptions
    from assay.speculation.spec import examine

    for source in (url, str(log)):
        with suppress(AssayError):
            results = examine([source], SpecOptions(interval=0.0)).results
            if results.get("health") not in (None, "unknown", "insufficient"):
                return str(results["health"]), results["record"].get("acceptance_rate")
    return "", None


# Did a setting take effect? Evidence from the log, the counters and the texts; "set and had no
# effect" is a finding.


@dataclass(frozen=True)
class Engaged:
    """`yes` True: it took effect; False: it did not; None: nothing tells."""

    yes: bool | None
    evidence: str


_UNKNOWN = Engaged(None, "nothing in the log, the counters or the texts tells")
_IGNORED = re.compile(
    r"ignor|no effect|not (?:be )?used|will be unused|unused|unrecogni[sz]ed|unknown"
    r" (?:argument|option)|has been disabled|"
    r"is disabled|disabling|falling back|not supported.{0,40}(?:using|fall)|no usable"
    r" GPU|overrid(?:e|es|den)",
    re.IGNORECASE,
)
_CONFIG_NAMES = {
    "--max-num-seqs": "max_num_seqs",
    "--ubatch-size": "n_ubatch",
    "--batch-size": "n_batch",
    "--ctx-size": "n_ctx",
    "--flash-attn": "flash_attn",
    "--rope-freq-base": "freq_base",
    "--rope-freq-scale": "freq_scale",
    "--parallel": "n_seq_max",
    "--rope-scaling": "rope scaling",
    "--kv-unified": "kv_unified",
}
_SAME = {"on": "enabled", "off": "disabled", "true": "enabled", "false": "disabled"}


def engaged(setting: Setting, given: Observation, without: Observation | None) -> Engaged:
    """What the starts of the given command, and of one without the setting, say about it."""
    ignored = _ignored(setting, given.log)
    if ignored:
        return Engaged(False, f"log: {ignored}")
    special = _SPECIAL.get(
        setting.safe.kind if setting.safe.kind in ("draft", "adapter") else setting.name
    )
    if special is not None:
        found = special(setting, given, without)
        if found.yes is not None:
            return found
    return _in_log(setting, given.log)


def _flag_words(setting: Setting) -> tuple[str, ...]:
    bare = setting.name.lstrip("-")
    extra = {"n-gpu-layers": ("gpu-layers", "ngl", "GPU support")}.get(bare, ())
    return (bare, bare.replace("-", "_"), *extra)


def _ignored(setting: Setting, log: str) -> str:
    """The line of the log that says that the option is not used."""
    names = [n for n in _flag_words(setting) if len(n) > 2]
    pattern = re.compile("|".join(rf"(?<![\w-])-{{0,2}}{re.escape(n)}(?![\w-])" for n in names))
    for line in log.splitlines():
        said, named = pattern.subn(
            "", line
        )  # --hf-overrides and --override-kv have the word in their names
        if (
            named
            and _IGNORED.search(said)
            and "non-default args" not in line
            and "config:" not in line
        ):
            return line.strip()[:240]
    return ""


def _in_log(setting: Setting, log: str) -> Engaged:
    """The engine's own account of its settings: `name=value` in vLLM's configuration, `name =
    value` in llama.cpp's.
    """
    key = _CONFIG_NAMES.get(
        setting.name, setting.name.lstrip("-").removeprefix("no-").replace("-", "_")
    )
    found = re.findall(rf"(?<![\w-]){re.escape(key)}['\"]?\s*[=:]\s*['\"]?([\w./+-]+)", log)
    found = [value.rstrip(".,") for value in found if value not in ("None", "null")]
    if not found or setting.value is None or setting.implicit:
        return _UNKNOWN
    if any(_same(value, setting.value) for value in found):
        return Engaged(True, f"log: {key}={setting.value}")
    return _UNKNOWN


def _same(found: str, want: str) -> bool:
    """Whether two words name one value: 100 and 100.0, on and enabled."""
    ours, theirs = (
        _SAME.get(word.strip().casefold(), word.strip().casefold()) for word in (found, want)
    )
    with suppress(ValueError):
        return float(ours) == float(theirs)
    return ours == theirs


def _kv_dtype(setting: Setting, given: Observation, without: Observation | None) -> Engaged:
    want = (setting.value or "").casefold()
    stated = str(given.facts.get("kv_cache_dtype") or "").casefold()
    found = re.findall(r"(?:kv_cache_dtype|cache_dtype)['\"]?\s*[=:]\s*['\"]?([\w.]+)", given.log)
    line = next(
        (w for w in (stated, *map(str.casefold, found)) if w and w not in ("auto", "none")), ""
    )
    if line and (line.startswith(want[:3]) or want.startswith(line[:3])):
        return Engaged(True, f"the engine says kv_cache_dtype {line}")
    if stated == "auto" and want != "auto":
        return Engaged(False, "the engine says kv_cache_dtype auto")
    return _UNKNOWN


def _backend(setting: Setting, given: Observation, without: Observation | None) -> Engaged:
    """vLLM names the backend that it took, or says that it cannot take the one that was
    asked for.
    """
    want = re.escape(setting.value or "")
    for line in given.log.splitlines():
        if re.search(rf"Cannot use {want} (?:attention )?backend", line, re.IGNORECASE):
            return Engaged(False, f"log: {line.strip()[-200:]}")
        if re.search(rf"Using {want} (?:attention )?backend", line, re.IGNORECASE):
            return Engaged(True, f"log: {line.strip()[-200:]}")
    return _UNKNOWN


def _llama_kv(setting: Setting, given: Observation, without: Observation | None) -> Engaged:
    side = "K" if setting.name.endswith("-k") else "V"
    found = re.findall(rf"\b{side} \((\w+)\)", given.log)
    if not found:
        return _UNKNOWN
    return Engaged(
        (setting.value or "").casefold() in map(str.casefold, found), f"log: {side} ({found[-1]})"
    )


def _draft(setting: Setting, given: Observation, without: Observation | None) -> Engaged:
    drafted = sum(
        v for name, v in given.metrics.items() if "draft" in name and "accept" not in name
    )
    if drafted > 0 or given.acceptance is not None:
        rate = "" if given.acceptance is None else f", {given.acceptance:.0%} accepted"
        return Engaged(
            True,
            (
                f"draft counters moved by {drafted:g}{rate}"
                if drafted
                else f"tokens were drafted{rate}"
            ),
        )
    if given.health == "off" or any("spec_decode" in name for name in given.metrics):
        return Engaged(False, "no token was drafted")
    return _UNKNOWN


def _prefix(setting: Setting, given: Observation, without: Observation | None) -> Engaged:
    """Hits of the cache: of a prompt that was asked twice, else of all that was asked."""
    hits = given.facts.get("prefix_hits")
    if hits is not None:
        same = "the same answer" if given.facts.get("prefix_same") else "another answer"
        says = f"a prompt asked twice took {hits:g} tokens from the prefix cache and got {same}"
        return Engaged(hits > 0, says)
    moved = [
        v
        for name, v in given.metrics.items()
        if "prefix_cache_hits" in name and "external" not in name
    ]
    return (
        Engaged(True, f"prefix cache hits rose by {sum(moved):g} tokens")
        if sum(moved) > 0
        else _UNKNOWN
    )


def texts_of(seen: Observation) -> Mapping[tuple[str, str], str]:
    """Greedy texts by probe and form."""
    return {
        (p.name, s.variant): s.text_head
        for p in seen.record.probes
        for s in p.samples
        if s.greedy and s.text_head
    }


def _adapter(setting: Setting, given: Observation, without: Observation | None) -> Engaged:
    """An adapter whose output equals the base model's exactly is not applied."""
    if asked := given.facts.get("adapter_asked"):
        differ = given.facts["adapter_differ"]
        says = (
            f"{differ} of {asked} greedy texts differ from those of the base model on the same"
            " server"
        )
        return Engaged(bool(differ), says)
    if without is None:
        return _UNKNOWN
    ours, theirs = texts_of(given), texts_of(without)
    shared = [key for key in ours if key in theirs]
    if len(shared) < 5:
        return _UNKNOWN
    differ = sum(ours[key] != theirs[key] for key in shared)
    if differ:
        return Engaged(
            True, f"{differ} of {len(shared)} greedy texts differ from those of the base model"
        )
    return Engaged(False, f"all {len(shared)} greedy texts equal those of the base model exactly")


_Judge = Callable[[Setting, Observation, Observation | None], Engaged]
_SPECIAL: Mapping[str, _Judge] = {
    "--kv-cache-dtype": _kv_dtype,
    "--cache-type-k": _llama_kv,
    "--cache-type-v": _llama_kv,
    "draft": _draft,
    "--enable-prefix-caching": _prefix,
    "--attention-backend": _backend,
    "adapter": _adapter,
}
