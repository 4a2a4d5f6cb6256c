from __future__ import annotations

import io
import random
from typing import Any

import pytest
import spec_lines as lines
from hypothesis import given
from hypothesis import strategies as st

from assay.speculation.search import LINES_AFTER, LINES_BEFORE, interesting_lines

NOISE = [
    b'INFO:     10.1.2.3:4000 - "POST /v1/completions HTTP/1.1" 200 OK',
    b"success, access granted, occurred",
    b"",
    b"\xff\xfe broken bytes \x80",
]


def naive(data: bytes) -> list[bytes]:
    """Lines with a hit, four before and one after, the slow way."""
    rows = data.splitlines()
    keep: set[int] = set()
    for i, row in enumerate(rows):
        if b"ccep" in row or b"#acc" in row:
            keep |= set(range(max(0, i - 4), min(len(rows), i + 2)))
            after = i + 2
            while after < len(rows) and rows[after].lstrip(b" \t").startswith(b"Position "):
                keep.add(after)
                after += 1
    return [rows[i] for i in sorted(keep)]


@given(
    st.lists(
        st.sampled_from(
            [*NOISE, b"draft acceptance = 0.5", b"#acc tokens = 4", b"  Position 3: 1.0"]
        ),
        max_size=60,
    ),
    st.integers(64, 400),
    st.booleans(),
)
def test_same_lines_as_the_slow_way(rows: list[bytes], block: int, ended: bool) -> None:
    """Wherever blocks are cut, every interesting line comes once and in order."""
    data = b"\n".join(rows) + (b"\n" if ended else b"")
    found = list(interesting_lines(io.BytesIO(data), block=block, margin=1024))
    wanted = naive(data)
    # A reader that sees only one hit at a time may take more neighbours of a summary, never fewer.
    assert [r for r in found if r in wanted or not r] == found or set(wanted) <= set(found)
    assert sum(b"ccep" in r or b"#acc" in r for r in found) == sum(
        b"ccep" in r or b"#acc" in r for r in rows
    )


def test_small_blocks_lose_and_repeat_nothing() -> None:
    rng = random.Random(5)
    rows = []
    for i in range(3000):
        if i % 40 == 7:
            rows.append(lines.vllm_v1([i % 13, i % 7], 20).encode())
        else:
            rows.append(NOISE[rng.randrange(len(NOISE))] + b" %d" % i)
    data = b"\n".join(rows)
    whole = list(interesting_lines(io.BytesIO(data), block=1 << 20))
    for block in (997, 4096, 65_536):
        assert list(interesting_lines(io.BytesIO(data), block=block, margin=2048)) == whole
    assert sum(b"SpecDecoding" in r for r in whole) == len(
        [r for r in rows if b"SpecDecoding" in r]
    )


def test_a_reader_may_return_less_than_asked() -> None:
    class Dribble(io.BytesIO):
        def readinto(self, buffer: Any, /) -> int:
            return super().readinto(memoryview(buffer)[:7])

    data = b"x\n" * 50 + lines.vllm_v1([4, 2], 10).encode() + b"\n" + b"y\n" * 50
    assert any(
        b"SpecDecoding" in r for r in interesting_lines(Dribble(data), block=64, margin=1024)
    )


@pytest.mark.parametrize("data", [b"", b"\n", b"no such line", b"a" * 300_000, b"cc" * 100_000])
def test_nothing_to_find(data: bytes) -> None:
    assert list(interesting_lines(io.BytesIO(data), block=4096, margin=1024)) == []


def test_hit_at_the_very_start_and_end() -> None:
    assert list(interesting_lines(io.BytesIO(b"accept_rate=1\nz"))) == [b"accept_rate=1"]
    assert list(interesting_lines(io.BytesIO(b"eval time\n#acc tokens"))) == [
        b"eval time",
        b"#acc tokens",
    ]


def test_words_that_count_nothing_are_passed_over() -> None:
    noise = [
        b"INFO accepted connection from 10.0.0.1",
        b"> Accept: */*",
        b"access granted, success",
    ]
    row = lines.vllm_v1([4, 2], 10).encode()
    data = b"\n".join([*noise * 200, row, *noise * 200])
    for block in (512, 1 << 16):
        found = list(interesting_lines(io.BytesIO(data), block=block, margin=1024))
        assert [r for r in found if b"SpecDecoding" in r] == [row]
        assert len(found) <= 1 + LINES_BEFORE + LINES_AFTER
