"""Tables of `kv_codecs.py` over several models: rows of kv_models.specs, kv_contexts.specs, kv_texts.specs and kv_trellis.specs.

    python benchmarks/kv_models_table.py benchmarks/results/kv_models_*.json [--out benchmarks/results/kv_models.md]

First what docs/kv.md shows: KL and grade (A ACCEPT, M MARGINAL, R REJECT, I INCONCLUSIVE) of every codec by model, then by context
and by text; the smallest accepted codec of each section on its fresh windows; and every row with its intervals.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from comparison_table import interval

Row = dict[str, Any]
NAMES = {
    "smollm2": "SmolLM2-135M",
    "gemma3": "Gemma 3 270M",
    "qwen05": "Qwen2.5-Coder-0.5B",
    "qwen15": "Qwen2.5-Coder-1.5B",
}
WIKI = "wikitext-2-test.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kv_models.md")
    arguments = parser.parse_args()
    documents = {d["model"]: d for d in (json.loads(f.read_text(encoding="utf-8")) for f in arguments.files)}
    text = "\n".join(render({m: documents[m] for m in NAMES if m in documents})) + "\n"
    arguments.out.write_text(text, encoding="utf-8")
    print(text)


def render(documents: dict[str, Any]) -> Iterator[str]:
    """Markdown of everything."""
    rows = [{**row, "model": model} for model, document in documents.items() for row in document["rows"]]
    yield "# KV codecs on several models\n"
    for model, document in documents.items():
        facts = next(r for r in rows if r["model"] == model)
        yield (
            f"- {NAMES[model]}: {document['machine']['gpu']}, perplexity of the reference {facts['ppl_reference']:.1f}, "
            f"{facts['characters_per_token']:.2f} characters a token"
        )
    short = [r for r in rows if r["text"] == WIKI and r["length"] == 1024]
    yield f"\n## WikiText, 1,024 tokens ({sizes(short)})\n"
    yield from grid([r for r in short if not r["fresh"]], list(documents), lambda r: r["model"], NAMES.get)
    yield f"\n## The smallest accepted of each section, on fresh windows ({sizes([r for r in short if r['fresh']])})\n"
    yield from listed([r for r in short if r["fresh"]])
    lengths = sorted({r["length"] for r in rows if r["text"] == WIKI})
    for model in documents:
        mine = [r for r in rows if r["model"] == model and r["text"] == WIKI and not r["fresh"]]
        longer = {r["codec"] for r in mine if r["length"] > 1024}
        yield f"\n## {NAMES[model]} by context\n"
        yield from grid([r for r in mine if r["codec"] in longer], lengths, lambda r: r["length"], "{:,}".format)
    others = list(dict.fromkeys(r["text"] for r in rows if r["text"] != WIKI))
    for model in documents if others else ():
        mine = [r for r in rows if r["model"] == model and r["text"] in others]
        if mine:
            yield f"\n## {NAMES[model]} by text ({sizes(mine)})\n"
            yield from grid(mine, others, lambda r: r["text"], str)
    yield "\n## What a user may take (README)\n"
    yield from taken(short, list(documents))
    yield "\n## All rows\n"
    yield from listed(rows)


def grid(
    rows: Sequence[Row], columns: Sequence[Any], of: Callable[[Row], Any], name: Callable[[Any], Any]
) -> Iterator[str]:
    """A line for each codec with its ratio, KL and grade in every column."""
    yield "| codec | " + " | ".join(str(name(c)) for c in columns) + " |"
    yield "|---|" + "---|" * len(columns)
    for codec in dict.fromkeys(r["codec"] for r in rows):
        found = {of(r): r for r in rows if r["codec"] == codec}
        cells = [brief(found[c]) if c in found else "–" for c in columns]
        yield f"| `{shorter(codec)}` | " + " | ".join(cells) + " |"


def taken(rows: Sequence[Row], models: Sequence[str]) -> Iterator[str]:
    """Which cache a model may take: of families of codecs the smallest that was accepted, on fresh windows where there are some."""
    yield "| KV cache | " + " | ".join(NAMES[m] for m in models) + " |"
    yield "|---|" + "---|" * len(models)
    said = {"ACCEPT": "yes", "MARGINAL": "marginal", "REJECT": "**no**", "INCONCLUSIVE": "undecided"}
    for name, wanted in FAMILIES.items():
        cells = []
        for model in models:
            mine = [r for r in rows if r["model"] == model]
            found = [
                r
                for r in mine
                if r["codec"] == wanted or ("=" in wanted and "(" not in wanted and wanted in r["codec"])
            ]
            fresh = [r for r in found if r["fresh"]]
            good = [r for r in fresh or found if r["grade"] == "ACCEPT"] or fresh or found
            best = max(good, key=lambda r: (r["bytes"]["ratio"], -r["kld"]["mean"]), default=None)
            cells.append(
                f"{said[best['grade']]}: {best['bytes']['ratio']:.1f}×, {best['kld']['mean']:.4f}" if best else "–"
            )
        yield f"| {name} | " + " | ".join(cells) + " |"


FAMILIES = {
    "`fp8` with scale 1, vLLM's default": "fp8",
    "`fp8(scale=head)`, calibrated": "fp8(scale=head)",
    "`int(bits=4,group=32)`, as KIVI": "int",
    "`hadamard(bits=4)`, plain rotation": "hadamard",
    "`prerope+mean+sinks+hadamard(bits=5)`": "prerope+mean+sinks+hadamard(bits=5)",
    "`pca(coding=fixed,gains=3)`, read token by token": "coding=fixed, weights=measured, gains=3",
    "`pca(predict=all)`, entropy-coded": "predict=all",
}
"""By what a row says: a codec, or a part of its parameters."""


def brief(row: Row) -> str:
    """`2.00×, 0.0072 A`."""
    return f"{row['bytes']['ratio']:.2f}×, {row['kld']['mean']:.4f} {row['grade'][0]}"


def listed(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each row, with intervals."""
    yield "| model | text | tokens | codec | smaller | one cache of 1,024 / 8,192 | KL, nats | Δppl % | top-1 % | grade |"
    yield "|---|---|---:|---|---:|---|---|---|---|---|"
    for r in rows:
        at = r["bytes"]["ratio_at"]
        cells = (
            NAMES[r["model"]],
            r["text"].removesuffix(".txt") + ", fresh" * r["fresh"],
            f"{r['length']:,}",
            f"`{shorter(r['codec'])}`",
            f"{r['bytes']['ratio']:.2f}×",
            f"{at['1024']:.2f}× / {at['8192']:.2f}×",
            interval(r["kld"], ".4f", "mean"),
            interval(r["dppl_pct"], "+.2f"),
            f"{r['top1_pct']['value']:.1f}",
            r["grade"],
        )
        yield f"| {' | '.join(cells)} |"


def sizes(rows: Sequence[Row]) -> str:
    """How many windows and scored tokens."""
    return "; ".join(dict.fromkeys(f"{r['windows']} windows, {r['tokens']:,} scored tokens" for r in rows))


def shorter(codec: str) -> str:
    """Without what all rows of a table share."""
    return codec.replace(", weights=measured", "").replace(", ", ",")


if __name__ == "__main__":
    main()
