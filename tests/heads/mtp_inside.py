"""Run by vLLM's Python: what vLLM drafts with a served MTP head, as JSON on the last line.

python mtp_inside.py FOLDER PROMPTS.json DEPTH TOKENS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

from vllm import LLM, SamplingParams
from vllm.v1.spec_decode import llm_base_proposer

STEPS: list[list[int]] = []


def main() -> None:
    """One prompt at a time, so that the steps of each are apart."""
    folder, prompts, depth, tokens = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), *map(int, sys.argv[3:5])
    real = llm_base_proposer.SpecDecodeBaseProposer.propose

    def propose(self: Any, *args: Any, **more: Any) -> Any:
        found = real(self, *args, **more)
        STEPS.append(found[0].tolist())
        return found

    llm_base_proposer.SpecDecodeBaseProposer.propose = propose
    engine = LLM(
        model=folder, max_model_len=256, max_num_seqs=1, dtype="float32", enforce_eager=True, enable_prefix_caching=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": depth}, disable_log_stats=False,
    )  # fmt: skip
    rows = []
    for ids in prompts:
        STEPS.clear()
        drawn = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        out = engine.generate([{"prompt_token_ids": ids}], drawn, use_tqdm=False)[0].outputs[0]
        rows.append({"text": list(out.token_ids), "drafts": list(STEPS)})
    counters = {
        m.name: getattr(m, "values", None) or getattr(m, "value", None)
        for m in engine.get_metrics()
        if "spec_decode" in m.name
    }
    print(json.dumps({"rows": rows, "counters": counters}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
