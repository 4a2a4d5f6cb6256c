"""Each hand-made twin of a torch routine, where it is used, beside plain torch and torch.compile.

    python kernel_speed.py [--rounds 9] [--out results/kernels_cpu.json]
    python kernel_speed.py --gpu [--out results/kernels_gpu.json]

A twin stays where it is twice as fast in use as the better of the two. Uses on a CPU: one stream of
1,024 tokens shaped like SmolLM2's (3 heads of 64) through a codec, the round trip of what a step of
decoding codes (8 windows, one token each), fitting, and `assay kv eval` of SmolLM2-135M as a whole.
Uses on a GPU: logits and statistics of scored tokens, and the round trip of 32,768 tokens.

Forms take turns, in reverse order every other round. On a CPU one thread is used and the
processor's time counts, which other programs disturb less than the clock; on a GPU the clock
counts, after the device is done. `first_s` is what the first call took: for torch.compile mostly
the compiler. `differs` is the share of values or bytes that are not the twin's.

Rows that the results file has are not measured again: delete it to begin anew.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from assay.environment import describe
from assay.fidelity.metrics.row_sums import row_sums
from assay.fidelity.metrics.token_statistics import row_statistics
from assay_lab import trellis
from assay_lab.kv import measured as measured_windows
from assay_lab.kv.codecs import cheapest_numbers
from assay_lab.kv.codecs.samples import Samples
from assay_lab.kv.hook_plan import _KEPT_CODERS
from assay_lab.kv.spec import parse_recipe
from kv_codec_speed import SITE, values

Form = Callable[[], AbstractContextManager[Any]]
Use = Callable[[], Any]
Plan = tuple[str, str, Mapping[str, Form], Callable[[], dict[str, Use]], int]
"""The twin, the codec, the forms, what prepares the uses, and the rounds."""
RESULTS = Path(__file__).parent / "results"
GPU = "cuda"
AROUND = "prerope+sinks(n=4)+"


# Forms of the routines.


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Some attributes with other values."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def plain_search() -> AbstractContextManager[None]:
    return replaced((cheapest_numbers, "cheapest_path", trellis.by_torch))


@torch.compile(dynamic=True)
def _step(
    total: torch.Tensor, step: torch.Tensor, sources: torch.Tensor, choices: torch.Tensor
) -> Any:
    low, high = (total[:, sources[i]] + step[:, choices[i]] for i in (0, 1))
    from_high = high < low
    return from_high, torch.where(from_high, high, low)


def compiled_search() -> AbstractContextManager[None]:
    """A step of the search compiled: the whole of it, of 192 steps and more, compiles for
    minutes.
    """

    def search(costs: torch.Tensor, code: trellis.Trellis) -> torch.Tensor:
        rows, count = costs.shape[:2]
        sources, choices = (torch.from_numpy(t).to(costs.device) for t in trellis._ways(code))
        total = costs.new_full((rows, code.states), trellis._FAR)
        total[:, 0] = 0
        came = []
        for step in costs.flatten(2).unbind(1):
            from_high, total = _step(total, step, sources, choices)
            came.append(from_high)
        state = total.argmin(dim=1)
        result = torch.empty(rows, count, dtype=torch.uint8, device=costs.device)
        for j in range(count - 1, -1, -1):
            way = came[j].gather(1, state[:, None])[:, 0].long()
            result[:, j] = choices[way, state].to(torch.uint8)
            state = sources[way, state]
        return result

    return replaced((cheapest_numbers, "cheapest_path", search))


TRELLIS: dict[str, Form] = {
    "twin": nullcontext,
    "torch": plain_search,
    "torch.compile": compiled_search,
}


def measured(
    forms: Mapping[str, Form], prepare: Callable[[], dict[str, Use]], rounds: int
) -> list[dict[str, Any]]:
    """A row for each use: seconds of every form, and the twin's advantage over the best of torch
    and torch.compile.
    """
    uses: dict[str, dict[str, Use]] = {}
    first: dict[tuple[str, str], float] = {}
    outcome: dict[tuple[str, str], Any] = {}
    for name, form in forms.items():
        with form():
            uses[name] = prepare()
            for use, call in uses[name].items():
                began = time.perf_counter()
                outcome[use, name] = call()
                first[use, name] = time.perf_counter() - began
    timed: dict[tuple[str, str], list[float]] = {key: [] for key in first}
    for turn in range(rounds):
        for name in sorted(forms, key=list(forms).index, reverse=turn % 2 == 1):
            with forms[name]():
                for use, call in uses[name].items():
                    timed[use, name].append(seconds(call))
    rows = []
    for use in next(iter(uses.values())):
        best = {name: min(timed[use, name]) for name in forms}
        rivals = [best[name] for name in ("torch", "torch.compile") if name in best]
        rows.append(
            {
                "use": use,
                "seconds": best,
                "median_s": {name: statistics.median(timed[use, name]) for name in forms},
                "first_s": {name: first[use, name] for name in forms},
                "advantage": min(rivals) / best["twin"],
                "differs": {
                    name: differs(outcome[use, "twin"], outcome[use, name]) for name in forms
                },
            }
        )
        print(
            use,
            {k: f"{1e3 * v:.3g} ms" for k, v in best.items()},
            f"{rows[-1]['advantage']:.2f}×",
            flush=True,
        )
    return rows


def seconds(call: Use) -> float:
    """Of the processor, or of the clock where a GPU works."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        clock = time.perf_counter
        began = clock()
        call()
        torch.cuda.synchronize()
        return clock() - began
    began = time.process_time()
    call()
    return time.process_time() - began


