"""No source hangs `assay spec`, fills its memory or ends in a bug."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import spec_lines as lines

from assay.errors import AssayError
from assay.speculation import metrics_page, read
from assay.speculation.document import MAX_DOCUMENT
from assay.speculation.options import SpecOptions
from assay.speculation.spec import examine


def test_figures_beyond_any_float(tmp_path: Path) -> None:
    line = lines.vllm_v1([0, 0], 10)
    log = tmp_path / "server.log"
    for old, new in (
        ("0.000, 0.000", f"{'9' * 401}.0, 0.000"),
        ("length: 1.00", f"length: {'9' * 401}"),
    ):
        log.write_text(line.replace(old, new) + "\n")
        assert examine([str(log)]).exit_code in (0, 1, 3)
    page = tmp_path / "reply.json"
    page.write_text('{"draft_n": %s, "draft_n_accepted": 3, "predicted_n": 9}' % ("9" * 401))
    assert examine([str(page)]).exit_code == 3


@pytest.mark.parametrize("follow", [False, True])
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path, follow: bool) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    began = time.monotonic()
    with pytest.raises(AssayError, match="named pipe"):
        examine([str(pipe)], SpecOptions(follow=follow))
    assert time.monotonic() - began < 30


def test_a_device_is_refused() -> None:
    with pytest.raises(AssayError, match="device"):
        examine(["/dev/zero"])


def test_a_pipe_of_the_shell_is_read() -> None:
    out, into = os.pipe()
    os.write(into, (lines.vllm_v1([80, 60], 100) + "\n").encode())
    os.close(into)
    assert examine([f"/dev/fd/{out}"]).results["record"]["drafts"] == 100
    os.close(out)


def test_a_page_with_too_many_draft_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_page, "MOST_SAMPLES", 10)
    row = 'vllm:spec_decode_num_drafts_total{engine="%d"} 5\n'
    page = tmp_path / "metrics"
    page.write_text("".join(row % i for i in range(12)))
    with pytest.raises(AssayError, match="counters of drafts"):
        examine([str(page)])
    # Series that have nothing to do with drafts are passed over at no cost.
    page.write_text(row % 1 + "".join(f'vllm:latency{{a="{i}"}} 1\n' for i in range(500)))
    assert examine([str(page)]).results["record"]["drafts"] == 5


def test_a_log_with_too_many_lines_about_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "MOST_OBSERVATIONS", 5)
    log = tmp_path / "server.log"
    log.write_text((lines.vllm_v1([80, 60], 100) + "\n") * 9)
    with pytest.raises(AssayError, match="more lines about drafts"):
        examine([str(log)])


def test_json_beyond_the_bounds(tmp_path: Path) -> None:
    path = tmp_path / "reply.json"
    path.write_text('{"a":' * 5000 + "1" + "}" * 5000)
    with pytest.raises(AssayError, match="nested deeper"):
        examine([str(path)])
    path.write_text("[" + "[]," * (MAX_DOCUMENT // 3 + 1) + "[]]")
    with pytest.raises(AssayError, match="MB of JSON"):
        examine([str(path)])


def test_a_large_log_whose_lines_begin_with_a_brace_is_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assay.speculation.sources.HEAD", 4096)
    log = tmp_path / "server.log"
    log.write_text(("{worker} " + lines.vllm_v1([80, 60], 100) + "\n") * 40)
    assert examine([str(log)]).results["record"]["drafts"] == 4000
