"""The noise of the diagnostic codec: its size, its law, and what it depends on."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from codec_cases import SITES, tokens
from scipy import stats

from assay.errors import UsageError
from assay_lab.kv.codecs.samples import LayerStream, Samples
from assay_lab.kv.spec import parse_recipe


def noisy(spec: str, site: LayerStream, x: torch.Tensor) -> torch.Tensor:
    return parse_recipe(spec).fit(Samples(site)).reconstruct(x)


@pytest.mark.parametrize("sigma", [0.003, 0.1, 1.0])
def test_it_is_standard_normal_over_the_rms_of_each_token(sigma: float) -> None:
    site = SITES["k64"]
    x = tokens(site, 600).bfloat16().float()
    rms = x.square().mean(dim=(0, 2), keepdim=True).sqrt()
    n = (noisy(f"noise(sigma={sigma})", site, x) - x) / (sigma * rms)
    assert abs(float(n.std()) - 1) < 0.01
    assert stats.kstest(n.flatten().double().numpy(), "norm").pvalue > 1e-3
    # Tokens and channels do not share their noise.
    flat = n.transpose(0, 1).flatten(1)
    corr = torch.corrcoef(flat[:100]).fill_diagonal_(0)
    assert float(corr.abs().max()) < 6 / math.sqrt(flat.shape[1])
    assert abs(float(n[..., 0::2].flatten().dot(n[..., 1::2].flatten()))) < 4 * math.sqrt(
        n.numel() / 2
    )


def test_seed_layer_and_stream_change_it_and_nothing_else_does() -> None:
    x = tokens(SITES["k64"], 50)
    site = LayerStream("k", 1, 4, 3, 64)
    first = noisy("noise(sigma=0.1)", site, x)
    assert torch.equal(first, noisy("noise(sigma=0.1)", site, x))
    # Order and company of the tokens do not matter.
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(first[:, order], noisy("noise(sigma=0.1)", site, x[:, order]))
    for other, spec in (
        (site, "noise(sigma=0.1, seed=1)"),
        (LayerStream("v", 1, 4, 3, 64), "noise(sigma=0.1)"),
        (LayerStream("k", 2, 4, 3, 64), "noise(sigma=0.1)"),
    ):
        n = noisy(spec, other, x)
        shared = torch.corrcoef(torch.stack([(first - x).flatten(), (n - x).flatten()]))[0, 1]
        assert abs(float(shared)) < 0.05


def test_its_stream_is_as_long_as_bf16() -> None:
    site = SITES["k64"]
    codec = parse_recipe("noise").fit(Samples(site))
    x = tokens(site, 1024)
    assert 0.99 < len(codec.encode(x)) / (2 * x.numel()) < 1.01
    assert codec.tables == {}


def test_without_size_it_is_bf16() -> None:
    site = SITES["v64"]
    x = tokens(site, 9)
    assert torch.equal(noisy("noise(sigma=0)", site, x), x.bfloat16().float())


@pytest.mark.parametrize("sigma", ["-0.1", "nan", "inf"])
def test_sizes_that_are_none_are_refused(sigma: str) -> None:
    with pytest.raises(UsageError, match="sigma"):
        parse_recipe(f"noise(sigma={sigma})")
