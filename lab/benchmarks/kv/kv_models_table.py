"""Tables of `kv_codecs.py` over several models, as README.md and lab/docs/kv.md show them.

    python kv_models_table.py results/kv_{models,fixed,wide,fresh}_*.json
    --speed results/kv_blocks_qwen15.json
        --into README.md lab/docs/kv.md [--out results/kv_models.md]

Of rows of the same codec, text, length, mode and freshness those of the last file count, and of
these the one of most tokens. A cell is `smaller, KL ± half its 95 % interval, grade` (A ACCEPT, M
MARGINAL, R REJECT, I INCONCLUSIVE). Where a family has several steps, README's table shows the
smallest codec that was accepted both on the windows where they were tried and on fresh ones.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kv_codecs_table import interval

Row = dict[str, Any]
NAMES = {
    "smollm2": "SmolLM2-135M",
    "gemma3": "Gemma 3 270M",
    "qwen05": "Qwen2.5-Coder-0.5B",
    "qwen15": "Qwen2.5-Coder-1.5B",
}
WIKI = "WikiText"
FAMILIES: dict[str, Callable[[str], bool]] = {
    "`fp8` with scale 1, vLLM's default": lambda c: c == "fp8",
    "`fp8(scale=head)`, calibrated": lambda c: c == "fp8(scale=head)",
    "`fp8` of the tensor, as vLLM's `calculate_kv_scales`": lambda c: c.startswith(
        "k:fp8(scale=tensor"
    ),
    "`fp8`, first layer exact": lambda c: c == "boundary(last=0)+fp8",
    "`int(bits=4,group=32)`, as KIVI": lambda c: c == "int",
    "`int(bits=2,group=32)`": lambda c: c == "int(bits=2)",
    "`hadamard(bits=4)`, plain rotation": lambda c: c == "hadamard",
    "`hadamard(bits=4,norm=projection)`, as TurboQuant": lambda c: c == "hadamard(norm=projection)",
    "`k:fp8;v:hadamard(bits=4)`, as its k8v4": lambda c: c == "k:fp8;v:hadamard",
    "`prerope+mean+fp8`": lambda c: c == "prerope+mean+fp8",
    "`prerope+mean+sinks+hadamard(bits=5)`": lambda c: c == "prerope+mean+sinks+hadamard(bits=5)",
    "`pca(coding=fixed,gains=3)`, read token by token": lambda c: (
        "gains=3" in c and "predict" not in c
    ),
    "`pca`, entropy-coded": lambda c: (
        "pca(" in c and not any(w in c for w in ("coding", "predict", "trellis"))
    ),
    "`pca(trellis=8)`": lambda c: "trellis" in c and "predict" not in c,
    "`pca(predict=all)`, entropy-coded": lambda c: (
        "predict" in c and "trellis" not in c and "coding" not in c
    ),
    "`pca(predict=all,trellis=…)`": lambda c: "predict" in c and "trellis" in c,
}
"""By what a row's codec is; those whose steps differ are one family."""
SAID = {"ACCEPT": "yes", "MARGINAL": "marginal", "REJECT": "**no**", "INCONCLUSIVE": "undecided"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--speed", nargs="*", type=Path, default=[], help="rows of kv_blocks.specs")
    parser.add_argument(
        "--into",
        nargs="*",
        type=Path,
        default=[],
        help="pages whose blocks are filled: README.md lab/docs/kv.md",
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "kv_models.md"
    )
    arguments = parser.parse_args()
    rows = merged(json.loads(f.read_text(encoding="utf-8")) for f in arguments.files)
    speed = [json.loads(f.read_text(encoding="utf-8")) for f in arguments.speed]
    text = "\n".join(render(rows, speed)) + "\n"
    arguments.out.write_text(text, encoding="utf-8")
    for page in arguments.into:
        page.write_text(
            filled(page.read_text(encoding="utf-8"), tables(rows, speed)), encoding="utf-8"
        )
    print(text)


def merged(documents: Iterable[Mapping[str, Any]]) -> list[Row]:
    """All rows with their model, one of each codec, text, length, mode and freshness; WikiText
    under one name.
    """
    found: dict[Any, Row] = {}
    for document in list(documents):  # together in memory, so that each has an id of its own
        for row in document["rows"]:
            text = WIKI if row["text"] in ("test", "wikitext-2-test.txt") else row["text"]
            whole = {
                "length": 1024,
                "fresh": False,
                "mode": "decode",
                **row,
                "text": text,
                "model": document["model"],
            }
            whole |= {"gpu": document["machine"]["gpu"], "document": id(document)}
            key = tuple(whole[k] for k in ("model", "codec", "text", "length", "fresh", "mode"))
            known = found.get(key)
            if (
                known is None
                or known["document"] != id(document)
                or known["tokens"] <= whole["tokens"]
            ):
                found[key] = whole
    return list(found.values())


def render(rows: Sequence[Row], speed: Sequence[Mapping[str, Any]] = ()) -> Iterator[str]:
    """Markdown of everything."""
    yield "# KV codecs on several models\n"
    for model in (m for m in NAMES if any(r["model"] == m for r in rows)):
        facts = next(r for r in rows if r["model"] == model)
        yield (
            f"- {NAMES[model]}: {facts['gpu']}, perplexity of the reference"
            f" {facts['ppl_reference']:.1f}, {facts['characters_per_token']:.2f} characters a token"
        )
    for title, lines in tables(rows, speed).values():
        yield f"\n## {title}\n"
        yield from lines
    if told := sorted(r["apart"] for r in rows if "apart" in r):
        yield (
            f"\nStreams and what attention read differ by at most {100 * told[-1]:.1f} % of a"
            f" codec's own squared error in any stream (median of {len(told)} rows"
            f" {100 * told[len(told) // 2]:.2g} %)."
        )
    yield "\n## All rows\n"
    yield from listed(rows)


def tables(
    rows: Sequence[Row], speed: Sequence[Mapping[str, Any]] = ()
) -> dict[str, tuple[str, list[str]]]:
    """Title and lines of every table, by the name of the block of README.md or lab/docs/kv.md that
    holds it.
    """
    models = [m for m in NAMES if any(r["model"] == m for r in rows)]
    forward, rows = (
        [r for r in rows if (r["mode"] == "inforward") is inside] for inside in (True, False)
    )
    wiki, others = ([r for r in rows if (r["text"] == WIKI) is same] for same in (True, False))
    short = [r for r in wiki if r["length"] == 1024]
    fresh = [r for r in short if r["fresh"]]
    fixed = [r for r in short if "gains=3" in r["codec"] and "predict" not in r["codec"]]
    long = {(r["model"], r["codec"]) for r in wiki if r["length"] > 1024}
    by_length = [
        r for r in wiki if (r["fresh"] or r["length"] > 1024) and (r["model"], r["codec"]) in long
    ]
    lengths = sorted({r["length"] for r in by_length})
    texts = list(dict.fromkeys(r["text"] for r in others))

    def size(row: Row) -> float:
        return float(row["bytes"]["ratio"])

    def model_of(row: Row) -> str:
        return str(row["model"])

    found = {
        "taken": ("What a user may take (README)", taken(short, models)),
        "fresh": (
            f"WikiText, 1,024 tokens, fresh windows ({sizes(fresh)})",
            grid(fresh, models, model_of, NAMES.get, size),
        ),
        "steps": (
            "Codes of fixed width: steps that were tried, and what was measured again",
            stepped(fixed),
        ),
        "forward": (
            f"KL in decode, and in-forward ({sizes(forward)})",
            beside(fresh, forward, models),
        ),
        "contexts": (
            f"By context ({sizes(by_length)}); one cache of so many tokens with all its tables",
            grid(by_length, lengths, lambda r: r["length"], "{:,} tokens".format, own, models),
        ),
        "texts": (
            f"By text ({sizes(others)})",
            grid(others, texts, lambda r: r["text"], str, size, models),
        ),
        "fresh, with intervals": (
            "Fresh windows, with intervals",
            listed(sorted(fresh, key=_by_family)),
        ),
        **{
            f"speed {d['model']}": (
                (
                    f"Speed of scoring a decode, {NAMES[d['model']]}, on a GPU that other programs"
                    " used too"
                ),
                speeds(d),
            )
            for d in speed
        },
    }
    return {name: (title, list(lines)) for name, (title, lines) in found.items()}


def filled(text: str, found: Mapping[str, tuple[str, list[str]]]) -> str:
    """A page whose blocks `<!-- kv NAME -->` … `<!-- end of kv NAME -->` hold the tables of those
    names.
    """
    for name, (_, lines) in found.items():
        block = re.compile(f"(<!-- kv {name} -->\n).*?(<!-- end of kv {name} -->)", re.DOTALL)
        text = block.sub(lambda m, lines=lines: m[1] + "\n".join(lines) + "\n" + m[2], text)
    return text


def grid(
    rows: Sequence[Row], columns: Sequence[Any], of: Callable[[Row], Any], name: Callable[[Any], Any],  # noqa: E501
    ratio: Callable[[Row], float], models: Sequence[str] = (),
) -> Iterator[str]:  # fmt: skip
    """A line for each codec (and model) with its ratio, KL and grade in every column."""
    heads = ["model", "codec"] if models else ["codec"]
    yield f"| {' | '.join([*heads, *(str(name(c)) for c in columns)])} |"
    yield "|---" * (len(heads) + len(columns)) + "|"
    for model in models or (None,):
        mine = [r for r in sorted(rows, key=_by_family) if model in (None, r["model"])]
        for codec in dict.fromkeys(r["codec"] for r in mine):
            found = {of(r): r for r in mine if r["codec"] == codec}
            cells = [
                f"{ratio(found[c]):.2f}×, {brief(found[c])}" if c in found else "–" for c in columns
            ]
            yield (
                f"| {' | '.join([*([NAMES[model]] if model else []), f'`{shorter(codec)}`', *cells])} |"  # noqa: E501
            )


def beside(decode: Sequence[Row], forward: Sequence[Row], models: Sequence[str]) -> Iterator[str]:
    """A line for each codec: in every model the KL in decode, then in-forward."""
    yield "| codec | " + " | ".join(NAMES[m] for m in models) + " |"
    yield "|---|" + "---|" * len(models)
    for codec in dict.fromkeys(r["codec"] for r in sorted(forward, key=_by_family)):
        cells = []
        for model in models:
            both = [
                next((r for r in rows if (r["model"], r["codec"]) == (model, codec)), None)
                for rows in (decode, forward)
            ]
            cells.append(
                " → ".join(f"{r['kld']['mean']:.4f} {r['grade'][0]}" if r else "–" for r in both)
                if both[1]
                else "–"
            )
        yield f"| `{shorter(codec)}` | {' | '.join(cells)} |"


def speeds(document: Mapping[str, Any]) -> Iterator[str]:
    """How many tokens a second were scored, by the tokens and windows that are fed together."""
    yield (
        "| tokens at once | windows at once | codec | exact cache, tokens/s | with the codec,"
        " tokens/s | KL, nats |"
    )
    yield "|---:|---:|---|---:|---:|---|"
    for r in document["rows"]:
        # Rows of before `exact_s` have it in the time to fit, which fp8 has not.
        seconds = r.get("exact_s") or (r["fit_s"] if r["codec"] == "fp8" else None)
        exact = (
            r.get("exact_windows", r["windows"]) * r["tokens"] / r["windows"] / seconds
            if seconds
            else None
        )
        cells = (
            str(r["block"]),
            str(r.get("batch", 16)),
            f"`{shorter(r['codec'])}`",
            f"{exact:,.0f}" if exact else "as above",
            f"{r['tokens'] / r['score_s']:,.0f}",
            interval(r["kld"], ".5f", "mean"),
        )
        yield f"| {' | '.join(cells)} |"


def stepped(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each model and step of one codec, fresh windows behind those that it was tried
    on.
    """
    yield (
        "| model | step | smaller, at 32k | KL, nats | Δppl % | top-1 % | grade | one cache of"
        " 1,024 / 8,192 tokens |"
    )
    yield "|---|---:|---:|---|---|---:|---|---|"
    for r in sorted(rows, key=lambda r: (list(NAMES).index(r["model"]), r["codec"], r["fresh"])):
        at = r["bytes"]["ratio_at"]
        cells = (
            NAMES[r["model"]],
            r["codec"].partition("step=")[2].partition(",")[0] + ", fresh windows" * r["fresh"],
            f"{r['bytes']['ratio']:.2f}×",
            interval(r["kld"], ".4f", "mean"),
            interval(r["dppl_pct"], "+.2f"),
            f"{r['top1_pct']['value']:.1f}",
            r["grade"],
            f"{at['1024']:.2f}× / {at['8192']:.2f}×",
        )
        yield f"| {' | '.join(cells)} |"


def taken(rows: Sequence[Row], models: Sequence[str]) -> Iterator[str]:
    """Which cache a model may take: of each family the choice, as it came to on fresh windows where
    it was measured there.
    """
    yield "| KV cache | " + " | ".join(NAMES[m] for m in models) + " |"
    yield "|---|" + "---|" * len(models)
    for name, belongs in FAMILIES.items():
        cells = []
        for model in models:
            row = chosen([r for r in rows if r["model"] == model and belongs(r["codec"])])
            old = "" if row is None or row["fresh"] else "*"
            cells.append(
                f"{SAID[row['grade']]}: {row['bytes']['ratio']:.1f}×, {row['kld']['mean']:.4f}{old}"
                if row
                else "–"
            )
        if any(c != "–" for c in cells):
            yield f"| {name} | {' | '.join(cells)} |"


def chosen(family: Sequence[Row]) -> Row | None:
    """The smallest codec that was accepted where its steps were tried and on fresh windows too; its
    fresh row.

    Where none was, what the smallest that was accepted where they were tried came to; or else the
    one of least KL.
    """
    fresh = {r["codec"]: r for r in family if r["fresh"]}
    tried = [r for r in family if not r["fresh"]] or list(fresh.values())
    accepted = sorted(
        (r for r in tried if r["grade"] == "ACCEPT"), key=lambda r: -r["bytes"]["ratio"]
    )
    confirmed = [
        fresh[r["codec"]] for r in accepted if fresh.get(r["codec"], {}).get("grade") == "ACCEPT"
    ]
    if not tried:
        return None
    if not accepted:  # a step that was tried nowhere else was chosen by no windows
        alone = [
            r
            for c, r in fresh.items()
            if r["grade"] == "ACCEPT" and c not in {t["codec"] for t in tried}
        ]
        confirmed = sorted(alone, key=lambda r: -r["bytes"]["ratio"])
    best = accepted[0] if accepted else min(tried, key=lambda r: r["kld"]["mean"])
    return confirmed[0] if confirmed else fresh.get(best["codec"], best)


def own(row: Row) -> float:
    """The ratio of one cache as long as the window that carries all tables of the decoder."""
    b = row["bytes"]
    streams = b["stored"] - b["tables"] * b["tokens"] / b["table_tokens"]
    return float(b["bf16"] / (streams + b["tables"]))


def brief(row: Row) -> str:
    """`0.0072 ± 0.0003 A`: the wider side of its interval."""
    kl = row["kld"]
    return (
        f"{kl['mean']:.4f} ± {max(kl['hi'] - kl['mean'], kl['mean'] - kl['lo']):.4f}"
        f" {row['grade'][0]}"
    )


def listed(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each row, with intervals."""
    yield (
        "| model | text | tokens | codec | smaller | one cache of 1,024 / 8,192 | KL, nats | Δppl %"
        " | top-1 % | grade |"
    )
    yield "|---|---|---:|---|---:|---|---|---|---|---|"
    for r in rows:
        at = r["bytes"].get("ratio_at")
        cells = (
            NAMES[r["model"]],
            r["text"].removesuffix(".txt")
            + ", fresh" * r["fresh"]
            + ", in-forward" * (r["mode"] == "inforward"),
            f"{r['length']:,}",
            f"`{shorter(r['codec'])}`",
            f"{r['bytes']['ratio']:.2f}×",
            f"{at['1024']:.2f}× / {at['8192']:.2f}×" if at else "–",
            interval(r["kld"], ".4f", "mean"),
            interval(r["dppl_pct"], "+.2f"),
            f"{r['top1_pct']['value']:.1f}",
            r["grade"],
        )
        yield f"| {' | '.join(cells)} |"


def _by_family(row: Row) -> tuple[int, str, int]:
    """In the order of the families, then of the codecs and the models."""
    family = next(
        (i for i, belongs in enumerate(FAMILIES.values()) if belongs(row["codec"])), len(FAMILIES)
    )
    return family, row["codec"], list(NAMES).index(row["model"])


def sizes(rows: Sequence[Row]) -> str:
    """How many windows and scored tokens."""
    return "; ".join(
        dict.fromkeys(f"{r['windows']} windows, {r['tokens']:,} scored tokens" for r in rows)
    )


def shorter(codec: str) -> str:
    """Without what all rows of a table share, and with the bits where they are the default."""
    codec = re.sub(r"\b(int|hadamard)(?=;|$)", r"\1(bits=4)", codec).replace(
        "(norm=", "(bits=4, norm="
    )
    return codec.replace(", weights=measured", "").replace(", ", ",")


if __name__ == "__main__":
    main()
