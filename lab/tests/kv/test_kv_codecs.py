"""One matrix for all codecs: shapes, types, counts, appended tokens, random access, bad values,
damaged streams.
"""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from codec_cases import SITES, SPECS, fitted, metric, samples, tokens

from assay.errors import AssayError, UsageError
from assay_lab.kv.codecs.stream import from_bytes
from assay_lab.kv.spec import parse_recipe, parse_spec

# Every codec meets one site of keys, with a head_dim that is no power of two, and one of values;
# the others when there is time.
slowly = partial(pytest.param, marks=pytest.mark.slow)
QUICK = {"k24", "v64"}
every_spec = pytest.mark.parametrize("spec", SPECS)
every_site = pytest.mark.parametrize("site", [s if s in QUICK else slowly(s) for s in SITES])
some_sites = pytest.mark.parametrize("site", ["k24", slowly("k80"), "v64"])


@every_spec
@every_site
def test_round_trip_is_as_close_as_its_bits_allow(spec: str, site: str) -> None:
    codec = fitted(spec, site)
    x = tokens(SITES[site], 301)
    back = codec.decode(codec.encode(x))
    assert back.shape == x.shape and back.dtype == torch.float32
    assert float((back - x).norm() / x.norm()) <= SPECS[spec]
    if not codec.lossless:
        assert not torch.equal(back, x)


@every_spec
@pytest.mark.parametrize("count", [0, 1, slowly(2), slowly(31), slowly(128), 129])
def test_counts(spec: str, count: int) -> None:
    codec = fitted(spec, "k24")
    x = tokens(SITES["k24"], count)
    back = codec.decode(codec.encode(x))
    assert back.shape == x.shape
    assert float((back - x).norm()) <= max(SPECS[spec], 1e-9) * 1.3 * float(x.norm()) + 1e-6


@every_spec
@pytest.mark.parametrize("kind", [torch.bfloat16, slowly(torch.float32), slowly(torch.float16)])
def test_types(spec: str, kind: torch.dtype) -> None:
    codec = fitted(spec, "v64")
    x = tokens(SITES["v64"], 70).to(kind)
    stream = codec.encode(x)
    assert codec.decode(stream, dtype=kind).dtype == kind
    torch.testing.assert_close(codec.decode(stream), codec.decode(codec.encode(x.float())))
    if codec.lossless:
        assert torch.equal(codec.decode(stream, dtype=kind), x)


@every_spec
@some_sites
def test_appended_tokens_give_the_stream_of_the_whole(spec: str, site: str) -> None:
    codec = fitted(spec, site)
    x = tokens(SITES[site], 300)
    whole = codec.encode(x)
    writer = codec.open()
    for lo, hi in ((0, 0), (0, 1), (1, 2), (2, 140), (140, 299)):
        writer.append(x[:, lo:hi])
    early = writer.finish()
    assert torch.isfinite(codec.decode(early)).all() and codec.decode(early).shape[1] == 299
    writer.append(x[:, 299:])
    finished = writer.finish()
    if "fp32" in spec:
        # Eigenvectors kept to their last digit show it when other blocks stand beside theirs.
        assert len(finished) == len(whole)
        torch.testing.assert_close(
            codec.decode(finished), codec.decode(whole), rtol=1e-4, atol=1e-4
        )
    else:
        assert finished == whole


@every_spec
def test_a_stream_goes_on(spec: str) -> None:
    codec = fitted(spec, "v64")
    x = tokens(SITES["v64"], 200)
    first = codec.encode(x[:, :150])
    writer = codec.open(first)
    writer.append(x[:, 150:])
    back = codec.decode(writer.finish())
    assert back.shape == x.shape
    torch.testing.assert_close(back[:, :150], codec.decode(first))


@every_spec
@every_site
def test_reconstruct_is_the_round_trip_without_the_bytes(spec: str, site: str) -> None:
    codec = fitted(spec, site)
    x = tokens(SITES[site], 300)
    back = codec.decode(codec.encode(x))
    blocks = from_bytes(codec.encode(x)).blocks
    lo = codec.exact_first
    hi = 300 - codec.exact_last
    coded = sum(b.tokens for b in blocks if not b.exact)
    assert coded == hi - lo
    torch.testing.assert_close(codec.reconstruct(x[:, lo:hi]), back[:, lo:hi], rtol=1e-5, atol=1e-5)


@every_spec
@some_sites
def test_blocks_do_not_depend_on_each_other(spec: str, site: str) -> None:
    codec = fitted(spec, site)
    size = codec.granularity
    x = tokens(SITES[site], 3 * size)
    together = codec.reconstruct(x)
    apart = [codec.reconstruct(x[:, i * size : (i + 1) * size]) for i in range(3)]
    torch.testing.assert_close(together, torch.cat(apart, dim=1), rtol=1e-5, atol=1e-5)


