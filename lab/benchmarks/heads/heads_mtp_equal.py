"""Draft by draft: what vLLM's MTP layer guesses, and what `assay_lab.heads.model` does. Run by a
Python that has vLLM.

    python heads_mtp_equal.py MODEL HEAD RESULTS.json [--prompts PROMPTS.json] [--texts
    8] [--tokens 96] [--depth 4]
        [--dtype bfloat16] [--options '{"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes":
        1073741824}']

HEAD is the folder of an MTP head, which vLLM serves one greedy prompt at a time; every proposal is
recorded as it is made. MODEL is its target, whose states the same text gives in transformers. In
float32 all drafts must be equal; in bf16 those differ whose two best logits are closer than
rounding. The walk of `assay heads try` over the texts stands beside vLLM's counters, which also
count the last steps, those that reach past the end of a text.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch


def main() -> None:
    """Serve, draft again, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("model", "head", "results"):
        parser.add_argument(name, type=Path)
    parser.add_argument(
        "--prompts",
        type=Path,
        help="JSON: lists of token ids (default: held-out prompts of the training)",
    )
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--options", default="{}", help="JSON: more arguments of vllm.LLM")
    a = parser.parse_args()
    import vllm
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    from assay_lab.heads.drafting import draft, padded, walk
    from assay_lab.heads.export import read_head
    from assay_lab.heads.observed import observe

    if a.prompts:
        asked: list[list[int]] = json.loads(a.prompts.read_text())
    else:
        from transformers import AutoTokenizer

        from assay_lab.heads.prompts import HELD_OUT, prompts

        asked = [
            ids
            for _, ids in prompts(AutoTokenizer.from_pretrained(a.model), 6000)[::HELD_OUT][
                : a.texts
            ]
        ]
    steps: list[list[int]] = []
    real = SpecDecodeBaseProposer.propose

    def propose(self: Any, *given: Any, **more: Any) -> Any:
        found = real(self, *given, **more)
        steps.append(found[0].tolist())
        return found

    SpecDecodeBaseProposer.propose = propose
    llm = vllm.LLM(
        str(a.head),
        max_model_len=512,
        max_num_seqs=1,
        dtype=a.dtype,
        enforce_eager=True,
        enable_prefix_caching=False,
        seed=0,
        speculative_config={"method": "mtp", "num_speculative_tokens": a.depth},
        disable_log_stats=False,
        **json.loads(a.options),
    )
    drawn = vllm.SamplingParams(
        max_tokens=a.tokens, temperature=0.0, ignore_eos=True, detokenize=False
    )
    texts, proposed = [], []
    for ids in asked:
        steps.clear()
        out = llm.generate([{"prompt_token_ids": ids}], drawn, use_tqdm=False)[0].outputs[0]
        texts.append(ids + list(out.token_ids))
        proposed.append(list(steps))
    counted = {
        m.name.rpartition("spec_decode_")[2]: getattr(m, "values", None) or getattr(m, "value", 0)
        for m in llm.get_metrics()
        if "spec_decode" in m.name
    }

    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = (
        AutoModelForCausalLM.from_pretrained(a.model, dtype=getattr(torch, a.dtype))
        .to(device)
        .eval()
    )
    head = read_head(a.head, a.model).to(device, getattr(torch, a.dtype)).eval()
    rows, walked, accepted = [], 0, [0] * a.depth
    for ids, text, own in zip(asked, texts, proposed, strict=True):
        ours = draft(
            head, target, observe(target, *padded([text], device), head.config.aux_layers), a.depth
        )[0].tolist()
        n, equal, tokens, compared = len(ids), 0, 0, 0
        for theirs in own:  # the first token is drawn without drafts; vLLM drafts after it
            if n + a.depth >= len(text):
                break
            same = [x == y for x, y in zip(theirs, ours[n - 1], strict=True)]
            compared, equal, tokens = compared + 1, equal + all(same), tokens + sum(same)
            n += 1 + next((j for j in range(a.depth) if theirs[j] != text[n + 1 + j]), a.depth)
        whole = walk(text, ours, len(ids))
        walked += whole.steps
        accepted = [x + y for x, y in zip(accepted, whole.accepted, strict=True)]
        rows.append({"steps": compared, "equal": equal, "equal_tokens": tokens})
    found = {
        "engine": {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "dtype": a.dtype,
            "depth": a.depth,
            "device": torch.cuda.get_device_name(0) if device == "cuda" else "CPU",
        },
        "steps": sum(r["steps"] for r in rows),
        "equal": sum(r["equal"] for r in rows),
        "equal_tokens": sum(r["equal_tokens"] for r in rows),
        "walk": {"steps": walked, "accepted": accepted},
        "counters": counted,
        "rows": rows,
    }
    a.results.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({k: v for k, v in found.items() if k != "rows"}), flush=True)
    os._exit(0)  # threads of an engine that linger would keep the caller waiting


if __name__ == "__main__":
    main()
