"""Where the gap between two engines comes from: llama.cpp, an 8-bit KV cache of vLLM, or one codec
in both, against transformers.

    python gap_engines.py --against gguf --model qwen05            # one GGUF file, and
    the checkpoint made of it python gap_engines.py --against fp8 --model qwen15 --device
    cuda --windows 32 --length 1024 --text WIKI_TEST python gap_engines.py --against fp8
    --same-cache …             # both sides keep 8-bit floats python gap_engines.py
    --against codec --codec fp8 …            # assay's codec in both engines' caches

`gguf`: both sides hold the same weights but for their rounding to bf16; transformers computes in
float32, llama.cpp multiplies its 4-bit blocks with activations of 8 bits. `fp8`: transformers with
its cache in bf16 (or in e4m3, `--same-cache`) against vLLM with `kv_cache_dtype=fp8`, token by
token. `codec`: both in bf16 with the codec of assay, in-forward, the total token by token behind an
exact prefix. Writes the report as JSON and its tables as Markdown.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from assay.cli.progress import show
from assay.demo import models
from assay.report import markdown
from assay_lab.gap.gap import run_gap
from assay_lab.gap.plan import GapPlan
from gap_smollm2 import without_python

MODELS = {"qwen05": models.QWEN05, "qwen15": models.QWEN15, "smollm2": models.SMOLLM2}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", choices=("gguf", "fp8", "codec"), required=True)
    parser.add_argument("--codec", default="fp8", help="of `--against codec`")
    parser.add_argument("--same-cache", action="store_true", help="fp8 on both sides")
    parser.add_argument("--model", choices=MODELS, default="qwen05")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--fresh", type=int, default=0)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--text", type=Path)
    parser.add_argument(
        "--engine", default="", help="more options of vLLM, as in vllm:MODEL?option=value&…"
    )
    parser.add_argument(
        "--gguf", type=Path, help="another file than the one that the checkpoint was made of"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    codec = given.codec if given.against == "codec" else ""
    name = given.against + "_both" * given.same_cache
    out = given.out or Path(__file__).parent / "results" / f"gap_{name}_{given.model}.json"
    model = MODELS[given.model]
    folder = models.build(model)
    began = time.perf_counter()
    reference, candidate = sides(given, str(folder))
    plan = GapPlan(
        reference,
        candidate,
        codec=codec,
        text=(str(given.text),) if given.text else (),
        windows=given.windows,
        fresh=given.fresh,
        length=given.length,
        phases=(1,),
        batch=given.batch,
        mode="decode",
        base_mode="inforward" if codec else "decode",
    )
    report = run_gap(plan, show)
    body = report.to_json()
    body["seconds"] = round(time.perf_counter() - began, 1)
    names = [
        without_python(side.replace(str(folder), model.title)) for side in (reference, candidate)
    ]
    body["subject"] = {
        "model": model.title,
        "reference": names[0],
        "candidate": names[1].rpartition("/")[2],
    }
    out.write_text(
        without_python(json.dumps(body, indent=1, ensure_ascii=False)) + "\n", encoding="utf-8"
    )
    text = markdown.render(report).replace(str(folder), model.title)
    if given.against == "gguf":
        text = text.replace(f"{Path(candidate.removeprefix('gguf:')).parent}/", "")
    text = without_python(text)
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def sides(given: argparse.Namespace, folder: str) -> tuple[str, str]:
    """Both engines as they are written."""
    if given.against == "gguf":
        file = given.gguf or models.gguf_of(MODELS[given.model])
        return f"hf:{folder}?device={given.device}&dtype=float32", f"gguf:{file}"
    kept = "&kv_cache_dtype=fp8_e4m3" * given.same_cache
    options = "".join(
        f"&{o}" for o in ("kv_cache_dtype=fp8" * (given.against == "fp8"), given.engine) if o
    )
    return (
        f"hf:{folder}?device={given.device}&dtype=bfloat16{kept}",
        f"vllm:{folder}?max_model_len={max(given.length, 512)}{options}",
    )


if __name__ == "__main__":
    main()
