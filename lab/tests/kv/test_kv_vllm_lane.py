"""A stream inside vLLM: packed requests are told apart, and get what transformers' hook would give
each alone.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from assay.engines.vllm.steps import Request
from assay.errors import AssayError
from assay_lab.kv.hook_plan import Mode
from assay_lab.kv.vllm.stream import VllmStream
from kv.test_kv_hook import Rounding

HEADS, WIDTH = 2, 4
CODERS = [
    Rounding(),
    Rounding(exact_first=3),
    Rounding(granularity=4),
    Rounding(exact_first=3, exact_last=5),
    Rounding(granularity=4, exact_first=2, exact_last=3),
]


def tokens(seed: int, count: int) -> Any:
    return torch.randn(count, HEADS, WIDTH, generator=torch.Generator().manual_seed(seed))


class Batch:
    """Feeds sequences through a lane by the steps of each, packed, and keeps each one's cache as
    the engine would.
    """

    def __init__(self, lane: VllmStream, sequences: dict[str, Any], prefix: int) -> None:
        self.lane, self.sequences, self.prefix = lane, sequences, prefix
        self.cache = {name: torch.empty(0, HEADS, WIDTH) for name in sequences}
        self.at = dict.fromkeys(sequences, 0)

    def step(self, counts: dict[str, int], *, second: bool = False, padding: int = 0) -> None:
        requests, offset = [], 0
        for row, (name, count) in enumerate(counts.items()):
            requests.append(Request(name, self.at[name], count, offset, self.prefix, row))
            offset += count
        packed = [self.sequences[r.key][r.start : r.end] for r in requests]
        x = torch.cat([*packed, torch.full((padding, HEADS, WIDTH), 0.3)])
        before = x.clone()
        out, changed = self.lane.feed(requests, x, lambda request: False, second=second)
        assert torch.equal(x, before)  # it is a view of what the projection gave
        assert torch.equal(out[offset:], x[offset:])
        for r in requests:
            if r.key in changed:
                lo, hi = changed[r.key]
                assert 0 <= lo < hi <= r.start
                self.cache[r.key][lo:hi] = (
                    self.lane.histories[r.key].held.states[:, lo:hi].transpose(0, 1)
                )
            self.cache[r.key] = torch.cat([self.cache[r.key], out[r.offset : r.offset + r.count]])
            self.at[r.key] = r.end


def rounded(x: Any, coder: Rounding, end: int) -> Any:
    """What a cache of the first `end` tokens holds when all that is due of them has been coded."""
    lo = coder.exact_first
    ready = end - coder.exact_last
    ready -= max(0, ready - lo) % coder.granularity
    found = x[:end].clone()
    if ready > lo:
        found[lo:ready] = torch.round(found[lo:ready] / coder.step) * coder.step
    return found


def lane(coder: Rounding, mode: Mode) -> VllmStream:
    stateful = mode is not Mode.INFORWARD or coder.granularity > 1 or coder.exact_last > 0
    return VllmStream((0, "k"), coder, mode, stateful=stateful)


@pytest.mark.parametrize("coder", CODERS)
def test_inforward_codes_each_request_by_its_own_blocks_however_it_is_cut(coder: Rounding) -> None:
    sequences = {"a": tokens(1, 23), "b": tokens(2, 17), "c": tokens(3, 20)}
    batch = Batch(lane(coder, Mode.INFORWARD), sequences, prefix=10**6)
    batch.step({"a": 9, "b": 17}, padding=3)
    for name, end in (("a", 9), ("b", 17)):
        assert torch.equal(batch.cache[name], rounded(sequences[name], coder, end))
    batch.step({"c": 2, "a": 1})
    batch.step({"a": 6, "c": 11})
    for _ in range(7):
        batch.step({"c": 1, "a": 1})
    for name, x in sequences.items():
        assert torch.equal(batch.cache[name], rounded(x, coder, len(x))), name


@pytest.mark.parametrize("coder", CODERS)
def test_decode_leaves_the_prefix_exact_until_the_next_step(coder: Rounding) -> None:
    sequences = {"a": tokens(1, 21), "b": tokens(2, 21)}
    batch = Batch(lane(coder, Mode.DECODE), sequences, prefix=12)
    batch.step({"b": 12, "a": 7})
    batch.step({"a": 5})
    for name, x in sequences.items():
        assert torch.equal(batch.cache[name], x[:12])
    at_once = coder.granularity == 1 and not coder.exact_last
    for end in range(13, 22):
        batch.step({"a": 1, "b": 1})
        for name, x in sequences.items():
            # A token that has to wait for others is exact in its own step.
            expected = rounded(x, coder, end if at_once else end - 1)
            assert torch.equal(batch.cache[name][: len(expected)], expected), (name, end)
            assert at_once or torch.equal(batch.cache[name][end - 1], x[end - 1])


@pytest.mark.parametrize(
    "coder", [Rounding(), Rounding(exact_first=3), Rounding(exact_first=15), None]
)
def test_what_settles_is_what_is_kept(coder: Rounding | None) -> None:
    """Requests at different places, one of which begins again with more than its prefix, as after a
    preemption.
    """
    sequences = {"a": tokens(1, 30), "b": tokens(2, 30), "c": tokens(3, 30)}
    batches = [
        Batch(
            VllmStream((0, "k"), coder, Mode.DECODE, stateful=True, settles=settles),
            sequences,
            prefix=12,
        )
        for settles in (False, True)
    ]
    steps = [{"a": 12}, {"a": 1, "b": 7}, {"b": 5, "a": 1}, {"a": 1, "c": 12, "b": 1}]
    steps += [{"c": 1, "a": 1, "b": 1}] * 4
    for batch in batches:
        for step in steps:
            batch.step(step, padding=2)
        batch.at["b"], batch.cache["b"] = 0, torch.empty(0, HEADS, WIDTH)
        batch.step({"a": 1, "b": 17})
        for _ in range(3):
            batch.step({"a": 1, "b": 1, "c": 1})
    for name in sequences:
        assert torch.equal(batches[0].cache[name], batches[1].cache[name]), name
    if coder is not None:
        assert batches[0].lane.coded == batches[1].lane.coded
        assert (
            batches[1].lane.histories["a"].track.length
            < batches[0].lane.histories["a"].track.length
        )


@pytest.mark.parametrize("coder", CODERS)
def test_snapshot_gives_what_the_first_pass_saw(coder: Rounding) -> None:
    clean = {"a": tokens(1, 22), "b": tokens(2, 15)}
    batch = Batch(lane(coder, Mode.SNAPSHOT), clean, prefix=10**6)
    batch.step({"a": 22, "b": 15})
    assert all(torch.equal(batch.cache[name], x) for name, x in clean.items())
    # The second pass comes with other states, packed otherwise, in other steps.
    batch.sequences = {name: x + 1 for name, x in clean.items()}
    batch.at, batch.cache = (
        dict.fromkeys(clean, 0),
        {n: torch.empty(0, HEADS, WIDTH) for n in clean},
    )
    batch.step({"b": 6, "a": 20}, second=True)
    batch.step({"a": 2, "b": 9}, second=True)
    for name, x in clean.items():
        assert torch.equal(batch.cache[name], rounded(x, coder, len(x))), name


def test_an_uncoded_stream_passes() -> None:
    for mode in Mode:
        batch = Batch(
            VllmStream((0, "v"), None, mode, stateful=True), {"a": tokens(1, 9)}, prefix=4
        )
        for lo, hi in pairwise((0, 4, 5, 9)):
            batch.step({"a": hi - lo})
        assert torch.equal(batch.cache["a"], tokens(1, 9))
        assert batch.lane.fires == batch.lane.coded == 0


def test_a_request_that_begins_again_is_new_and_one_from_elsewhere_is_refused() -> None:
    coder = Rounding(granularity=4)
    batch = Batch(lane(coder, Mode.INFORWARD), {"a": tokens(1, 16)}, prefix=16)
    batch.step({"a": 6})
    # Preempted: its blocks are gone, it is computed again.
    batch.at, batch.cache = {"a": 0}, {"a": torch.empty(0, HEADS, WIDTH)}
    batch.step({"a": 16})
    assert torch.equal(batch.cache["a"], rounded(tokens(1, 16), coder, 16))
    batch.sequences["b"], batch.at["b"] = tokens(2, 16), 8
    with pytest.raises(AssayError, match="another request's cache"):
        batch.step({"b": 2})
    batch.lane.forget(["a"])
    assert not batch.lane.histories
