"""Which twins `assay check --identity` tells apart, and what `--determinism` finds, on real servers on the CPU.

    bash benchmarks/build_llama_cpp.sh
    python benchmarks/identity.py take NAME...     # bf16 bf16_seed7 q8_0 q4_0 q4_1 qwen05 qwen15 (llama-server), vllm
    python benchmarks/identity.py judge            # compares all pairs that were taken; writes the results

SmolLM2-135M-Instruct comes as a GGUF file of Q4_1; `bf16` is that file with its weights written as bf16, `q8_0` and `q4_0`
are rounded from it once more (by the package gguf), `q4_1` is the file itself (the same numbers as bf16, in other kernels), `vllm` serves the
checkpoint in bf16, and benchmarks/watch_alarms.py adds its twins `vllm_int8` and so on. Each is asked twice: the first is the reference of every pair, the second what is examined.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from assay.coherence.determinism import measure_determinism
from assay.coherence.identity import Print, compare_prints, read_print, take, write_print
from assay.demo.models import QWEN05, QWEN15, SMOLLM2, build_smollm2, gguf_of
from assay.demo.servers import Server, llama_server, vllm_server
from assay.engines.server.engine import ServerEngine
from assay.environment import describe
from assay.runs import cache_dir

OUT = Path(__file__).parent / "results" / "identity.json"
BINARY = cache_dir("llama.cpp") / "bin" / "llama-server"
FILES = {"q4_1": SMOLLM2, "qwen05": QWEN05, "qwen15": QWEN15}


def rounded(source: Path, target: Path, kind: str) -> None:
    """A copy of a GGUF file whose quantised tensors are of another type, from the numbers that they stand for."""
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
    file = folder / f"{kind}.gguf"
    if kind in FILES:
        file = gguf_of(FILES[kind])
    elif not file.exists():
        rounded(gguf_of(SMOLLM2), file, kind.upper())
    more = ("--seed", seed) if seed else ()
    with llama_server(file, BINARY, max_model_len=512, streams=8, extra_args=more) as server:
        yield server


def keep(url: str, name: str, folder: Path, *, determinism: bool) -> None:
    """Take the fingerprint of a running server, and again as a reference with its noise."""
    with ServerEngine.connect(url) as engine:
        began = time.monotonic()
        write_print(take(engine), folder / f"{name}.found.json")
        kept: dict[str, Any] = {"seconds_to_check": time.monotonic() - began}
        write_print(take(engine, noise=True), folder / f"{name}.reference.json")
        if determinism:
            kept["determinism"] = measure_determinism(engine).to_json()
        (folder / f"{name}.more.json").write_text(json.dumps(kept))
    print(name, kept["seconds_to_check"], flush=True)


def take_all(names: list[str], folder: Path) -> None:
    for name in names:
        with serve(name, folder) as server:
            keep(server.url, name, folder, determinism=name in ("bf16", "vllm", "qwen05"))


def with_less(reference: Print, found: Print) -> dict[str, str]:
    """The decision where the server gives less, or where the reference comes from another kind of engine."""

    def tokens(side: Print) -> Print:
        plain = tuple(tuple(replace(item, likely={}) for item in text) for text in side.items)
        return replace(side, items=plain, nats=())

    return {
        "greedy tokens alone": compare_prints(tokens(reference), tokens(found)).decision,
        "scores alone": compare_prints(replace(reference, items=()), found).decision
        if reference.nats and found.nats
        else "",
        "allowance of another engine": compare_prints(replace(reference, kind="another"), found).decision,
    }


def judge(folder: Path) -> None:
    names = sorted(p.name.removesuffix(".more.json") for p in folder.glob("*.more.json"))
    prints = {
        (n, side): read_print(folder / f"{n}.{side}.json") for n in names for side in ("reference", "found")
    }
    pairs = []
    for a, b in product(names, names):
        found = compare_prints(prints[a, "reference"], prints[b, "found"])
        tests = {
            t.name: {"value": t.value, "lo": t.lo, "hi": t.hi, "allowed": t.allowed, "decision": t.decision}
            for t in found.tests
        }
        pair = {
            "reference": a,
            "examined": b,
            "decision": found.decision,
            "tokenizer": found.tokenizer,
            "tests": tests,
        }
        pairs.append(pair | {"with_less": with_less(prints[a, "reference"], prints[b, "found"])})
    more = {n: json.loads((folder / f"{n}.more.json").read_text()) for n in names}
    out = {
        "about": __doc__, "noise": {n: prints[n, "reference"].noise for n in names}, "pairs": pairs, "more": more,
        "servers": {n: prints[n, "reference"].server for n in names}, "environment": describe(),
    }  # fmt: skip
    OUT.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    for pair in pairs:
        values = ", ".join(
            f"{k} {t['value']:.4f} [{t['lo']:.4f}, {t['hi']:.4f}]" for k, t in pair["tests"].items()
        )
        print(f"{pair['reference']:>10} {pair['examined']:>10} {pair['decision']:>10} {values}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("take", "judge"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/assay-identity"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.what == "take":
        take_all(arguments.names, arguments.folder)
    else:
        judge(arguments.folder)


if __name__ == "__main__":
    main()
