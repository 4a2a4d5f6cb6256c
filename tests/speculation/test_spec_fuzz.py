"""No input may crash a parser, and no answer may contradict itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import spec_lines as lines
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.errors import AssayError
from assay.speculation.combine import Evidence
from assay.speculation.health import assess
from assay.speculation.spec import examine

GOOD = [
    lines.vllm_v1([8, 5], 10),
    lines.vllm_v1([3], 9, wording="0.8.2"),
    lines.vllm_v1([3], 9, wording="0.8.3"),
    lines.vllm_v0(50, 90, 70, 3),
    lines.sglang(2.5, 0.5),
    lines.llama_request(5, 9),
    lines.vllm_engine(1),
    lines.llama_statistics("draft-mtp", 4, 9, 5),
    "average acceptance length: 2.0 / 4",
    "Spec decode metrics: draft_acceptance_rate=0.62, system_efficiency=1.85",
    "spec-ngram: req 2 gave up (poor: verifies=8 accepted=0/8 misses=8)",
    "Acceptance rate (%): 50",
    "Drafts: 10",
    "Draft tokens: 20",
    "Accepted tokens: 10",
    "  Position 0: 60.00",
    "n_drafted = 10",
    "n_accept = 4",
    "eval time = 3 ms / 10 tokens ( 1 ms per token, 9 tokens per second)",
]


def consistent(evidence: Evidence) -> None:
    record = evidence.record
    found = assess(evidence)
    assert found.reason
    for rate in (record.acceptance_rate, *(record.per_position or ())):
        assert rate is None or rate >= 0
    assert record.counts.drafted is None or record.counts.drafted >= 0
    for interval in (*found.positions, *([found.pooled] if found.pooled else [])):
        assert -1e-9 <= interval.lo <= interval.value <= interval.hi <= 1 + 1e-9


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A real line with a piece cut out, doubled or replaced."""
    line = draw(st.sampled_from(GOOD))
    a = draw(st.integers(0, len(line)))
    b = draw(st.integers(a, len(line)))
    middle = draw(
        st.sampled_from(
            ["", line[a:b] * 2, "nan", "-1", "1e999", "99999999999999999999", "\x00", "%", "é"]
        )
    )
    return line[:a] + middle + line[b:]


@settings(max_examples=400)
@given(st.lists(st.one_of(damaged(), st.sampled_from(GOOD), st.text(max_size=80)), max_size=12))
def test_damaged_lines(rows: list[str]) -> None:
    consistent(lines.read(*(r.encode("utf-8", "replace").decode() for r in rows)))


KEYS = [
    "draft_n",
    "draft_n_accepted",
    "predicted_n",
    "draft_rounds",
    "timings",
    "meta_info",
    "spec_verify_ct",
    "spec_num_correct_drafts",
    "spec_num_proposed_drafts",
    "spec_accept_histogram",
    "completion_tokens",
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "acceptance_histogram",
    "num_spec_tokens",
    "draft_count",
    "accept_count",
    "numDraftTokens",
    "numAcceptedTokens",
    "numRequestsWithDraftTokens",
    "completion_tokens_details",
    "accepted_prediction_tokens",
    "rejected_prediction_tokens",
    "speculative_decoding",
]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-1, 9), max_size=4),
)


@settings(max_examples=400)
@given(
    st.recursive(
        VALUES,
        lambda v: st.lists(v, max_size=4) | st.dictionaries(st.sampled_from(KEYS), v, max_size=8),
    )
)
def test_any_document(value: Any) -> None:
    consistent(lines.read_document(value))


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    "drafts",
                    "draft_tokens",
                    "accepted_tokens",
                    'accepted_tokens_per_pos{position="0"}',
                    "emitted_tokens",
                ]
            ),
            st.sampled_from(["0", "5", "1e3", "NaN", "+Inf", "-4", "x"]),
        ),
        max_size=8,
    ),
    st.sampled_from(["vllm:spec_decode_num_", "llamacpp:spec_decode_num_", "sglang:spec_"]),
)
def test_any_page(samples: list[tuple[str, str]], prefix: str) -> None:
    consistent(lines.read_metrics("\n".join(f"{prefix}{name} {value}" for name, value in samples)))


@settings(max_examples=150)
@given(st.binary(max_size=300))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "any.bin"
    path.write_bytes(data)
    try:
        report = examine([str(path)])
    except AssayError as error:
        assert error.finding_id.startswith("speculation.source")
    else:
        assert report.results["health"] in ("off", "insufficient")
