"""The kernels of packed pages against their reference on a GPU, over shapes and settings: which are
wrong.

    python pages_check.py --out FILE.jsonl [--part 0/4] [--quick]

One line for each case: what writes into pages (share of vectors that differ, by a code on an edge
at most), what attends to them (root mean square of the error over that of the output, two requests
of padding behind the others), what unpacks them, and writing and attending in one CUDA graph that
is replayed. `--part i/n` takes every n-th case, to run n processes at once. Exit code 1 where one
is wrong. It needs torch and Triton, no vLLM and no model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from assay_lab.kv.pages import launch
from assay_lab.kv.pages import layout as lay

MODELS = {128: (2, 6), 64: (3, 3)}
"""KV heads and query heads of each of Qwen2.5-Coder-1.5B and SmolLM2-135M, by head_dim."""
MOST = {"store": 0.02, "decode": 0.015, "unpack": 0.006, "graph": 0.015}


def tables_of(d: int, heads: int) -> launch.LayerTables:
    """Tables with means far from zero and channels of unequal size."""
    with torch.device("cpu"):
        made = torch.Generator(device="cpu").manual_seed(0)
        found = [launch.drawn_tables(heads, d, made) for _ in "kv"]
        angles = lay.trigonometry(10000.0 ** (-torch.arange(0, d, 2) / d), 1.0, 17_000)
    return launch.LayerTables.of(lay.layout_of(heads, d, 64), *found, angles.cuda())


class Cache:
    """Pages in a shuffled order with the drawn tokens of requests of given lengths, and what the
    pages say by the reference.
    """

    def __init__(self, t: launch.LayerTables, lengths: list[int]) -> None:
        self.t, self.lengths = t, lengths
        per = [-(-n // 64) for n in lengths]
        order = torch.randperm(sum(per) + 3)
        self.pages = torch.randint(
            0, 256, (sum(per) + 3, t.layout.heads * 64 * t.layout.slot), dtype=torch.uint8
        )
        self.table = torch.zeros(len(lengths), max(per) + 1, dtype=torch.int32)
        for i, n in enumerate(per):
            self.table[i, :n] = order[sum(per[:i]) : sum(per[:i]) + n].int()
        places = [torch.arange(n) for n in lengths]
        self.slots = torch.cat(
            [self.table[i, p // 64].long() * 64 + p % 64 for i, p in enumerate(places)]
        )
        self.positions = torch.cat(places)
        size = (len(self.slots), t.layout.heads, t.layout.head_dim)
        r = [torch.einsum("nhe,hed->nhd", 4 * torch.randn(size), x.synthesis) for x in (t.k, t.v)]
        self.k, self.v = (
            (x + mean).bfloat16().contiguous() for x, mean in zip(r, self.means(), strict=True)
        )
        launch.prepare(
            self.k,
            self.k,
            self.v,
            self.positions,
            self.pages,
            self.slots,
            self.slots,
            t,
            1.0,
            requests=0,
        )

    def means(self) -> list[torch.Tensor]:
        cosines = self.t.trig[self.positions]
        return [
            lay.means(x, s, self.positions, cosines) for s, x in (("k", self.t.k), ("v", self.t.v))
        ]

    def decoded(self) -> list[torch.Tensor]:
        parts = zip("kv", (self.t.k, self.t.v), self.means(), strict=True)
        return [
            lay.read(self.pages, self.t.layout, self.slots, s, x, self.positions) + mean
            for s, x, mean in parts
        ]

    def last(self) -> list[int]:
        """The row of each request's last token, which asks."""
        return [sum(self.lengths[: i + 1]) - 1 for i in range(len(self.lengths))]

    def attended(self, q: torch.Tensor) -> torch.Tensor:
        """What the reference makes of pages; a token's own key and value are as they were."""
        found = []
        k, v = self.decoded()
        for i, (end, length) in enumerate(zip(self.last(), self.lengths, strict=True)):
            rows = slice(end + 1 - length, end)
            own = [
                torch.cat([x[rows], exact[end : end + 1].float()])
                for x, exact in ((k, self.k), (v, self.v))
            ]
            found.append(lay.attend(q[i : i + 1], *own, q.shape[-1] ** -0.5))
        return torch.cat(found)


