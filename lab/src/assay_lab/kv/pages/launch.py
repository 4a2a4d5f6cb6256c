"""Running the kernels of packed pages: the tables of a layer as they take them, one step of a
layer, and a check on the GPU that is there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import triton

from assay.errors import AssayError
from assay_lab.kv.pages import layout as reference
from assay_lab.kv.pages.kernels import attend_kernel, combine_kernel, prepare_kernel, unpack_kernel
from assay_lab.kv.pages.layout import PAIRS, Layout, StreamTables

DECODE: dict[int, dict[str, int]] = {
    64: {"num_warps": 1, "num_stages": 4, "tile": 64, "waves": 8, "most": 128, "registers": 168},
    128: {"num_warps": 1, "num_stages": 4, "tile": 64, "waves": 4, "most": 128, "registers": 255},
}
"""How decode runs, by head_dim: tokens read at once (a page holds whole tiles), programs wanted for
a multiprocessor, the most parts of a context, and registers of a thread: more than are needed in
the loop would let fewer programs run at once."""
ASM = True
"""Unpack words by PTX's instructions for two at once."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PREPARE = {"num_warps": 8, "rows": 16}
PREFILL = {"num_warps": 8, "rows": 32}
"""How a step is prepared, of few tokens and of many: tokens of a program."""
MANY = 1024
COMBINE = {"num_warps": 4}
ADDED = (8, 64, 128)
"""Parts of a context that are added up at once: few kernels, so that all are compiled before a
request comes.
"""
UNPACK = {"num_warps": 4, "tile": 32}
"""How pages are unpacked: tokens at once."""
LOG2E = 1.4426950408889634


