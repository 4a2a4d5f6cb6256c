import math

import pytest

from assay.engines.server.metrics import corrupted_requests, kv_cache_dtype, parse_metrics

PAGE = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 20.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 30.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="fp8",engine="0"} 1.0
# TYPE vllm:corrupted_requests_total counter
vllm:corrupted_requests_total{engine="0"} 3.0
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{model_name="a \\"quoted\\" name"} NaN
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{le="0.01"} 5.0
vllm:inter_token_latency_seconds_bucket{le="+Inf"} 6.0
vllm:inter_token_latency_seconds_count 6.0
vllm:inter_token_latency_seconds_sum 0.25
"""


def test_samples_keep_the_servers_names() -> None:
    metrics = parse_metrics(PAGE)
    assert metrics.total("vllm:spec_decode_num_drafts_total") == 120.0
    assert metrics.total("vllm:spec_decode_num_drafts_total", engine="1") == 20.0
    assert metrics.total("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="1") == 30.0
    assert metrics.total("vllm:inter_token_latency_seconds_sum") == 0.25
    assert metrics.total("vllm:no_such_metric") is None
    buckets = metrics.samples("vllm:inter_token_latency_seconds_bucket")
    assert [(s.labels["le"], s.value) for s in buckets] == [("0.01", 5.0), ("+Inf", 6.0)]
    assert metrics.families["vllm:inter_token_latency_seconds"].type == "histogram"


def test_facts_of_vllm() -> None:
    metrics = parse_metrics(PAGE)
    assert kv_cache_dtype(metrics) == "fp8"
    assert corrupted_requests(metrics) == 3.0


def test_numbers_that_are_none() -> None:
    metrics = parse_metrics(PAGE)
    (sample,) = metrics.samples("sglang:spec_accept_length")
    assert math.isnan(sample.value)
    assert sample.labels == {"model_name": 'a "quoted" name'}
    assert metrics.total("sglang:spec_accept_length") is None


def test_an_empty_page_has_no_families() -> None:
    assert parse_metrics("").families == {}
    assert kv_cache_dtype(parse_metrics("")) is None


@pytest.mark.parametrize(
    "text", ["<html><body>502</body></html>", '{"detail": "Not Found"}', "a{b", "x y z w"]
)
def test_what_is_no_page_of_metrics(text: str) -> None:
    with pytest.raises(ValueError, match="not a page of Prometheus metrics"):
        parse_metrics(text)
