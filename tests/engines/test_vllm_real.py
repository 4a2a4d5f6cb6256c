"""vLLM itself with a real model: in its own process, and as a worker of this one."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import assay
from assay.demo import vllm_python
from assay.engines.scoring import ScoreJob, ScoringPath, StateRows, Window
from assay.engines.vllm.scorer import VllmScorer
from assay.errors import AssayError, UsageError

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent
LENGTH, PREFIX = 64, 32


@pytest.fixture(scope="module")
def inside(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `vllm_inside.py` measured."""
    alone = tmp_path_factory.mktemp("path")
    (alone / "assay").symlink_to(Path(assay.__file__).parent, target_is_directory=True)
    done = subprocess.run(
        [str(vllm_python()), str(HERE / "vllm_inside.py"), str(smollm2)],
        env={
            **os.environ,
            "PYTHONPATH": str(alone),
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)  # and nothing else may be on stdout
    return found


def test_the_head_gives_vllms_own_logprobs(inside: dict[str, Any]) -> None:
    # Logits are bf16 in vLLM: one unit at 16 … 32 is 0.125, and the matrix product is the same
    # kernel or its like.
    assert inside["own_prompt_logprobs"] < 0.13
    assert inside["own_decode_logprobs"] < 0.13


BF16_LOGIT = 2.0**-3
"""One unit of a bf16 between 16 and 32, where the largest logits are."""


def same(found: dict[str, Any], inside: dict[str, Any]) -> None:
    """The same numbers but for their last bits: a kernel may share its sums out among cores in
    another way. Rounding moves a logit by at most half a unit, and a KL is about half the variance
    of that; what a small change of V does is ten times larger on the average.
    """
    assert found["max"] <= BF16_LOGIT**2 / 12 / 2
    assert found["mean"] <= inside["scaled_v"]["mean"] / 10


def test_paths_agree_within_the_rounding_of_bf16(inside: dict[str, Any]) -> None:
    for path in ("batch_1", "chunked", "decode"):
        assert inside[path]["mean"] < 0.005, path
        assert inside[path]["rows"] == 6 * (63 if path == "batch_1" else 31), path
    same(inside["decode_again"], inside)


def test_decode_reads_the_cache_and_prefill_does_not(inside: dict[str, Any]) -> None:
    token = 2 * 3 * 64 * 30 * 2  # K and V, 3 heads of 64, 30 layers, bf16
    assert inside["facts"]["kv_bytes_per_token"] == token
    assert inside["prefill_bytes_read"] == 0
    assert inside["decode_bytes_read"] == 6 * token * sum(range(32, 63))


def test_fp8_cache_takes_half_the_bytes_and_shows_in_decode(inside: dict[str, Any]) -> None:
    assert inside["facts_fp8"]["kv_bytes_per_token"] * 2 == inside["facts"]["kv_bytes_per_token"]
    assert inside["fp8_bytes_read"] * 2 == inside["decode_bytes_read"]
    assert inside["fp8_decode"]["same"] < 0.05
    assert 2 * inside["decode"]["mean"] < inside["fp8_decode"]["mean"] < 1.0


def test_an_identity_hook_changes_nothing_and_fires_in_every_layer(inside: dict[str, Any]) -> None:
    assert inside["hooked_layers"] == 30
    assert inside["scaled_v"]["mean"] > 1e-4
    for place in ("pre_rope", "post_rope"):
        same(inside[f"identity_{place}"], inside)
        assert inside[f"identity_{place}"]["fires"] == [1]
    same(inside["after_hooks"], inside)


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[VllmScorer]:
    """A worker."""
    opened = VllmScorer.load(
        f"vllm:{smollm2}?python={vllm_python()}&max_model_len=128&max_num_batched_tokens=512&kv_cache_gib=0.25"
    )
    yield opened
    opened.close()


def windows(engine: VllmScorer, count: int = 3) -> list[Window]:
    ids = engine.tokenizer.encode(
        "The old bridge over the river was built of stone, long before the war. " * 20
    )
    assert engine.tokenizer.bos_id is None  # it names <|im_start|> and puts none
    return [Window(i, tuple(ids[i * 5 : i * 5 + LENGTH])) for i in range(count)]


def test_a_worker_gives_what_transformers_gives(engine: VllmScorer, smollm2: Path) -> None:
    from assay.engines.hf.scorer import HfScorer
    from assay.fidelity.metrics.token_statistics import window_statistics

    reference = HfScorer.load(f"hf:{smollm2}?dtype=float32")
    assert engine.tokenizer.sha256 == reference.tokenizer.sha256
    assert engine.tokenizer.decode(engine.tokenizer.encode("naïve café")) == "naïve café"
    job = ScoreJob(batch=3)
    wanted = list(reference.score_windows(windows(engine), job))
    found = list(engine.score_windows(windows(engine), job))
    for one, other in zip(wanted, found, strict=True):
        statistics = window_statistics(one, other)
        assert float(statistics.kl.mean()) < 0.01
        assert float(statistics.top1.double().mean()) > 0.95
    # Where only the statistics come back, they are the same.
    reduced = list(
        engine.reduce_windows(
            windows(engine),
            iter(wanted),
            job,
            "assay.fidelity.metrics.token_statistics:batch_statistics",  # type: ignore[arg-type]
        )
    )
    for (window, values), one, other in zip(reduced, wanted, found, strict=True):
        assert window == one.window
        here = window_statistics(one, StateRows(window, 1, other.states, other.head))
        torch.testing.assert_close(values["kl"], here.kl, atol=2e-3, rtol=0.05)
        torch.testing.assert_close(values["nll_cand"], here.nll_cand, atol=0.05, rtol=0.02)


def test_a_worker_decodes(engine: VllmScorer) -> None:
    job = ScoreJob(ScoringPath.DECODE, scored_from=PREFIX, batch=2)
    rows = list(engine.score_windows(windows(engine), job))
    assert [r.states.shape[0] for r in rows] == [LENGTH - PREFIX] * 3
    assert engine.engagement().bytes_read == 3 * 23040 * sum(range(PREFIX - 1, LENGTH - 1))
    assert engine.describe()["placement"] == "worker"


def test_a_worker_goes_on_greedily(engine: VllmScorer) -> None:
    some = windows(engine)
    found = engine.generate_greedy([w.tokens[:PREFIX] for w in some], 8)
    assert [len(steps) for steps in found] == [8] * 3
    grown = [
        Window(w.index, (*w.tokens[:PREFIX], *(s.token for s in steps)))
        for w, steps in zip(some, found, strict=True)
    ]
    for rows, steps in zip(
        engine.score_windows(grown, ScoreJob(scored_from=PREFIX)), found, strict=True
    ):
        logprobs = rows.logits(0, 8).double().log_softmax(-1)
        for row, step in zip(logprobs, steps, strict=True):
            # bf16 logits: one unit at 16 … 32 is 0.125, by which a token and the next may change
            # places.
            assert step.gap >= 0
            assert float(row[step.token]) == pytest.approx(step.logprob, abs=0.2)
            assert float(row.max() - row[step.token]) < 0.2


def test_errors_come_through_and_the_worker_goes_on(engine: VllmScorer) -> None:
    long = [Window(0, tuple([1] * 200))]
    with pytest.raises(UsageError, match="max_model_len=128"):
        list(engine.score_windows(long, ScoreJob()))
    with pytest.raises(UsageError, match="do not fit into max_model_len=128"):
        engine.generate_greedy([tuple([1] * 100)], 50)
    assert len(list(engine.score_windows(windows(engine), ScoreJob()))) == 3


def test_a_killed_worker_is_named(engine: VllmScorer) -> None:
    engine.core._process.kill()  # type: ignore[attr-defined]
    with pytest.raises(AssayError, match="killed by signal 9"):
        list(engine.score_windows([Window(0, (1, 2, 3))], ScoreJob()))