def digits_of(t: StreamTables, layout: Layout, stream: str) -> tuple[torch.Tensor, torch.Tensor]:
    """T [h, d + wide d / 4, d] in fp16, the rows of S for each digit over its place in a word; and
    what T is to be multiplied by [h].
    """
    w, wide = layout.words, layout.wide["kv".index(stream)]
    place = torch.tensor([1.0, 16.0, 4.0, 64.0], device=t.mean.device).repeat_interleave(w)
    upper = t.synthesis / place[:, None]
    upper = torch.cat([upper[:, : wide * w] * 4, upper[:, wide * w :]], dim=1)
    lower = (
        t.synthesis[:, : wide * w]
        / (4.0 ** (torch.arange(wide * w, device=t.mean.device) % 16 // 2 % 4))[:, None]
    )
    found = torch.cat([upper, lower], dim=1)
    unit = 2.0 ** (found.abs().amax(dim=(1, 2)).clamp_min(1e-30).log2().ceil() - 12)
    return (found / unit[:, None, None]).half().contiguous(), unit.contiguous()


@dataclass(frozen=True)
class LayerTables:
    """The tables of a layer as kernels take them; `trig` [positions, d] is shared by all layers.

    `digits_*` and `unit_*` are those of `digits_of`; `pairs` [h, PAIRS] the pairs of channels with
    a mean; `near` [h, block, 2 PAIRS], fp16, their cosines and sines at the places of a page, and
    `step` [h, 2 PAIRS] those of a tile.
    """

    layout: Layout
    k: StreamTables
    v: StreamTables
    trig: torch.Tensor
    digits_k: torch.Tensor
    unit_k: torch.Tensor
    digits_v: torch.Tensor
    unit_v: torch.Tensor
    pairs: torch.Tensor
    near: torch.Tensor
    step: torch.Tensor

    @classmethod
    def of(
        cls, layout: Layout, k: StreamTables, v: StreamTables, trig: torch.Tensor
    ) -> LayerTables:
        """All tensors on the device of `trig`, which has at least `block` + 1 positions."""
        k, v, half = k.to(trig.device), v.to(trig.device), layout.head_dim // 2
        pairs = (
            k.mean.square()
            .unflatten(1, (2, half))
            .sum(dim=1)
            .topk(PAIRS[layout.head_dim], dim=1)
            .indices
        )
        pairs = pairs.sort(dim=1).values
        some = (trig[: layout.block + 1] / trig[0, 0])[
            :, torch.cat([pairs, pairs + half], dim=1)
        ].transpose(0, 1)
        tile = min(DECODE[layout.head_dim]["tile"], layout.block)
        return cls(
            layout,
            k,
            v,
            trig,
            *digits_of(k, layout, "k"),
            *digits_of(v, layout, "v"),
            pairs.int().contiguous(),
            some[:, : layout.block].half().contiguous(),
            some[:, tile].contiguous(),
        )

    def sizes(self) -> tuple[int, ...]:
        """The constants of all kernels: offsets, slot, block, D, WK, WV, FK, FV."""
        layout = self.layout
        return (
            *layout.offsets().values(),
            layout.slot,
            layout.block,
            layout.head_dim,
            *layout.wide,
            *layout.finer,
        )


_COMPILED: dict[Any, Any] = {}
"""Kernels by what Triton makes another of."""


def _launch(
    kernel: Any,
    grid: tuple[int, int, int],
    given: tuple[Any, ...],
    constants: tuple[int, ...],
    **how: int,
) -> None:
    """Run a kernel. Triton looks at every argument again, which takes longer than a small model's
    layer: from the second time on what it compiled is launched directly, found by all that it makes
    another kernel for."""
    if INTERPRETED:
        kernel[grid](*given, *constants, **how)
        return
    numbers = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in given]
    kinds = tuple(
        (
            (x.dtype, n % 16 == 0)
            if isinstance(x, torch.Tensor)
            else (type(x), x == 1 or (x % 16 == 0) * 16, x >= 2**31)
        )
        for x, n in zip(given, numbers, strict=True)
    )
    device = torch.cuda.current_device()
    key = (kernel.__name__, device, kinds, constants, tuple(how.values()))
    found = _COMPILED.get(key)
    if found is None:
        _COMPILED[key] = kernel[grid](*given, *constants, **how)
    else:
        stream = torch.cuda.current_stream(device).cuda_stream
        found.run(
            *grid,
            stream,
            found.function,
            found.packed_metadata,
            None,
            None,
            None,
            *numbers,
            *constants,
        )


@dataclass(frozen=True)
class Turned:
    """What `prepare` makes of queries: their digits [requests, H, d + wide d / 4], fp16, and waves
    [requests, H, 2 PAIRS + 1], float32.
    """

    digits: torch.Tensor
    waves: torch.Tensor


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    t: LayerTables,
    scale: float,
    *,
    requests: int,
) -> Turned:
    """Code keys after RoPE and values [tokens, heads, d] into `slots` [tokens] of `pages` (uint8,
    contiguous), and turn the queries [tokens, H, d] of the first `requests` requests, which have
    one each, at the rows `starts`."""
    layout, tokens = t.layout, slots.shape[0]
    how = PREFILL if tokens > MANY else PREPARE
    rows = how["rows"]
    heads = q.shape[1]
    group, pairs = heads // layout.heads, t.pairs.shape[1]
    digits = q.new_empty(max(1, requests), heads, t.digits_k.shape[1], dtype=torch.float16)
    waves = q.new_empty(max(1, requests), heads, 2 * pairs + 1, dtype=torch.float32)
    programs = max(-(-tokens // rows), -(-requests * group // rows))
    _launch(
        prepare_kernel,
        (programs, layout.heads, 3 if requests else 2),
        (
            k,
            k.stride(0),
            v,
            v.stride(0),
            pages,
            pages.stride(0),
            slots,
            positions,
            t.trig,
            t.k.mean,
            t.k.first,
            t.k.analysis,
            t.k.weight,
            t.v.mean,
            t.v.first,
            t.v.analysis,
            t.v.weight,
            tokens,
            q,
            q.stride(0),
            digits,
            waves,
            starts,
            t.pairs,
            t.digits_k,
            t.unit_k,
            scale * LOG2E,
            requests,
        ),
        (*t.sizes(), pairs, group, layout.heads, rows),
        num_warps=how["num_warps"],
    )
    return Turned(digits, waves)


def splits_of(requests: int, layout: Layout, longest: int, multiprocessors: int = 132) -> int:
    """Parts of a context, so that all multiprocessors have work."""
    how = DECODE[layout.head_dim]
    wanted = triton.next_power_of_2(
        triton.cdiv(how["waves"] * multiprocessors, requests * layout.heads)
    )
    return int(
        max(1, min(how["most"], wanted, triton.next_power_of_2(triton.cdiv(longest, how["tile"]))))
    )


def attend(
    turned: Turned,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    t: LayerTables,
    scale: float,
    *,
    requests: int,
    longest: int,
    splits: int = 0,
) -> None:
    """Attention of the first `requests` requests, which have one query each, to their pages, into
    `out` [tokens, H, d].

    `turned`, `q`, `k` and `v` are those of `prepare`; `table` [requests, pages]; `starts` [requests
    + 1] the query row of each; `lengths` [requests] tokens, at most `longest`, that of the query
    included, which must be in the pages already. `splits`: parts of a context, 0 for as many as
    there is room for.
    """
    layout = t.layout
    group, pairs = q.shape[1] // layout.heads, t.pairs.shape[1]
    rows = 8 if group <= 8 else 16
    how = DECODE[layout.head_dim]
    tile = min(how["tile"], layout.block)
    splits = splits or splits_of(requests, layout, longest)
    lines = requests * layout.heads * splits * group
    part = q.new_empty(lines, t.digits_v.shape[1], dtype=torch.float32)
    sums = q.new_empty(lines, 3, dtype=torch.float32)
    where = (pages, pages.stride(0), table, table.stride(0), starts, lengths)
    _launch(
        attend_kernel,
        (requests, layout.heads, splits),
        (turned.digits, turned.waves, part, sums, *where, t.trig, t.pairs, t.near, t.step, splits),
        (
            *t.sizes(),
            pairs,
            group,
            layout.heads,
            rows,
            tile,
            how["num_stages"],
            int(ASM and not INTERPRETED),
        ),
        num_warps=how["num_warps"],
        maxnreg=how["registers"] if rows == 8 else 255,
    )
    _launch(
        combine_kernel,
        (requests, q.shape[1], 1),
        (
            q,
            q.stride(0),
            k,
            k.stride(0),
            v,
            v.stride(0),
            turned.digits,
            turned.waves,
            part,
            sums,
            out,
            out.stride(0),
            *where,
            t.k.first,
            t.v.first,
            t.v.mean,
            t.digits_v,
            t.unit_v,
            scale * LOG2E,
            splits,
        ),
        (*t.sizes(), pairs, group, layout.heads, tile, next(n for n in ADDED if n >= splits)),
        **COMBINE,
    )


def unpack(
    k: torch.Tensor,
    v: torch.Tensor,
    places: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    t: LayerTables,
    *,
    first: int,
    requests: int,
    longest: int,
) -> None:
    """Keys after RoPE and values of requests `first` … `first + requests` − 1 into k and v [tokens,
    heads, d].

    `places` [requests] is the row at which each begins; `lengths` (of all requests), at most
    `longest`.
    """
    layout = t.layout
    tile = min(UNPACK["tile"], layout.block)
    _launch(
        unpack_kernel,
        (triton.cdiv(longest, tile), layout.heads, requests),
        (
            k,
            v,
            pages,
            pages.stride(0),
            table,
            table.stride(0),
            lengths,
            places,
            t.trig,
            t.k.mean,
            t.v.mean,
            t.k.first,
            t.v.first,
            t.digits_k,
            t.digits_v,
            t.unit_k,
            t.unit_v,
            first,
        ),
        (*t.sizes(), layout.heads, tile),
        num_warps=UNPACK["num_warps"],
    )


def check(layout: Layout, group: int, dtype: torch.dtype, device: torch.device) -> None:
    """AssayError where kernels do not give on this device what the reference gives for a page and a
    half of drawn tokens.

    It is the compiler that is checked: another GPU or another version of Triton may make other code
    of the same kernels.
    """
    drawn, n, d, heads = (
        torch.Generator().manual_seed(0),
        layout.block * 3 // 2,
        layout.head_dim,
        layout.heads,
    )
    tables = {s: drawn_tables(heads, d, drawn) for s in "kv"}
    place = torch.arange(n)
    angles = reference.trigonometry(
        10000.0 ** (-torch.arange(0, d, 2) / d), 1.0, max(n, layout.block + 1)
    )
    t = LayerTables.of(layout, tables["k"], tables["v"], angles.to(device))
    mean = {s: reference.means(tables[s], s, place, angles[:n]) for s in "kv"}
    exact = {
        s: (
            (
                torch.einsum(
                    "nhe,hed->nhd", 4 * torch.randn(n, heads, d, generator=drawn), x.synthesis
                )
                + mean[s]
            ).to(dtype)
        )
        for s, x in tables.items()
    }
    q = torch.randn(1, heads * group, d, generator=drawn).to(dtype)
    pages = torch.zeros(3, heads * layout.block * layout.slot, dtype=torch.uint8, device=device)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    slots = table[0, place // layout.block].long() * layout.block + place % layout.block
    starts, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([n - 1, n], [n]))
    on, k, v = table.to(device), *(exact[s].to(device).contiguous() for s in "kv")
    queries = torch.cat([torch.zeros(n - 1, *q.shape[1:], dtype=dtype), q]).to(device)
    found_k, found_v = (torch.zeros_like(k) for _ in "kv")
    # As many tokens as a prompt has, of which only the first are written; then as few as a step of
    # decode has.
    many = MANY // n + 1
    nowhere = torch.cat([slots, torch.full(((many - 1) * n,), -1)]).to(device)
    step = (
        *(x.repeat(many, 1, 1) for x in (queries, k, v)),
        place.repeat(many).to(device),
        pages,
        nowhere,
        starts,
        t,
        d**-0.5,
    )
    prepare(*step, requests=0)
    turned = prepare(
        queries, k, v, place.to(device), pages, slots.to(device), starts, t, d**-0.5, requests=1
    )
    outs = {parts: torch.zeros_like(queries) for parts in ADDED}
    for parts, out in outs.items():
        attend(
            turned,
            queries,
            k,
            v,
            out,
            pages,
            on,
            starts,
            lengths,
            t,
            d**-0.5,
            requests=1,
            longest=n,
            splits=parts,
        )
    unpack(
        found_k, found_v, starts - (n - 1), pages, on, lengths, t, first=0, requests=1, longest=n
    )
    held = {s: reference.read(pages.cpu(), layout, slots, s, x, place) for s, x in tables.items()}
    coded = {
        s: reference.reconstruct(exact[s].float() - mean[s], x, layout, s, place)
        for s, x in tables.items()
    }
    read = {s: held[s] + mean[s] for s in "kv"}
    # The query's own key and value are not read from pages.
    seen_k, seen_v = (torch.cat([read[s][:-1], exact[s][-1:].float()]) for s in "kv")
    # Of the codes a few may fall on the other side of an edge; what is read are those that are in
    # the pages.
    _hold(
        ("writes keys into pages", held["k"], coded["k"], 0.02),
        ("writes values into pages", held["v"], coded["v"], 0.02),
        *(
            (
                "attends to pages",
                out[-1:].cpu(),
                reference.attend(q, seen_k, seen_v, d**-0.5),
                0.015,
            )
            for out in outs.values()
        ),
        ("unpacks keys", found_k.cpu(), read["k"], 0.008),
        ("unpacks values", found_v.cpu(), read["v"], 0.008),
    )


def _hold(*results: tuple[str, torch.Tensor, torch.Tensor, float]) -> None:
    """AssayError for a kernel whose result is off; the last number is the most it may be off."""
    for what, found, wanted, most in results:
        off = float((found.float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
        if not off < most:
            raise AssayError(
                f"the kernel that {what} is wrong on this GPU with Triton {triton.__version__}: off"
                f" by {off:.2%}, {most:.1%} at most",
                finding_id="kv.unsupported",
                remedy="serve with vLLM's own cache, and report the GPU and the version of Triton",
            )


def drawn_tables(heads: int, d: int, drawn: torch.Generator) -> StreamTables:
    """Tables with means far from zero, in `PAIRS` pairs of channels, and channels of unequal size,
    for tests of kernels.
    """
    sizes = torch.logspace(0.7, -0.7, d) / 4
    turn = torch.linalg.qr(torch.randn(heads, d, d, generator=drawn))[0]
    mean, first = (
        3 * torch.randn(heads, *more, d, generator=drawn).half().float()
        for more in ((), (reference.FIRST,))
    )
    kept = torch.randperm(d // 2, generator=drawn)[: PAIRS[d]]
    some = torch.zeros(d).index_fill(0, torch.cat([kept, kept + d // 2]), 1.0)
    return StreamTables(
        mean * some,
        first,
        turn / sizes,
        (turn * sizes).mT.contiguous(),
        (sizes * 4).square().expand(heads, d).contiguous(),
    )
