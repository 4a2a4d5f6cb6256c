"""One engine of `kv_tier.py serve`, run by the Python that has vLLM: time to first token of
prompts, and what they say.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def main() -> None:
    job = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams

    tier: dict = {}
    report = Path(job["out"]).with_suffix(".report")
    if job["stage"] != "without":
        from assay_lab.kv.block_tables import tables_for

        tables = tables_for(job["model"], job["codec"], job["calibration"], Path(job["tables"]))
        path = tables.write(Path(job["tables"]))
        tier = {
            "kv_transfer_config": {
                "kv_connector": "AssayTier",
                "kv_connector_module_path": "assay_lab.kv.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "tables": str(path),
                    "size": 10**9,
                    "folder": job["folder"],
                    "report": str(report),
                },
            }
        }
    start = time.perf_counter()
    llm = LLM(
        job["model"],
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=max(job["lengths"]) + 64,
        block_size=128,
        max_num_batched_tokens=8192,
        **tier,
    )
    started = time.perf_counter() - start
    ids = llm.get_tokenizer()(Path(job["text"]).read_text()).input_ids
    one = SamplingParams(temperature=0, max_tokens=1)
    said = SamplingParams(temperature=0, max_tokens=32, logprobs=20)
    found: dict = {"start_s": started, "prompts": {}}

    def ask(tokens: list[int], how: SamplingParams):  # type: ignore[no-untyped-def]
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        (answer,) = llm.generate([{"prompt_token_ids": tokens}], how, use_tqdm=False)
        return time.perf_counter() - begin, answer.outputs[0]

    ask(ids[9000:9300], one)  # warm
    for number, length in enumerate(job["lengths"]):
        # Prompts that begin in different places share nothing.
        prompt = ids[number * 50 : number * 50 + length + 8]
        times = [
            ask(prompt, one)[0] for _ in range(1 if job["stage"] == "first" else job["rounds"])
        ]
        _, text = ask(prompt, said)
        first = {str(t): p.logprob for t, p in text.logprobs[0].items()}
        found["prompts"][str(length)] = {
            "ttft_s": statistics.median(times),
            "range_s": [min(times), max(times)],
            "text": text.text,
            "first": first,
        }
    llm.llm_engine.engine_core.shutdown()
    if report.exists():
        found["tier"] = json.loads(report.read_text())["tier"]
    Path(job["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
