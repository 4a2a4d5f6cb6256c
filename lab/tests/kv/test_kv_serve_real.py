"""`assay kv serve` with vLLM's real server: it answers with the codec's numbers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
import pytest

torch = pytest.importorskip("torch")

from assay.demo import vllm_python
from assay.engines.scoring import ScoreJob, Window
from assay.engines.vllm.scorer import VllmScorer
from assay.serving.launch import free_port
from assay_lab.kv.calibrate import CalibrationPlan, run_calibrate
from assay_lab.kv.hook_plan import hook_spec

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CODEC, LENGTH = "prerope+sinks(n=4)+hadamard(bits=3)", 128
PREDICT = "prerope+sinks(n=4)+pca(bits=2, coding=fixed, predict=all)"


def logprobs(
    engine: VllmScorer, window: Window, codec: str | None, calibration: Path | None = None
) -> Any:
    """Of every token but the first, by prefill."""
    hook = None
    if codec:
        hook = hook_spec(
            "vllm", codec=codec, mode="inforward", length=LENGTH, calibration=calibration
        )
    (rows,) = engine.score_windows([window], ScoreJob(hook=hook))
    values = rows.logits(0, LENGTH - 1).double().log_softmax(-1)
    return values.gather(1, torch.tensor(window.tokens[1:])[:, None])[:, 0]


@pytest.mark.parametrize("codec", [CODEC, PREDICT])
def test_a_served_codec_gives_the_numbers_that_the_laboratory_measures(
    smollm2: Path, tmp_path: Path, codec: str
) -> None:
    calibration, more = None, []
    if codec == PREDICT:
        calibration, text = tmp_path / "calibration", tmp_path / "text"
        text.write_text("\n".join(topics[name] for name in sorted(topics) if name != "class"))
        run_calibrate(
            CalibrationPlan(
                str(smollm2), calibration, text=(str(text),), windows=8, length=512, tokens=2400
            )
        )
        more = ["--calibration", calibration]
    engine = VllmScorer.load(
        f"vllm:{smollm2}?python={vllm_python()}&max_model_len=256&kv_cache_gib=0.1"
    )
    window = Window(0, tuple(engine.tokenizer.encode(topics["class"])[:LENGTH]))
    exact, coded = logprobs(engine, window, None), logprobs(engine, window, codec, calibration)
    engine.close()
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [
        sys.executable,
        "-m",
        "assay",
        "kv",
        "serve",
        smollm2,
        "--codec",
        codec,
        *more,
        "--python",
        vllm_python(),
        "--json",
        "--",
        "--port",
        port,
        "--max-model-len",
        256,
        "--served-model-name",
        "m",
    ]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    log = (tmp_path / "log").open("w")
    served = subprocess.Popen(
        [*map(str, command)], env=environment, stdout=subprocess.PIPE, stderr=log, text=True
    )
    try:
        until = time.monotonic() + 240
        while True:
            assert served.poll() is None, (tmp_path / "log").read_text()[-3000:]
            assert time.monotonic() < until
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(1)
        asked = {"model": "m", "prompt": list(window.tokens), "max_tokens": 16, "temperature": 0}
        answer = httpx.post(
            f"{url}/v1/completions", json=asked | {"prompt_logprobs": 0}, timeout=120
        ).json()
        # Two at once, so that their tokens share steps.
        both = httpx.post(
            f"{url}/v1/completions",
            json=asked | {"prompt": ["One two three", "The capital of France is"]},
            timeout=120,
        ).json()
        served.send_signal(signal.SIGINT)
        report = json.loads(served.communicate(timeout=60)[0])
    finally:
        if served.poll() is None:
            served.kill()
            served.wait()
        log.close()
    choice = answer["choices"][0]
    assert answer["usage"]["completion_tokens"] == 16
    found = [
        entry[str(token)]["logprob"]
        for token, entry in zip(window.tokens[1:], choice["prompt_logprobs"][1:], strict=True)
    ]
    to_coded = float((torch.tensor(found) - coded).abs().mean())
    to_exact = float((torch.tensor(found) - exact).abs().mean())
    assert to_coded < 0.2 * to_exact, (to_coded, to_exact)
    assert len(both["choices"]) == 2
    assert all(c["text"] for c in both["choices"])
    assert served.returncode == 0
    assert report["results"]["layers"] == 30
