"""Bytes of calibration tables: those of the decoder, what an encoder needs beyond them, and how
both are billed; and how far a stream may be from what attention read.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from assay.engines.scoring import Engagement
from assay.errors import AssayError
from assay_lab.kv.cache_bytes import (
    NOTE,
    CacheBytes,
    LayerBytes,
    check_read,
    measured_bytes,
    streams_note,
)
from assay_lab.kv.cache_shape import CacheShape
from assay_lab.kv.codecs.samples import LayerStream, Samples
from assay_lab.kv.spec import parse_recipe
from assay_lab.kv.stream_facts import StreamFacts

HEADS, WIDTH, TOKENS = 3, 8, 400
SHAPE = CacheShape(1, HEADS, HEADS, WIDTH, (None,), "Small")


def fitted(spec: str) -> Any:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(HEADS, TOKENS, WIDTH, generator=draw)
    metric = torch.eye(WIDTH).repeat(HEADS, 1, 1)
    return parse_recipe(spec).fit(Samples(LayerStream("v", 0, 1, HEADS, WIDTH), x, metric=metric))


def facts(apart: float = 0.0, error: float = 1.0, power: float = 1e4) -> StreamFacts:
    return StreamFacts(stored=1000, exact=4000, sha256="", apart=apart, error=error, power=power)


@pytest.mark.parametrize(
    ("spec", "decoder"),
    [
        ("hadamard(bits=4)", 0),
        ("fp8(scale=head)", 4 * HEADS),  # one float32 a head
        ("fp8(scale=tensor)", 4 * HEADS),
    ],
)
def test_a_decoder_is_billed_every_byte_of_its_tables(spec: str, decoder: int) -> None:
    coder = fitted(spec)
    assert coder.table_bytes == decoder == sum(t.nbytes for t in coder.tables.values())


@pytest.mark.parametrize("spec", ["pca(bits=3)", "pca(bits=3,coding=fixed)", "mean+pca(bits=3)"])
def test_an_encoder_needs_the_analysis_beyond_the_tables_of_the_decoder(spec: str) -> None:
    coder = fitted(spec)
    analysis = sum(t.nbytes for name, t in coder.tables.items() if name.endswith("analysis"))
    assert analysis > 0
    note = streams_note({}, {(0, "v"): coder}, SHAPE)
    assert note["encoder_tables"] == analysis
    assert note["tables"] == sum(t.nbytes for t in coder.tables.values()) - analysis


def test_tables_of_all_streams_are_added_and_come_out_in_the_results() -> None:
    one = SimpleNamespace(
        tables={"a": np.zeros(10, np.float32), "b": np.zeros(3, np.uint8)},
        table_bytes=17,
        lossless=False,
    )
    coders = {(0, "k"): one, (0, "v"): one}
    note = streams_note({key: [facts()] for key in coders}, coders, SHAPE)  # type: ignore[arg-type]
    assert (note["tables"], note["encoder_tables"]) == (34, 52)
    size = measured_bytes(Engagement(1, 1, {0: 1}, {NOTE: note}), 64, 64)
    assert (size.to_json()["tables_decoder"], size.to_json()["tables_encoder"]) == (34, 52)
    assert size.stored == 2000 + 34  # as many tokens share the tables as there are
    assert size.ratio == pytest.approx(8000 / 2034)


def test_a_sequence_of_its_own_carries_all_tables() -> None:
    size = CacheBytes({0: LayerBytes(1000, 4000)}, 500, 0, tokens=64, windows=1, table_tokens=640)
    assert size.stored == 1000 + 50
    assert size.ratio_at(64) == pytest.approx(4000 / 1500)
    assert size.ratio_at(128) == pytest.approx(8000 / 2500)
    assert size.break_even_tokens == 11  # 500 bytes at 3000/64 a token


@pytest.mark.parametrize(("apart", "error", "ok"), [
    (0.04, 1.0, True), (0.06, 1.0, False), (0.5, 1.0, False), (0.4, 10.0, True),
])  # fmt: skip
def test_a_stream_may_differ_by_a_twentieth_of_the_codecs_own_error(
    apart: float, error: float, ok: bool
) -> None:
    found = [facts(apart, error, power=1.0)]
    if ok:
        check_read((0, "k"), found)
    else:
        with pytest.raises(AssayError, match="does not give back what attention read"):
            check_read((0, "k"), found)
