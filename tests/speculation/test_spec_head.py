from __future__ import annotations

import numpy as np
import pytest
import spec_lines as lines

from assay.speculation.clues import start_up
from assay.speculation.decay import decay
from assay.speculation.diagnosis import likely_causes
from assay.speculation.head_state import HeadState, head_evidence
from assay.speculation.record import Record


def state(per_position: list[int], drafts: int) -> HeadState:
    return head_evidence(lines.read(lines.vllm_v1(per_position, drafts)).record).state


@pytest.mark.parametrize(
    ("per_position", "drafts", "expected"),
    [
        ([0, 0, 0], 400, HeadState.DEAD),
        ([0, 0, 0], 60, HeadState.UNCLEAR),
        ([40, 0, 0, 0], 1344, HeadState.NOISE),
        ([30, 1, 0], 1500, HeadState.NOISE),
        ([45, 30, 20], 1000, HeadState.DIVERGED),  # rare, but hits go on: the head knows the text
        ([150, 57], 1000, HeadState.DIVERGED),
        ([2, 0], 1000, HeadState.UNCLEAR),
    ],
)
def test_states(per_position: list[int], drafts: int, expected: HeadState) -> None:
    assert state(per_position, drafts) is expected


def test_simulated_heads() -> None:
    """A head that agrees by chance and one that agrees by understanding, at the same position 0."""
    rng = np.random.default_rng(3)
    drafts, k = 4000, 4
    chance = (rng.random((drafts, k)) < 0.04).cumprod(axis=1).sum(axis=0)
    # Half of the text is easy: there the head is right nearly always.
    easy = rng.random(drafts) < 0.045
    knows = ((rng.random((drafts, k)) < 0.9) & easy[:, None]).cumprod(axis=1).sum(axis=0)
    assert state(chance.tolist(), drafts) is HeadState.NOISE
    assert state(knows.tolist(), drafts) is HeadState.DIVERGED


def test_rule_of_three() -> None:
    found = head_evidence(lines.read(lines.vllm_v1([0, 0], 300)).record)
    assert found.upper == pytest.approx(0.01)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.83])
def test_geometric_ratio_inverts_the_sum(ratio: float) -> None:
    mean = sum(ratio**i for i in range(1, 6))
    record = Record(tokens_per_step=1 + mean, num_speculative_tokens=5)
    assert decay(record) == pytest.approx(ratio, abs=1e-9)


def test_geometric_ratio_at_the_ends() -> None:
    assert decay(Record(tokens_per_step=1.0, num_speculative_tokens=3)) is None
    assert decay(Record(tokens_per_step=4.0, num_speculative_tokens=3)) == 1.0
    assert decay(Record(tokens_per_step=2.0)) is None


LOADING = """\
INFO 03-04 10:00:00 [api_server.py:1] vLLM API server version 0.11.2
INFO 03-04 10:00:01 [x.py:1] Initializing engine, speculative_config=SpeculativeConfig(method='mtp', num_spec_tokens=2), quantization=compressed-tensors, kv_cache_dtype=fp8,
WARNING 03-04 10:00:05 [q.py:9] mtp.layers.0.mlp.gate_up_proj.weight_packed not found in params_dict, skip loading
WARNING 03-04 10:00:05 [q.py:9] mtp.fc.weight_packed not found in params_dict, skip loading
WARNING 03-04 10:00:05 [q.py:9] visual.blocks.0.norm.weight not found in params_dict, skip loading
"""  # noqa: E501


def test_what_was_seen_comes_before_what_is_usual() -> None:
    clues = start_up(LOADING)[0]
    causes = likely_causes(HeadState.DEAD, clues)
    assert causes[0].startswith("head weights were skipped at load (2 lines")
    assert "uninitialised" in causes[1]
    by_id = {c.id: c.text for c in clues}
    assert by_id["version"].endswith("0.11.2")
    assert by_id["kv_cache_dtype"] == "kv_cache_dtype=fp8"
    assert "speculation_off" not in by_id


def test_a_long_line_is_no_trap() -> None:
    """A line of megabytes (a dumped tensor) must not take more than a moment."""
    assert start_up("mtp weight " * 400_000)[0] == []


def test_speeds_of_running_intervals_only() -> None:
    text = "\n".join(
        [lines.vllm_engine(0, 40.0), lines.vllm_engine(0, 0.0, 0), lines.vllm_engine(0, 44.0, 2)]
    )
    assert start_up(text)[1] == [40.0, 44.0]
