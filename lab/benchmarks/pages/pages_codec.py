"""What the parts of the codec of packed pages bring: KL of a model with the codec in its cache, in
float32, without vLLM.

    python pages_codec.py MODEL CALIBRATION TEXT --out FILE.jsonl [--windows 16]
    [--device cuda] [--variants whole,none]

Every passage is read as a server reads it: the first half of its tokens see keys and values as they
are (a prompt), those of the second half see codes. One line for each variant: none of the parts
below (`none`); with a mean of their own for the first four tokens (`means`); with the query's own
key and value exact too (`own`); and the first tokens with two bits more, which is the codec
(`whole`); with the first four tokens exact (`exact`); and keys or values alone coded (`keys`,
`values`).
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama as llama
import transformers.models.qwen2.modeling_qwen2 as qwen2
from transformers import AutoModelForCausalLM, AutoTokenizer

from assay_lab.kv.pages import BLOCK
from assay_lab.kv.pages import layout as lay
from assay_lab.kv.pages.source import source_of

VARIANTS = {
    "whole": "means own finer",
    "none": "",
    "means": "means",
    "own": "means own",
    "exact": "own exact",
    "keys": "means own finer k",
    "values": "means own finer v",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("text")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--skip", type=int, default=0, help="passages that are left out before")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    given = parser.parse_args()
    source = source_of(given.calibration, given.model)
    shape, half = source.shape, given.length // 2
    layout = lay.layout_of(shape.kv_heads, shape.head_dim, BLOCK)
    tables = [{s: t.to(given.device) for s, t in one.items()} for one in source.tables()]
    cosines = source.trigonometry(given.length).to(given.device)
    model = AutoModelForCausalLM.from_pretrained(
        given.model, dtype=torch.float32, attn_implementation="eager"
    )
    model = model.eval().to(given.device)
    text = Path(given.text).read_text(encoding="utf-8")[
        : 8 * given.length * (given.windows + given.skip + 2)
    ]
    ids = AutoTokenizer.from_pretrained(given.model)(text)["input_ids"]
    passages = [
        torch.tensor(ids[i * given.length : (i + 1) * given.length], device=given.device)
        for i in range(given.skip, given.skip + given.windows)
    ]
    how: set[str] = set()
    on = {"coded": False}

    def coded(inner: Any) -> Any:
        def attend(
            module: Any, query: Any, key: Any, value: Any, mask: Any, *more: Any, **options: Any
        ) -> Any:
            if not on["coded"]:
                return inner(module, query, key, value, mask, *more, **options)
            places = torch.arange(given.length, device=given.device)
            late = places + lay.FIRST
            new = {}
            for s, x in (("k", key), ("v", value)):
                t, one = tables[module.layer_idx][s], x[0].transpose(0, 1).float()
                mean = lay.means(t, s, places, cosines)
                if "means" not in how:
                    usual = (
                        lay.rotated_mean(t.mean, cosines) if s == "k" else t.mean.expand(one.shape)
                    )
                    mean = torch.where((places < lay.FIRST)[:, None, None], usual, mean)
                made = (
                    lay.reconstruct(one - mean, t, layout, s, places if "finer" in how else late)
                    + mean
                )
                if "exact" in how:
                    made[: lay.FIRST] = one[: lay.FIRST]
                if how & {"k", "v"} - {s} and s not in how:
                    made = one
                new[s] = made.transpose(0, 1).repeat_interleave(
                    query.shape[1] // key.shape[1], dim=0
                )
            q = query[0].float()
            k, v = (
                x[0].float().repeat_interleave(query.shape[1] // key.shape[1], dim=0)
                for x in (key, value)
            )
            before = torch.full((given.length, given.length), -math.inf, device=given.device).triu(
                1
            )
            first = ((q[:, :half] @ k.mT) * module.scaling + before[:half]).softmax(-1) @ v
            s = (q[:, half:] @ new["k"].mT) * module.scaling
            i = torch.arange(given.length - half, device=given.device)
            if "own" in how:
                s[:, i, i + half] = (q[:, half:] * k[:, half:]).sum(-1) * module.scaling
            p = (s + before[half:]).softmax(-1)
            second = p @ new["v"]
            if "own" in how:
                second += p[:, i, i + half][..., None] * (v - new["v"])[:, half:]
            return torch.cat([first, second], dim=1).transpose(0, 1)[None].contiguous().to(
                query.dtype
            ), None

        return attend

    for module in (llama, qwen2):
        module.eager_attention_forward = coded(module.eager_attention_forward)

    @torch.no_grad()
    def scored() -> list[torch.Tensor]:
        return [model(p[None]).logits[0, half:-1].float().log_softmax(-1).cpu() for p in passages]

    exact = scored()
    labels = [p[half + 1 :, None].cpu() for p in passages]
    for name in given.variants.split(","):
        how.clear()
        how.update(VARIANTS[name].split())
        on["coded"] = True
        other = scored()
        on["coded"] = False
        kl = torch.stack(
            [(e.exp() * (e - o)).sum(-1).mean() for e, o in zip(exact, other, strict=True)]
        )
        lost = torch.stack(
            [(e - o).gather(1, y).mean() for e, o, y in zip(exact, other, labels, strict=True)]
        )
        same = torch.stack(
            [
                (e.argmax(-1) == o.argmax(-1)).float().mean()
                for e, o in zip(exact, other, strict=True)
            ]
        )
        row = {
            "model": Path(given.model).name,
            "variant": name,
            "bytes": layout.slot,
            "ratio": layout.ratio,
            "windows": len(passages),
            "length": given.length,
            "text": Path(given.text).name,
            "kl": float(kl.mean()),
            "kl_se": _error(kl),
            "dppl_pct": 100 * math.expm1(float(lost.mean())),
            "dppl_pct_se": 100 * _error(lost),
            "top1": float(same.mean()),
            "kl_each": [round(float(x), 5) for x in kl],
        }
        print(json.dumps(row), flush=True)
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _error(x: torch.Tensor) -> float:
    return float(x.std()) / len(x) ** 0.5 if len(x) > 1 else 0.0


if __name__ == "__main__":
    main()
