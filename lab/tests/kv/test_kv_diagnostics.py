"""The figures of a diagnosis against plain formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from codec_cases import SITES, fitted, tokens
from scipy import stats

from assay.errors import UsageError
from assay_lab.kv.capture import queries_of
from assay_lab.kv.diagnose.metrics import Reads, output_error, score_error
from assay_lab.kv.diagnose.stages import (
    coded,
    distribution,
    outlier_share,
    relative_mse,
    stage_errors,
)
from assay_lab.kv.diagnose.verb import collapsed
from assay_lab.options import DiagnosisPlan


def windows(count: int = 2, length: int = 200) -> torch.Tensor:
    return torch.stack([tokens(SITES["k64"], length, seed=s) for s in range(count)])


def reads(window: int | None = None) -> Reads:
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(2, 6, 5, 64, generator=generator)
    return Reads(queries, torch.tensor([0, 17, 60, 120, 199]), 0.125, window)


def test_known_laws_have_their_known_distances() -> None:
    rng = np.random.default_rng(0)
    n = 200_000
    normal = distribution(torch.from_numpy(rng.normal(3.0, 7.0, n)))
    assert abs(normal.kurtosis or 1) < 0.05 and (normal.w2 or 1) < 0.01 and (normal.ks or 1) < 0.005
    uniform = distribution(torch.from_numpy(rng.uniform(size=n)))
    assert uniform.kurtosis == pytest.approx(-1.2, abs=0.02)
    # W2² of the uniform law of variance 1 to the normal one: 2 − 2 √(3 / π).
    assert uniform.w2 == pytest.approx(math.sqrt(2 - 2 * math.sqrt(3 / math.pi)), abs=0.003)
    laplace = distribution(torch.from_numpy(rng.laplace(size=n)))
    assert laplace.kurtosis == pytest.approx(3, abs=0.3)


def test_ks_is_that_of_scipy_and_w2_that_of_matched_quantiles() -> None:
    x = np.random.default_rng(1).gamma(2.0, size=500)
    found = distribution(torch.from_numpy(x))
    z = (x - x.mean()) / x.std()
    assert found.ks == pytest.approx(stats.kstest(z, "norm").statistic)
    fine = np.repeat(np.sort(z), 2000)
    quantiles = stats.norm.ppf((np.arange(fine.size) + 0.5) / fine.size)
    assert found.w2 == pytest.approx(float(np.sqrt(((fine - quantiles) ** 2).mean())), rel=1e-3)


def test_values_that_are_all_alike_have_no_distance() -> None:
    assert distribution(torch.full((9,), 2.5)).w2 is None
    assert distribution(torch.tensor([1.0, float("nan")])).values == 1


def test_errors_are_relative_to_the_variance_of_each_head() -> None:
    x = windows()
    back = x.clone()
    back[:, 1] = x[:, 1].mean(dim=(0, 1), keepdim=True)
    back[:, 2] += 0.1 * (x[:, 2] - x[:, 2].mean(dim=(0, 1)))
    torch.testing.assert_close(
        relative_mse(x, back), torch.tensor([0.0, 1.0, 0.01]), rtol=1e-4, atol=1e-6
    )


def test_outliers_are_counted() -> None:
    x = torch.randn(2, 3, 1000, 64, generator=torch.Generator().manual_seed(0))
    assert float(outlier_share(x).max()) < 3e-4
    x[0, 1, :50, 3] = 40.0
    assert float(outlier_share(x)[1]) == pytest.approx(50 / (2 * 1000 * 64), rel=0.2)


def test_exact_ends_stay_as_they_are() -> None:
    x = windows()
    back = coded(fitted("sinks+recent(n=3)+hadamard(bits=1)", "k64"), x)
    assert torch.equal(back[:, :, :4], x[:, :, :4]) and torch.equal(back[:, :, -3:], x[:, :, -3:])
    assert not torch.equal(back[:, :, 4:-3], x[:, :, 4:-3])


@pytest.mark.parametrize(
    "spec", ["hadamard", "kakeya(block=128)", "mean+sinks+pca(bits=2.5, coding=fixed)"]
)
def test_the_stages_add_up_to_the_error(spec: str) -> None:
    x = windows()
    codec = fitted(spec, "k64")
    found = stage_errors(codec, x)
    lo = codec.exact_first
    whole = float(relative_mse(x[:, :, lo:], coded(codec, x)[:, :, lo:]).mean())
    assert sum(s.added for s in found) == pytest.approx(whole, rel=1e-3)
    assert found[-1].relative_mse == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("window", [None, 30])
def test_score_errors_are_those_of_a_plain_loop(window: int | None) -> None:
    read, keys = reads(window), windows()
    back = keys + 0.05 * torch.randn(keys.shape, generator=torch.Generator().manual_seed(1))
    found = score_error(read, keys, back)
    for h in range(3):
        variances, kls = [], []
        for w in range(2):
            for q in (2 * h, 2 * h + 1):
                for i, at in enumerate(read.positions.tolist()):
                    lo = 0 if window is None else max(0, at - window + 1)
                    query = read.queries[w, q, i]
                    s, t = (0.125 * k[w, h, lo : at + 1] @ query for k in (keys, back))
                    p = s.softmax(0)
                    d = t - s
                    variances.append(float((p * (d - (p * d).sum()) ** 2).sum()))
                    kls.append(float((p * (s.log_softmax(0) - t.log_softmax(0))).sum()))
        assert float(found.rms[h]) == pytest.approx(math.sqrt(np.mean(variances)), rel=1e-4)
        assert float(found.kl[h]) == pytest.approx(np.mean(kls), rel=1e-3)
        # Half the variance is the divergence, to second order.
        assert float(found.kl[h]) == pytest.approx(float(found.rms[h]) ** 2 / 2, rel=0.2)


def test_an_error_that_all_keys_share_moves_no_attention() -> None:
    keys = windows()
    found = score_error(
        reads(), keys, keys + torch.randn(64, generator=torch.Generator().manual_seed(2))
    )
    assert float(found.rms.max()) < 1e-3 and float(found.kl.max()) < 1e-5


def test_errors_of_values_are_those_of_attentions_output() -> None:
    read, keys, values = reads(), windows(), windows(length=200) + 1
    assert float(output_error(read, keys, values, values).max()) == 0
    torch.testing.assert_close(
        output_error(read, keys, values, 1.1 * values), torch.full((3,), 0.01)
    )


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_queries_are_read_from_projections_and_both_kinds_of_norms(order: tuple[int, ...]) -> None:
    queries = torch.randn(2, 6, 11, 8)
    assert torch.equal(queries_of(queries.permute(*order), 6, 8, 11), queries)
    flat = queries.transpose(1, 2).reshape(2, 11, 48)
    assert torch.equal(queries_of(flat, 6, 8, 11), queries)


def test_a_cut_rank_is_warned_of_only_where_it_costs_most() -> None:
    def stream(rank: float, first: float) -> dict[str, object]:
        stages = [{"stage": "pca", "relative_mse": first}, {"stage": "norm", "relative_mse": 1.0}]
        return {"layer": 3, "stream": "k", "rank": rank, "relative_mse": 1.0, "stages": stages}

    assert collapsed([stream(9, 0.2), stream(60, 0.9)], 64, 3) == []
    (warning,) = collapsed([stream(9, 0.8)], 64, 3)
    assert warning.id == "kv.rank_collapse" and "rank 9 of 64" in warning.detail


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(UsageError, match="stream"):
        DiagnosisPlan("m", "fp8", streams="x")
    with pytest.raises(UsageError, match="queries"):
        DiagnosisPlan("m", "fp8", queries=0)
