"""Which twins `assay check --identity` tells apart, and what `--determinism` finds, on real
servers.

    bash benchmarks/build/build_llama_cpp.sh python benchmarks/check/identity.py take NAME...     #
    served by llama-server on the CPU, or vllm python benchmarks/check/identity.py at NAME URL
    # a server that is up already python benchmarks/check/identity.py judge            # compares
    all pairs of one model; writes the results python benchmarks/check/identity.py table
    # puts the table of the results into docs/check.md

A name is [MODEL_]TYPE[_seedN], with MODEL qwen05 or qwen15 (else SmolLM2-135M-Instruct). The
model's GGUF file is of four bits; `bf16` is that file with its weights written as bf16, `q8_0` and
`q4_0` are rounded from it once more (by the package gguf), `q4_1` is SmolLM2's file itself (the
same numbers as bf16, in other kernels). `vllm` serves SmolLM2's checkpoint in bf16,
benchmarks/watch/watch_alarms.py adds its twins `vllm_int8` and so on, and on a GPU `at` adds those
of Qwen 1.5B (`gpu15_bf16`, …). A server is asked twice: the first time as what is examined, the
second time, one request at a time too, as a reference; with `--found-only` just the first.

How often another draw of texts would give each answer: 1,000 times twelve of the twelve texts are
drawn with replacement (of the pairs in the table).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from assay.coherence.determinism import measure_determinism
from assay.coherence.fingerprint import Fingerprint, read_fingerprint, write_fingerprint
from assay.coherence.identity import compare_fingerprints
from assay.coherence.take_fingerprint import take_fingerprint
from assay.demo import Server, llama_server, vllm_server
from assay.demo.models import QWEN05, QWEN15, SMOLLM2, build_smollm2, gguf_of
from assay.engines.server.engine import ServerEngine
from assay.environment import describe
from assay.runs import cache_dir

OUT = Path(__file__).parent / "results" / "identity.json"
BINARY = cache_dir("llama.cpp") / "bin" / "llama-server"
DOCS = Path(__file__).parents[2] / "docs" / "check.md"
MODELS = {"qwen05": QWEN05, "qwen15": QWEN15}
RESAMPLES = 1000


def rounded(source: Path, target: Path, kind: str) -> None:
    """A copy of a GGUF file whose quantised tensors are of another type, from the numbers that they
    stand for.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub)
    wanted = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        data, own = tensor.data, tensor.tensor_type
        if own not in (gguf.GGMLQuantizationType.F32, wanted):
            data, own = gguf.quants.quantize(gguf.quants.dequantize(data, own), wanted), wanted
        writer.add_tensor(tensor.name, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextmanager
def serve(name: str, folder: Path) -> Iterator[Server]:
    if name == "vllm":
        with vllm_server(build_smollm2(), name="smollm2") as server:
            yield server
        return
    kind, _, seed = name.partition("_seed")
    slug, _, rest = kind.partition("_")
    slug, kind = (slug, rest) if slug in MODELS else ("", kind)
    source = gguf_of(MODELS.get(slug, SMOLLM2))
    file = source if kind == "q4_1" else folder / f"{slug}{'_' * bool(slug)}{kind}.gguf"
    if not file.exists():
        rounded(source, file, kind.upper())
    more = ("--seed", seed) if seed else ()
    with llama_server(file, BINARY, max_model_len=512, streams=8, extra_args=more) as server:
        yield server


def keep(url: str, name: str, folder: Path, *, determinism: bool, found_only: bool = False) -> None:
    """Take the fingerprint of a running server, and again as a reference with its noise."""
    with ServerEngine.connect(url) as engine:
        began = time.monotonic()
        write_fingerprint(take_fingerprint(engine), folder / f"{name}.found.json")
        kept: dict[str, Any] = {
            "seconds_to_check": time.monotonic() - began,
            "environment": describe(),
        }
        (folder / f"{name}.more.json").write_text(json.dumps(kept))
        if not found_only:
            write_fingerprint(
                take_fingerprint(engine, noise=True), folder / f"{name}.reference.json"
            )
        if determinism:
            kept["determinism"] = measure_determinism(engine).to_json()
        (folder / f"{name}.more.json").write_text(json.dumps(kept))
    print(name, kept["seconds_to_check"], flush=True)


def with_less(reference: Fingerprint, found: Fingerprint) -> dict[str, str]:
    """The decision where the server gives less, or where the reference comes from another kind of
    engine.
    """

    def tokens(side: Fingerprint) -> Fingerprint:
        plain = tuple(tuple(replace(item, likely={}) for item in text) for text in side.items)
        return replace(side, items=plain, nats=())

    return {
        "greedy tokens alone": compare_fingerprints(tokens(reference), tokens(found)).decision,
        "scores alone": (
            compare_fingerprints(replace(reference, items=()), found).decision
            if reference.nats and found.nats
            else ""
        ),
        "allowance of another engine": (
            compare_fingerprints(replace(reference, kind="another"), found).decision
        ),
    }


def resampled(reference: Fingerprint, found: Fingerprint) -> dict[str, int]:
    """How often each answer came, the texts drawn anew."""
    rng = np.random.default_rng(0)

    def drawn(side: Fingerprint, which: list[int]) -> Fingerprint:
        return replace(
            side,
            items=tuple(side.items[i] for i in which),
            nats=tuple(side.nats[i] for i in which) if side.nats else (),
        )

    draws = (rng.integers(0, len(found.items), len(found.items)).tolist() for _ in range(RESAMPLES))
    return dict(
        Counter(compare_fingerprints(drawn(reference, w), drawn(found, w)).decision for w in draws)
    )


def model_of(name: str) -> str:
    """Which model a name is of."""
    first = name.split("_")[0]
    return {"qwen05": QWEN05, "gpu05": QWEN05, "qwen15": QWEN15, "gpu15": QWEN15}.get(
        first, SMOLLM2
    ).title


def judge(folder: Path) -> None:
    names = sorted(p.name.removesuffix(".found.json") for p in folder.glob("*.found.json"))
    names = [n for n in names if (folder / f"{n}.more.json").exists()]
    prints = {
        (n, side): read_fingerprint(folder / f"{n}.{side}.json")
        for n in names for side in ("reference", "found") if (folder / f"{n}.{side}.json").exists()
    }  # fmt: skip
    pairs = []
    for a, b in product(names, names):
        if (a, "reference") not in prints or model_of(a) != model_of(b):
            continue
        reference, examined = prints[a, "reference"], prints[b, "found"]
        found = compare_fingerprints(reference, examined)
        tests = {
            t.name: {
                "value": t.value,
                "lo": t.lo,
                "hi": t.hi,
                "allowed": t.allowed,
                "decision": t.decision,
            }
            for t in found.tests
        }
        pairs.append(
            {
                "model": model_of(a),
                "reference": a,
                "examined": b,
                "decision": found.decision,
                "tokenizer": found.tokenizer,
                "tests": tests,
                "resampled": resampled(reference, examined) if (a, b) in SHOWN[model_of(a)] else {},
                "with_less": with_less(reference, examined),
            }
        )
    more = {n: json.loads((folder / f"{n}.more.json").read_text()) for n in names}
    out = {
        "about": __doc__,
        "noise": {n: prints[n, "reference"].noise for n in names if (n, "reference") in prints},
        "pairs": pairs,
        "more": more,
        "servers": {n: prints[n, "found"].server for n in names},
        "resamples": RESAMPLES,
        "environment": describe(),
    }
    OUT.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    print(table(out))


SHOWN = {
    "SmolLM2-135M-Instruct": (
        ("vllm_healthy", "vllm_healthy"),
        ("vllm_healthy", "bf16"),
        ("bf16", "bf16_seed7"),
        ("bf16", "q8_0"),
        ("bf16", "q4_0"),
        ("vllm_healthy", "vllm_int8"),
        ("vllm_healthy", "q8_0"),
        ("bf16", "vllm_int8"),
        ("vllm_healthy", "vllm_int6"),
        ("vllm_healthy", "vllm_int4"),
    ),
    "Qwen2.5-Coder-0.5B-Instruct": (
        *(("qwen05_bf16", f"qwen05_{b}") for b in ("bf16", "bf16_seed7", "q8_0", "q4_0")),
        *(("gpu05_bf16", f"gpu05_{b}") for b in ("bf16", "fp8_kv", "fp8")),
        ("gpu05_bf16", "qwen05_bf16"),
    ),
    "Qwen2.5-Coder-1.5B-Instruct": tuple(
        ("gpu15_bf16", f"gpu15_{b}") for b in ("bf16", "bf16_seed7", "fp8_kv", "fp8")
    ),
}
"""Pairs of the table in docs/check.md, reference first."""
WORDS = {
    "seed7": "another seed",
    "int8": "weights of 8 bits, a scale a row",
    "int6": "weights of 6 bits",
    "int4": "weights of 4 bits",
    "fp8": "weights in fp8",
    "kv": "KV cache in fp8",
    "q8_0": "Q8_0",
    "q4_0": "Q4_0",
    "bf16": "bf16",
    "healthy": "bf16",
}


def words(name: str) -> str:
    """A name of a server as the table shows it."""
    engine = (
        "vLLM on a GPU"
        if name.startswith("gpu")
        else "vLLM"
        if name.startswith("vllm")
        else "llama.cpp"
    )
    kind = "kv" if name.endswith("fp8_kv") else next(k for k in WORDS if name.endswith(k))
    return f"{engine}, {WORDS[kind]}"


def table(results: dict[str, Any]) -> str:
    """The table of docs/check.md."""
    lines = [
        (
            "| model | reference | examined | probability that moved (bounds) | answer | of 1,000"
            " resamples: different, undecided, same |"
        ),
        "|---|---|---|---|---|---|",
    ]
    by = {(p["reference"], p["examined"]): p for p in results["pairs"]}
    for model, shown in SHOWN.items():
        for pair in filter(None, map(by.get, shown)):
            t, often = pair["tests"]["moved"], pair["resampled"]
            counts = ", ".join(str(often.get(k, 0)) for k in ("different", "undecided", "same"))
            lines.append(
                f"| {model.split('-Inst')[0]} | {words(pair['reference'])} |"
                f" {words(pair['examined'])} | {t['value']:.4f} ({t['lo']:.4f} to {t['hi']:.4f}) |"
                f" {pair['decision']} | {counts} |"
            )
    return "\n".join(lines)


def write_table() -> None:
    """Put the table between its two comments in docs/check.md."""
    head, _, rest = DOCS.read_text(encoding="utf-8").partition("<!-- identity -->\n")
    _, _, tail = rest.partition("<!-- end of identity -->\n")
    body = table(json.loads(OUT.read_text(encoding="utf-8")))
    DOCS.write_text(
        f"{head}<!-- identity -->\n{body}\n<!-- end of identity -->\n{tail}", encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("take", "at", "judge", "table"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/assay-identity"))
    parser.add_argument("--found-only", action="store_true")
    arguments = parser.parse_args()
    folder, names = arguments.folder, arguments.names
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.what == "at":
        keep(
            names[1],
            names[0],
            folder,
            determinism=names[0].endswith("bf16"),
            found_only=arguments.found_only,
        )
    elif arguments.what == "take":
        for name in names:
            with serve(name, folder) as server:
                keep(
                    server.url,
                    name,
                    folder,
                    determinism=name in ("bf16", "vllm"),
                    found_only=arguments.found_only,
                )
    elif arguments.what == "judge":
        judge(folder)
    else:
        write_table()


if __name__ == "__main__":
    main()
