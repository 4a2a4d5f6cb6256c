"""One matrix for all codecs: shapes, types, counts, appended tokens, random access, bad values, damaged streams."""

from __future__ import annotations

from zlib import crc32

import pytest

torch = pytest.importorskip("torch")

from codec_cases import SITES, SPECS, fitted, metric, samples, tokens  # noqa: E402

from assay.errors import AssayError, UsageError  # noqa: E402
from assay.kv.spec import parse_recipe, parse_spec  # noqa: E402
from assay.kv.stream import from_bytes  # noqa: E402

every_spec = pytest.mark.parametrize("spec", SPECS)
every_site = pytest.mark.parametrize("site", SITES)


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
@pytest.mark.parametrize("count", [0, 1, 2, 31, 128, 129])
def test_counts(spec: str, count: int) -> None:
    codec = fitted(spec, "k64")
    x = tokens(SITES["k64"], count)
    back = codec.decode(codec.encode(x))
    assert back.shape == x.shape
    assert float((back - x).norm()) <= max(SPECS[spec], 1e-9) * 1.3 * float(x.norm()) + 1e-6


@every_spec
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_types(spec: str, kind: torch.dtype) -> None:
    codec = fitted(spec, "v64")
    x = tokens(SITES["v64"], 70).to(kind)
    stream = codec.encode(x)
    assert codec.decode(stream, dtype=kind).dtype == kind
    torch.testing.assert_close(codec.decode(stream), codec.decode(codec.encode(x.float())))
    if codec.lossless:
        assert torch.equal(codec.decode(stream, dtype=kind), x)


@every_spec
@every_site
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
    assert writer.finish() == whole


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
def test_random_access(spec: str, site: str) -> None:
    codec = fitted(spec, site)
    stream = codec.encode(tokens(SITES[site], 400))
    whole = codec.decode(stream)
    for lo, hi in ((0, 400), (0, 1), (3, 6), (127, 129), (130, 390), (399, 400), (5, 5)):
        torch.testing.assert_close(codec.decode_range(stream, lo, hi), whole[:, lo:hi])
    with pytest.raises(UsageError):
        codec.decode_range(stream, 0, 401)


@every_spec
def test_random_access_reads_no_other_block(spec: str) -> None:
    codec = fitted(spec, "k64")
    stream = codec.encode(tokens(SITES["k64"], 1300))
    last = from_bytes(stream).blocks[-1]
    assert len(from_bytes(stream).blocks) > 1 and last.payload
    damaged = stream[:-1] + bytes([stream[-1] ^ 1])
    torch.testing.assert_close(codec.decode_range(damaged, 10, 20), codec.decode(stream)[:, 10:20])
    with pytest.raises(AssayError, match="checksum"):
        codec.decode(damaged)


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
@every_site
def test_blocks_do_not_depend_on_each_other(spec: str, site: str) -> None:
    codec = fitted(spec, site)
    size = codec.granularity
    x = tokens(SITES[site], 3 * size)
    together = codec.reconstruct(x)
    apart = [codec.reconstruct(x[:, i * size : (i + 1) * size]) for i in range(3)]
    torch.testing.assert_close(together, torch.cat(apart, dim=1), rtol=1e-5, atol=1e-5)


@every_spec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_no_numbers_are_refused(spec: str, bad: float) -> None:
    x = tokens(SITES["k64"], 10)
    x[1, 7, 3] = bad
    with pytest.raises(AssayError, match="head 1, token 7, channel 3"):
        fitted(spec, "k64").encode(x)


@every_spec
@pytest.mark.parametrize("scale", [1e-12, 1e8, 1e30])
def test_huge_and_tiny_values_stay_numbers(spec: str, scale: float) -> None:
    codec = fitted(spec, "k64")
    x = tokens(SITES["k64"], 140)
    x[0, 50] *= scale
    back = codec.decode(codec.encode(x))
    assert torch.isfinite(back).all()


@every_spec
def test_a_cut_stream_is_refused(spec: str) -> None:
    codec = fitted(spec, "v64")
    stream = codec.encode(tokens(SITES["v64"], 200))
    for end in (0, 3, 10, 27, 60, len(stream) // 2, len(stream) - 1):
        with pytest.raises(AssayError):
            codec.decode(stream[:end])
    with pytest.raises(AssayError):
        codec.decode(stream + b"x")


@every_spec
def test_an_altered_stream_is_refused(spec: str) -> None:
    codec = fitted(spec, "v64")
    stream = codec.encode(tokens(SITES["v64"], 200))
    step = max(1, len(stream) // 97)
    for at in range(0, len(stream), step):
        with pytest.raises(AssayError):
            codec.decode(stream[:at] + bytes([stream[at] ^ 64]) + stream[at + 1 :])


@every_spec
def test_payloads_of_a_wrong_length_are_refused_even_with_a_good_checksum(spec: str) -> None:
    codec = fitted(spec, "v64")
    blocks = from_bytes(codec.encode(tokens(SITES["v64"], 128))).blocks
    block = next((b for b in blocks if not b.exact), blocks[0])
    for payload in (b"", block.payload[:-1], block.payload + b"\0"):
        assert crc32(payload) is not None
        with pytest.raises(AssayError):
            codec.coder.dequantise(codec.coder.unpack([payload], block.tokens))


@every_spec
@every_site
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
    with pytest.raises(AssayError, match="calibration"):
        from assay.kv.codec import Samples

        parse_recipe("fp8(scale=head)").fit(Samples(SITES["k64"]))


@pytest.mark.parametrize(
    ("spec", "heads", "width", "tokens_coded", "bits"),
    [("hadamard(bits=4)", 3, 64, 1024, 4 + 16 / 64), ("hadamard(bits=3.5)", 3, 64, 1024, 3.5 + 16 / 64)],
)
def test_bytes_are_what_the_formula_says(
    spec: str, heads: int, width: int, tokens_coded: int, bits: float
) -> None:
    stream = fitted(spec, "k64").encode(tokens(SITES["k64"], tokens_coded))
    blocks = len(from_bytes(stream).blocks)
    values = heads * width * tokens_coded
    assert len(stream) == values * bits / 8 + blocks * (12 + 1) + 28 + len(str(parse_spec(spec)))


def test_boundary_layers_stay_exact() -> None:
    from assay.kv.codec import Samples, Site

    for layer, exact in ((0, True), (1, False), (2, False), (3, True)):
        codec = parse_recipe("boundary+hadamard").fit(Samples(Site("k", layer, 4, 1, 16)))
        assert codec.lossless == exact
