"""Write the corpus of real outputs: broken, badly sampled and healthy models, with where each text
came from.

    python benchmarks/grade/corpus/generate.py [SOURCE ...] [--list]

Each source goes to `parts/SOURCE.jsonl` in the cache; a source that is there is not generated
again. The union is written to `outputs.jsonl.gz` beside this file. No text is labelled here: a
broken model sometimes writes a sane text, and a healthy small one really loops, so the texts are
labelled apart (see ../broken_outputs.py).
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from damages import damaged
from sources import SOURCES, Source

from assay.engines import Message, Request
from assay.engines.hf.engine import HfEngine
from assay.runs import cache_dir

OUTPUT = Path(__file__).parent / "outputs.jsonl.gz"


def checkpoint(source: Source, folder: Path) -> Path:
    """The model of a source, damaged in `folder` if it is to be."""
    from assay.demo.models import build_gemma3, build_smollm2

    whole = build_smollm2() if source.model == "smollm2" else build_gemma3(add_bos=source.add_bos)
    if source.damage is None:
        return whole
    return damaged(source.damage, whole, folder / source.name, source.damage_seed)


def requests(source: Source) -> Iterator[tuple[dict[str, Any], Request]]:
    """What is known of each text before it is written, and the request for it."""
    for prompt_id, prompt in source.prompts.items():
        for sampling in source.sampling:
            known = {
                "id": f"{source.name}/{prompt_id}/{sampling.temperature:g}/{sampling.seed}",
                "source": source.name,
                "model": source.model,
                "damage": source.damage,
                "damage_seed": source.damage_seed if source.damage else None,
                "add_bos": source.add_bos,
                "prompt_id": prompt_id,
                "sampling": asdict(sampling),
            }
            yield (
                known,
                Request(
                    messages=(Message("user", prompt),) if source.chat else None,
                    prompt=None if source.chat else f"{prompt}\n\n",
                    max_tokens=sampling.max_tokens,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    seed=sampling.seed,
                ),
            )


def generate(source: Source, device: str) -> list[dict[str, Any]]:
    """All records of one source."""
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(source, Path(folder))
        with HfEngine.load(f"hf:{model}?device={device}") as engine:
            known, asked = zip(*requests(source), strict=True)
            replies = engine.generate_batch(asked)
    return [
        {
            **about,
            "text": r.content,
            "finish_reason": r.finish_reason,
            "completion_tokens": r.completion_tokens,
        }
        for about, r in zip(known, replies, strict=True)
    ]


def pack(parts: Path) -> None:
    """Write all parts that exist to `OUTPUT`; the same texts give the same file (no name, no time
    in it).
    """
    with (
        OUTPUT.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
    ):
        for source in SOURCES:
            part = parts / f"{source.name}.jsonl"
            if part.exists():
                packed.write(part.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="SOURCE", help="only these, in this order; all by default"
    )
    parser.add_argument("--device", default="cpu", help="where to run the models, such as cuda")
    parser.add_argument(
        "--list", action="store_true", help="print the names of the sources and stop"
    )
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(source.name for source in SOURCES))
        return
    parts = cache_dir("corpus-parts")
    by_name = {source.name: source for source in SOURCES}
    for name in arguments.names or by_name:
        source, part = by_name[name], parts / f"{name}.jsonl"
        if part.exists():
            continue
        began = time.perf_counter()
        records = generate(source, arguments.device)
        tokens = sum(record["completion_tokens"] for record in records)
        fresh = part.with_suffix(".tmp")
        fresh.write_text(
            "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8"
        )
        fresh.replace(part)
        seconds = time.perf_counter() - began
        print(f"{source.name}: {len(records)} texts, {tokens} tokens, {seconds:.0f} s", flush=True)
        pack(parts)
    pack(parts)


if __name__ == "__main__":
    main()
