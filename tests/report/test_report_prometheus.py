from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families
from report_samples import full

from assay.report import prometheus
from assay.verdict import Report, Verdict


def parsed(report):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(prometheus.render(report))
        for sample in family.samples
    }


def results(command="check", **values):
    found = parsed(Report(command, Verdict.PASS, results=values))
    fixed = ("assay_verdict", "assay_exit_code", "assay_findings", "assay_report_info")
    return {key: value for key, value in found.items() if key[0] not in fixed}


def test_the_verdict_is_a_state_set_and_findings_are_counted():
    found = parsed(full())
    command = ("command", "check")
    states = {key[2][1]: value for key, value in found.items() if key[0] == "assay_verdict"}
    assert states == {"pass": 0, "fail": 1, "inconclusive": 0, "error": 0}
    assert found["assay_exit_code", command] == 1
    assert found["assay_findings", command, ("severity", "error")] == 1
    assert (
        found["assay_finding", command, ("id", "coherence.degenerate"), ("severity", "error")] == 1
    )
    assert (
        found["assay_report_info", command, ("model", "smollm2-135m"), ("schema", "assay/1")] == 1
    )
    assert found["assay_check_probes", ("status", "skipped")] == 1


def test_an_invalid_speed_enters_no_time_series():
    throughput = {"valid": False, "decode_tokens_per_s": {"median": 183.0}}
    assert results(throughput=throughput) == {("assay_check_throughput_valid",): 0}
    throughput["valid"] = True
    assert results(throughput=throughput) == {
        ("assay_check_throughput_valid",): 1,
        ("assay_check_throughput_decode_tokens_per_second", ("stat", "median")): 183.0,
    }


@pytest.mark.parametrize(
    ("path", "name", "factor"),
    [
        ("assay_check_throughput_ttft_s", "assay_check_throughput_ttft_seconds", 1),
        ("assay_check_itl_ms", "assay_check_itl_seconds", 1e-3),
        ("assay_compare_dppl_pct", "assay_compare_dppl_ratio", 1e-2),
        ("assay_kv_bytes_stored", "assay_kv_stored_bytes", 1),
        ("assay_kv_bytes_ratio", "assay_kv_bytes_ratio", 1),
        ("assay_kv_bytes_bits_per_value", "assay_kv_bytes_bits_per_value", 1),
        ("assay_compare_engaged_bytes_read", "assay_compare_engaged_read_bytes", 1),
        ("assay_kv eval_Total-µ", "assay_kv_eval_total", 1),
        ("assay_spec_windows", "assay_spec_windows", 1),
        ("assay_日本_!", "assay_value", 1),
    ],
)
def test_names_end_in_base_units(path, name, factor):
    assert prometheus.metric_name(path) == (name, factor)


def test_statistics_become_a_label_and_positions_an_index():
    assert results(
        "compare",
        dppl_pct={"value": 1.5, "lo": -0.5, "hi": math.nan},
        record={"per_position": [0.8, 0.6]},
    ) == {
        ("assay_compare_dppl_ratio", ("stat", "value")): pytest.approx(0.015),
        ("assay_compare_dppl_ratio", ("stat", "lo")): pytest.approx(-0.005),
        ("assay_compare_record_per_position", ("index", "0")): 0.8,
        ("assay_compare_record_per_position", ("index", "1")): 0.6,
    }


def test_lists_of_things_are_counted_by_status_and_text_never_becomes_a_label():
    files = [
        {"status": "verified", "path": "a"},
        {"status": "verified", "path": "b"},
        {"status": "mismatch"},
    ]
    texts = [{"label": "the model wrote this: <x>"}]
    assert results("verify", files=files, texts=texts, note="free text") == {
        ("assay_verify_files", ("status", "verified")): 2,
        ("assay_verify_files", ("status", "mismatch")): 1,
    }


def test_long_lists_are_left_out():
    assert results(per_window=list(range(prometheus.MAX_INDEX + 1))) == {}


def test_lists_inside_lists_are_counted_together():
    probes = [
        {"status": "run", "samples": [{"label": "ok"}, {"label": "degenerate"}]},
        {"status": "run", "samples": [{"label": "ok"}]},
        {"status": "skipped", "samples": []},
    ]
    assert results(probes=probes) == {
        ("assay_check_probes", ("status", "run")): 2,
        ("assay_check_probes", ("status", "skipped")): 1,
        ("assay_check_probes_samples", ("label", "ok")): 2,
        ("assay_check_probes_samples", ("label", "degenerate")): 1,
    }