def lengths_of(batch: int, longest: int) -> list[int]:
    """The longest, edges of tiles, and drawn ones."""
    edges = [longest, *(min(longest, n) for n in (1, 63, 64, 65, 127, 128, 129))][:batch]
    return edges + torch.randint(1, longest + 1, (batch - len(edges),)).tolist()


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def store(d: int, heads: int, batch: int, longest: int) -> float:
    cache = Cache(tables_of(d, heads), lengths_of(batch, longest))
    t, shares = cache.t, []
    for stream, x, mean, held, tables in zip(
        "kv", (cache.k, cache.v), cache.means(), cache.decoded(), (t.k, t.v), strict=True
    ):
        exact = lay.reconstruct(x.float() - mean, tables, t.layout, stream, cache.positions)
        shares.append(float(((held - mean - exact).abs().amax(dim=(1, 2)) > 1e-2).float().mean()))
    return max(shares)


def decode(
    d: int, heads: int, group: int, batch: int, longest: int, promised: int = 0, dtype: str = "bfloat16", asm: bool = True, **how: int  # noqa: E501
) -> float:  # fmt: skip
    usual, launch.ASM = dict(launch.DECODE[d]), asm
    launch.DECODE[d].update(how)
    try:
        cache = Cache(tables_of(d, heads), lengths_of(batch, longest))
        q = torch.randn(batch, heads * group, d).to(getattr(torch, dtype))
        out = torch.full_like(q, 7.0)
        starts = torch.tensor([*range(batch + 1), batch, batch], dtype=torch.int32)
        lengths = torch.tensor([*cache.lengths, 0, 0], dtype=torch.int32)
        table = torch.cat([cache.table, cache.table[:1], cache.table[:1]])
        last = cache.last()
        step = cache.k[last].to(q.dtype), cache.v[last].to(q.dtype)
        if q.dtype != cache.k.dtype:
            cache.k[last], cache.v[last] = (x.bfloat16() for x in step)
        more: dict[str, int] = {"requests": batch + 2, "longest": promised or longest}
        turned = launch.prepare(
            q,
            *step,
            cache.positions[last],
            cache.pages,
            cache.slots[last],
            starts,
            cache.t,
            d**-0.5,
            requests=batch + 2,
        )
        launch.attend(
            turned, q, *step, out, cache.pages, table, starts, lengths, cache.t, d**-0.5, **more
        )
        return off(out, cache.attended(q))
    finally:
        launch.DECODE[d].update(usual)
        launch.ASM = True


def unpack(d: int, heads: int, batch: int, longest: int, **how: int) -> float:
    usual = dict(launch.UNPACK)
    launch.UNPACK.update(how)
    cache = Cache(tables_of(d, heads), lengths_of(batch, longest))
    k, v = (torch.full(cache.k.shape, 9.0, dtype=torch.bfloat16) for _ in "kv")
    places = torch.tensor([0, *cache.lengths[:-1]]).cumsum(0).int()
    lengths = torch.tensor(cache.lengths, dtype=torch.int32)
    launch.unpack(
        k,
        v,
        places,
        cache.pages,
        cache.table,
        lengths,
        cache.t,
        first=0,
        requests=batch,
        longest=longest,
    )
    launch.UNPACK.update(usual)
    return max(off(found, wanted) for found, wanted in zip((k, v), cache.decoded(), strict=True))


