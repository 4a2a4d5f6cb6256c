"""vLLM's own client `bench serve`, kept running, one measured request at a time. Used by
speed_agreement.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from assay.demo import Server, run_pip, vllm_python
from assay.engines import Request
from assay.runs import cache_dir

DRIVER = Path(__file__).parent / "bench_serve_driver.py"
PANDAS = (
    "pandas==2.3.3",
    "python-dateutil==2.9.0.post0",
    "pytz==2025.2",
    "six==1.17.0",
    "tzdata==2025.2",
)
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def bench_extras() -> Path:
    """A folder with pandas, which `bench serve` reads prompts with and vLLM does not install.

    It is apart from the private environment, so that the server that is measured is the one users
    get.
    """
    folder = cache_dir("bench-extras")
    if not (folder / "pandas").exists():
        run_pip(
            ["install", "--no-deps", "--target", str(folder), *PANDAS],
            log_name="bench-extras.log",
            python=vllm_python(),
        )
    return folder


class BenchServe:
    """The running client."""

    def __init__(
        self, process: subprocess.Popen[str], server: Server, model: Path, folder: Path, log: Path
    ) -> None:
        self._process, self._server, self._model = process, server, model
        self._folder, self._log = folder, log

    def _said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"bench serve ended:\n{self._log.read_text(errors='replace')[-3000:]}")
        found: dict[str, Any] = json.loads(line) if line != "ready\n" else {}
        return found

    def wait_until_ready(self) -> None:
        """Importing vLLM takes many seconds, and both cores."""
        self._said()

    def one(self, request: Request) -> dict[str, Any]:
        """The timing of one request over the chat route, without a warm-up."""
        assert request.messages is not None and self._process.stdin is not None
        prompts = self._folder / "prompts.jsonl"
        prompts.write_text(
            json.dumps({"prompt": request.messages[0].content}) + "\n", encoding="utf-8"
        )
        arguments = [
            "--backend",
            "openai-chat",
            "--endpoint",
            "/v1/chat/completions",
            "--base-url",
            self._server.url,
            "--model",
            self._server.model,
            "--tokenizer",
            str(self._model),
            "--dataset-name",
            "custom",
            "--dataset-path",
            str(prompts),
            "--disable-shuffle",
            "--no-oversample",
            "--skip-chat-template",
            "--custom-output-len",
            str(request.max_tokens),
            "--ignore-eos",
            "--num-prompts",
            "1",
            "--max-concurrency",
            "1",
            "--num-warmups",
            "0",
            "--disable-tqdm",
            "--temperature",
            str(request.temperature),
            "--top-p",
            str(request.top_p),
            "--repetition-penalty",
            "1.0",
            "--extra-body",
            json.dumps({"seed": request.seed}),
            "--ready-check-timeout-sec",
            "0",
            "--save-detailed",
        ]
        print(json.dumps(arguments), file=self._process.stdin, flush=True)
        result = self._said()
        if result["completed"] != 1:
            raise SystemExit(f"bench serve did not complete its request: {result['errors']}")
        return {
            "ttft_s": result["mean_ttft_ms"] / 1000,
            "tpot_s": result["mean_tpot_ms"] / 1000,
            "tokens": result["output_lens"][0],
            "prompt_tokens": result["input_lens"][0],
            "text": result["generated_texts"][0],
        }


@contextlib.contextmanager
def bench_serve(server: Server, model: Path) -> Iterator[BenchServe]:
    """Start the client against `server`; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="assay-bench-") as name:
        folder = Path(name)
        log = folder / "bench.log"
        with log.open("w") as err:
            process = subprocess.Popen(
                [str(vllm_python()), str(DRIVER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                cwd=folder,
                env={**os.environ, **QUIET, "PYTHONPATH": str(bench_extras())},
            )
        try:
            client = BenchServe(process, server, model, folder, log)
            client.wait_until_ready()
            yield client
        finally:
            process.kill()
            process.wait()
