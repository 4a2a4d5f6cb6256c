"""Packed pages: the reference against plain attention, and the kernels against the reference in
Triton's interpreter.
"""

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
from assay_lab.kv.eval import run_eval
from assay_lab.kv.packed_eval import run_packed
from assay_lab.kv.pages import CODEC
from assay_lab.kv.pages import layout as lay
from assay_lab.kv.pages.source import Source, check_model, shape_of
from assay_lab.kv.serve import launch_of
from assay_lab.options import EvalPlan, ServePlan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tables(heads: int, d: int, seed: int) -> lay.StreamTables:
    """Tables with means far from zero, of keys in some pairs of channels alone, and channels of
    unequal size.
    """
    made = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(heads, d, d, generator=made, dtype=torch.float64))[0]
    deviations = torch.logspace(0.7, -0.7, d, dtype=torch.float64)
    steps = deviations * torch.where(torch.arange(d) < d // 4, lay.STEP[6], lay.STEP[4])
    some = torch.randperm(d // 2, generator=made)[: lay.PAIRS[d]]
    kept = torch.zeros(d).index_fill(0, torch.cat([some, some + d // 2]), 1.0)
    mean, first = (
        3 * torch.randn(heads, *n, d, generator=made).half().float() for n in ((), (lay.FIRST,))
    )
    return lay.StreamTables(
        mean * kept, first, (rotation / steps).float(), (rotation * steps).mT.contiguous().float(),
        (steps.square() / steps.square().mean()).float().expand(heads, d).contiguous(),
    )  # fmt: skip


def drawn(tokens: int, t: lay.StreamTables, seed: int) -> torch.Tensor:
    """Residuals [tokens, heads, d] as the tables expect them: coefficients of variance 1, in
    steps.
    """
    y = torch.randn(tokens, *t.mean.shape, generator=torch.Generator().manual_seed(seed))
    d = y.shape[-1]
    steps = torch.where(torch.arange(d) < d // 4, lay.STEP[6], lay.STEP[4])
    return torch.einsum("nhe,hed->nhd", y / steps, t.synthesis)


def trig(d: int, positions: int) -> torch.Tensor:
    return lay.trigonometry(10000.0 ** (-torch.arange(0, d, 2) / d), 1.0, positions)


@pytest.mark.parametrize("d", [64, 128])
def test_pages_hold_what_the_codec_reconstructs(d: int) -> None:
    layout, t = lay.layout_of(2, d, 64), tables(2, d, 0)
    assert layout.ratio > 3.3
    pages = torch.zeros(5, 2 * 64 * layout.slot, dtype=torch.uint8)
    positions = torch.arange(100)
    slots = torch.tensor([3, 1])[positions // 64] * 64 + positions % 64
    r = drawn(100, t, 1)
    lay.write(pages, layout, slots, "k", r, t, positions)
    lay.write(pages, layout, slots, "v", 2 * r, t, positions)
    for stream, x in (("k", r), ("v", 2 * r)):
        found = lay.read(pages, layout, slots, stream, t, positions)
        assert torch.allclose(found, lay.reconstruct(x, t, layout, stream, positions), atol=1e-5)
        # Of four bits and more: the error is a small part of what was coded; of two bits more, a
        # sixteenth of that part.
        error = (found - x).square().sum((1, 2)) / x.square().sum((1, 2))
        assert error[lay.FIRST :].mean() < 0.012
        assert error[: lay.FIRST].mean() < (0.001 if layout.finer["kv".index(stream)] else 0.012)
    assert pages[[0, 2, 4]].sum() == 0


def test_a_mean_is_taken_off_where_it_weighs_most_and_first_tokens_have_their_own() -> None:
    mean = torch.zeros(1, 64)
    mean[0, :40] = torch.arange(40) + 1.0
    kept = lay._largest(mean, torch.ones(1, 64), 5)
    # Pairs are channels j and j + 32: of 3 … 7 and 35 … 39 the sum of squares is the largest.
    assert kept.nonzero()[:, 1].tolist() == [*range(3, 8), *range(35, 40)]
    t, cosines = tables(1, 64, 0), trig(64, 8)
    for stream in "kv":
        found = lay.means(t, stream, torch.arange(8), cosines)
        assert torch.equal(found[:4, 0], t.first[0])
        usual = lay.rotated_mean(t.mean, cosines[4:]) if stream == "k" else t.mean.expand(4, 1, 64)
        assert torch.equal(found[4:], usual)


def test_a_slot_below_zero_is_left_out() -> None:
    layout, t = lay.layout_of(1, 64, 64), tables(1, 64, 0)
    pages = torch.zeros(1, 64 * layout.slot, dtype=torch.uint8)
    lay.write(pages, layout, torch.tensor([-1, -1]), "k", drawn(2, t, 1), t, torch.arange(2))
    assert not pages.any()


def batch(d: int, group: int, heads: int, block: int, counts: list[int], lengths: list[int]):
    """Keys, values and queries of requests, their pages in a shuffled order, and what attention
    should give.
    """
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
        mean_k, mean_v = (
            lay.means(tk, "k", place, cosines[place]),
            lay.means(tv, "v", place, cosines[place]),
        )
        keys = (drawn(length, tk, 10 + i) + mean_k).bfloat16()
        values = (drawn(length, tv, 20 + i) + mean_v).bfloat16()
        q = torch.randn(
            count, heads * group, d, generator=torch.Generator().manual_seed(30 + i)
        ).bfloat16()
        coded_k = lay.reconstruct(keys.float() - mean_k, tk, layout, "k", place) + mean_k
        coded_v = lay.reconstruct(values.float() - mean_v, tv, layout, "v", place) + mean_v
        # A token's own key and value are at hand as they are.
        own = [
            torch.cat([x[:-1], exact[-1:].float()])
            for x, exact in ((coded_k, keys), (coded_v, values))
        ]
        wanted.append(lay.attend(q, *own, d**-0.5))
        coded.append(torch.stack([coded_k, coded_v]))
        queries.append(q)
        k.append(keys), v.append(values), positions.append(place)
        slots.append(table[i, place // block].long() * block + place % block)
    # The query of each request is at its last token, the next one's behind it.
    starts = torch.tensor(
        [n - 1 for n in torch.tensor([*lengths, 1]).cumsum(0).tolist()], dtype=torch.int32
    )
    queries = [
        torch.cat([torch.zeros(n - 1, *q.shape[1:]).bfloat16(), q])
        for n, q in zip(lengths, queries, strict=True)
    ]
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


@pytest.mark.engine
@pytest.mark.parametrize(("d", "group", "heads", "block", "lengths"), CASES)
def test_kernels_give_what_the_reference_gives(
    d: int, group: int, heads: int, block: int, lengths: list[int]
) -> None:
    pytest.importorskip("triton")
    from assay_lab.kv.pages import launch

    counts = [1] * len(lengths)
    layout, tk, tv, cosines, pages, table, starts, parts = batch(
        d, group, heads, block, counts, lengths
    )
    k, v, positions, slots, q, wanted, coded = parts
    t = launch.LayerTables.of(layout, tk, tv, cosines)
    count, scale = len(lengths), d**-0.5
    slots = torch.cat([slots, slots.new_full((2,), -1)])  # padding of a CUDA graph
    q, k, v, positions = (torch.cat([x, x[:2] * 0]) for x in (q, k, v, positions))
    turned = launch.prepare(q, k, v, positions, pages, slots, starts, t, scale, requests=count)
    real, at = slots[:-2].cpu(), positions[:-2].cpu()
    for stream, x, table_of in (("k", k, tk), ("v", v, tv)):
        table_of = table_of.to("cpu")
        found = lay.read(pages.cpu(), layout, real, stream, table_of, at)
        r = x[:-2].float().cpu() - lay.means(table_of, stream, at, cosines.cpu()[at])
        same = (found - lay.reconstruct(r, table_of, layout, stream, at)).abs().amax(
            dim=(1, 2)
        ) < 1e-2
        assert (
            same.float().mean() > 0.98
        )  # a coefficient on the edge between two codes may fall on either side
        assert (found - r).square().mean() < 0.012 * r.square().mean()
    out = torch.zeros_like(q)
    held = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    launch.attend(
        turned,
        q,
        k,
        v,
        out,
        pages,
        table,
        starts,
        held,
        t,
        scale,
        requests=count,
        longest=max(lengths),
    )
    rows = starts[:count].long()
    assert torch.allclose(out[rows].float(), wanted, atol=0.06, rtol=0.03), (
        (out[rows].float() - wanted).abs().max()
    )
    out[rows] = 0
    assert not out.any()
    # All requests but the first out of their pages, behind three rows of something else.
    first = int(len(lengths) > 1)
    places = torch.tensor([3, *lengths[first:-1]], device=DEVICE).cumsum(0).int()
    found_k, found_v = (
        torch.full((3 + sum(lengths), heads, d), 9.0, device=DEVICE).bfloat16() for _ in "kv"
    )
    launch.unpack(
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
    assert lay.together(ends, lengths, 1, 100) == [
        (1, 3, True),
        (3, 5, False),
        (5, 6, False),
        (6, 7, True),
    ]
    assert lay.together(ends, lengths, 1, 50) == [
        (1, 3, True),
        *((i, i + 1, False) for i in (3, 4, 5)),
        (6, 7, True),
    ]
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
    assert all(
        torch.equal(first[n][s].analysis, again[n][s].analysis) for n in (0, 1) for s in "kv"
    )
    next(tmp_path.rglob("*.safetensors")).write_bytes(b"cut")  # made anew
    sources[0].tables(), sources[2].tables()
    assert len(made) == 12


@pytest.mark.engine
def test_a_gpu_on_which_kernels_are_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from assay_lab.kv.pages import launch

    layout = lay.layout_of(1, 64, 16)
    launch.check(layout, 3, torch.bfloat16, torch.device(DEVICE))
    right = launch.attend

    def off(
        turned: object,
        q: object,
        k: object,
        v: object,
        out: torch.Tensor,
        *more: object,
        **options: object,
    ) -> None:
        right(turned, q, k, v, out, *more, **options)  # type: ignore[arg-type]
        out *= 1.02

    monkeypatch.setattr(launch, "attend", off)
    with pytest.raises(AssayError, match="attends to pages is wrong on this GPU"):
        launch.check(layout, 3, torch.bfloat16, torch.device(DEVICE))


def ran(text: str, outputs: int, *inputs: np.ndarray) -> list[np.ndarray]:
    """What the few instructions of PTX that kernels use make of 32-bit registers [n]: `outputs` of
    them, as two words [n, 2] each.
    """
    held = {f"${outputs + i}": x.view(np.uint32) for i, x in enumerate(inputs)}
    for line in re.sub(r"\.reg[^;]*;|[{}]", "", text).split(";"):
        if not line.strip():
            continue
        name, rest = line.split(maxsplit=1)
        to, *given = [x.strip() for x in rest.split(",")]
        one = [
            held[x] if x in held else np.full_like(held[f"${outputs}"], int(x, 0)) for x in given
        ]
        if name == "shr.u32":
            held[to] = one[0] >> one[1]
        elif name == "and.b32":
            held[to] = one[0] & one[1]
        else:
            assert (name, given[3]) == ("lop3.b32", "0xea")  # of a, b and c: a & b | c
            held[to] = one[0] & one[1] | one[2]
    return [held[f"${i}"].view(np.uint16) for i in range(outputs)]


def test_instructions_unpack_every_word() -> None:
    pytest.importorskip("triton")
    from assay_lab.kv.pages import kernels

    words = np.random.default_rng(0).permutation(2**16).astype(np.uint16)
    found = ran(kernels.WORDS.value, 4, words)
    for i, place in enumerate((1, 16, 4, 64)):
        # As fp16 they are the digit, its place and 2⁻²⁴: what the factors in the tables count on.
        digit = (words >> 4 * i & 15).astype(float)
        assert (
            found[i].reshape(-1).view(np.float16).astype(float) == digit * place * 2.0**-24
        ).all()
    t = np.random.default_rng(1).integers(0, 8, 2**16)
    first = np.where(t < 4, 3 << 2 * (t % 4), 0).astype(np.uint16)
    second = np.where(t < 4, 0, 3 << 2 * (t % 4)).astype(np.uint16)
    (low,) = ran(kernels.LOWER.value, 1, words, first, second)
    assert (
        low.reshape(-1).view(np.float16).astype(float)
        == (words >> 2 * t & 3) * 4.0 ** (t % 4) * 2.0**-24
    ).all()


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
    usual = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    config = SimpleNamespace(**{**usual, "architectures": ["LlamaForCausalLM"], **change})
    config.get_text_config = lambda: config
    with pytest.raises(AssayError, match=said):
        check_model(config, shape_of(config))


def test_a_model_whose_cache_fits_is_taken() -> None:
    config = SimpleNamespace(
        num_hidden_layers=2, num_attention_heads=4, head_dim=128, architectures=["X"]
    )
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
        ("-sc {}", "drafted"),
        ("--attention-config.backend FLASH_ATTN", "of their own"),
        ("--model other", "first argument"),
        ("", "need a calibration"),
    ],
)
def test_a_server_of_packed_pages_refuses(words: str, said: str) -> None:
    with pytest.raises(AssayError, match=said):
        launch_of(ServePlan("model", CODEC, options=tuple(words.split())))


def test_pages_are_graded_in_vllm_with_a_calibration_alone() -> None:
    for plan in (
        EvalPlan("hf:model", CODEC, text=("x",)),
        EvalPlan("vllm:model", CODEC, text=("x",)),
    ):
        with pytest.raises(UsageError, match="in vLLM, with a calibration"):
            run_packed(plan)
    with pytest.raises(AssayError, match="no parameters"):
        run_eval(EvalPlan("vllm:model", "prerope+pages", text=("x",), calibration="c"))
    with pytest.raises(AssayError, match="all tokens in all layers"):
        launch_of(ServePlan("model", CODEC, mode="decode"))


def test_pages_of_other_heads_or_beside_another_cache_are_not_graded(tmp_path: Path) -> None:
    from assay_lab.kv.calibrate import CalibrationPlan, run_calibrate
    from tiny_target import make_target

    make_target(tmp_path / "model", layers=1)
    (tmp_path / "t").write_text("some words of no matter, and a few more of them " * 200)
    plan = CalibrationPlan(
        str(tmp_path / "model"),
        tmp_path / "c",
        text=(str(tmp_path / "t"),),
        windows=2,
        length=64,
        tokens=256,
    )
    run_calibrate(plan)
    for model, said in (
        ("model", "16 channels"),
        ("model?kv_pages=c", "kv_pages changes"),
        ("model?kv_cache_dtype=fp8", "kv_cache_dtype changes"),
    ):
        with pytest.raises(AssayError, match=said):
            run_packed(
                EvalPlan(
                    f"vllm:{tmp_path}/{model}", CODEC, text=("x",), calibration=str(tmp_path / "c")
                )
            )


COMPILED = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from assay_lab.kv.pages import kernels
from assay_lab.kv.pages.layout import PAIRS, layout_of

layout = layout_of(3, 64, 64)
sizes = {f"OFF_{name.upper()}": at for name, at in layout.offsets().items()}
sizes |= {"D": 64, "SLOT": layout.slot, "BLOCK": 64, "GROUP": 3, "HEADS": 3, "TILE": 64, "ROWS": 16, "PAIR": PAIRS[64]}
sizes |= {"WK": layout.wide[0], "WV": layout.wide[1], "FK": layout.finer[0], "FV": layout.finer[1], "SPLITS": 16, "STAGES": 4, "ASM": True}
types = {"pages": "u8", "slots": "i64", "positions": "i64"} | dict.fromkeys(("q", "k", "v", "out"), "bf16")
types |= dict.fromkeys(("starts", "lengths", "table", "places", "pairs"), "i32")
types |= dict.fromkeys(("digits", "near", "table_k", "table_v"), "fp16")
for kernel, warps in ((kernels.prepare_kernel, 8), (kernels.attend_kernel, 1), (kernels.combine_kernel, 4), (kernels.unpack_kernel, 4)):
    fixed = {name: value for name, value in sizes.items() if name in kernel.arg_names}
    def of(name):
        if name in fixed:
            return "constexpr"
        if name.endswith("_ptr"):
            return "*" + types.get(name.removesuffix("_ptr"), "fp32")
        return "fp32" if name == "scale" else "i32"
    source = ASTSource(kernel, {name: of(name) for name in kernel.arg_names}, constexprs=fixed)
    found = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 3})
    print(kernel.__name__, len(found.asm["ptx"]))
"""  # noqa: E501


@pytest.mark.engine
def test_kernels_compile_for_a_gpu_that_is_not_here() -> None:
    pytest.importorskip("triton")
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("kernel") == 4
