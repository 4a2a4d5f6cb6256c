"""From observations to figures: against numpy by hand, and with tokens that must not count."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from assay.engines.scoring import Engagement, ScoringPath, Window
from assay.errors import AssayError
from assay.fidelity.breakdown.bins import by_class, by_confidence, by_depth, worst_tokens
from assay.fidelity.engaged import engaged, zero_share
from assay.fidelity.observation import WindowObservation, from_arrays, to_arrays
from assay.fidelity.summary import per_window, summarise
from assay.runs import Kept
from assay.stats import Resampling, cluster_ratio
from assay.stats.equivalence import Grade, Margins

DRAWS = Resampling(500, 1)


def window(
    index: int, seed: int, n: int = 60, shift: float = 0.0, noise: float = 0.02
) -> WindowObservation:
    rng = np.random.default_rng((seed, index))
    nll = rng.gamma(2.0, 1.5, n)
    d = shift + noise * rng.standard_t(4, n)
    return WindowObservation(
        index=index,
        first=1,
        tokens=rng.integers(0, 50, n + 1).astype(np.int32),
        nll_ref=nll,
        nll_cand=nll + d,
        kl=np.abs(d) ** 2,
        kl_rev=np.abs(d) ** 2,
        top1=rng.random(n) > 0.02,
        p_ref=np.exp(-nll),
        p_cand=np.exp(-nll - d),
        conf=rng.random(n),
        tv=np.abs(d) / 2,
        beyond=rng.random(n) > 0.99,
    )


def windows(count: int = 16, **kwargs: float) -> list[WindowObservation]:
    return [window(i, seed=3, **kwargs) for i in range(count)]  # type: ignore[arg-type]


def test_figures_are_those_of_the_pooled_tokens() -> None:
    seen = windows(shift=0.004)
    d = np.concatenate([w.dnll for w in seen])
    found = summarise(seen, Margins(), DRAWS)
    assert found.judgement.dppl_pct.value == pytest.approx(100 * (np.exp(d.mean()) - 1))
    assert found.kl.value == pytest.approx(np.concatenate([w.kl for w in seen]).mean())
    assert found.top1.value == pytest.approx(np.concatenate([w.top1 for w in seen]).mean())
    assert found.quantiles["median"].value == pytest.approx(
        np.median(np.concatenate([w.kl for w in seen])), rel=0.01
    )
    assert found.tokens == d.size
    assert found.judgement.grade is Grade.ACCEPT


def test_tokens_that_are_not_finite_are_counted_and_not_averaged() -> None:
    seen = windows()
    whole = summarise(seen, Margins(), DRAWS)
    broken = windows()
    for name in ("nll_cand", "nll_ref", "kl", "kl_rev", "p_ref", "p_cand", "conf", "tv"):
        values = getattr(broken[2], name)
        values[5] = np.nan
    found = summarise(broken, Margins(), DRAWS)
    assert found.nonfinite == 1
    assert found.tokens == whole.tokens - 1
    assert np.isfinite(found.kl.value)
    assert per_window(broken)[2]["tokens"] == 59


def test_an_infinite_kl_is_not_hidden() -> None:
    seen = windows()
    seen[0].kl[0] = np.inf
    found = summarise(seen, Margins(), DRAWS)
    assert found.kl.value == np.inf
    assert found.quantiles["median"].value < 1


def test_few_windows_are_inconclusive_whatever_they_show() -> None:
    assert summarise(windows(7), Margins(), DRAWS).judgement.grade is Grade.INCONCLUSIVE


def test_the_parts_of_a_breakdown_add_up() -> None:
    seen = windows()
    total = sum(w.kl.sum() for w in seen)
    for bins in (
        by_depth(seen),
        by_confidence(seen),
        by_class(seen, lambda t: "odd" if t % 2 else "even"),
    ):
        assert sum(b.tokens for b in bins) == sum(w.kl.size for w in seen)
        assert sum(b.kl.value * b.tokens for b in bins) == pytest.approx(total)


def test_depth_puts_tokens_where_they_stand() -> None:
    seen = windows()
    for w in seen:
        w.kl[:] = 0
        w.kl[-5:] = 1.0  # only the deepest tokens differ
    bins = by_depth(seen)
    assert bins[0].kl.value == 0
    assert bins[-1].kl.value > 0


def test_worst_tokens_come_with_what_was_before() -> None:
    seen = windows()
    seen[4].kl[30] = 9.0
    found = worst_tokens(seen, lambda ids: " ".join(map(str, ids)), count=3, context=4)
    assert found[0]["window"] == 4
    assert found[0]["position"] == 31
    assert found[0]["before"] == " ".join(map(str, seen[4].tokens[27:31]))


def test_observations_survive_the_disk(tmp_path: Path) -> None:
    original = [window(7, 1), window(8, 2)]
    same = [
        Window(3, tuple(map(int, w.tokens))) for w in original
    ]  # the same text, further up in another run
    Kept(tmp_path).put("batch", to_arrays(original))
    back = from_arrays(Kept(tmp_path).get("batch"), same)
    assert [w.index for w in back] == [3, 3]
    for one, other in zip(back, original, strict=True):
        for field in fields(WindowObservation):
            if field.name != "index":
                np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))


class TestEngaged:
    def same(self) -> list[WindowObservation]:
        seen = windows()
        for w in seen:
            w.nll_cand[:] = w.nll_ref
            w.kl[:] = 0
        return seen

    def check(self, seen: list[WindowObservation], **changes: object) -> object:
        settings = {
            "path": ScoringPath.PREFILL,
            "hooked": False,
            "same": False,
            "label": "x",
        } | changes
        return engaged(seen, settings.pop("facts", Engagement()), **settings)  # type: ignore[arg-type]

    def test_no_difference_anywhere_is_an_error(self) -> None:
        assert zero_share(self.same()) == 1.0
        with pytest.raises(AssayError, match="exactly zero") as error:
            self.check(self.same())
        assert error.value.finding_id == "fidelity.not_engaged"

    def test_unless_sameness_was_asked_for(self) -> None:
        assert self.check(self.same(), same=True).ok  # type: ignore[attr-defined]

    def test_a_hook_that_never_fired_is_an_error_even_where_numbers_differ(self) -> None:
        with pytest.raises(AssayError, match="never fired"):
            self.check(windows(), hooked=True, facts=Engagement(fires=0))

    def test_a_cache_that_nobody_read_is_an_error(self) -> None:
        with pytest.raises(AssayError, match="read no cache"):
            self.check(windows(), path=ScoringPath.DECODE, facts=Engagement(bytes_read=0))

    def test_a_difference_is_engagement(self) -> None:
        found = self.check(windows())
        assert json.dumps(found.to_json())  # type: ignore[attr-defined]
        assert found.zero_share < 0.1  # type: ignore[attr-defined]


def test_windows_of_one_block_are_one_cluster() -> None:
    seen = windows(16, shift=0.004)
    blocks = [i // 2 for i in range(16)]
    found = summarise(seen, Margins(), DRAWS, blocks=blocks)
    sums = np.array([sum(w.dnll.sum() for w in seen[i : i + 2]) for i in range(0, 16, 2)])
    by_hand = cluster_ratio(sums, np.full(8, 120.0))
    assert (found.windows, found.clusters) == (16, 8)
    assert found.dnll.se == pytest.approx(by_hand.se)
    assert found.dnll.value == pytest.approx(summarise(seen, Margins(), DRAWS).dnll.value)
    assert [row["block"] for row in per_window(seen, blocks)] == blocks
    shuffled = [seen[i] for i in np.random.default_rng(0).permutation(16)]
    assert summarise(shuffled, Margins(), DRAWS, blocks=blocks).kl.se == pytest.approx(found.kl.se)


def test_an_interval_of_kl_never_reaches_below_zero() -> None:
    seen = windows(3, noise=0.0)
    seen[0].kl[0] = 5.0
    found = summarise(seen, Margins(), DRAWS).kl
    t = cluster_ratio([w.kl.sum() for w in seen], [w.kl.size for w in seen]).interval
    assert t.lo < 0 < found.interval.lo < found.value
    assert found.interval.hi == pytest.approx(t.hi)