def differs(one: Any, other: Any) -> float:
    """Share of bytes, or of values to five digits, that are not the same; 0 for what is no
    result.
    """
    if isinstance(one, bytes):
        return sum(a != b for a, b in zip(one, other, strict=False)) / max(1, len(one))
    if isinstance(one, torch.Tensor):
        return float((~torch.isclose(one, other, rtol=1e-5, atol=1e-7)).float().mean())
    return 0.0


# Uses on a CPU.


def stream_uses(spec: str, tokens: int = 1024) -> Callable[[], dict[str, Use]]:
    """Encoding, decoding and the round trip of one stream, and the round trip of a step of
    decoding.
    """
    calibration, x = values(4096, 1).float(), values(tokens, 2)

    def prepare() -> dict[str, Use]:
        codec = parse_recipe(spec).fit(Samples(SITE, calibration))
        stream = codec.encode(x)
        return {
            f"encode, {tokens} tokens": lambda: codec.encode(x),
            f"decode, {tokens} tokens": lambda: codec.decode(stream),
            f"encode and decode, {tokens} tokens": lambda: codec.decode(codec.encode(x)),
            f"round trip, {tokens} tokens": lambda: codec.reconstruct(x),
            "round trip, one token of 8 windows": lambda: codec.reconstruct(x[:, :8]),
        }

    return prepare


def fit_use(spec: str) -> Callable[[], dict[str, Use]]:
    calibration = values(4096, 1).float()
    return lambda: {
        "fit to 4,096 tokens": lambda: str(parse_recipe(spec).fit(Samples(SITE, calibration)).spec)
    }


def eval_uses(spec: str, skip: tuple[int, ...]) -> Callable[[], dict[str, Use]]:
    """`assay kv eval` of SmolLM2, as a whole, with the reference and loading the model; nothing
    kept is used.
    """
    import kv_texts
    from assay.demo.models import build_smollm2
    from assay.runs import cache_dir
    from assay_lab.kv.eval import run_eval
    from assay_lab.options import EvalPlan

    text = cache_dir("kernels") / "text.txt"
    text.write_text(kv_texts.python_source()[:200_000], encoding="utf-8")

    def run(mode: str) -> None:
        _KEPT_CODERS.clear()  # coders of another form
        plan = EvalPlan(
            str(build_smollm2()),
            spec,
            mode=mode,
            skip_layers=skip,
            text=(str(text),),
            windows=4,
            length=256,
            batch=4,
            calibration=str(small_calibration()),
        )
        with replaced((measured_windows, "source_digest", lambda *packages: time.time_ns())):
            run_eval(plan)

    return lambda: {f"kv eval, {mode}": partial(run, mode) for mode in ("decode", "inforward")}


def small_calibration() -> Path:
    import kv_texts
    from assay.demo.models import build_smollm2
    from assay.runs import cache_dir, write_atomically
    from assay_lab.kv.calibrate import run_calibrate
    from assay_lab.options import CalibrationPlan

    table = cache_dir("kernels") / "smollm2.safetensors"
    if not table.exists():
        text = table.with_suffix(".txt")
        write_atomically(text, kv_texts.other_source()[:400_000])
        run_calibrate(
            CalibrationPlan(
                str(build_smollm2()), table, text=(str(text),), windows=4, length=256, tokens=1016
            )
        )
    return table


