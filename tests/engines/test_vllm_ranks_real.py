"""vLLM with two ranks on this machine's CPU against one: the same statistics within float32
summation; what a dead rank becomes.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from vllm_ranks_model import LENGTH, WINDOWS, make_model

from assay.demo import vllm_python
from assay.engines.scoring import ScoreJob, ScoringPath, StateRows
from assay.engines.vllm.scorer import VllmScorer
from assay.errors import AssayError
from assay.fidelity.metrics.token_statistics import RowStatistics, window_statistics
from assay.fidelity.store.manifest import StoreHeader
from assay.fidelity.store.writer import StoreWriter
from assay_lab.kv.cache_bytes import stream_facts
from assay_lab.kv.hook_plan import hook_spec

pytestmark = [pytest.mark.engine, pytest.mark.slow]
STATISTICS = "assay.fidelity.metrics.token_statistics:batch_statistics"
CODED = ScoreJob(
    ScoringPath.DECODE,
    scored_from=24,
    batch=4,
    hook=hook_spec("vllm:m", codec="sinks(n=2)+hadamard(bits=6)", mode="decode", length=LENGTH),
)
DECODE = ScoreJob(ScoringPath.DECODE, scored_from=24, batch=4)


def load(model: Path, options: str = "") -> VllmScorer:
    return VllmScorer.load(
        f"vllm:{model}?python={vllm_python()}&dtype=float32&max_model_len=64&max_num_batched_tokens=256&kv_cache_gib=0.1"
        + options
    )


def reduced(engine: VllmScorer, reference: list[StateRows], job: ScoreJob) -> list[RowStatistics]:
    windows = [r.window for r in reference]
    found = engine.reduce_windows(windows, iter(reference), job, STATISTICS)
    return [RowStatistics(**values) for _, values in found]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def one(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What one process gives: states by both paths, and a stored reference that is a little off."""
    engine = load(model)
    try:
        rows = list(engine.score_windows(WINDOWS, ScoreJob(batch=4)))
        decoded = list(engine.score_windows(WINDOWS, DECODE))
        facts = engine.describe()
        coded = list(engine.score_windows(WINDOWS, CODED))
        count = engine.engagement()
    finally:
        engine.close()
    noise = torch.Generator().manual_seed(5)
    folder = tmp_path_factory.mktemp("store")
    header = StoreHeader(facts, {}, {}, "prefill", 1, LENGTH, "float32", {})
    writer = StoreWriter(folder, header, rows[0].head)
    for r in rows:
        writer.add(r.window, r.states + 0.05 * torch.randn(r.states.shape, generator=noise))
    store = writer.finish()
    yield {
        "rows": rows,
        "decoded": decoded,
        "facts": facts,
        "coded": coded,
        "count": count,
        "stored": list(store.rows(WINDOWS)),
    }


def agree(
    found: list[RowStatistics],
    reference: list[StateRows],
    own: list[StateRows],
    rtol: float = 2e-4,
    atol: float = 2e-6,
) -> None:
    for statistics, theirs, mine in zip(found, reference, own, strict=True):
        for name, wanted in vars(window_statistics(theirs, mine)).items():
            np.testing.assert_allclose(
                getattr(statistics, name), wanted, rtol=rtol, atol=atol, err_msg=name
            )


@pytest.mark.parametrize("parallel", ["tensor_parallel", "pipeline_parallel"])
def test_two_ranks_give_what_one_gives(one: dict[str, Any], model: Path, parallel: str) -> None:
    engine = load(model, f"&{parallel}=2")
    try:
        facts = engine.describe()
        assert facts[parallel] == 2 and "unequal_memory" not in facts
        assert facts["kv_bytes_per_token"] == one["facts"]["kv_bytes_per_token"]
        # A stored reference, whose head the ranks read from its file.
        agree(reduced(engine, one["stored"], ScoreJob(batch=4)), one["stored"], one["rows"])
        # By decode; a reference whose head came from an engine, and is that of the ranks.
        decoded = reduced(engine, one["decoded"], DECODE)
        agree(decoded, one["decoded"], one["decoded"], atol=2e-5)
        assert engine.engagement().bytes_read == one["facts"]["kv_bytes_per_token"] * 4 * sum(
            range(23, LENGTH - 1)
        )
        chunked = ScoreJob(ScoringPath.CHUNKED, scored_from=24, chunk=8, batch=3)
        agree(reduced(engine, one["decoded"], chunked), one["decoded"], one["decoded"], atol=2e-5)
        # A codec of single heads: every rank codes its own, or its own layers.
        agree(
            reduced(engine, one["decoded"], CODED),
            one["decoded"],
            one["coded"],
            rtol=5e-2,
            atol=1e-3,
        )
        count = engine.engagement()
        assert (count.fires, count.per_layer) == (one["count"].fires, one["count"].per_layer)
        for key, found in stream_facts(one["count"]).items():
            assert [f.exact for f in stream_facts(count)[key]] == [f.exact for f in found]
        # As a reference: states and the whole head, put together once.
        rows = list(engine.score_windows(WINDOWS, ScoreJob(batch=2)))
        assert torch.equal(rows[0].head.weight, one["rows"][0].head.weight)
        for mine, theirs in zip(rows, one["rows"], strict=True):
            torch.testing.assert_close(mine.states, theirs.states, rtol=2e-4, atol=2e-5)
        assert len(engine.generate_greedy([w.tokens[:16] for w in WINDOWS], 4)[0]) == 4
        if parallel == "tensor_parallel":
            killed(engine, one["stored"])
    finally:
        engine.close()


def killed(engine: VllmScorer, reference: list[StateRows]) -> None:
    """A rank that dies is one line with its number."""
    worker = engine.core._process.pid  # type: ignore[union-attr]
    listed = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    ).stdout
    ranks = [
        int(line.split()[0])
        for line in listed.splitlines()
        if (line.split()[1] == str(worker) and "spawn_main" in line)
        or ("Worker_TP" in line and line.split()[1] == str(worker))
    ]
    os.kill(max(ranks), signal.SIGKILL)
    with pytest.raises(
        AssayError, match=r"rank [01] of 2 of vLLM ended .* killed by signal 9"
    ) as caught:
        reduced(engine, reference, ScoreJob(batch=4))
    assert "\n" not in caught.value.message
