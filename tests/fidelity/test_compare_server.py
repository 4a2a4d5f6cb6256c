"""Servers as candidates: faults, refusals, resuming and what a result says, against a stub with a
known distribution.
"""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from assay.cli.main import invoke
from assay.engines import MissingCapability
from assay.engines.scoring import LogitRows, ScoreJob, ScoringPath, Window, WindowRows
from assay.engines.server.candidate import ServerCandidate, parse_server
from assay.engines.server.errors import BadScores
from assay.engines.specs import open_candidate
from assay.errors import AssayError, UsageError
from assay.fidelity import compare as compare_module
from assay.fidelity.names import label_of
from assay.fidelity.plan import Plan
from assay.fidelity.reference import Reference
from assay.fidelity.score import observe
from assay.fidelity.text.tokenizer_proof import PROBE, probe_ids, prove_tokenizer
from assay.runs import Kept
from stub_server import MODEL, Exchange, StubServer, healthy, models, not_found

VOCAB, LENGTH, COUNT = 40, 12, 9
COMPLETIONS, TOKENS_IN = "POST /v1/completions", "POST /inference/v1/generate"
JOB = ScoreJob(batch=3)


def reference_logits(tokens: Sequence[int]) -> np.ndarray:
    """Of the next token, from the one before: [len(tokens) − 1, V]."""
    return np.random.default_rng(1).normal(0, 2.5, (VOCAB, VOCAB))[list(tokens[:-1])]


def served_logprobs(tokens: Sequence[int], shift: float) -> np.ndarray:
    logits = (
        reference_logits(tokens)
        + shift * np.random.default_rng(2).normal(0, 1, (VOCAB, VOCAB))[list(tokens[:-1])]
    )
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def encode(text: str) -> list[int]:
    return [b % VOCAB for b in text.encode()]


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer() as server:
        server.shift = 0.3  # type: ignore[attr-defined]

        def completions(e: Exchange) -> None:
            prompt, top = e.body.get("prompt"), e.body.get("prompt_logprobs") or 0
            if not (isinstance(prompt, list) and len(prompt) == LENGTH and top):
                return healthy()(e)
            entries: list[Any] = [None]
            for token, row in zip(prompt[1:], served_logprobs(prompt, server.shift), strict=True):  # type: ignore[attr-defined]
                best = {int(i) for i in np.argsort(row)[::-1][:top]} | {token}
                entries.append({str(i): {"logprob": float(row[i])} for i in best})
            return e.json({"choices": [{"index": 0, "text": "x", "prompt_logprobs": entries}]})

        server.on(COMPLETIONS, completions)
        server.on("POST /tokenize", lambda e: e.json({"tokens": encode(e.body["prompt"])}))
        server.on(
            "POST /detokenize",
            lambda e: e.json({"prompt": " ".join(f"w{t}" for t in e.body["tokens"])}),
        )
        yield server


def given_ids(shift: float, best: bool = False) -> Any:
    """vLLM's route for ids that the caller chooses, and with `best` its own likeliest
    beside them.
    """

    def answer(e: Exchange) -> None:
        rows = e.body["sampling_params"]["prompt_logprob_token_ids"]
        logq = served_logprobs(e.body["token_ids"], shift)
        values = [
            [q[i] if i >= 0 else -np.inf for i in row] for row, q in zip(rows, logq, strict=True)
        ]
        buffer = io.BytesIO()
        np.save(buffer, np.array(values, np.float32))
        answer: dict[str, Any] = {
            "prompt_token_id_logprobs": base64.b64encode(buffer.getvalue()).decode()
        }
        if best and e.body["sampling_params"]["prompt_logprobs"] == 1:
            own = [
                {t: q[t], int(q.argmax()): q.max()}
                for t, q in zip(e.body["token_ids"][1:], logq, strict=True)
            ]
            answer["prompt_logprobs"] = [None] + [
                {str(t): {"logprob": float(v)} for t, v in row.items()} for row in own
            ]
        e.json(answer)

    return answer


