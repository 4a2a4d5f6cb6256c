"""Scores token by token from a real llama-server, beside what it says of the same tokens while it
writes them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from assay.coherence.passages import passages
from assay.demo import llama_server
from assay.demo.models import SMOLLM2, gguf_of
from assay.engines import Request
from assay.engines.server.engine import ServerEngine
from assay.runs import cache_dir
from assay.serving.symptoms import Measure, Observation, measure, see

pytestmark = [pytest.mark.engine, pytest.mark.llama]
BINARY = cache_dir("llama.cpp") / "bin" / "llama-server"


@pytest.mark.skipif(
    not BINARY.exists(), reason="no llama-server: bash benchmarks/build/build_llama_cpp.sh"
)
def test_a_token_that_is_forced_is_as_likely_as_it_is_while_the_server_writes(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    log = tmp_path_factory.mktemp("steps") / "log"
    log.touch()
    with llama_server(gguf_of(SMOLLM2), BINARY, max_model_len=1024, streams=2) as server:
        with ServerEngine.connect(server.url) as engine:
            prompt = "The capital of France is"
            written = engine.generate(Request(prompt=prompt, max_tokens=8, extra={"logprobs": 1}))
            assert written.token_logprobs is not None
            forced = engine.score_by_steps(prompt + written.content)
            assert forced[-8:] == pytest.approx(written.token_logprobs, abs=0.05)
            assert len(forced) == len(engine.tokenize(prompt + written.content)) - 1
        # The doctor judges by them: a text that became less likely is a fault, the same scores are
        # none.
        seen = measure(server.url, Measure(25.0, 4), 0, {"bits_per_byte"}, None, kinds=(), log=log)
    assert len(seen.record.passages) >= 8 and all(p.bytes < 101 for p in seen.record.passages)
    assert 0.5 < seen.record.passages[0].bits_per_byte < 2.5 and len(passages()) >= len(
        seen.record.passages
    )
    worse = replace(
        seen.record, passages=tuple(replace(p, nats=1.1 * p.nats) for p in seen.record.passages)
    )
    assert see(seen, seen, {"bits_per_byte"}).state == "good"
    assert "bits_per_byte" in see(Observation(record=worse), seen, {"bits_per_byte"}).bad