@every_spec
@pytest.mark.parametrize("bad", [float("nan"), slowly(float("inf")), float("-inf")])
def test_values_that_are_no_numbers_are_refused(spec: str, bad: float) -> None:
    x = tokens(SITES["k24"], 10)
    x[1, 7, 3] = bad
    with pytest.raises(AssayError, match="head 1, token 7, channel 3"):
        fitted(spec, "k24").encode(x)


@every_spec
@pytest.mark.parametrize("scale", [1e-12, slowly(1e8), 1e30])
def test_huge_and_tiny_values_stay_numbers(spec: str, scale: float) -> None:
    codec = fitted(spec, "k24")
    x = tokens(SITES["k24"], 140)
    x[0, 50] *= scale
    back = codec.decode(codec.encode(x))
    assert torch.isfinite(back).all()


@every_spec
def test_a_cut_stream_is_refused(spec: str) -> None:
    codec = fitted(spec, "v64")
    stream = codec.encode(tokens(SITES["v64"], 200))
    for end in (0, 3, 27, 60, len(stream) - 1):
        with pytest.raises(AssayError):
            codec.decode(stream[:end])
    with pytest.raises(AssayError):
        codec.decode(stream + b"x")


@every_spec
def test_an_altered_stream_is_refused(spec: str) -> None:
    codec = fitted(spec, "v64")
    stream = codec.encode(tokens(SITES["v64"], 200))
    step = max(1, len(stream) // 41)
    for at in range(0, len(stream), step):
        with pytest.raises(AssayError):
            codec.decode(stream[:at] + bytes([stream[at] ^ 64]) + stream[at + 1 :])


@every_spec
def test_payloads_of_a_wrong_length_are_refused_even_with_a_good_checksum(spec: str) -> None:
    codec = fitted(spec, "v64")
    blocks = from_bytes(codec.encode(tokens(SITES["v64"], 128))).blocks
    block = next((b for b in blocks if not b.exact), blocks[0])
    for payload in (b"", block.payload[:-1], block.payload + b"\0"):
        with pytest.raises(AssayError):
            codec.coder.dequantise(codec.coder.unpack([payload], block.tokens))


@every_spec
@some_sites
def test_tables_restore_the_codec(spec: str, site: str) -> None:
    codec = fitted(spec, site)
    again = parse_recipe(spec).restore(SITES[site], codec.tables)
    x = tokens(SITES[site], 150)
    assert again.encode(x) == codec.encode(x)
    assert again.table_bytes == codec.table_bytes


@every_spec
def test_a_spec_survives_its_text(spec: str) -> None:
    recipe = parse_recipe(spec)
    assert parse_recipe(str(recipe)) == recipe


def test_streams_of_other_codecs_and_shapes_are_refused() -> None:
    stream = fitted("hadamard", "k64").encode(tokens(SITES["k64"], 9))
    with pytest.raises(AssayError, match="coded by hadamard"):
        fitted("bf16", "k64").decode(stream)
    with pytest.raises(AssayError, match="heads"):
        fitted("hadamard", "k80").decode(stream)
    with pytest.raises(UsageError, match="shape"):
        fitted("hadamard", "k64").encode(tokens(SITES["k80"], 9))


def test_streams_of_other_tables_are_refused() -> None:
    site = SITES["k64"]
    stream = fitted("fp8(scale=head)", "k64").encode(tokens(site, 9))
    other = samples(site)
    codec = parse_recipe("fp8(scale=head)").fit(type(other)(site, 2 * other.x, None, metric(site)))
    with pytest.raises(AssayError, match="tables"):
        codec.decode(stream)


def test_a_codec_that_must_learn_says_so() -> None:
    from assay_lab.kv.codecs.samples import Samples

    with pytest.raises(AssayError, match="calibration"):
        parse_recipe("fp8(scale=head)").fit(Samples(SITES["k64"]))


@pytest.mark.parametrize(
    ("spec", "heads", "width", "tokens_coded", "bits"),
    [
        ("hadamard(bits=4)", 3, 64, 1024, 4 + 16 / 64),
        ("hadamard(bits=3.5)", 3, 64, 1024, 3.5 + 16 / 64),
    ],
)
def test_bytes_are_what_the_formula_says(
    spec: str, heads: int, width: int, tokens_coded: int, bits: float
) -> None:
    stream = fitted(spec, "k64").encode(tokens(SITES["k64"], tokens_coded))
    blocks = len(from_bytes(stream).blocks)
    values = heads * width * tokens_coded
    assert len(stream) == values * bits / 8 + blocks * (12 + 1) + 28 + len(str(parse_spec(spec)))


def test_boundary_layers_stay_exact() -> None:
    from assay_lab.kv.codecs.samples import LayerStream, Samples

    for layer, exact in ((0, True), (1, False), (2, False), (3, True)):
        codec = parse_recipe("boundary+hadamard").fit(Samples(LayerStream("k", layer, 4, 1, 16)))
        assert codec.lossless == exact


def test_more_bits_help_only_with_the_norm() -> None:
    x = tokens(SITES["k64"], 256)

    def error(bits: int, published: bool) -> float:
        spec = f"kakeya(block=128, bits={bits}, published_norm={str(published).lower()})"
        codec = fitted(spec, "k64")
        return float((codec.decode(codec.encode(x)) - x).square().mean())

    assert error(2, False) > 3 * error(3, False) > 9 * error(4, False)
    assert error(2, True) < 1.2 * error(4, True)
    assert error(4, True) > 5 * error(4, False)


@pytest.mark.parametrize("spec", ["pca(bits=3)", "pca(bits=3, trellis=8)"])
def test_the_range_code_is_as_short_as_its_laws_say(spec: str) -> None:
    codec = fitted(spec, "k64")
    assert abs(codec.coder.calibrated_bits - 3) < 0.05
    x = tokens(SITES["k64"], 1024, seed=2)
    numbers, kinds, _ = codec.coder.quantise(x[None])
    ideal = float(codec.coder.lengths(numbers.long(), kinds.long()).sum()) / 8
    blocks = len(from_bytes(codec.encode(x)).blocks)
    payload = sum(len(b.payload) for b in from_bytes(codec.encode(x)).blocks)
    # A block costs its number of escapes and at most two words of the coder on top.
    assert 0 <= payload - ideal <= 12 * blocks + 0.002 * ideal


def test_no_scale_brings_back_what_an_8_bit_float_loses_on_a_large_mean() -> None:
    """Layer 0 of Qwen2.5-Coder-1.5B: keys of 358 ± 1.4, where neighbours in e4m3 lie 32 apart.
    Without the mean it is small.
    """
    site = SITES["k64"]
    generator = torch.Generator().manual_seed(3)
    mean = torch.zeros(site.heads, 1, site.head_dim)
    mean[..., -8:] = torch.linspace(70, 358, 8)
    x = torch.randn(site.heads, 2000, site.head_dim, generator=generator) * 1.4 + mean
    learnt = type(samples(site))(site, x[:, :1000])
    tail = x[:, 1000:]
    lost = {
        spec: float(
            (parse_recipe(spec).fit(learnt).reconstruct(tail) - tail)[..., -8:].square().mean()
            / 1.4**2
        )
        for spec in (
            "fp8",
            "fp8(scale=tensor)",
            "fp8(scale=head)",
            "fp8(scale=head, top=200)",
            "mean+fp8",
        )
    }
    assert lost.pop("mean+fp8") < 0.01
    assert min(lost.values()) > 1


def test_a_transform_over_heads_beats_one_vector_alone_at_equal_bytes() -> None:
    x = tokens(SITES["k64"], 1024, seed=2)
    errors, sizes = {}, {}
    for spec in ("pca(bits=3)", "pca(bits=3, coding=fixed)", "mean+hadamard(bits=3)"):
        codec = parse_recipe(spec).fit(
            type(samples(SITES["k64"]))(SITES["k64"], tokens(SITES["k64"], 4000, seed=9))
        )
        stream = codec.encode(x)
        errors[spec] = float((codec.decode(stream) - x).square().mean())
        sizes[spec] = len(stream)
    assert sizes["pca(bits=3)"] < sizes["mean+hadamard(bits=3)"]
    assert (
        errors["pca(bits=3)"]
        < errors["pca(bits=3, coding=fixed)"]
        < errors["mean+hadamard(bits=3)"]
    )


@pytest.mark.parametrize("gains", [0, 3])
def test_a_site_that_gets_no_bits_at_all_is_its_mean(gains: int) -> None:
    """A step as wide as the values leaves no channel a bit: the stream holds no codes, and decodes
    to what attention reads.
    """
    site = SITES["k64"]
    codec = parse_recipe(f"pca(step=1000, coding=fixed, gains={gains})").fit(
        type(samples(site))(site, tokens(site, 4000, seed=9))
    )
    x = tokens(site, 64, seed=2)
    assert torch.equal(codec.decode(codec.encode(x)), codec.reconstruct(x))


def test_gains_hold_tokens_that_lie_far_outside_and_cost_little_on_others() -> None:
    """One token in a hundred is 20 times as large, as line breaks of real models are: gains follow
    it.
    """
    site = SITES["k64"]

    def with_outliers(count: int, seed: int) -> torch.Tensor:
        x = tokens(site, count, seed=seed)
        x[:, ::100] *= 20
        return x

    x = with_outliers(1024, 2)
    error, size = {}, {}
    for gains in (0, 1, 3):
        recipe = parse_recipe(f"pca(bits=4, coding=fixed, gains={gains})")
        codec = recipe.fit(type(samples(site))(site, with_outliers(4000, 9)))
        stream = codec.encode(x)
        error[gains] = float((codec.decode(stream) - x).square().mean())
        size[gains] = len(stream)
    assert max(size.values()) < 1.01 * min(size.values())
    assert error[1] < 0.3 * error[0]
    assert error[3] < 0.3 * error[0]
    plain = {
        gains: float((parse_recipe(f"pca(bits=4, coding=fixed, gains={gains})").fit(
            type(samples(site))(site, tokens(site, 4000, seed=9))
        ).reconstruct(y) - y).square().mean())
        for y in [tokens(site, 1024, seed=2)]
        for gains in (0, 3)
    }  # fmt: skip
    assert plain[3] < 1.1 * plain[0]


@pytest.mark.parametrize("bits", [1.5, pytest.param(4, marks=pytest.mark.slow)])
def test_a_trellis_has_less_error_than_rounding_at_equal_bytes(bits: float) -> None:
    x = tokens(SITES["k64"], 1024, seed=2)
    learnt = type(samples(SITES["k64"]))(SITES["k64"], tokens(SITES["k64"], 4000, seed=9))
    error, size = {}, {}
    for states in (0, 8, 32):
        codec = parse_recipe(f"pca(bits={bits}, trellis={states})").fit(learnt)
        stream = codec.encode(x)
        size[states] = len(stream)
        # As if all streams were of the same length: a bit a value is 6.02 dB.
        error[states] = float((codec.decode(stream) - x).square().mean()) * 4.0 ** (
            (len(stream) - size[0]) * 8 / x.numel()
        )
    assert abs(size[8] / size[0] - 1) < 0.02
    assert error[8] < 0.92 * error[0]
    assert error[32] < error[8]


@pytest.mark.parametrize("states", [4, 8, 16, 32])
def test_far_outliers_along_a_trellis_are_escapes(states: int) -> None:
    codec = fitted(f"pca(bits=3, trellis={states})", "k64")
    x = tokens(SITES["k64"], 40, seed=2)
    x[1, 7, 5] = 3e4
    x[0, 30] *= -100
    numbers, _, raw = codec.coder.quantise(x[None])
    assert (numbers[0, [7, 30]] == 1024).any() and raw[0, [7, 30]].abs().max() > 100
    others = [t for t in range(40) if t not in (7, 30)]
    calm = codec.decode(codec.encode(x))
    torch.testing.assert_close(
        calm[:, others], codec.decode(codec.encode(x[:, others])), rtol=1e-4, atol=1e-4
    )
    assert (calm - x)[:, [7, 30]].norm() < 0.02 * x[:, [7, 30]].norm()


def test_what_the_decoder_has_makes_codes_shorter() -> None:
    from assay_lab.kv.codecs.samples import Samples

    site = SITES["v64"]
    below = tokens(site, 3000, seed=4)
    x = 0.8 * below + 0.2 * tokens(site, 3000, seed=5)
    codec = parse_recipe("pca(bits=2, predict=below)").fit(Samples(site, x, predictors=below))
    stream = codec.encode(x, below)
    back = codec.decode(stream, predictors=below)
    rival = parse_recipe("pca(bits=2)").fit(Samples(site, x))
    other = rival.decode(rival.encode(x))
    assert abs(len(stream) / len(rival.encode(x)) - 1) < 0.05
    assert float((back - x).square().mean()) < 0.5 * float((other - x).square().mean())
    with pytest.raises(UsageError, match="side"):
        codec.encode(x)


def test_widths_are_the_best_of_all() -> None:
    import itertools

    import numpy as np

    from assay_lab.kv.codecs.pca_fixed import allocate

    rng = np.random.default_rng(3)
    for budget in range(9):
        cost = np.sort(rng.random((4, 4)), axis=1)[:, ::-1].copy()
        best = min(
            sum(cost[i, w] for i, w in enumerate(widths))
            for widths in itertools.product(range(4), repeat=4)
            if sum(widths) <= budget
        )
        found = allocate(cost, budget)
        assert found.sum() <= budget
        assert sum(cost[i, w] for i, w in enumerate(found)) == pytest.approx(best)