def windows(count: int = COUNT) -> list[Window]:
    rng = np.random.default_rng(3)
    return [Window(i, tuple(int(t) for t in rng.integers(0, VOCAB, LENGTH))) for i in range(count)]


class Rows:
    """A reference that is known in closed form."""

    def rows(self, some: Sequence[Window]) -> Iterator[WindowRows]:
        for w in some:
            yield LogitRows(w, 1, torch.from_numpy(reference_logits(w.tokens)).float())


def exact_kl(shift: float) -> np.ndarray:
    """Mean KL of each window over the whole vocabulary."""
    found = []
    for w in windows():
        logits = reference_logits(w.tokens)
        lp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        found.append((np.exp(lp) * (lp - served_logprobs(w.tokens, shift))).sum(-1).mean())
    return np.array(found)


def test_more_ids_come_closer_to_the_whole_and_all_of_them_are_it(stub: StubServer) -> None:
    means = []
    for ids in (2, 8, VOCAB):
        server = open_candidate(f"{stub.url}?ids={ids}")
        seen = observe(Rows(), server, windows(), JOB)
        means.append([float(w.kl.mean()) for w in seen])
        server.close()
    assert (np.array(means) <= exact_kl(0.3) + 1e-6).all()
    assert (np.diff(np.array(means).mean(1)) > 0).all()
    np.testing.assert_allclose(means[-1], exact_kl(0.3), rtol=1e-4)
    asked = {tuple(b["prompt"]) for b in stub.bodies(COMPLETIONS) if b.get("prompt_logprobs") == 8}
    assert asked == {w.tokens for w in windows()}


def test_windows_that_were_scored_are_not_asked_for_again(stub: StubServer, tmp_path: Path) -> None:
    server = open_candidate(stub.url)
    taken: list[int] = []

    def cut(seen: Any) -> None:
        taken.append(seen.index)
        if len(taken) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observe(Rows(), server, windows(), JOB, kept=Kept(tmp_path), on_window=cut)
    before = len(stub.bodies(COMPLETIONS))
    seen = observe(Rows(), server, windows(), JOB, kept=Kept(tmp_path))
    assert [w.index for w in seen] == list(range(COUNT))
    assert {tuple(b["prompt"]) for b in stub.bodies(COMPLETIONS)[before:]} == {
        w.tokens for w in windows()[4:]
    }
    whole = observe(Rows(), server, windows(), JOB)
    for a, b in zip(seen, whole, strict=True):
        np.testing.assert_array_equal(a.kl, b.kl)
    server.close()


def test_a_server_that_slows_down_half_way_is_waited_for_only_as_long_as_there_is_time(
    stub: StubServer,
) -> None:
    answer, goes_on, asked = stub._behaviours[COMPLETIONS], Event(), []

    def tiring(e: Exchange) -> None:
        if len(e.body["prompt"]) == LENGTH:
            asked.append(e)
        if len(asked) > 5:
            goes_on.wait(60)
        answer(e)

    server = open_candidate(f"{stub.url}?ids=8")
    stub.on(COMPLETIONS, tiring)
    try:
        began = time.monotonic()
        seen = observe(
            Rows(),
            server,
            windows(),
            ScoreJob(batch=2),
            left=lambda: began + 4.0 - time.monotonic(),
        )
        took = time.monotonic() - began
    finally:
        goes_on.set()
        server.close()
    assert [w.index for w in seen] == list(range(len(seen))) and 3 <= len(seen) < COUNT
    assert took < 30


def test_garbage_in_the_middle_ends_the_run_with_what_is_wrong(stub: StubServer) -> None:
    server = open_candidate(stub.url)
    observe(Rows(), server, windows(2), JOB)
    stub.on(
        COMPLETIONS, lambda e: e.json({"choices": [{"index": 0, "prompt_logprobs": [None] * 5}]})
    )
    with pytest.raises(BadScores, match="5 log-probabilities came back"):
        observe(Rows(), server, windows(), JOB)
    server.close()


