"""Packed pages: the reference against plain attention, and the kernels against the reference in Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from assay.errors import AssayError, UsageError
from assay.lab.kv.evaluate import run_eval
from assay.lab.kv.pages import CODEC
from assay.lab.kv.pages import layout as lay
from assay.lab.kv.pages.source import Source, check_model, shape_of
from assay.lab.kv.serve import launch_of
from assay.lab.options import EvalPlan, ServePlan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tables(heads: int, d: int, seed: int, size: float = 3.0) -> lay.StreamTables:
    """Tables with a mean far from zero and channels of unequal size."""
    made = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(heads, d, d, generator=made, dtype=torch.float64))[0]
    deviations = torch.logspace(0.7, -0.7, d, dtype=torch.float64)
    return lay.StreamTables(
        (size * torch.randn(heads, d, generator=made)).half().float(),
        (rotation / deviations).float(),
        (rotation * deviations).mT.contiguous().float(),
        (deviations.square() / deviations.square().mean()).float().expand(heads, d).contiguous(),
    )


def drawn(tokens: int, t: lay.StreamTables, seed: int) -> torch.Tensor:
    """Residuals [tokens, heads, d] as the tables expect them."""
    y = torch.randn(tokens, *t.mean.shape, generator=torch.Generator().manual_seed(seed))
    return torch.einsum("nhe,hed->nhd", y, t.synthesis)


def trig(d: int, positions: int) -> torch.Tensor:
    return lay.trigonometry(10000.0 ** (-torch.arange(0, d, 2) / d), 1.0, positions)


@pytest.mark.parametrize("d", [64, 128])
def test_pages_hold_what_the_codec_reconstructs(d: int) -> None:
    layout, t = lay.layout_of(2, d, 16), tables(2, d, 0)
    assert layout.ratio > 3.3
    pages = torch.zeros(5, 2 * 16 * layout.slot, dtype=torch.uint8)
    slots = torch.randperm(80)[:37]
    r = drawn(37, t, 1)
    lay.write(pages, layout, slots, "k", r, t)
    lay.write(pages, layout, slots, "v", 2 * r, t)
    for stream, x in (("k", r), ("v", 2 * r)):
        found = lay.read(pages, layout, slots, stream, t)
        assert torch.allclose(found, lay.reconstruct(x, t, layout.wide), atol=1e-5)
        # Of four bits and more: the error is a small part of what was coded.
        assert (found - x).square().mean() < 0.012 * x.square().mean()


def test_a_slot_below_zero_is_left_out() -> None:
    layout, t = lay.layout_of(1, 64, 16), tables(1, 64, 0)
    pages = torch.zeros(1, 16 * layout.slot, dtype=torch.uint8)
    lay.write(pages, layout, torch.tensor([-1, -1]), "k", drawn(2, t, 1), t)
    assert not pages.any()


def batch(d: int, group: int, heads: int, block: int, counts: list[int], lengths: list[int]):
    """Keys, values and queries of requests, their pages in a shuffled order, and what attention should give."""
    layout, tk, tv = lay.layout_of(heads, d, block), tables(heads, d, 0), tables(heads, d, 1)
    cosines = trig(d, 512)
    per = [-(-length // block) for length in lengths]
    order = torch.randperm(sum(per) + 3, generator=torch.Generator().manual_seed(2))
    table = torch.zeros(len(lengths), max(per) + 1, dtype=torch.int32)
    pages = torch.randint(0, 256, (sum(per) + 3, heads * block * layout.slot), dtype=torch.uint8)
    k, v, slots, positions, wanted, queries, coded = [], [], [], [], [], [], []
    for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        table[i, : per[i]] = order[sum(per[:i]) : sum(per[: i + 1])]
        place = torch.arange(length)
        mean = lay.rotated_mean(tk.mean, cosines[place])
        keys = (drawn(length, tk, 10 + i) + mean).bfloat16()
        values = (drawn(length, tv, 20 + i) + tv.mean).bfloat16()
        q = torch.randn(count, heads * group, d, generator=torch.Generator().manual_seed(30 + i)).bfloat16()
        coded_k = lay.reconstruct(keys.float() - mean, tk, layout.wide) + mean
        coded_v = lay.reconstruct(values.float() - tv.mean, tv, layout.wide) + tv.mean
        wanted.append(lay.attend(q, coded_k, coded_v, d**-0.5))
        coded.append(torch.stack([coded_k, coded_v]))
        queries.append(q)
        k.append(keys), v.append(values), positions.append(place)
        slots.append(table[i, place // block].long() * block + place % block)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    parts = [torch.cat(x).to(DEVICE) for x in (k, v, positions, slots, queries, wanted)]
    parts.append(torch.cat(coded, dim=1).to(DEVICE))
    return layout, *(x.to(DEVICE) for x in (tk, tv, cosines, pages, table, starts)), parts


CASES = [
    (64, 3, 3, 16, [1, 37, 150]),
    (128, 6, 2, 64, [64, 301]),
    (64, 1, 2, 16, [33]),
    (64, 8, 1, 64, [5, 70]),
    (128, 16, 1, 64, [1, 130]),
]


@pytest.mark.parametrize(("d", "group", "heads", "block", "lengths"), CASES)
def test_kernels_give_what_the_reference_gives(d: int, group: int, heads: int, block: int, lengths: list[int]) -> None:
    pytest.importorskip("triton")
    from assay.lab.kv.pages import kernels

    counts = [1] * len(lengths)
    layout, tk, tv, cosines, pages, table, starts, parts = batch(d, group, heads, block, counts, lengths)
    k, v, positions, slots, q, wanted, coded = parts
    t = kernels.LayerTables.of(layout, tk, tv, cosines)
    slots = torch.cat([slots, slots.new_full((2,), -1)])  # padding of a CUDA graph
    pad = torch.cat([k, k[:2]]), torch.cat([v, v[:2]]), torch.cat([positions, positions[:2] * 0])
    kernels.store(*pad, pages, slots, t)
    real = slots[:-2].cpu()
    for stream, x, mean in (("k", k, lay.rotated_mean(tk.mean, cosines[positions])), ("v", v, tv.mean)):
        table_of = tk if stream == "k" else tv
        found = lay.read(pages.cpu(), layout, real, stream, table_of.to("cpu"))
        r = (x.float() - mean).cpu()
        same = (found - lay.reconstruct(r, table_of.to("cpu"), layout.wide)).abs().amax(dim=(1, 2)) < 1e-2
        assert same.float().mean() > 0.98  # a coefficient on the edge between two codes may fall on either side
        assert (found - r).square().mean() < 0.012 * r.square().mean()
    out = torch.zeros_like(q)
    held = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    kernels.attend(q, out, pages, table, starts, held, t, d**-0.5, requests=len(counts), longest=max(lengths))
    assert torch.allclose(out.float(), wanted, atol=0.06, rtol=0.03), (out.float() - wanted).abs().max()
    # All requests but the first out of their pages, behind three rows of something else.
    first = int(len(lengths) > 1)
    places = torch.tensor([3, *lengths[first:-1]], device=DEVICE).cumsum(0).int()
    found_k, found_v = (torch.full((3 + sum(lengths), heads, d), 9.0, device=DEVICE).bfloat16() for _ in "kv")
    kernels.unpack(
        found_k,
        found_v,
        places,
        pages,
        table,
        held,
        t,
        first=first,
        requests=len(lengths) - first,
        longest=max(lengths),
    )
    rows = slice(3, 3 + sum(lengths[first:]))
    for found, exact in zip((found_k, found_v), coded[:, sum(lengths[:first]) :], strict=True):
        assert bool((found[:3] == 9).all()) and bool((found[rows.stop :] == 9).all())
        near = (found[rows].float() - exact).abs() <= 0.02 + 0.01 * exact.abs()
        assert near.all(dim=(1, 2)).float().mean() > 0.98  # as above


def test_prompts_are_read_at_once_as_far_as_the_workspace_reaches() -> None:
    # A decode; two new prompts; three of which something is cached; a new one.
    counts, lengths = [1, 30, 40, 10, 10, 10, 5], [900, 30, 40, 60, 30, 90, 5]
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    assert lay.together(ends, lengths, 1, 100) == [(1, 3, True), (3, 5, False), (5, 6, False), (6, 7, True)]
    assert lay.together(ends, lengths, 1, 50) == [(1, 3, True), *((i, i + 1, False) for i in (3, 4, 5)), (6, 7, True)]
    assert lay.together([0, 7], [7], 0, 1) == [(0, 1, True)]


def test_tables_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    made: list[tuple[int, str]] = []

    def fit(self: Source, layer: int, stream: str) -> lay.StreamTables:
        made.append((layer, stream))
        return tables(1, 64, layer)

    monkeypatch.setattr(Source, "fit", fit)
    shape, other = SimpleNamespace(layers=2), torch.zeros(1)
    sources = [Source(None, shape, None, other, 1.0, key) for key in ("a", "a", "b")]  # type: ignore[arg-type]
    first, again = sources[0].tables(), sources[1].tables()
    assert sorted(made) == [(0, "k"), (0, "v"), (1, "k"), (1, "v")]
    assert all(torch.equal(first[n][s].analysis, again[n][s].analysis) for n in (0, 1) for s in "kv")
    next(tmp_path.rglob("*.safetensors")).write_bytes(b"cut")  # made anew
    sources[0].tables(), sources[2].tables()
    assert len(made) == 12


def test_a_gpu_on_which_kernels_are_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from assay.lab.kv.pages import kernels

    layout = lay.layout_of(1, 64, 16)
    kernels.check(layout, 3, torch.bfloat16, torch.device(DEVICE))
    right = kernels.attend

    def off(q: torch.Tensor, out: torch.Tensor, *more: object, **options: object) -> None:
        right(q, out, *more, **options)  # type: ignore[arg-type]
        out *= 1.02

    monkeypatch.setattr(kernels, "attend", off)
    with pytest.raises(AssayError, match="attends to pages is wrong on this GPU"):
        kernels.check(layout, 3, torch.bfloat16, torch.device(DEVICE))


def ran(text: str, outputs: int, *inputs: np.ndarray) -> list[np.ndarray]:
    """What the few instructions of PTX that kernels use make of 32-bit registers [n]: `outputs` of them, as fp16 [n, 2] each."""
    held = {f"${outputs + i}": x.view(np.uint32) for i, x in enumerate(inputs)}
    for line in re.sub(r"\.reg[^;]*;|[{}]", "", text).split(";"):
        if not line.strip():
            continue
        name, rest = line.split(maxsplit=1)
        to, *given = [x.strip() for x in rest.split(",")]
        one = [held[x] if x in held else np.full_like(held[f"${outputs}"], int(x, 0)) for x in given]
        if name == "prmt.b32":
            digits = [given[2][-1 - i] for i in range(4)]
            found = np.zeros_like(one[0])
            for i, d in enumerate(digits):
                found = found | ((one[0] if int(d) < 4 else one[1]) >> np.uint32(8 * (int(d) % 4)) & 255) << np.uint32(
                    8 * i
                )
        elif name == "lop3.b32":
            assert given[3] == "0xea"  # of a, b and c: a & b | c
            found = one[0] & one[1] | one[2]
        elif name == "mov.b32":
            found = one[0]
        else:
            halves = [x.view(np.float16) for x in one]
            found = halves[0] - halves[1] if name == "sub.f16x2" else halves[0] * halves[1] + halves[2]
            assert name in ("sub.f16x2", "fma.rn.f16x2")
        held[to] = found.view(np.uint32)
    return [held[f"${i}"].view(np.float16) for i in range(outputs)]


def test_instructions_unpack_every_byte() -> None:
    pytest.importorskip("triton")
    from assay.lab.kv.pages import kernels

    given = np.random.default_rng(0).permutation(np.arange(1024) % 256).astype(np.uint8)
    low1, low2, high1, high2 = ran(kernels.NIBBLES.value, 4, given)
    low, high = (np.stack([a.reshape(-1, 2), b.reshape(-1, 2)], 1).ravel() for a, b in ((low1, low2), (high1, high2)))
    assert (low == (given & 15).astype(int) - 8).all() and (high == (given >> 4).astype(int) - 8).all()
    masks = np.random.default_rng(1).choice([3, 12, 48, 192], 1024).astype(np.int16).reshape(-1, 2, 2)
    fine1, fine2 = ran(kernels.FINE.value, 2, given, masks[:, 0].copy().ravel(), masks[:, 1].copy().ravel())
    assert (np.stack([fine1.reshape(-1, 2), fine2.reshape(-1, 2)], 1).ravel() == (given & masks.ravel())).all()


# What is refused before an engine starts.


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"head_dim": 256}, "256 channels"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "length of a request"),
        ({"partial_rotary_factor": 0.5}, "a part of its channels"),
    ],
)
def test_models_whose_cache_does_not_fit_are_refused(change: dict[str, object], said: str) -> None:
    usual = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = SimpleNamespace(**{**usual, "architectures": ["LlamaForCausalLM"], **change})
    config.get_text_config = lambda: config
    with pytest.raises(AssayError, match=said):
        check_model(config, shape_of(config))


def test_a_model_whose_cache_fits_is_taken() -> None:
    config = SimpleNamespace(num_hidden_layers=2, num_attention_heads=4, head_dim=128, architectures=["X"])
    config.get_text_config = lambda: config
    check_model(config, shape_of(config))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tensor-parallel-size 2", "a part of the heads"),
        ("--speculative-config {}", "drafted"),
        ("--kv-transfer-config {}", "keys and values"),
        ("--block-size 16", "take 64"),
        ("--kv-cache-dtype fp8", "take auto"),
        ("", "need a calibration"),
    ],
)
def test_a_server_of_packed_pages_refuses(words: str, said: str) -> None:
    with pytest.raises(AssayError, match=said):
        launch_of(ServePlan("model", CODEC, options=tuple(words.split())))


def test_pages_are_graded_in_vllm_with_a_calibration_alone() -> None:
    for plan in (EvalPlan("hf:model", CODEC, text=("x",)), EvalPlan("vllm:model", CODEC, text=("x",))):
        with pytest.raises(UsageError, match="in vLLM, with a calibration"):
            run_eval(plan)


COMPILED = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from assay.lab.kv.pages import kernels
from assay.lab.kv.pages.layout import layout_of

layout = layout_of(3, 64, 64)
off = {name: at for name, (at, _) in layout.offsets().items()}
sizes = {"D": 64, "WIDE": layout.wide, "SLOT": layout.slot, "BLOCK": 64, "GROUP": 3, "HEADS": 3, "TILE": 64}
types = {"pages": "u8", "x": "bf16", "q": "bf16", "out": "bf16", "slots": "i64", "positions": "i64"}
types |= dict.fromkeys(("starts", "lengths", "table", "places"), "i32") | {"k": "bf16", "v": "bf16"} | dict.fromkeys(("near", "synthesis_k", "synthesis_v", "synthesis"), "fp16")
for kernel, more in (
    (kernels.store_kernel, {f"OFF_{name.upper()}": at for name, at in off.items()} | {"ROWS": 16}),
    (kernels.attend_kernel, {f"OFF_{name.upper()}": at for name, at in off.items()} | {"ROWS": 16, "STAGES": 5, "ASM": True}),
    (kernels.unpack_kernel, {f"OFF_{name.upper()}": at for name, at in off.items()} | {"TILE": 32}),
    (kernels.combine_kernel, {"SPLITS": 16}),
):
    fixed = {name: value for name, value in {**sizes, **more}.items() if name in kernel.arg_names}
    def of(name):
        if name in fixed:
            return "constexpr"
        if name.endswith("_ptr"):
            return "*" + types.get(name.removesuffix("_ptr"), "fp32")
        return "fp32" if name == "scale" else "i32"
    source = ASTSource(kernel, {name: of(name) for name in kernel.arg_names}, constexprs=fixed)
    found = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 2})
    print(kernel.__name__, len(found.asm["ptx"]))
"""


def test_kernels_compile_for_a_gpu_that_is_not_here() -> None:
    pytest.importorskip("triton")
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("kernel") == 4