def on_cpu(rounds: int) -> list[Plan]:
    """All uses of the loops for a CPU."""
    torch.set_num_threads(1)
    spec = "pca(bits=3, trellis=8)"
    both = {name: TRELLIS[name] for name in ("twin", "torch")}
    few = tuple(range(2, 28))  # four of 30 layers are coded, as fitting all takes long
    return [
        ("trellis_loops", spec, TRELLIS, stream_uses(spec), rounds),
        ("trellis_loops", f"{spec}, fitted", both, fit_use(spec), 3),
        (
            "trellis_loops",
            f"prerope+{spec}, 4 of 30 layers",
            both,
            eval_uses(f"prerope+{spec}", few),
            1,
        ),
    ]


# Uses on a GPU.


def on_gpu(rounds: int) -> list[Plan]:
    """All uses of the Triton kernels."""
    searched = "pca(bits=3, trellis=8)"
    plans: list[Plan] = [
        (
            "metrics_gpu",
            f"{rows} rows of {vocab} logits in bf16",
            STATISTICS,
            statistics_use(rows, vocab),
            rounds,
        )
        for rows, vocab in ((4096, 49_152), (4096, 151_936))
    ]
    return [*plans, ("trellis_kernel", searched, TRELLIS, gpu_round_trip(searched), rounds)]


def plain_statistics() -> AbstractContextManager[None]:
    return replaced((row_sums, "kernel_of", lambda: None))


_row_sums = torch.compile(row_sums.row_sums)


def compiled_statistics() -> AbstractContextManager[None]:
    return replaced((row_sums, "kernel_of", lambda: None), (row_sums, "row_sums", _row_sums))


STATISTICS: dict[str, Form] = {
    "twin": nullcontext,
    "torch": plain_statistics,
    "torch.compile": compiled_statistics,
}


def statistics_use(rows: int, vocab: int) -> Callable[[], dict[str, Use]]:
    """Logits of both sides by their heads, as a comparison makes them, and their statistics."""
    generator = torch.Generator(GPU).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=GPU, dtype=torch.bfloat16)

    hidden, head = drawn(rows, 1024), drawn(1024, vocab) / 8
    gold = torch.randint(0, vocab, (rows,), generator=generator, device=GPU)
    near = hidden + drawn(rows, 1024) / 64

    def use() -> torch.Tensor:
        return row_statistics(hidden @ head, near @ head, gold).kl

    def other_sizes() -> list[torch.Tensor]:
        """As the last batches of windows have: a compiler may begin anew for each (see
        `first_s`).
        """
        sizes = [rows * k // 7 for k in range(1, 7)]
        return [row_statistics(hidden[:n] @ head, near[:n] @ head, gold[:n]).kl for n in sizes]

    return lambda: {
        "logits and statistics": use,
        "the same of six batches of other sizes": other_sizes,
    }


def gpu_round_trip(spec: str, tokens: int = 32_768) -> Callable[[], dict[str, Use]]:
    calibration = values(4096, 1).float()
    x = values(tokens, 2).to(GPU)

    def prepare() -> dict[str, Use]:
        codec = parse_recipe(spec).fit(Samples(SITE, calibration))
        return {
            f"round trip, {tokens} tokens": lambda: codec.reconstruct(x),
            "round trip, one token of 32 requests": lambda: codec.reconstruct(x[:, :32]),
        }

    return prepare


def commit() -> str:
    """Of this source: forms that lost are gone from later ones."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    out = arguments.out or RESULTS / f"kernels_{'gpu' if arguments.gpu else 'cpu'}.json"
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
    kept = {(row["twin"], row["codec"]) for row in rows}
    for twin, codec, forms, prepare, rounds in (on_gpu if arguments.gpu else on_cpu)(
        arguments.rounds
    ):
        if (twin, codec) in kept:
            continue
        rows += [{"twin": twin, "codec": codec, **row} for row in measured(forms, prepare, rounds)]
        found = {
            "commit": commit(),
            "unit": (
                "seconds of the clock" if arguments.gpu else "seconds of the processor, one thread"
            ),
            "environment": (
                describe() | ({"gpu": torch.cuda.get_device_name()} if arguments.gpu else {})
            ),
            "rows": rows,
        }
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
