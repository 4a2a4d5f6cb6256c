"""What the first tokens cost packed pages: KL of SmolLM2-135M with the codec in its cache, in float32 on the CPU, without vLLM.

    python benchmarks/pages_sinks.py MODEL CALIBRATION TEXT --out FILE.json

Every key and value of two passages of 300 tokens is what the codec makes of it, also for the token itself: as it is; with the first
four tokens exact; and with the mean of each of the first positions, out of the calibration's samples, in place of the common one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama as llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from assay.lab.kv.codec import Site
from assay.lab.kv.pages import layout as lay
from assay.lab.kv.pages.source import source_of

FIRST = 4


def main() -> None:
    name, calibration, text = sys.argv[1:4]
    source = source_of(calibration, name)
    tables, angles, shape = source.tables(), source.trigonometry(512), source.shape
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="eager").eval()
    ids = AutoTokenizer.from_pretrained(name)(Path(text).read_text())["input_ids"]
    passages = torch.tensor([ids[:300], ids[400:700]])
    means: dict[tuple[int, str], torch.Tensor] = {}
    for n in range(shape.layers):
        for s in "kv":
            site = Site(s, n, shape.layers, shape.kv_heads, shape.head_dim)
            found = source.calibration.samples(site, before_rope=True, rotary=None)
            x, at = found.need_x("it").float(), found.positions
            rows = [x[:, at == i].mean(1) if (at == i).any() else tables[n][s].mean for i in range(FIRST)]
            means[n, s] = torch.stack(rows)
    how = {"first": "coded"}
    inner = llama.eager_attention_forward

    def coded(module: Any, query: Any, key: Any, value: Any, *more: Any, **options: Any) -> Any:
        n, parts = module.layer_idx, []
        for x, s in ((key, "k"), (value, "v")):
            t, rows = tables[n][s], []
            for one in x.transpose(1, 2):
                first = means[n, s]
                if s == "k":
                    mean = lay.rotated_mean(t.mean, angles[: len(one)])
                    first = torch.stack([lay.rotated_mean(first[i], angles[i : i + 1])[0] for i in range(FIRST)])
                else:
                    mean = t.mean.expand(one.shape).clone()
                if how["first"] == "by position":
                    mean[:FIRST] = first
                new = lay.reconstruct(one - mean, t, shape.head_dim // 4) + mean
                if how["first"] == "exact":
                    new[:FIRST] = one[:FIRST]
                rows.append(new)
            parts.append(torch.stack(rows).transpose(1, 2))
        return inner(module, query, *parts, *more, **options)

    found = {"model": Path(name).name, "tokens": passages.numel(), "text": Path(text).name}
    with torch.no_grad():
        exact = model(passages).logits.log_softmax(-1)
        llama.eager_attention_forward = coded
        for how["first"] in ("coded", "exact", "by position"):
            other = model(passages).logits.log_softmax(-1)
            same = exact.argmax(-1) == other.argmax(-1)
            found[how["first"]] = {
                "kl": float((exact.exp() * (exact - other)).sum(-1).mean()), "top1": float(same.float().mean())
            }  # fmt: skip
            print(json.dumps(found), flush=True)
    Path(sys.argv[sys.argv.index("--out") + 1]).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
