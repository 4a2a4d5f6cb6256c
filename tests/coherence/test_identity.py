"""Identity and determinism: told apart what differs, left alone what is the same, and undecided in
between.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import assay
from assay.coherence import identity
from assay.coherence.determinism import (
    Answer,
    Determinism,
    find_divergence,
    findings_of,
    measure_determinism,
)
from assay.coherence.differences import moved
from assay.coherence.fingerprint import (
    FORMAT,
    Fingerprint,
    Item,
    read_fingerprint,
    write_fingerprint,
)
from assay.coherence.identity import ALLOWED, compare_fingerprints
from assay.coherence.take_fingerprint import take_fingerprint
from assay.engines.server.engine import ServerEngine
from assay.engines.server.top_tokens import TopToken, read_top
from assay.errors import AssayError
from assay.verdict import Verdict
from stub_server import MODEL, Exchange, StubServer, healthy, text


@dataclass
class lm(healthy):
    """A stub whose next tokens and their probabilities are a function of the prompt, with `noise`
    of its logits.

    From `after` requests on an answer differs: by a token that was nearly as likely (`near`) or by
    one that was not.
    """

    noise: float = 0.0
    salt: str = ""
    logprobs: bool = True
    after: int = 10**9
    near: bool = True
    count: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        self.lock = Lock()

    def step(self, prompt: str, n: int) -> dict[str, float]:
        key = f"{prompt}|{n}"
        rng, shake = (
            random.Random(hashlib.sha256(key.encode()).digest()),
            random.Random(f"{self.salt}|{key}"),
        )
        logits = [rng.gauss(0, 2) + shake.gauss(0, self.noise) for _ in range(6)]
        total = math.log(sum(map(math.exp, logits)))
        return {f" w{i}": x - total for i, x in enumerate(logits)}

    def __call__(self, e: Exchange) -> None:
        if (
            e.body.get("stream")
            or "prompt_logprobs" in e.body
            or e.body.get("echo")
            or not isinstance(e.body.get("prompt"), str)
        ):
            super().__call__(e)
            return
        tokens, tops, values, made = [], [], [], []
        with self.lock:
            self.count += 1
            wrong = self.count > self.after
        for n in range(e.body["max_tokens"]):
            step = self.step(e.body["prompt"] + "".join(made), n)
            ranked = sorted(step, key=lambda t: -step[t])
            if n >= 3 and not self.near and wrong:
                ranked = ranked[::-1]
            if n == 3 and self.near:
                step[ranked[1]] = step[ranked[0]] - 0.01
                ranked[:2] = ranked[:2][::-1] if wrong else ranked[:2]
            made.append(ranked[0])
            tokens.append(ranked[0])
            values.append(step[ranked[0]])
            tops.append(dict(sorted(step.items(), key=lambda kv: -kv[1])[:5]))
        choice: dict[str, Any] = {
            "index": 0,
            "text": "".join(made),
            "finish_reason": "length",
            "logprobs": None,
        }
        if self.logprobs and e.body.get("logprobs"):
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
        usage = {
            "prompt_tokens": len(e.body["prompt"].split()) + self.offset,
            "completion_tokens": len(made),
        }
        e.json({"id": "x", "choices": [choice], "usage": usage})


def stub(model: lm) -> StubServer:
    server = StubServer().on("POST /v1/completions", model)
    if not model.logprobs:
        server.on("POST /v1/chat/completions", replace(healthy(), chunks=("x",)))
        plain = healthy()

        def without(e: Exchange) -> None:
            e.body.pop("logprobs", None)
            plain(e)

        server.on("POST /v1/chat/completions", without)
    return server


def taken(twice: bool = False, **fields: Any) -> Fingerprint:
    with stub(lm(**fields)) as server, ServerEngine.connect(server.url) as engine:
        return take_fingerprint(engine, noise=twice)


@pytest.fixture(scope="module")
def reference() -> Fingerprint:
    return taken(twice=True)


def test_the_same_model_is_the_same_and_the_reference_goes_through_a_file(
    reference: Fingerprint, tmp_path: Path
) -> None:
    assert (
        reference.noise["moved"] == 0.0
        and len(reference.items) == 12
        and len(reference.items[0]) == 12
    )
    write_fingerprint(reference, tmp_path / "r.json")
    assert read_fingerprint(tmp_path / "r.json") == reference
    answer = compare_fingerprints(reference, taken())
    assert answer.decision == "same" and answer.tokenizer == "same ids"
    assert all(t.hi <= t.allowed for t in answer.tests if t.decides)


@pytest.mark.parametrize("noise, decision", [(0.3, "different"), (0.002, "same")])
def test_a_change_of_the_logits_is_told_by_its_size(
    reference: Fingerprint, noise: float, decision: str
) -> None:
    assert compare_fingerprints(reference, taken(noise=noise, salt="b")).decision == decision


def test_a_difference_at_the_allowance_is_undecided(reference: Fingerprint) -> None:
    # Half of the prompts move by nothing, half by twice what is allowed: the mean lies at the
    # allowance.
    shift = 2 * ALLOWED["moved"].same_engine

    def shifted(item: Item) -> Item:
        (a, p), (b, q), *rest = item.likely.items()
        p, q = math.exp(p), math.exp(q)
        return replace(
            item, likely={a: math.log(p + shift), b: math.log(max(q - shift, 1e-9)), **dict(rest)}
        )

    items = tuple(
        tuple(shifted(i) if n % 2 else i for i in row) for n, row in enumerate(reference.items)
    )
    answer = compare_fingerprints(
        replace(reference, strange=()), replace(reference, strange=(), items=items)
    )
    assert answer.decision == "undecided"
    assert identity.finding_of(answer).id == "coherence.identity_undecided"
    assert identity.VERDICTS[answer.decision] is Verdict.INCONCLUSIVE


def test_another_tokenizer_is_another_model_and_a_start_token_is_not(
    reference: Fingerprint,
) -> None:
    other = replace(reference, strange=((1, 2), *reference.strange[1:]))
    assert compare_fingerprints(reference, other).decision == "different"
    a, b = replace(reference, strange=()), replace(taken(offset=1), strange=())
    assert compare_fingerprints(a, b).tokenizer == "same counts"
    items = ((replace(b.items[0][0], prompt_tokens=99), *b.items[0][1:]), *b.items[1:])
    assert compare_fingerprints(a, replace(b, items=items)).decision == "different"


def test_without_probabilities_the_tokens_decide() -> None:
    a = taken(logprobs=False, scores=False, echo=False)
    assert not a.items[0][0].likely and not a.nats
    same = compare_fingerprints(a, a)
    assert same.decision == "same" and [t.name for t in same.tests] == ["tokens"]
    other = compare_fingerprints(
        a, taken(logprobs=False, scores=False, echo=False, noise=0.5, salt="q")
    )
    assert other.decision == "different"
    few = tuple(
        tuple(
            replace(i, token="?") if (r, c) in ((0, 0), (3, 3), (5, 5)) else i
            for c, i in enumerate(row)
        )
        for r, row in enumerate(a.items)
    )
    assert compare_fingerprints(a, replace(a, items=few)).decision == "undecided"


def test_the_reference_may_say_it_is_noisy_itself(reference: Fingerprint) -> None:
    shaky = replace(reference, noise={"moved": 0.1, "flips": 0.1, "tokens": 0.1, "scores": 0.1})
    assert compare_fingerprints(shaky, taken(noise=0.1, salt="b")).decision == "same"


def test_the_false_rejections_stay_within_alpha(reference: Fingerprint) -> None:
    # Draw the distances of a model that lies exactly at the allowance.
    rng = random.Random(3)
    allowed = ALLOWED["moved"].same_engine
    wrong = 0
    for _ in range(400):
        groups = [[rng.expovariate(1 / allowed) for _ in range(12)] for _ in range(12)]
        wrong += (
            identity._test("moved", groups, replace(reference, noise={}), reference, 1).decision
            == "different"
        )
    assert wrong <= 400 * identity.ALPHA + 3 * math.sqrt(400 * identity.ALPHA)


@given(st.integers(0, 200), st.integers(1, 200), st.sampled_from([0.05, 0.01, 0.001]))
def test_bounds_of_a_share_are_those_of_the_binomial(count: int, n: int, alpha: float) -> None:
    from scipy.stats import binom

    count = min(count, n)
    value, lo, hi = identity._share(count, n, alpha)
    assert lo <= value <= hi
    if count:
        assert binom.sf(count - 1, n, lo) == pytest.approx(alpha, rel=1e-6)
    if count < n:
        assert binom.cdf(count, n, hi) == pytest.approx(alpha, rel=1e-6)


LIKELY = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 1), min_size=1).map(
    lambda d: {k: math.log(v / (sum(d.values()) + 0.3)) for k, v in d.items()}
)


@given(LIKELY, LIKELY)
def test_what_moved_is_a_distance_and_never_more_than_all(
    p: dict[str, float], q: dict[str, float]
) -> None:
    a, b = Item("a", 1, p), Item("a", 1, q)
    assert (
        moved(a, a) == 0.0
        and moved(a, b) == pytest.approx(moved(b, a))
        and 0 <= moved(a, b) <= 1 + 1e-9
    )


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        "7",
        '{"format": "other"}',
        '{"format": "assay-identity/1"}',
        '{"command": "check"}',
        "{" * 10_000,
    ],
)
def test_a_reference_that_is_none_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "reference.json"
    path.write_text(content)
    with pytest.raises(AssayError, match="reference") as caught:
        read_fingerprint(path)
    assert "\n" not in caught.value.message and str(tmp_path) not in caught.value.message
    with pytest.raises(AssayError, match="cannot be read"):
        read_fingerprint(tmp_path / "missing.json")


@pytest.mark.parametrize("value", [math.nan, 3.0, "x", None])
def test_a_reference_with_numbers_that_are_none_is_refused(
    reference: Fingerprint, tmp_path: Path, value: object
) -> None:
    document = reference.to_json()
    document["items"][3][4]["likely"]["x"] = value
    (tmp_path / "r.json").write_text(json.dumps(document))
    with pytest.raises(AssayError, match=r"r\.json"):
        read_fingerprint(tmp_path / "r.json")


def test_the_verb_writes_a_reference_and_compares(tmp_path: Path) -> None:
    file = tmp_path / "reference.json"
    with stub(lm()) as server:
        made = assay.check(server.url, identity_out=file)
        assert made.verdict is Verdict.PASS and made.results["identity_reference"]["items"] == 144
        assert json.loads(file.read_text())["format"] == FORMAT
        same = assay.check(server.url, identity=file, determinism=True)
        assert same.exit_code == 0 and same.results["identity"]["decision"] == "same"
        assert same.results["determinism"]["decision"] == "same"
        with pytest.raises(AssayError, match="ask no texts"):
            assay.check(server.url, identity=file, reference=file)
        with pytest.raises(AssayError, match="folder"):
            assay.check(server.url, identity_out=tmp_path / "no" / "x.json")
    with stub(lm(noise=0.5, salt="x")) as server:
        other = assay.check(server.url, identity=file)
        assert other.exit_code == 1 and other.findings[0].id == "coherence.identity"
        assert MODEL in other.findings[0].title


def test_a_kept_check_is_a_reference_of_scores(tmp_path: Path) -> None:
    with stub(lm()) as server:
        kept = assay.check(server.url, quick=True, throughput=False)
        path = tmp_path / "check.json"
        path.write_text(json.dumps(kept.to_json()))
        found = assay.check(server.url, identity=path)
        assert [t["name"] for t in found.results["identity"]["tests"]] == ["scores"]
        assert found.exit_code == 0


# Determinism.


def measured(model: lm) -> Determinism:
    with stub(model) as server, ServerEngine.connect(server.url) as engine:
        engine.capabilities  # noqa: B018
        model.count = 0
        return measure_determinism(engine)


def test_one_answer_each_is_deterministic() -> None:
    found = measured(lm())
    assert found.decision == "same" and found.verdict is Verdict.PASS
    assert [(level.batch, level.asked, level.outputs) for level in found.levels] == [
        (1, 12, (1,) * 4),
        (8, 8, (1,) * 4),
        (44, 44, (1,) * 4),
    ]
    assert findings_of(found) == ()


def test_a_close_call_is_rounding_and_a_clear_one_is_corruption() -> None:
    close = measured(lm(after=16))
    assert close.decision == "rounding" and close.verdict is Verdict.PASS
    assert close.levels[0].divergences == () and len(close.levels[2].divergences) == 44
    assert {p.position for p in close.divergences} == {3} and all(
        abs(p.gap or 9) < 0.02 for p in close.divergences
    )
    clear = measured(lm(after=30, near=False))
    assert clear.decision == "corruption" and clear.verdict is Verdict.FAIL
    (finding,) = findings_of(clear)
    assert finding.id == "coherence.nondeterministic" and "nats less likely" in finding.detail


def test_without_probabilities_a_difference_is_not_explained() -> None:
    found = measured(lm(after=20, logprobs=False))
    assert found.decision == "not known" and found.verdict is Verdict.INCONCLUSIVE


def test_requests_that_fail_in_a_batch_are_told() -> None:
    model = lm()
    with stub(model) as server, ServerEngine.connect(server.url) as engine:
        engine.capabilities  # noqa: B018
        model.count = 0
        refuse = text("{}")
        server.on("POST /v1/completions", lambda e: (refuse if model.count >= 30 else model)(e))
        found = measure_determinism(engine)
    assert found.verdict is Verdict.INCONCLUSIVE and found.levels[2].failed > 0
    assert findings_of(found)[-1].id == "coherence.determinism_unfinished"


def test_where_two_answers_part() -> None:
    def answer(*words: str, **likely: float) -> Answer:
        return Answer(
            "".join(words), tuple(TopToken(w, -0.5, {w: -0.5, "b": -0.6, "c": -3.0}) for w in words)
        )

    assert find_divergence(answer("x", "y"), answer("x", "y")) is None
    close = find_divergence(answer("x", "a", "z"), answer("x", "b", "q"))
    assert (
        close is not None
        and close.position == 1
        and close.gap == pytest.approx(0.1)
        and close.why == "rounding"
    )
    far = find_divergence(answer("x", "a"), answer("x", "unlisted"))
    assert far is not None and far.gap == pytest.approx(2.5) and far.why == "corruption"
    shorter = find_divergence(answer("x", "a"), answer("x"))
    assert shorter is not None and shorter.first == "(end)"
    plain = find_divergence(Answer("abc"), Answer("abd"))
    assert plain is not None and (plain.position, plain.why) == (2, "not known")


def test_tokens_are_read_in_both_shapes_and_damaged_ones_are_none() -> None:
    chat = {
        "logprobs": {
            "content": [
                {
                    "token": "a",
                    "logprob": -0.1,
                    "top_logprobs": [
                        {"token": "a", "logprob": -0.1},
                        {"token": "b", "logprob": -2.5},
                    ],
                }
            ]
        }
    }
    plain = {
        "logprobs": {
            "tokens": ["a"],
            "token_logprobs": [-0.1],
            "top_logprobs": [{"a": -0.1, "b": -2.5}],
        }
    }
    assert read_top(chat) == read_top(plain) == (TopToken("a", -0.1, {"a": -0.1, "b": -2.5}),)
    assert read_top(plain)[0].top_gap == pytest.approx(2.4)
    for damaged in (
        {},
        {"logprobs": None},
        {"logprobs": {"content": [7]}},
        {"logprobs": {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [None]}},
    ):
        assert read_top(damaged) == ()
