"""A trained head in a real vLLM, engine after engine in one process: acceptance by position and
prompt, losslessness, speed.

    python heads_serve.py MODEL HEAD RESULTS.json --row bf16 --row int4-g128 --row
    bf16+kv-turboquant_4bit_nc --row "bf16|zeros"
        [--off bf16,fp8] [--speed bf16 --compilation JSON] [--options '{"kv_cache_memory_bytes":
        2147483648}'] [--start-lock FILE]

A row is TARGET or TARGET|HEAD, named as by `assay heads try`: what vLLM has itself (fp8 weights, KV
caches in fp8 and TurboQuant) it does itself; other weights are rounded first and written as bf16;
`kv-fp8-calibrated` has one scale a layer and stream in the checkpoint; `w4a16-g128` is int4 in a
checkpoint that vLLM's own kernels read. The prompts are those that `assay heads train` held out.
What each step of each request adds to its text is what was accepted, so a prompt is a cluster of
the intervals; the counters of /metrics stand beside it. The log of each row is read by `assay
spec`. Targets of `--off` are served without a head too, and the texts go through the test of `assay
spec --lossless`. Targets of `--speed` are timed with and without a head: one request at a time, and
`--batch` at once.

A row that is in RESULTS is not served again, one that ended the process neither: run the same
command again to go on.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from assay.engines.vllm.cache_names import PREFIX, name_caches
from assay.runs import write_atomically
from assay.speculation.completions import TOP
from assay.speculation.lossless import GREEDY_TOKENS, SAMPLED_TOKENS, judge_texts
from assay.speculation.options import SpecOptions
from assay.speculation.partings import Tokens
from assay.speculation.spec import examine
from assay.speculation.traffic import PROMPTS
from assay.stats import mean_interval
from assay.verdict import jsonable
from assay_lab.heads.acceptance import Acceptance
from assay_lab.heads.drafting import Walk
from assay_lab.heads.export import MTP_FILE, read_head, write_head
from assay_lab.heads.head_states import HEADS, head_state
from assay_lab.heads.model import RmsNorm
from assay_lab.heads.prompts import HELD_OUT, KINDS, prompts
from assay_lab.heads.targets import CALIBRATED, WEIGHTS, calibration_texts, changed
from assay_lab.heads.text import with_transformers

DEPTH = 4


# Heads and targets as folders.


def damaged(head: Path, state: str, folder: Path, target: Path | None = None) -> Path:
    """A copy of the head in a state of `assay heads try`, or with norms stored as w − 1, as a
    loader would leave it.
    """
    shutil.copytree(head, folder, ignore=shutil.ignore_patterns("text", "*.pt"))
    tensors = load_file(head / "model.safetensors")
    shift = {"norms-minus-one": -1, "wrong-norm": 1}.get(state)
    if state == "zeros":
        tensors = {
            n: torch.zeros_like(t) if t.is_floating_point() else t for n, t in tensors.items()
        }
    elif shift:
        tensors = {n: t + shift if "norm" in n else t for n, t in tensors.items()}
    elif state in ("missing", "missing-layer"):
        keep = ("d2t", "t2d") if state == "missing" else ("d2t", "t2d", "fc", "norm", "lm_head")
        tensors = {n: t for n, t in tensors.items() if n.startswith(keep)}
    elif state == "embedding-swapped" and target is not None:
        weight = next(
            t
            for f in target.glob("*.safetensors")
            for n, t in load_file(f).items()
            if n.endswith("embed_tokens.weight")
        )
        order = torch.randperm(len(weight), generator=torch.Generator().manual_seed(11))
        tensors["embed_tokens.weight"] = weight[order].contiguous()
    elif state in HEADS:
        write_head(
            folder,
            head_state(read_head(head), state),
            json.loads((head / "training.json").read_text()),
        )
        return folder
    else:
        raise ValueError(state)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def head_folder(head: Path, state: str, folder: Path, model: Path, work: Path) -> Path:
    """The head in this state as vLLM is to load it: an MTP layer stands in the checkpoint of its
    target, `folder`.
    """
    place = Path(tempfile.mkdtemp(dir=work)) / "head"
    if not (head / MTP_FILE).exists():
        return head if state in ("", "bf16") else damaged(head, state, place, model)
    if state == "embedding-swapped":
        raise ValueError("vLLM shares the target's embedding with an MTP layer")
    layer = head_state(read_head(head), state or "bf16")
    with torch.no_grad():
        for module in layer.modules():
            if state == "wrong-norm" and isinstance(module, RmsNorm):
                module.weight += 1
    write_head(place, layer, json.loads((head / "training.json").read_text()), target=folder)
    return place


def served_target(
    model: Path, name: str, work: Path, a: argparse.Namespace
) -> tuple[Path, dict[str, Any]]:
    """(the folder that vLLM is to serve for this target, its arguments)."""
    weights, _, cache = name.partition("+kv-")
    options: dict[str, Any] = {"kv_cache_dtype": cache.partition("-")[0]} if cache else {}
    if weights == "fp8":
        options["quantization"] = "fp8"
    packed = weights == "w4a16-g128"
    rounded = weights in (*WEIGHTS, *CALIBRATED) and weights != "fp8" and not packed
    if not rounded and not packed and cache != "fp8-calibrated":
        return model, options
    folder = work / name.replace("+", "_")
    if (folder / "config.json").exists():
        return folder, options
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)

    def texts() -> list[list[int]]:
        kept = work / "calibration.json"
        if not kept.exists():
            write, every = (
                with_transformers(target, tokenizer),
                prompts(tokenizer, a.prompts, a.text),
            )
            write_atomically(kept, json.dumps(calibration_texts(every, write, a.tokens)))
        found: list[list[int]] = json.loads(kept.read_text())
        return found

    with changed(target, weights if rounded else "bf16", texts):
        target.save_pretrained(folder)
    for file in model.glob("*token*"):
        shutil.copy(file, folder)
    scales = largest(target, texts()) if cache == "fp8-calibrated" else []
    target.cpu(), torch.cuda.empty_cache()
    if packed:
        pack_int4(folder, 128)
    if scales:
        add_scales(folder, scales)
    return folder, options


def pack_int4(folder: Path, group: int) -> None:
    """Linear layers as codes of 4 bits, symmetric, with a scale a group, as llm-compressor writes
    them: an engine's own int4 kernels read that.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, w in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = w
            continue
        grouped = w.float().reshape(len(w), -1, group)
        scale = (grouped.abs().amax(-1, keepdim=True) / 7).clamp_min(1e-12).to(w.dtype)
        codes = (
            (torch.round(grouped / scale.float()).clamp(-8, 7) + 8)
            .to(torch.int64)
            .reshape(len(w), -1, 8)
        )
        words = (codes << torch.arange(0, 32, 4)).sum(-1)
        stem = name.removesuffix(".weight")
        tensors[f"{stem}.weight_packed"] = (words - (words >= 1 << 31).long() * (1 << 32)).to(
            torch.int32
        )
        tensors[f"{stem}.weight_scale"], tensors[f"{stem}.weight_shape"] = (
            scale[..., 0].contiguous(),
            torch.tensor(w.shape),
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group,
        "dynamic": False,
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


@torch.no_grad()
def largest(target: Any, texts: Sequence[list[int]]) -> list[tuple[float, float]]:
    """The largest key (after RoPE) and value of each layer."""
    tops: list[tuple[float, float]] = []
    for ids in texts:
        held = target(
            torch.tensor([ids], device=target.device), use_cache=True
        ).past_key_values.layers
        own = [(float(x.keys.abs().max()), float(x.values.abs().max())) for x in held]
        tops = [(max(a, c), max(b, d)) for (a, b), (c, d) in zip(tops or own, own, strict=True)]
    return tops


def add_scales(folder: Path, tops: Sequence[tuple[float, float]]) -> None:
    """Scales of keys and values, as llm-compressor writes them."""
    save_file(
        {
            f"model.layers.{i}.self_attn.{n}_scale": torch.tensor([x / 448])
            for i, own in enumerate(tops)
            for n, x in zip("kv", own, strict=True)
        },
        folder / "scales.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {},
        "ignore": ["re:.*"],
        "kv_cache_scheme": {
            "num_bits": 8,
            "type": "float",
            "strategy": "tensor",
            "dynamic": False,
            "symmetric": True,
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


# The engine.


@contextlib.contextmanager
def heard(log: Path) -> Iterator[None]:
    """Whatever this process and its libraries print goes into `log`."""
    sys.stdout.flush(), sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with log.open("w") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        for number, old in enumerate(kept, 1):
            os.dup2(old, number)
            os.close(old)


@contextlib.contextmanager
def engine(
    a: argparse.Namespace,
    folder: Path,
    options: dict[str, Any],
    head: Path | None,
    eager: bool = True,
) -> Iterator[Any]:
    """One engine in this process; nothing of it is left behind."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    speculative = (
        {"method": "eagle3", "model": str(head), "num_speculative_tokens": DEPTH} if head else None
    )
    if head and (head / MTP_FILE).exists():
        folder, speculative = head, {"method": "mtp", "num_speculative_tokens": DEPTH}
    if options.get("kv_cache_dtype", "").startswith(PREFIX):
        name_caches(
            options["kv_cache_dtype"]
        )  # what model runner V1 needs, and V2 does not ask for
    llm = None
    try:
        with contextlib.ExitStack() as starting:
            if a.start_lock:
                fcntl.flock(starting.enter_context(Path(a.start_lock).open("w")), fcntl.LOCK_EX)
            llm = LLM(
                str(folder),
                max_model_len=a.max_model_len,
                max_num_seqs=a.batch if not eager else 128,
                enforce_eager=eager,
                seed=0,
                enable_prefix_caching=False,
                disable_log_stats=False,
                speculative_config=speculative,
                **json.loads(a.options)
                | options
                | ({} if eager else {"compilation_config": json.loads(a.compilation)}),
            )
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def answers(
    llm: Any, asked: Sequence[list[int]], tokens: int, temperature: float, seed: int = 1
) -> list[tuple[int, list[int]]]:
    """By prompt, all at once: tokens written, and by how many the text grew at each step after the
    first.
    """
    from vllm import SamplingParams

    core = llm.llm_engine
    known, grown = [0] * len(asked), [[] for _ in asked]
    for i, ids in enumerate(asked):
        drawn = SamplingParams(
            temperature=temperature,
            max_tokens=tokens,
            seed=seed + i if temperature else None,
            detokenize=False,
        )
        core.add_request(f"{time.monotonic_ns()}-{i}", {"prompt_token_ids": ids}, drawn)
    while core.has_unfinished_requests():
        for out in core.step():
            i, now = int(out.request_id.split("-")[1]), len(out.outputs[0].token_ids)
            if now > known[i]:
                if known[i]:
                    grown[i].append(now - known[i])
                known[i] = now
    return list(zip(known, grown, strict=True))


def acceptance(
    asked: Sequence[tuple[str, list[int]]], found: Sequence[tuple[int, list[int]]]
) -> dict[str, Any]:
    """As a row of `assay heads try`; the last step of a text, which its end may cut, is left
    out.
    """
    walks = [
        (
            Walk(len(g) - 1, tuple(sum(n > j + 1 for n in g[:-1]) for j in range(DEPTH)))
            if len(g) > 1
            else Walk(0, ())
        )
        for _, g in found
    ]
    by = {
        k: Acceptance.of(
            [w for w, (kind, _) in zip(walks, asked, strict=True) if k in ("all", kind)]
        )
        for k in ("all", *KINDS)
    }
    if by["all"] is None:
        return {}
    kinds = {
        k: {"positions": [vars(p) for p in v.positions], "tokens_per_step": vars(v.tokens_per_step)}
        for k, v in by.items()
        if v and k != "all"
    }
    row: dict[str, Any] = jsonable({**vars(by["all"]), "kinds": kinds})
    return row


def counters(llm: Any) -> dict[str, Any]:
    """Steps and accepted drafts by position since the engine began."""
    found: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # what /metrics shows stands beside the rows only
        llm.llm_engine.do_log_stats()
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            found["steps"] = metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            found["counts"] = list(metric.values)
    return found


def completions(
    llm: Any, texts: Sequence[str], tokens: int, temperature: float, seeds: Sequence[int]
) -> list[Tokens]:
    """Texts with the alternatives of every token, as /v1/completions gives them."""
    from vllm import SamplingParams

    asked = [
        SamplingParams(temperature=temperature, max_tokens=tokens, seed=s, logprobs=TOP)
        for s in seeds
    ]
    found = []
    for out in llm.generate(list(texts), asked, use_tqdm=False):
        own = out.outputs[0]
        places = [
            {e.decoded_token or "": e.logprob for e in place.values()} for place in own.logprobs
        ]
        chosen = [place[i] for place, i in zip(own.logprobs, own.token_ids, strict=True)]
        found.append(
            Tokens(
                tuple(c.decoded_token or "" for c in chosen),
                tuple(c.logprob for c in chosen),
                tuple(places),
            )
        )
    return found


def texts_of(
    llm: Any, prompts: int, samples: int
) -> tuple[list[Tokens], list[Tokens], list[tuple[str, ...]]]:
    """What `assay spec --lossless` asks a server for: greedy texts one by one, the same at once,
    and sampled texts.
    """
    texts = [PROMPTS[i % len(PROMPTS)] for i in range(prompts)]
    first = [completions(llm, [t], GREEDY_TOKENS, 0.0, [0])[0] for t in texts]
    again = completions(llm, texts, GREEDY_TOKENS, 0.0, [0] * prompts)
    drawn = completions(llm, [PROMPTS[0]] * samples, SAMPLED_TOKENS, 1.0, range(1, samples + 1))
    return first, again, [t.texts for t in drawn]


def timed(llm: Any, asked: Sequence[list[int]], tokens: int, batch: int) -> dict[str, list[float]]:
    """Tokens a second of each prompt alone, and of each batch."""

    def speed(part: Sequence[list[int]]) -> float:
        began = time.perf_counter()
        return sum(n for n, _ in answers(llm, part, tokens, 0.0)) / (time.perf_counter() - began)

    speed(asked[:1]), speed(asked[:batch])  # warm
    batches = [asked[i : i + batch] for i in range(0, len(asked) - batch + 1, batch)]
    return {"1": [speed([p]) for p in asked[:16]], str(batch): [speed(b) for b in batches]}


# Rows.


def serve(
    a: argparse.Namespace,
    name: str,
    work: Path,
    asked: list[tuple[str, list[int]]],
    off: dict[str, Any],
) -> dict[str, Any]:
    """The rows of one engine, by temperature."""
    target, _, state = name.partition("|")
    folder, options = served_target(Path(a.model), target, work, a)
    head = head_folder(Path(a.head), state, folder, Path(a.model), work)
    if target in a.off and target not in off and state in ("", "bf16"):
        with engine(a, folder, options, None) as llm:
            off[target] = texts_of(llm, a.lossless, a.samples)
    rows: dict[str, Any] = {}
    log, own_log = work / "engine.log", work / "spec.log"
    began, begin = time.monotonic(), log.stat().st_size
    with engine(a, folder, options, head) as llm:
        started = round(time.monotonic() - began, 1)
        before, start = counters(llm), log.read_bytes()[begin:]
        for temperature in a.temperatures:
            begin = log.stat().st_size
            began = time.monotonic()
            found = answers(llm, [ids for _, ids in asked], a.tokens, temperature)
            seconds = time.monotonic() - began
            now = counters(llm)
            own = {"steps": now.get("steps", 0) - before.get("steps", 0)} | {
                "counts": [
                    x - y
                    for x, y in zip(
                        now.get("counts", []), before.get("counts", [0] * DEPTH), strict=False
                    )
                ]
            }
            before = now
            own_log.write_bytes(start + log.read_bytes()[begin:])
            asked_of = SpecOptions(
                num_speculative_tokens=DEPTH, model=str(head), temperature=temperature
            )
            report = examine([str(own_log)], asked_of)
            rows[f"{target}|{state or 'bf16'}|{temperature:g}"] = acceptance(asked, found) | {
                "engine": own,
                "tokens": sum(n for n, _ in found),
                "seconds": round(seconds, 2),
                "start_s": started,
                "spec": jsonable(
                    {
                        "health": report.results["health"],
                        "findings": [f.id for f in report.findings],
                        "start_up": report.results["start_up"],
                        "causes": [
                            c
                            for f in report.findings
                            if f.id.startswith("speculation.head_")
                            for c in f.causes
                        ][:3],
                    }
                ),
            }
        if state in ("", "bf16") and target in off:
            first, again, drawn = off[target]
            on = texts_of(llm, a.lossless, a.samples)
            rows[f"{target}|bf16|0"]["lossless"] = jsonable(
                judge_texts(on[0], first, again, (on[2], drawn)).to_json()
            )
    return rows


def race(a: argparse.Namespace, target: str, work: Path, asked: list[list[int]]) -> dict[str, Any]:
    """Tokens a second with and without the head, and their quotient by prompt (or batch): the
    geometric mean with its interval.
    """
    folder, options = served_target(Path(a.model), target, work, a)
    found: dict[str, dict[str, list[float]]] = {}
    for name, head in (
        ("off", None),
        ("on", head_folder(Path(a.head), "", folder, Path(a.model), work)),
    ):
        with engine(a, folder, options, head, eager=a.compilation == "eager") as llm:
            found[name] = timed(llm, asked, a.tokens, a.batch)
    import numpy as np

    return {
        batch: {
            "off": float(np.mean(found["off"][batch])),
            "on": float(np.mean(found["on"][batch])),
            "n": len(found["on"][batch]),
            "quotient": (lambda i: np.exp([i.value, i.lo, i.hi]).tolist())(
                mean_interval(np.log(np.divide(found["on"][batch], found["off"][batch])).tolist())
            ),
        }
        for batch in found["on"]
        if len(found["on"][batch]) > 1
    }


def main() -> None:
    """Serve what is not there yet; each row is written before the next begins."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("model", "head", "results"):
        parser.add_argument(name)
    parser.add_argument("--row", action="append", default=[])
    parser.add_argument("--off", type=lambda s: s.split(","), default=[])
    parser.add_argument("--speed", type=lambda s: s.split(","), default=[])
    parser.add_argument(
        "--temperatures", type=lambda s: [float(t) for t in s.split(",")], default=[0.0, 0.7]
    )
    parser.add_argument("--options", default="{}", help="JSON: more arguments of vllm.LLM")
    parser.add_argument(
        "--compilation",
        default='{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}',
        help="JSON, or eager: of --speed",
    )
    parser.add_argument("--start-lock", default="")
    parser.add_argument("--texts", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--prompts", type=int, default=6000)
    parser.add_argument("--text", action="append", default=[])
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lossless", type=int, default=8, help="greedy texts")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--work", default="", help="folder of the targets that are written")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after so many")
    a = parser.parse_args()
    ends, path, work = (
        time.monotonic() + a.seconds,
        Path(a.results),
        Path(a.work or tempfile.mkdtemp()),
    )
    work.mkdir(parents=True, exist_ok=True)
    held = (
        json.loads(path.read_text()) if path.exists() else {"rows": {}, "speed": {}, "failed": {}}
    )
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    asked = prompts(tokenizer, a.prompts, a.text)[::HELD_OUT][: a.texts]
    off: dict[str, Any] = {}

    def save() -> None:
        write_atomically(path, json.dumps(held, indent=1) + "\n")

    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOG_STATS_INTERVAL": "1"}
    import vllm

    held["engine"] = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "texts": len(asked),
        "tokens": a.tokens,
        "depth": DEPTH,
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU",
    }
    for name in [*a.row, *(f"speed {t}" for t in a.speed)]:
        target, _, state = name.partition("|")
        done = (
            f"{target}|{state or 'bf16'}|{a.temperatures[0]:g}" in held["rows"]
            or name.removeprefix("speed ") in held["speed"]
        )
        if done or name in held["failed"] or time.monotonic() > ends:
            continue
        held["failed"][name] = "the process ended while it was served"
        save()
        began = time.monotonic()
        try:
            if name.startswith("speed "):
                held["speed"][name[6:]] = race(a, name[6:], work, [ids for _, ids in asked]) | {
                    "compilation": a.compilation
                }
            else:
                with heard(work / "engine.log"):
                    found = serve(a, name, work, asked, off)
                held["rows"] |= found
            del held["failed"][name]
        except Exception as error:
            held["failed"][name] = f"{type(error).__name__}: {error}"[:600]
            shutil.copy(
                work / "engine.log",
                path.with_name(f"{path.stem}_{name.replace('|', '_').replace(' ', '_')}.log"),
            )
            if "CUDA" in str(error):  # this process cannot use the device any more
                save()
                os._exit(3)
        save()
        print(
            name,
            f"{time.monotonic() - began:.0f} s",
            held["failed"].get(name, ""),
            file=sys.stderr,
            flush=True,
        )
    os._exit(0)  # threads of an engine that linger would keep the caller waiting


if __name__ == "__main__":
    main()