def graph(d: int, heads: int, group: int) -> float:
    lengths = [1500, 1, 64, 65, 700, 129, 1023, 40]
    cache = Cache(tables_of(d, heads), lengths)
    q = torch.randn(8, heads * group, d).bfloat16()
    out, starts, held = (
        torch.zeros_like(q),
        torch.arange(9, dtype=torch.int32),
        torch.ones(8, dtype=torch.int32),
    )
    last = cache.last()
    k, v, positions, slots = cache.k[last], cache.v[last], cache.positions[last], cache.slots[last]

    def run() -> None:
        turned = launch.prepare(
            q, k, v, positions, cache.pages, slots, starts, cache.t, d**-0.5, requests=8
        )
        more = {"requests": 8, "longest": 2048}
        launch.attend(
            turned, q, k, v, out, cache.pages, cache.table, starts, held, cache.t, d**-0.5, **more
        )

    run()
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        run()
    found = []
    for _ in range(2):
        held.copy_(torch.tensor(lengths))
        q.copy_(torch.randn(q.shape).bfloat16())
        recorded.replay()
        found.append(off(out, cache.attended(q)))
    return max(found)


def cases(quick: bool) -> Iterator[tuple[Callable[..., float], dict[str, Any]]]:
    for d, (h, g) in MODELS.items():
        for heads, batch, longest in (
            (h, 1, 1),
            (h, 9, 400),
            (1, 3, 77),
            (8, 33, 300),
            (h, 4, 4000),
        ):
            yield store, {"d": d, "heads": heads, "batch": batch, "longest": longest}
        one = {"d": d, "heads": h, "group": g}
        for batch, longest, promised in (
            (1, 1, 0), (1, 4096, 0), (1, 16000, 16384), (2, 65, 16384), (8, 4096, 0), (64, 2000, 16384), (128, 700, 0), (3, 5000, 32768)  # noqa: E501
        ):  # fmt: skip
            yield decode, one | {"batch": batch, "longest": longest, "promised": promised}
        yield graph, one
        if quick:
            continue
        middle = one | {"batch": 17, "longest": 1500}
        for warps in (1, 2, 4, 8):
            for stages in (3, 4, 5, 6):
                for tile in (64, 32):
                    yield (
                        decode,
                        middle
                        | {
                            "num_warps": warps,
                            "num_stages": stages,
                            "tile": tile,
                            "registers": 255,
                        },
                    )
        for warps, stages in ((1, 3), (2, 4)):
            yield decode, middle | {"num_warps": warps, "num_stages": stages, "asm": False}
        for group in (1, 2, 3, 4, 5, 6, 7, 8, 16):
            heads = (2, 1, 3, 4, 8)[group % 5]
            yield decode, {"d": d, "heads": heads, "group": group, "batch": 9, "longest": 900}
        for waves in (1, 2, 16, 64):
            yield decode, one | {"batch": 5, "longest": 3000, "waves": waves, "dtype": "float16"}
        for warps, tile in ((4, 32), (8, 32), (4, 64), (8, 64), (4, 16), (2, 32)):
            yield (
                unpack,
                {"d": d, "heads": h, "batch": 9, "longest": 700, "num_warps": warps, "tile": tile},
            )
        for heads, batch, longest in ((h, 2, 9000), (h, 1, 1), (8, 3, 500)):
            yield unpack, {"d": d, "heads": heads, "batch": batch, "longest": longest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("pages_check.jsonl"))
    parser.add_argument("--part", default="0/1")
    parser.add_argument(
        "--quick", action="store_true", help="the settings that are used, for two models"
    )
    arguments = parser.parse_args()
    torch.set_default_device("cuda")
    part, parts = map(int, arguments.part.split("/"))
    wrong = 0
    facts = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": launch.triton.__version__,
    }
    for number, (what, case) in enumerate(cases(arguments.quick)):
        if number % parts != part:
            continue
        torch.manual_seed(number)
        row: dict[str, Any] = {"row": what.__name__, **case}
        try:
            row["off"] = what(**case)
            row["ok"] = row["off"] < MOST[what.__name__]  # NaN is not
        except Exception as error:  # a setting that needs more than the GPU has
            row |= {"ok": False, "raised": f"{type(error).__name__}: {str(error)[:200]}"}
        wrong += not row["ok"]
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | facts) + "\n")
        print(json.dumps(row), flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
