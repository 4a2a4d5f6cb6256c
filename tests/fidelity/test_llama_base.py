"""llama.cpp's file of log-probabilities: our writer against our reader, against hand-made bytes and
broken files.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from assay.engines.scoring import LogitRows, Window
from assay.errors import AssayError
from assay.fidelity.llama_base import encode_rows, open_base, write_base


def scored(
    count: int, length: int, vocab: int, seed: int = 0
) -> tuple[list[Window], list[LogitRows]]:
    rng = np.random.default_rng(seed)
    windows = [Window(i, tuple(rng.integers(0, vocab, length).tolist())) for i in range(count)]
    first = length // 2 + 1
    rows = [
        LogitRows(
            w, first, torch.from_numpy(rng.normal(0, 4, (length - first, vocab)).astype(np.float32))
        )
        for w in windows
    ]
    return windows, rows


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def test_bytes_by_hand(tmp_path: Path) -> None:
    """Two rows of five entries, written with struct: what each number means."""
    path = tmp_path / "base.kld"
    row = struct.pack("<ff6H", 0.5, -8.0, 0, 2, 4, 16, 1, 99)  # the sixth is padding
    path.write_bytes(b"_logits_" + struct.pack("<Iii6i", 6, 5, 1, 4, 0, 1, 2, 3, 4) + 2 * row)
    base = open_base(path)
    assert (base.length, base.vocab_size, base.scored_from, base.rows_per_window) == (6, 5, 4, 2)
    assert base.windows(None)[0].tokens == (4, 0, 1, 2, 3, 4)
    assert base.windows(3)[0].tokens == (3, 0, 1, 2, 3, 4)
    assert base.log_probs(0).tolist() == [[-8.0, -7.0, -6.0, 0.0, -7.5]] * 2


@pytest.mark.parametrize("vocab", [50, 51])
@pytest.mark.parametrize("length", [8, 9])
def test_round_trip(tmp_path: Path, vocab: int, length: int) -> None:
    windows, rows = scored(3, length, vocab)
    base = write_base(tmp_path / "base.kld", windows, rows)
    assert base.windows(None) == tuple(windows)
    for found, original in zip(base.rows(windows), rows, strict=True):
        assert found.window == original.window
        assert found.first == original.first
        exact = log_softmax(original.values.numpy())
        # Half a step of 16 / 65,535 nats, and float32.
        kept = np.isfinite(found.values.numpy())
        gold = np.array(original.window.tokens[found.first :])
        exact[np.arange(len(gold)), gold] = np.maximum(
            exact[np.arange(len(gold)), gold], exact.max(1) - 16
        )  # an upper bound
        np.testing.assert_allclose(
            found.values.numpy()[kept], exact[kept], atol=0.5 * 16 / 65535 + 5e-6
        )
        assert (kept | (exact < exact.max(1, keepdims=True) - 15.99)).all()


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(2, 300),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 8.0, 40.0]),
    offset=st.sampled_from([0.0, 55.0, -200.0]),
)
@settings(max_examples=60, deadline=None)
def test_encoded_rows_are_within_half_a_step(
    seed: int, vocab: int, scale: float, offset: float
) -> None:
    logits = (np.random.default_rng(seed).normal(0, 1, (4, vocab)) * scale + offset).astype(
        np.float32
    )
    encoded = encode_rows(logits)
    assert encoded.shape == (4, 2 * ((vocab + 1) // 2) + 4)
    step, lowest = np.ascontiguousarray(encoded[:, :4]).view("<f4").T.astype(np.float64)
    decoded = encoded[:, 4 : 4 + vocab] * step[:, None] + lowest[:, None]
    expected = np.maximum(log_softmax(logits), log_softmax(logits).max(1, keepdims=True) - 16)
    tolerance = 0.51 * step[:, None] + 3e-6 * (1 + np.abs(expected)) + 1e-7 * abs(offset)
    assert (np.abs(decoded - expected) <= tolerance).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no file of log-probabilities"),
        (b"GGUF" + bytes(40), "no file of log-probabilities"),
        (b"_logits_" + bytes(5), "no file of log-probabilities"),
        (b"_logits_" + struct.pack("<Iii", 6, -1, 1), "claims 1 windows of 6 tokens and -1"),
        (b"_logits_" + struct.pack("<Iii6i", 6, 5, 1, *range(5), 0), "it is cut short"),
        (
            b"_logits_" + struct.pack("<Iii6i", 6, 5, 1, *range(5), 0) + bytes(41),
            "something behind",
        ),
        (
            b"_logits_" + struct.pack("<Iii6i", 6, 5, 1, *range(5), 7) + bytes(40),
            "outside its vocabulary of 5",
        ),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "base.kld"
    path.write_bytes(content)
    with pytest.raises(AssayError, match=message) as caught:
        open_base(path)
    assert "base.kld" in caught.value.message


def test_raised_entries_are_ruled_out_but_for_the_token_that_came(tmp_path: Path) -> None:
    logits = torch.zeros(3, 10)
    logits[:, 2], logits[:, 5], logits[:, 7] = -40.0, -15.0, -30.0
    window = Window(0, (0, 1, 2, 3, 4, 7, 1, 2))
    base = write_base(tmp_path / "base.kld", [window], [LogitRows(window, 5, logits)])
    values = next(base.rows([window])).values
    assert torch.isinf(values).nonzero().tolist() == [[0, 2], [1, 2], [1, 7], [2, 7]]
    assert values[0, 7] == pytest.approx(-16 - np.log(7), abs=1e-3)
    assert np.isfinite(base.log_probs(0)).all()


def test_the_smallest_logit_of_a_narrow_row_is_kept(tmp_path: Path) -> None:
    windows, _ = scored(1, 8, 10)
    rows = [LogitRows(windows[0], 5, torch.arange(30.0).reshape(3, 10) % 10)]
    assert torch.isfinite(
        next(write_base(tmp_path / "b", windows, rows).rows(windows)).values
    ).all()


def test_rows_of_another_protocol_are_refused(tmp_path: Path) -> None:
    windows, rows = scored(1, 8, 10)
    wrong = [LogitRows(windows[0], 1, torch.zeros(7, 10))]
    with pytest.raises(ValueError, match="from token 5 on"):
        write_base(tmp_path / "base.kld", windows, wrong)
    with pytest.raises(ValueError, match="from token 5 on"):
        write_base(tmp_path / "base.kld", [Window(0, tuple(range(8)))], rows)
    assert not (tmp_path / "base.kld").exists()
