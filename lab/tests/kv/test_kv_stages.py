"""The stages of codecs: the last is the whole round trip, and each adds to the error what it
must.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from codec_cases import SITES, SPECS, fitted, tokens

STAGED = [s for s in SPECS if any(name in s for name in ("kakeya", "pca", "hadamard"))]


@pytest.mark.parametrize("spec", STAGED)
def test_the_last_stage_is_the_round_trip(spec: str) -> None:
    codec = fitted(spec, "v64")
    x = tokens(SITES["v64"], codec.granularity if codec.granularity > 1 else 128)
    stages = codec.coder.stages(x[None])
    torch.testing.assert_close(stages[-1].decoded[0], codec.reconstruct(x), rtol=1e-4, atol=1e-4)
    errors = [float((s.decoded[0] - x).square().mean()) for s in stages]
    # No stage loses less than those before it.
    assert all(a <= b * 1.001 + 1e-6 for a, b in pairwise(errors))


def test_codecs_of_one_step_have_no_stages() -> None:
    assert fitted("fp8", "v64").coder.stages(tokens(SITES["v64"], 8)[None]) == []


def test_the_lost_norm_shows_in_its_own_stage() -> None:
    x = tokens(SITES["k64"], 128)[None]
    added = {}
    for published in ("true", "false"):
        stages = fitted(f"kakeya(block=128, published_norm={published})", "k64").coder.stages(x)
        *_, levels, norm = [float((s.decoded - x).square().mean()) for s in stages]
        added[published] = norm - levels
        assert [s.name for s in stages] == ["pca", "kmeans", "wht", "levels", "norm"]
    assert added["true"] > 5 * levels and abs(added["false"]) < 0.01 * levels


def test_a_rank_that_leaves_out_components_shows_in_the_first_stage() -> None:
    x = tokens(SITES["k64"], 128)[None]
    stages = fitted("kakeya(block=128, rank=8)", "k64").coder.stages(x)
    assert torch.equal(stages[0].figures["rank"], torch.full((1, 3), 8.0))
    mine = float((stages[0].decoded - x).square().sum())
    # Against the plain eigenvalues that a cut of rank 8 leaves out.
    expected = 0.0
    for head in x[0]:
        values = torch.linalg.svdvals((head - head.mean(dim=0)).double())
        expected += float(values[8:].square().sum())
    assert mine == pytest.approx(expected, rel=0.01)


def test_rotated_residuals_are_more_gaussian_than_plain_ones() -> None:
    x = tokens(SITES["k64"], 128)[None]
    stages = {s.name: s for s in fitted("kakeya(block=128)", "k64").coder.stages(x)}
    plain, turned = stages["kmeans"].values, stages["wht"].values
    assert plain is not None and turned is not None
    # Unit vectors of 64 values, whose squares sum to 1, and to 64 once they are turned.
    assert float(plain.nanmean().abs()) < 0.05
    torch.testing.assert_close(float(turned.square().nanmean()), 1.0, rtol=0.01, atol=0.0)
    assert 0 < float(stages["kmeans"].figures["explained"].min()) < 1
