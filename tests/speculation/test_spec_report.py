"""The command as a user runs it: exit codes, JSON, findings."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import spec_lines as lines

from assay.cli.main import invoke
from assay.speculation.options import SpecOptions
from assay.speculation.spec import examine


def spec(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = invoke(["spec", *arguments, "--json"])
    out = json.loads(capsys.readouterr().out)
    assert out["exit_code"] == code
    return code, out


def log(tmp_path: Path, *rows: str, name: str = "server.log") -> str:
    path = tmp_path / name
    path.write_text("\n".join(rows) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("row", "code", "health", "finding"),
    [
        (lines.vllm_v1([800, 600], 1000), 0, "healthy", None),
        (lines.vllm_v1([200, 80], 1000), 1, "degraded", "speculation.head_diverged"),
        (lines.vllm_v1([0, 0], 1000), 1, "broken", "speculation.head_dead"),
        (lines.vllm_v1([30, 0, 0], 1000), 1, "broken", "speculation.head_noise"),
        (lines.vllm_v1([4, 2], 6), 3, "insufficient", "speculation.insufficient"),
        ("INFO nothing here", 3, "insufficient", "speculation.no_evidence"),
        ("speculative_config=None,", 3, "off", "speculation.off"),
        (lines.vllm_v1([890, 220, 30, 5, 0], 1000), 0, "healthy", "speculation.k_too_deep"),
        (lines.vllm_v1([900, 900], 900), 0, "healthy", "speculation.perfect_acceptance"),
        (
            "Spec decode metrics: draft_acceptance_rate=0.62, system_efficiency=0.85",
            0,
            "healthy",
            "speculation.costs_more",
        ),
    ],
)
def test_exit_codes(
    row: str,
    code: int,
    health: str,
    finding: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, out = spec(capsys, log(tmp_path, row))
    assert (found, out["results"]["health"]) == (code, health)
    ids = [f["id"] for f in out["findings"]]
    assert (finding in ids) if finding else ids == [] or health == "healthy"
    assert ("error" in [f["severity"] for f in out["findings"]]) == (code == 1)


SAMPLED = lines.vllm_v1(
    [8440, 3600, 1600, 800], 20_000
)  # a sound head, greedy drafts, temperature 0.7
DEFAULTS = (
    "INFO Default vLLM sampling parameters have been overridden by the model's"
    " `generation_config.json`: `{'temperature': 0.6, 'top_p': 0.9}`"
)


def test_a_head_that_works_is_not_accused_of_what_sampling_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = spec(capsys, log(tmp_path, SAMPLED))
    (found,) = [f for f in out["findings"] if f["severity"] == "error"]
    assert (code, out["results"]["health"], found["id"]) == (
        1,
        "degraded",
        "speculation.low_acceptance",
    )
    assert "works" in found["title"] and found["causes"][0].startswith("the text is sampled")
    # The temperature that a log names comes first among the causes, and is not held against the
    # run.
    _, out = spec(capsys, log(tmp_path, DEFAULTS, SAMPLED))
    (found,) = [f for f in out["findings"] if f["severity"] == "error"]
    assert "temperature 0.6" in found["causes"][0] and out["results"]["health"] == "degraded"


@pytest.mark.parametrize(
    ("temperature", "counts", "health"),
    [
        ("0.7", [8440, 3600, 1600, 800], "healthy"),
        ("0", [8440, 3600, 1600, 800], "degraded"),
        ("0.7", [6000, 2200, 900, 300], "degraded"),  # 30 %: less than any sound head there
        ("0.7", [2400, 500, 100, 20], "degraded"),
        ("0.7", [0, 0, 0, 0], "broken"),
    ],
)
def test_with_its_temperature_a_run_is_judged_by_what_sound_heads_reach_there(
    temperature: str,
    counts: list[int],
    health: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = lines.vllm_v1(counts, 20_000)
    _, out = spec(capsys, log(tmp_path, row), "--temperature", temperature)
    assert (out["results"]["health"], out["results"]["temperature"]) == (health, float(temperature))
    found = [f for f in out["findings"] if f["severity"] == "error"]
    if counts[0] == 6000:
        assert "at temperature 0.7" in found[0]["title"] and "sampled" not in found[0]["causes"][0]
    if counts[0] == 2400:
        assert found[0]["id"] == "speculation.head_diverged"


def test_record_has_the_promised_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out = spec(capsys, log(tmp_path, lines.vllm_v1([80, 50], 100), lines.vllm_v1([70, 50], 100)))
    record = out["results"]["record"]
    assert {
        k: record[k] for k in ("engine", "drafted", "accepted", "drafts", "windows", "counts")
    } == {
        "engine": "vllm",
        "drafted": 400,
        "accepted": 250,
        "drafts": 200,
        "windows": 2,
        "counts": True,
    }
    assert record["acceptance_rate"] == pytest.approx(0.625)
    assert record["mean_acceptance_length"] == pytest.approx(2.25)
    assert record["per_position"] == pytest.approx([0.75, 0.5])
    assert record["num_speculative_tokens"] == 2


def test_unknown_values_are_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out = spec(capsys, log(tmp_path, lines.sglang(2.5)))
    record = out["results"]["record"]
    assert record["counts"] is False
    assert [record[k] for k in ("drafted", "accepted", "drafts", "per_position")] == [None] * 4


@pytest.mark.parametrize(
    "arguments",
    [
        ["/no/such/file.log"],
        [],
        ["x", "--lossless", "http://127.0.0.1:9"],
        ["a", "b", "--follow"],
        ["--nonsense"],
    ],
)
def test_what_cannot_be_examined_is_exit_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = spec(capsys, *arguments)
    assert (code, out["verdict"]) == (2, "error")
    assert len(out["findings"]) == 1 and "\n" not in out["findings"][0]["title"]


def test_truncated_gzip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.log.gz"
    path.write_bytes(gzip.compress((lines.vllm_v1([8, 5], 10) + "\n").encode() * 500)[:-9])
    code, out = spec(capsys, str(path))
    assert (code, out["findings"][0]["id"]) == (2, "speculation.source_truncated")


def test_baseline_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = log(tmp_path, lines.vllm_v1([0, 0], 500))
    good = log(tmp_path, lines.vllm_v1([430, 300], 500), name="good.log")
    code, out = spec(capsys, bad, "--baseline", good)
    assert code == 1
    difference = out["results"]["baseline"]["position_0_difference"]
    assert difference["value"] == pytest.approx(-0.86)
    assert "loader fault" in out["results"]["baseline"]["reading"]
    assert "speculation.baseline_worse" in [f["id"] for f in out["findings"]]


def test_multiplier_is_measured_against_a_run_without_speculation(tmp_path: Path) -> None:
    on = log(tmp_path, lines.vllm_engine(0, 90.0), lines.vllm_v1([80, 60], 100))
    off = log(tmp_path, lines.vllm_engine(0, 50.0), lines.vllm_engine(0, 50.0), name="off.log")
    found = examine([on], SpecOptions(baseline=(off,))).results["benefit"]
    assert found["measured_multiplier"] == pytest.approx(1.8)
    assert found["cost_source"] == "measured"
    assert found["multiplier"] == pytest.approx(1.8), "the model is fitted to that one speed"
    slow = examine(
        [on], SpecOptions(baseline=(log(tmp_path, lines.vllm_engine(0, 120.0), name="s.log"),))
    )
    assert "speculation.costs_more" in [f.id for f in slow.findings]


def test_given_cost(tmp_path: Path) -> None:
    source = log(tmp_path, lines.vllm_v1([800, 600], 1000))
    found = examine([source], SpecOptions(cost_ratio=0.5)).results["benefit"]
    assert found["multipliers"][1] == pytest.approx(2.4 / 2.0)


def test_every_output_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = log(
        tmp_path,
        lines.vllm_engine(0),
        lines.vllm_v1([80, 50], 100),
        lines.vllm_engine(1),
        lines.vllm_v1([0, 0], 100),
    )
    files = {
        f"--{kind}": str(tmp_path / f"r.{kind}")
        for kind in ("html", "junit", "markdown", "prometheus")
    }
    code = invoke(["spec", source, *(part for pair in files.items() for part in pair)])
    assert code == 1
    out = capsys.readouterr().out
    assert "Engines" in out and "Draft positions" not in out, "the table that decides is the first"
    assert len(out.splitlines()) <= 40
    for path in files.values():
        assert "speculation" in Path(path).read_text().lower()


def test_a_checkpoint_is_examined_or_it_is_said_why_not(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3NextForCausalLM"],
                "model_type": "qwen3_next",
                "num_nextn_predict_layers": 1,
            }
        )
    )
    source = log(tmp_path, lines.vllm_v1([0, 0], 500))
    try:
        report = examine([source], SpecOptions(model=str(checkpoint)))
    except Exception as error:
        assert getattr(error, "finding_id", "").startswith("checkpoint."), (
            "a readable refusal, not a crash"
        )
        return
    ids = [f.id for f in report.findings]
    assert "speculation.head_not_examined" in ids or any(i.startswith("checkpoint.") for i in ids)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--interval", "nan"), ("--interval", "inf"), ("--interval", "-1"), ("--requests", "-1"), ("--prompts", "0"),  # noqa: E501
        ("--samples", "-1"), ("--cost-ratio", "nan"), ("--for", "3"), ("--follow", "--for", "nan"),
        ("--follow", "--for", "-1"), ("--requests", "3"), ("--lossless", "http://127.0.0.1:9"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    code, out = spec(capsys, log(tmp_path, lines.vllm_v1([80, 60], 100)), *arguments)
    assert (code, out["findings"][0]["id"]) == (2, "speculation.usage")


@pytest.mark.parametrize("arguments", [("-", "-"), ("-", "--baseline", "-")])
def test_standard_input_is_read_once(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    code, out = spec(capsys, *arguments)
    assert (code, out["findings"][0]["id"]) == (2, "speculation.usage")
    assert "read once" in out["findings"][0]["title"]
