import math

import pytest

from assay.engines import (
    Capability,
    CapabilityReport,
    Message,
    MissingCapability,
    Request,
    Timing,
    TokenScores,
)
from assay.verdict import Verdict


def test_a_request_has_one_subject() -> None:
    assert Request(prompt="x", max_tokens=1).messages is None
    with pytest.raises(ValueError, match="exactly one"):
        Request(max_tokens=1)
    with pytest.raises(ValueError, match="exactly one"):
        Request(messages=(Message("user", "x"),), prompt="x", max_tokens=1)
    with pytest.raises(ValueError, match="at least 1"):
        Request(prompt="x", max_tokens=0)
    with pytest.raises(ValueError, match="tools need messages"):
        Request(prompt="x", max_tokens=1, tools=({},))


def test_decode_speed_leaves_out_what_came_with_the_first_chunk() -> None:
    timing = Timing(
        started=1.0, first_token=1.5, last_token=3.5, first_chunk_tokens=4, chunk_times=(1.5, 3.5)
    )
    assert timing.ttft == 0.5
    assert timing.decode_tokens_per_s(104) == 50.0
    assert timing.time_per_output_token(104) == 0.02


@pytest.mark.parametrize(("last", "tokens"), [(1.5, 10), (3.5, 4), (3.5, 0)])
def test_no_decode_no_speed(last: float, tokens: int) -> None:
    timing = Timing(1.0, 1.5, last, 4, (1.5, last))
    assert timing.decode_tokens_per_s(tokens) is None
    assert timing.time_per_output_token(tokens) is None


def test_bits_per_byte() -> None:
    scores = TokenScores((None, -math.log(2), -3 * math.log(2)), 3, bytes=8)
    assert scores.bits_per_byte == pytest.approx(0.5)
    assert scores.scored == (-math.log(2), -3 * math.log(2))
    assert TokenScores((None, -1.0), 2).bits_per_byte is None


def test_a_missing_capability_is_refused_with_its_reason() -> None:
    report = CapabilityReport(
        frozenset({Capability.CHAT}), {Capability.ECHO: "400: no echo here"}, where="http://host/v1"
    )
    report.require(Capability.CHAT)
    assert report.reason(Capability.CHAT) is None
    with pytest.raises(MissingCapability) as caught:
        report.require(Capability.ECHO, "bits per byte")
    assert (
        caught.value.message
        == "http://host/v1 has no echo, needed for bits per byte: 400: no echo here"
    )
    assert caught.value.verdict is Verdict.ERROR
    assert report.reason(Capability.TOOLS) == "not probed"
    assert report.to_json() == {"present": ["chat"], "absent": {"echo": "400: no echo here"}}