def test_a_server_that_scores_no_prompt_is_refused_before_anything_is_scored(
    stub: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.on(COMPLETIONS, healthy(scores=False, echo=False))
    code = invoke(["compare", "hf:no-such-model", stub.url, "--json"])
    body = json.loads(capsys.readouterr().out)
    assert code == 2
    assert body["findings"][0]["id"] == "server.missing_capability"
    assert "ignores echo" in body["findings"][0]["title"]


def test_other_paths_and_long_windows_are_refused(stub: StubServer) -> None:
    server = open_candidate(stub.url)
    assert isinstance(server, ServerCandidate)
    server.require(JOB, 2047)
    with pytest.raises(UsageError, match="2049"):
        server.require(JOB, 2048)
    with pytest.raises(AssayError, match="not by the decode path"):
        server.require(ScoreJob(ScoringPath.DECODE), 64)
    stub.on(COMPLETIONS, healthy(scores=False, echo=False))
    other = ServerCandidate.load(stub.url)
    with pytest.raises(MissingCapability):
        other.require(JOB, 64)


class TestTokenizer:
    def prove(self, stub: StubServer, expected: list[int] | None) -> Any:
        server = open_candidate(stub.url)
        try:
            return prove_tokenizer(server, expected, windows(), "it")  # type: ignore[arg-type]
        finally:
            server.close()

    def test_equal_ids_of_the_probe_are_the_proof(self, stub: StubServer) -> None:
        proof = self.prove(stub, probe_ids(encode))
        assert proof.probe_tokens == len(PROBE.encode())

    def test_one_other_id_is_a_mismatch(self, stub: StubServer) -> None:
        ids = probe_ids(encode)
        ids[100] += 1
        with pytest.raises(AssayError, match="from id 100 on") as caught:
            self.prove(stub, ids)
        assert caught.value.finding_id == "fidelity.tokenizer_mismatch"
        with pytest.raises(AssayError, match="another tokenizer"):
            self.prove(stub, probe_ids(encode)[:-1])

    def test_a_small_vocabulary_is_a_mismatch(self, stub: StubServer) -> None:
        stub.on("GET /v1/models", models(MODEL, meta={"n_vocab": 10}))
        with pytest.raises(AssayError, match="vocabulary of 10"):
            self.prove(stub, probe_ids(encode))

    def test_without_a_page_for_it_nothing_is_proven(self, stub: StubServer) -> None:
        stub.on("POST /tokenize", not_found())
        with pytest.raises(AssayError, match="cannot show") as caught:
            self.prove(stub, probe_ids(encode))
        assert caught.value.finding_id == "fidelity.tokenizer_unproven"
        assert "/tokenize" in caught.value.remedy
        with pytest.raises(AssayError, match="nothing of that was stored"):
            self.prove(stub, None)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("http://h:1?speed=2", "unknown option 'speed'"),
        ("http://h:1?", "ends in a '\\?'"),
        ("http://h:1?ids=1", "ids must be"),
        ("http://h:1?ids=many", "ids must be"),
        ("http://h:1?timeout=0", "timeout"),
    ],
)
def test_what_is_wrong_in_a_spec_is_named(spec: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_server(spec.replace("//", "//me:secret@"))


def test_a_password_in_the_url_is_printed_nowhere() -> None:
    assert parse_server("http://me:secret@h:1?model=m&ids=7").ids == 7
    assert label_of("http://me:secret@h:1?model=m") == "http://h:1?model=m"
    with pytest.raises(UsageError) as caught:
        parse_server("http://me:secret@h:1?speed=2")
    assert "secret" not in str(caught.value) + caught.value.remedy


class TestReport:
    """The whole verb, with a reference in closed form."""

    def run(
        self, stub: StubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, query: str = ""
    ) -> dict[str, Any]:
        monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
        reference = Reference(
            windows(),
            Rows(),
            lambda tokenizer, label: None,
            {"label": "known"},
            {"sources": ["known"], "windows_available": COUNT},
            probe_ids=probe_ids(encode),
        )
        monkeypatch.setattr(compare_module, "open_reference", lambda *_: reference)
        spec = stub.url.replace("//", "//me:secret@") + query
        plan = Plan("hf:known", (spec,), windows=COUNT, length=LENGTH, draws=200)
        return compare_module.run_compare(plan).to_json()

    def test_a_lower_bound_is_named_one_everywhere(
        self, stub: StubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        body = self.run(stub, monkeypatch, tmp_path, "?ids=6")
        results = body["results"]
        kld = results["kld"]
        assert kld["kind"] == "lower_bound"
        assert kld["upper"] is None
        assert 0 < kld["mean"] < exact_kl(0.3).mean()
        assert {"lo", "hi", "median", "p90", "p99", "max"} <= set(kld)
        assert 0.05 < kld["unresolved_mass_reference"] < 0.9
        assert results["top1_pct"]["kind"] == "exact"
        assert results["engine"]["ids_chosen_by"] == "candidate"
        d = [
            float((-served_logprobs(w.tokens, 0.3)[range(LENGTH - 1), w.tokens[1:]]).sum())
            for w in windows()
        ]
        ref = [reference_logits(w.tokens) for w in windows()]
        ref_nll = [
            float(
                -(r - np.log(np.exp(r).sum(-1, keepdims=True)))[
                    range(LENGTH - 1), w.tokens[1:]
                ].sum()
            )
            for r, w in zip(ref, windows(), strict=True)
        ]
        mean = (sum(d) - sum(ref_nll)) / (COUNT * (LENGTH - 1))
        assert results["dppl_pct"]["value"] == pytest.approx(100 * np.expm1(mean), rel=1e-4)
        assert "fidelity.lower_bound" in [f["id"] for f in body["findings"]]
        assert "secret" not in json.dumps(body)
        assert body["subject"]["plan"]["candidates"] == [stub.url + "?ids=6"]

    def test_top1_has_bounds_where_the_reference_chose_the_ids(
        self, stub: StubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        stub.on(TOKENS_IN, given_ids(0.8))
        results = self.run(stub, monkeypatch, tmp_path, "?ids=3")["results"]
        top1 = results["top1_pct"]
        assert top1["kind"] == "bounds"
        assert top1["value"] is None
        same = [
            reference_logits(w.tokens).argmax(-1) == served_logprobs(w.tokens, 0.8).argmax(-1)
            for w in windows()
        ]
        assert top1["certain"] <= 100 * np.mean(same) <= top1["possible"]
        assert top1["lo"] <= top1["certain"] < top1["possible"] <= top1["hi"]
        assert results["engine"]["ids_chosen_by"] == "reference"
        stub.on(TOKENS_IN, given_ids(0.8, best=True))
        known = self.run(stub, monkeypatch, tmp_path, "?ids=3")["results"]
        assert known["top1_pct"]["kind"] == "exact"
        assert known["top1_pct"]["value"] == pytest.approx(100 * np.mean(same))
        assert known["engine"]["ids_chosen_by"] == "reference"
        assert results["kld"]["mean"] <= known["kld"]["mean"] <= exact_kl(0.8).mean()
        stub.on(TOKENS_IN, given_ids(0.8))
        whole = self.run(stub, monkeypatch, tmp_path, f"?ids={VOCAB}")["results"]
        assert whole["top1_pct"]["kind"] == "exact"
        assert whole["top1_pct"]["value"] == pytest.approx(100 * np.mean(same))
        assert whole["kld"]["upper"] == pytest.approx(whole["kld"]["mean"], rel=1e-4)

    def test_rounding_alone_is_no_difference(
        self, stub: StubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        stub.shift = 0.0  # type: ignore[attr-defined]
        results = self.run(stub, monkeypatch, tmp_path)["results"]
        # Another process rounds otherwise, so that a sound server is never exactly the same.
        assert results["grade"] == "ACCEPT"
        assert results["kld"]["mean"] < 1e-6
