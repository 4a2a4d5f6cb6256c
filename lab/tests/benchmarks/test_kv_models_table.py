"""README's table of caches: the choice is made where steps were tried, and what is shown comes from
fresh windows.
"""

from __future__ import annotations

from typing import Any

import pytest

from kv_models_table import chosen, filled, merged, own, render, shorter, tables

FIXED = "prerope+sinks+pca(step={}, coding=fixed, weights=measured, gains=3)"


def row(codec: str, kl: float, ratio: float, grade: str, **more: Any) -> dict[str, Any]:
    bytes_ = {
        "ratio": ratio,
        "stored": 1000.0,
        "bf16": 1000.0 * ratio,
        "tables": 320,
        "tokens": 1023,
        "table_tokens": 32736,
        "ratio_at": {"1024": 2.0, "8192": 3.0},
    }
    change = {"value": 0.1, "lo": 0.0, "hi": 0.2}
    return {
        "codec": codec,
        "text": "test",
        "length": 1024,
        "fresh": False,
        "grade": grade,
        "bytes": bytes_,
        "dppl_pct": change,
        "kld": {"mean": kl, "lo": kl, "hi": kl},
        "top1_pct": {"value": 95.0},
        "windows": 48,
        "tokens": 24528,
        "ppl_reference": 11.0,
        "characters_per_token": 4.0,
        **more,
    }


def document(*rows: dict[str, Any], model: str = "qwen15") -> dict[str, Any]:
    return {"model": model, "machine": {"gpu": "G"}, "rows": list(rows)}


TRIED = [
    row(FIXED.format(0.003), 0.005, 4.8, "ACCEPT"),
    row(FIXED.format(0.0035), 0.007, 5.1, "ACCEPT"),
    row(FIXED.format(0.005), 0.02, 5.9, "MARGINAL"),
]


def test_a_step_that_is_luckier_on_fresh_windows_than_where_it_was_tried_is_not_taken() -> None:
    fresh = [row(r["codec"], 0.006, r["bytes"]["ratio"], "ACCEPT", fresh=True) for r in TRIED]
    found = chosen([*TRIED, *fresh])
    assert found is not None
    assert (found["codec"], found["fresh"]) == (FIXED.format(0.0035), True)


def test_a_choice_that_fails_on_fresh_windows_is_shown_as_it_came_out() -> None:
    found = chosen([*TRIED, row(FIXED.format(0.0035), 0.011, 5.1, "MARGINAL", fresh=True)])
    assert found is not None
    assert found["grade"] == "MARGINAL"


def test_a_smaller_step_stands_in_for_one_that_fails_on_fresh_windows() -> None:
    narrow, wide = (
        row(FIXED.format(s), kl, 5.0, g, fresh=True)
        for s, kl, g in ((0.003, 0.005, "ACCEPT"), (0.0035, 0.011, "MARGINAL"))
    )
    assert chosen([*TRIED, narrow, wide]) == narrow


def test_without_fresh_windows_the_cell_is_marked() -> None:
    lines = list(render(merged([document(*TRIED)])))
    assert any("| yes: 5.1×, 0.0070* |" in line for line in lines)


def test_rows_of_later_files_take_the_place_of_earlier_ones_under_either_name_of_the_text() -> None:
    old = {
        k: v
        for k, v in row("fp8", 0.9, 2.0, "REJECT", text="wikitext-2-test.txt").items()
        if k not in ("length", "fresh")
    }
    (one,) = merged([document(old), document(row("fp8", 0.8, 2.0, "REJECT"))])
    assert one["kld"]["mean"] == 0.8


def test_one_cache_carries_all_its_tables() -> None:
    # 1,000 stored bytes of which 10 are the share of the tables; one cache alone stores 990 + 320.
    assert own(row("fp8", 0.1, 2.0, "ACCEPT")) == pytest.approx(2000 / (990 + 320))


def test_a_longer_context_has_a_column_of_its_own() -> None:
    rows = merged(
        [
            document(
                row("fp8", 0.8, 2.0, "REJECT", fresh=True),
                row("fp8", 0.9, 2.0, "REJECT", length=16384),
            )
        ]
    )
    assert any(
        line.startswith("| model | codec | 1,024 tokens | 16,384 tokens |") for line in render(rows)
    )


def test_of_one_file_the_row_of_most_tokens_counts_for_a_codec_that_was_measured_twice() -> None:
    short = row("fp8", 0.9, 2.0, "REJECT", fresh=True, tokens=12264)
    for rows in (
        (short, row("fp8", 0.8, 2.0, "REJECT", fresh=True)),
        (row("fp8", 0.8, 2.0, "REJECT", fresh=True), short),
    ):
        (one,) = merged([document(*rows)])
        assert one["kld"]["mean"] == 0.8


def test_in_forward_stands_beside_the_fresh_decode_of_the_same_codec() -> None:
    inside = row("fp8", 0.9, 2.0, "REJECT", mode="inforward")
    lines = tables(merged([document(row("fp8", 0.8, 2.0, "REJECT", fresh=True), inside)]))[
        "forward"
    ][1]
    assert lines[-1] == "| `fp8` | 0.8000 R → 0.9000 R |"


def test_speed_counts_the_tokens_that_were_scored_now() -> None:
    timed = row(
        "fp8", 0.8, 2.0, "REJECT", block=1, batch=192, score_s=2.0, exact_s=4.0, exact_windows=24
    )
    lines = tables([], [document(timed)])["speed qwen15"][1]
    assert lines[-1].startswith("| 1 | 192 | `fp8` | 3,066 | 12,264 |")


def test_a_page_has_its_blocks_filled_and_is_otherwise_left_alone() -> None:
    page = (
        "before\n<!-- kv fresh -->\nold\n<!-- end of kv fresh -->\n<!-- kv other -->\nkept\n<!--"
        " end of kv other -->\n"
    )
    found = filled(page, tables(merged([document(row("fp8", 0.8, 2.0, "REJECT", fresh=True))])))
    assert "old" not in found and found.startswith(
        "before\n<!-- kv fresh -->\n| codec | Qwen2.5-Coder-1.5B |"
    )
    assert found.endswith(
        "<!-- end of kv fresh -->\n<!-- kv other -->\nkept\n<!-- end of kv other -->\n"
    )


@pytest.mark.parametrize(
    ("codec", "shown"),
    [
        ("int", "int(bits=4)"),
        ("int(bits=2)", "int(bits=2)"),
        ("k:fp8;v:hadamard", "k:fp8;v:hadamard(bits=4)"),
        ("hadamard(norm=projection)", "hadamard(bits=4,norm=projection)"),
        ("prerope+mean+sinks+hadamard(bits=5)", "prerope+mean+sinks+hadamard(bits=5)"),
        ("prerope+sinks+pca(step=0.004, weights=measured)", "prerope+sinks+pca(step=0.004)"),
    ],
)
def test_a_codec_is_shown_with_its_bits(codec: str, shown: str) -> None:
    assert shorter(codec) == shown
