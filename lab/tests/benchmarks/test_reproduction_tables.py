"""The figures of the reproduction: known sums give known figures, and a packed file says the
same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reproduction_rows import Rows, pack
from reproduction_tables import (
    claims,
    difference,
    effect,
    judged,
    ladder,
    markdown,
    parts_of,
    passages,
    preconditioning,
    rounded,
)

WINDOWS = 8
TOKENS = {"all": 100, "tail": 64}


def row(
    kl: float, dnll: float, parts: tuple[str, ...] = ("all", "tail"), **more: Any
) -> dict[str, Any]:
    """A row whose windows lie evenly around a mean a token, so that the mean is known and the
    interval is not 0.
    """
    spread = np.linspace(-0.1, 0.1, WINDOWS)
    return {
        **{
            part: {
                "kl": list(TOKENS[part] * (kl + 0.1 * spread)),
                "dnll": list(TOKENS[part] * (dnll + spread)),
                "top1": [TOKENS[part] // 2] * WINDOWS,
                "tokens": [TOKENS[part]] * WINDOWS,
            }
            for part in parts
        },
        "seconds": 1.0,
        **more,
    }


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    found: dict[str, Any] = {"hf failed": {"error": "no"}}
    for kind in ("hf", "vllm"):
        found |= {
            f"{kind} joint vr=0.95": row(1.0, 0.9, ratio=3.0),
            f"{kind} k only vr=0.95": row(0.3, 0.2),
            f"{kind} v only vr=0.95": row(0.5, 0.4),
            f"{kind} snapshot vr=0.95": row(0.7, 0.6),
            f"{kind} decode vr=0.95": row(0.8, 0.7, ("tail",)),
            f"{kind} decode vr=1.0": row(0.4, 0.3, ("tail",)),
            f"{kind} joint vr=0.95 q=off": row(0.9, 0.8),
            f"{kind} layer 02 vr=0.95": row(0.1, 0.2),
            f"{kind} layer 03 vr=0.95": row(0.3, -0.3),
            **{f"{kind} noise {s}": row(0.01 + s * s, s * s) for s in (0.001, 0.2, 0.4, 0.8)},
        }
    found["hf precond k inforward q=off rank=half sinks=0"] = row(0.2, 0.2)
    found["hf precond k inforward q=on rank=half sinks=0"] = row(0.3, 0.3)
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"rows": found, "facts": {"windows": WINDOWS}}), encoding="utf-8")
    return Rows([file])


def figures(rows: Rows) -> dict[str, Any]:
    return {
        **{kind: parts_of(rows, kind) for kind in ("hf", "vllm")},
        "claims": claims(rows),
        "ladder": ladder(rows),
        "preconditioning": preconditioning(rows),
    }


def test_means_differences_and_ratios_are_those_of_the_sums(rows: Rows) -> None:
    assert not rows.has("hf failed")
    one = effect(rows, "hf joint vr=0.95")
    assert one["kl"]["value"] == pytest.approx(1.0)
    assert one["dppl_pct"]["value"] == pytest.approx(100 * np.expm1(0.9))
    assert (one["top1_pct"]["value"], one["ratio"], one["tokens"]) == (50.0, 3.0, 100 * WINDOWS)
    paired = difference(rows, ["hf joint vr=0.95"], ["hf k only vr=0.95", "hf v only vr=0.95"])
    assert paired["kl"]["value"] == pytest.approx(0.2)
    # One spread is taken from one, so that of one sum is left: paired, not independent.
    assert paired["kl"]["lo"] < 0.2 < paired["kl"]["hi"]


def test_a_path_of_changes_adds_up_and_a_difference_of_equals_is_exactly_nothing(
    rows: Rows,
) -> None:
    steps = ladder(rows)
    parts = [v["dnll"]["value"] for k, v in steps.items() if "→" in k]
    assert sum(parts) == pytest.approx(steps["all"]["dnll"]["value"]) == pytest.approx(0.6)
    engine = steps["engine: transformers → vLLM"]["kl"]
    assert (engine["lo"], engine["value"], engine["hi"]) == (0.0, 0.0, 0.0)


def test_layers_that_do_not_add_up_and_samples_that_get_the_sign_wrong_are_counted(
    rows: Rows,
) -> None:
    found = parts_of(rows, "hf")["layers vr=0.95"]
    assert found["joint over sum of KL"]["value"] == pytest.approx(2.5)
    assert found["sum"]["dnll"]["value"] == pytest.approx(-0.1)
    # Two samples of four windows of each layer; one layer is negative in both.
    assert found["published size: single layers"] == {"negative": 2, "samples": 4}
    assert found["kl above 0"] == 2


def test_noise_below_the_floor_does_not_count_for_the_slope(rows: Rows) -> None:
    found = parts_of(rows, "vllm")
    assert set(found["noise slope between neighbours"]) == {"0.2 to 0.4", "0.4 to 0.8"}
    assert found["noise slope between neighbours"]["0.2 to 0.4"][
        "less the smallest"
    ] == pytest.approx(2, 1e-3)


def test_samples_of_the_published_size_are_disjoint_fours() -> None:
    found = passages(np.array([1.0, 2, 3, 4, -5, -6, -7, -8, 99]))
    assert (found["lowest"], found["highest"], found["negative"], found["samples"]) == (
        -6.5,
        2.5,
        1,
        2,
    )


def test_a_packed_file_says_the_same(rows: Rows, tmp_path: Path) -> None:
    pack(rows, tmp_path / "rows.npz")
    again = Rows([tmp_path / "rows.npz"])
    assert again.facts == rows.facts
    assert list(again.rows) == list(rows.rows)
    assert "all" not in again.rows["hf decode vr=1.0"]
    for name in rows.rows:
        assert again.sums(name, "kl", "tail") == pytest.approx(
            rows.sums(name, "kl", "tail"), rel=2e-5
        )
        assert (again.sums(name, "tokens", "tail") == 64).all()
    page = markdown(rounded(figures(again)))
    assert "| joint vr=0.95 | 1 [" in page
    assert "k inforward q=on rank=half sinks=0: on minus off: 0.1 [" in page


def test_the_kept_figures_are_those_of_the_kept_rows() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "reproduction" / "results"
    kept = json.loads((results / "reproduction.json").read_text(encoding="utf-8"))
    rows = Rows([results / "reproduction_rows.npz"])
    assert kept["hf"]["rows"]["hf joint vr=0.95"] == rounded(effect(rows, "hf joint vr=0.95"))
    assert kept["ladder"]["all"] == rounded(ladder(rows)["all"])


def test_a_cell_is_held_against_the_recipe_and_a_kernel_against_the_other_of_its_engine(
    rows: Rows,
) -> None:
    rows.rows |= {
        "hf K4 vr=0.95": row(0.9, 0.7),
        "hf decode plain vr=1.0": row(0.5, 0.4, ("tail",)),
        "hf-eager joint vr=0.95": row(1.0, 0.95),
    }
    found = parts_of(rows, "hf")
    assert found["cells minus joint vr=0.95"]["K4 vr=0.95"]["dnll"]["value"] == pytest.approx(-0.2)
    assert found["cells minus joint vr=1.0"]["decode plain vr=1.0, tail"]["kl"][
        "value"
    ] == pytest.approx(0.1)
    assert ladder(rows)["hf-eager minus hf"]["joint vr=0.95"]["dnll"]["value"] == pytest.approx(
        0.05
    )
    assert "cells minus joint vr=0.95" not in parts_of(rows, "vllm")


def test_kl_against_the_number_of_layers_has_its_power_and_its_share_of_the_single_ones(
    rows: Rows,
) -> None:
    rows.rows |= {
        "hf nested 01 vr=0.95": row(0.1, 0.1, layers=[2]),
        "hf nested 02 vr=0.95": row(0.4, 0.2, layers=[2, 3]),
        "hf nested 04 vr=0.95": row(1.6, 0.4, layers=[2, 3, 4, 5]),  # of 4 and 5 no single row
    }
    found = parts_of(rows, "hf")["coded layers vr=0.95"]
    assert found["power"]["value"] == pytest.approx(2.0, abs=0.05)
    assert found["over the sum of the same layers alone"]["2"]["value"] == pytest.approx(1.0)
    assert list(found["over the sum of the same layers alone"]) == ["1", "2"]


def test_rows_of_some_windows_are_paired_with_the_same_windows_of_others(rows: Rows) -> None:
    half = row(0.3, 0.3)
    for part, sums in ((p, half[p]) for p in ("all", "tail")):
        for what in sums:
            sums[what] = [x if i % 2 == 0 else 0 for i, x in enumerate(sums[what])]
        sums["kl"] = [x + 0.5 * TOKENS[part] * (i % 4 == 0) for i, x in enumerate(sums["kl"])]
    rows.rows["hf K4 vr=0.95"] = half
    assert effect(rows, "hf K4 vr=0.95")["windows"] == WINDOWS // 2
    assert effect(rows, "hf K4 vr=0.95")["tokens"] == 100 * WINDOWS // 2
    whole = rows.sums("hf joint vr=0.95", "kl", each=True)
    expected = (np.asarray(half["all"]["kl"])[::2] - whole[::2]).sum() / (100 * WINDOWS // 2)
    assert difference(rows, ["hf K4 vr=0.95"], ["hf joint vr=0.95"])["kl"][
        "value"
    ] == pytest.approx(expected)
    assert rows.sums("hf joint vr=0.95", "kl", each=True, among=["hf K4 vr=0.95"]) == pytest.approx(
        whole[::2]
    )


def test_a_claim_is_judged_by_the_side_and_the_size_of_what_was_measured(rows: Rows) -> None:
    change = {"value": 2.0, "lo": 1.0, "hi": 3.0}
    assert judged(change, 10.0) == "survives" and judged(change, -1.0) == "does not"
    wide = {"value": 0.5, "lo": -1.0, "hi": 2.0}
    assert (
        judged(wide, 1.5) == "undecided"
        and judged(wide, 4.0) == "does not"
        and judged(wide, None) == "–"
    )
    found = {(c["claim"], c["engine"]): c for c in claims(rows)}
    snapshot = found["snapshot for in-forward", "hf"]
    assert snapshot["verdict"] == "survives" and snapshot["points"]["hi"] < 0
    assert snapshot["KL"]["value"] == pytest.approx(-0.3)
    assert (
        found["in-forward, share 0.95", "vllm"]["verdict"] == "does not"
    )  # its samples lie around e^0.9 - 1
