from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import spec_lines as lines

from assay.errors import AssayError
from assay.speculation.combine import combine
from assay.speculation.options import SpecOptions
from assay.speculation.plan import resolve
from assay.speculation.read import Reading
from assay.speculation.record import Record
from assay.speculation.run import read_files
from assay.speculation.sources import in_time_order, open_source
from assay.speculation.spec import examine

NOISE = random.Random(0).randbytes(60_000)
LOG = "\n".join([lines.vllm_engine(0), lines.vllm_v1([80, 50], 100), "bye", ""])


def record_of(*names: str) -> Record:
    return combine(reading_of(*names).settled()).record


def reading_of(*names: str) -> Reading:
    return read_files(resolve(names, SpecOptions()).files)


def packed(data: bytes, level: int = 9) -> bytes:
    """Compressed without the time of day: names of tests are made of it, and every process must
    find the same.
    """
    return gzip.compress(data, compresslevel=level, mtime=0)


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("plain.log", LOG.encode()),
        ("crlf.log", LOG.replace("\n", "\r\n").encode()),
        ("server.log.gz", packed(LOG.encode())),
        ("misnamed.log", packed(LOG.encode())),
        ("server.log.bz2", bz2.compress(LOG.encode())),
        ("server.log.xz", lzma.compress(LOG.encode())),
        ("powershell.log", b"\xff\xfe" + LOG.encode("utf-16-le")),
        ("big_endian.log", b"\xfe\xff" + LOG.encode("utf-16-be")),
        ("no_mark.log", LOG.encode("utf-16-le")),
        ("powershell.log.gz", packed(b"\xff\xfe" + LOG.encode("utf-16-le"))),
        ("bom.log", b"\xef\xbb\xbf" + LOG.encode()),
        ("latin1.log", "Gerät läuft\n".encode("latin-1") + LOG.encode()),
    ],
)
def test_encodings_and_compressions(tmp_path: Path, name: str, data: bytes) -> None:
    record = record_of(write(tmp_path / name, data))
    assert (record.counts.accepted, record.counts.drafted, record.counts.drafts) == (130, 200, 100)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda row: row,
        lambda row: f"\x1b[1;36m{row}\x1b[0;0m",
        lambda row: f"vllm-1  | {row}",
        lambda row: f"2026-05-17T11:04:29.854123456Z stdout F {row}",
        lambda row: f"May 17 11:04:29 node7 vllm[4711]: {row}",
        lambda row: json.dumps(
            {"log": f"\x1b[36m{row}\n", "stream": "stderr", "time": "2026-05-17T11:04:29Z"}
        ),
        lambda row: f"[rank0]: {row}",
    ],
    ids=["none", "ansi", "compose", "kubernetes", "journal", "docker_json", "rank"],
)
def test_what_containers_and_terminals_add(wrap: object, tmp_path: Path) -> None:
    rows = [lines.vllm_v1([80, 50], 100), lines.llama_request(5, 9)][:1]
    text = "\n".join(wrap(r) for r in rows)  # type: ignore[operator]
    assert record_of(write(tmp_path / "log", text.encode())).counts.accepted == 130


def test_compose_services_are_engines(tmp_path: Path) -> None:
    text = f"vllm-a | {lines.vllm_v1([80], 100)}\nvllm-b | {lines.vllm_v1([1], 100)}\n"
    report = examine([write(tmp_path / "log", text.encode())])
    assert {k: v["health"] for k, v in report.results["per_engine"].items()} == {
        "vllm-a": "healthy",
        "vllm-b": "broken",
    }


@pytest.mark.parametrize("data", [LOG.encode(), packed(LOG.encode()), LOG.encode("utf-16")])
def test_standard_input(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(data))))
    assert record_of("-").counts.accepted == 130


def test_rotated_parts_are_read_oldest_first(tmp_path: Path) -> None:
    names = ["s.log", "s.log.10.gz", "s.log.1", "s.log.2.gz"]
    assert in_time_order(names) == ["s.log.10.gz", "s.log.2.gz", "s.log.1", "s.log"]
    assert in_time_order(["b.log", "-", "a.log"]) == ["b.log", "-", "a.log"]
    # V0 counts since start: in the wrong order the older part would look like a restart.
    newer = write(tmp_path / "v.log", (lines.vllm_v0(100, 180, 150, 3) + "\n").encode())
    older = write(tmp_path / "v.log.1.gz", packed((lines.vllm_v0(50, 90, 70, 3) + "\n").encode()))
    assert record_of(newer, older).counts.drafted == 180


def test_json_in_all_its_wrappings(tmp_path: Path) -> None:
    one = {"timings": {"draft_n": 40, "draft_n_accepted": 30, "predicted_n": 50}}
    cases = [
        json.dumps(one),
        json.dumps(one, indent=2),
        f"data: {json.dumps(one)}\n\ndata: [DONE]\n",
        json.dumps([one]),
    ]
    for i, text in enumerate(cases):
        record = record_of(write(tmp_path / f"{i}.json", text.encode()))
        assert (record.counts.drafted, record.counts.accepted) == (40, 30), text
    two = write(tmp_path / "two.jsonl", (json.dumps(one) + "\n" + json.dumps(one) + "\n").encode())
    assert record_of(two).counts.drafted == 80


@pytest.mark.parametrize(
    ("name", "data", "finding"),
    [
        ("empty.log", b"", "source_empty"),
        ("blank.log", b" \n\r\n", "source_empty"),
        ("empty.gz", packed(b""), "source_empty"),
        ("model.bin", NOISE[:4096], "source_binary"),
        ("zeros.bin", bytes(4096), "source_binary"),
        ("cut.gz", packed(NOISE.hex().encode())[:20_000], "source_truncated"),
        ("broken.gz", packed(LOG.encode())[:12] + b"\x00" * 40, "source_truncated"),
        ("log.zst", b"\x28\xb5\x2f\xfd" + b"abc" * 20, "source_binary"),
        ("cut.json", b'{"timings": {"draft_n": 40, "draft_n_accep', "source_truncated"),
    ],
)
def test_unreadable_sources_say_so_in_one_line(
    tmp_path: Path, name: str, data: bytes, finding: str
) -> None:
    with pytest.raises(AssayError) as caught:
        examine([write(tmp_path / name, data)])
    assert caught.value.finding_id == f"speculation.{finding}"
    assert "\n" not in caught.value.message and name in caught.value.message
    assert caught.value.verdict.exit_code == 2


def test_missing_file_and_directory(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none.log"), str(tmp_path)):
        with pytest.raises(AssayError, match=r"cannot read|directory"):
            open_source(name)


def test_a_late_truncation_is_found_too(tmp_path: Path) -> None:
    """Also behind the part that is read first."""
    noise = os.urandom(6 << 20).hex().encode()
    path = write(tmp_path / "long.gz", packed(noise, level=1)[:-4000])
    with pytest.raises(AssayError, match="end early"):
        examine([path])


@pytest.mark.parametrize(
    "text",
    [
        "hello\nworld\n",
        "INFO Application startup complete.\n" * 3,
        "# HELP http_requests_total x\n# TYPE http_requests_total counter\nhttp_requests_total 5\n",
        "<html><body>not here</body></html>",
        '{"choices": [{"text": "hi"}], "usage": {"completion_tokens": 3}}',
        "SpecDecoding metrics:",
        "SpecDecoding metrics: Accepted: many tokens, Drafted: some tokens",
        "vllm:spec_decode_num_drafts_total{engine=",
        "INFO accepted connection 3/5 from 10.0.0.1",
    ],
)
def test_text_without_drafts_shows_nothing(tmp_path: Path, text: str) -> None:
    """Not even that speculation is off."""
    report = examine([write(tmp_path / "log", text.encode())])
    assert (report.results["health"], report.exit_code) == ("insufficient", 3)
    assert [f.id for f in report.findings] == ["speculation.no_evidence"]
    assert report.results["record"]["acceptance_rate"] is None


REPLY = (
    "slot print_timing: id  0 | task 0 |        eval time =     900.00 ms /    90 tokens (   10.0"
    " ms per token,   100.00 tokens per second)"
)


@pytest.mark.parametrize(
    "text",
    [
        (
            "Initializing a V1 LLM engine (v0.11.0) with config: speculative_config=None,"
            " tokenizer='x'\n"
        ),
        lines.vllm_engine(0, 40.0),
        (
            "[2026-03-04 10:00:00 TP0] Decode batch. #running-req: 2, #token: 400, gen throughput"
            " (token/s): 88.1, #queue-req: 0"
        ),
        REPLY,
        '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 1.0\n',
        lines.vllm_page({"0": (0, [0, 0])}),
        lines.vllm_v1([0], 0, wording="0.8.3"),
        json.dumps({"timings": {"predicted_n": 40, "predicted_per_second": 20.0}}),
        json.dumps(
            {
                "usage": {
                    "completion_tokens_details": {
                        "accepted_prediction_tokens": 0,
                        "rejected_prediction_tokens": 0,
                    }
                }
            }
        ),
    ],
    ids=["configured", "vllm", "sglang", "llama", "page", "counters", "nan", "timings", "usage"],
)
def test_off_needs_evidence(tmp_path: Path, text: str) -> None:
    report = examine([write(tmp_path / "log", text.encode())])
    assert (report.results["health"], report.exit_code) == ("off", 3)
    assert [f.id for f in report.findings] == ["speculation.off"]


def test_configured_but_silent(tmp_path: Path) -> None:
    text = (
        "speculative_config=SpeculativeConfig(method='mtp', num_spec_tokens=2)\nApplication startup"
        " complete.\n"
    )
    report = examine([write(tmp_path / "log", text.encode())])
    assert "configured" in report.findings[0].title
    assert report.results["health"] == "insufficient"


def test_a_file_that_cannot_be_read_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Broken(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: object, /) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BufferedReader(Broken())))
    with pytest.raises(AssayError, match="cannot read standard input: Input/output error"):
        open_source("-")


@pytest.mark.parametrize("shape", ["lines", "nested", "store", "large"])
def test_structured_logs(tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [lines.vllm_v1([65, 40], 100)] * 4
    match shape:
        case "lines" | "large":
            text = "\n".join(json.dumps({"ts": 1, "message": row}) for row in rows)
        case "nested":
            text = "\n".join(json.dumps({"log": {"line": row}}) for row in rows)
        case _:
            text = json.dumps({"data": {"result": [{"values": [["17", row] for row in rows]}]}})
    if shape == "large":
        monkeypatch.setattr("assay.speculation.sources.HEAD", 256)
    assert record_of(str(write(tmp_path / "log", text.encode()))).counts.accepted == 420


def test_what_a_model_wrote_about_drafts_is_not_evidence(tmp_path: Path) -> None:
    text = lines.vllm_v1([65, 40], 100)
    body = {"choices": [{"message": {"role": "assistant", "content": text}, "text": text}]}
    assert record_of(str(write(tmp_path / "r.json", json.dumps(body).encode()))).nothing_drafted


def test_a_log_that_begins_with_json_is_a_log(tmp_path: Path) -> None:
    text = '{"args": {"port": 8000}}\n' + LOG
    assert record_of(str(write(tmp_path / "log", text.encode()))).counts.accepted == 130


def test_scrapes_collected_in_one_file_are_totals_not_summands(tmp_path: Path) -> None:
    pages = lines.vllm_page({"0": (500, [400, 300])}) + lines.vllm_page({"0": (900, [700, 500])})
    record = record_of(str(write(tmp_path / "metrics.prom", pages.encode())))
    assert (record.counts.drafts, record.counts.accepted, record.windows) == (900, 1200, 2)


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    log = write(tmp_path / "log", LOG.encode())
    alias = tmp_path / "again"
    alias.symlink_to(log)
    assert (
        reading_of(str(log), str(alias), str(log)).observations == reading_of(str(log)).observations
    )


WINDOWS = [lines.vllm_v1([65, 40], 100), lines.vllm_v1([60, 30], 100), lines.vllm_v1([70, 35], 100)]
ALL = (300, 300)  # accepted, drafts


def counted(path: Path, data: bytes) -> tuple[int | None, int | None]:
    record = record_of(write(path, data))
    return record.counts.accepted, record.counts.drafts


@pytest.mark.parametrize(
    "text",
    [
        repr(WINDOWS),
        "\\n".join(WINDOWS).replace("\n", "\\n"),
        r"\n".join(WINDOWS),
        "\r".join(WINDOWS),
        " ".join(WINDOWS),
        json.dumps({"message": "\n".join(WINDOWS)}),
        json.dumps({"message": r"\n".join(WINDOWS)}),
    ],
    ids=["list", "escaped", "raw", "cr", "blank", "json", "json_escaped"],
)
def test_several_records_in_one_line(tmp_path: Path, text: str) -> None:
    assert counted(tmp_path / "log", text.encode()) == ALL


@pytest.mark.parametrize("width", [60, 80, 132, 200])
def test_lines_that_a_terminal_broke(tmp_path: Path, width: int) -> None:
    rows = [row[i : i + width] for row in WINDOWS for i in range(0, len(row), width)]
    assert counted(tmp_path / "log", "\n".join(rows).encode()) == ALL


def test_lines_that_were_broken_between_words(tmp_path: Path) -> None:
    text = "\n".join(
        "\n    ".join(textwrap.wrap(row, 90, break_long_words=False)) for row in WINDOWS
    )
    assert counted(tmp_path / "log", text.encode()) == ALL


def test_whole_lines_of_one_width_are_not_joined(tmp_path: Path) -> None:
    text = (
        "=" * 50
        + "\n"
        + "".join(
            f"{k:<40}{v:<10}\n"
            for k, v in (("Drafts:", 400), ("Draft tokens:", 1200), ("Accepted tokens:", 660))
        )
        + "=" * 50
    )
    assert counted(tmp_path / "log", text.encode()) == (660, 400)


@pytest.mark.parametrize("nulls", [1, 5000, 70_000, 5_000_000])
def test_nulls_that_copytruncate_leaves(tmp_path: Path, nulls: int) -> None:
    text = "\n".join(WINDOWS).encode()
    assert counted(tmp_path / "head", b"\0" * nulls + text) == ALL
    first, _, rest = text.partition(b"\n")
    assert counted(tmp_path / "middle", first + b"\n" + b"\0" * nulls + rest) == ALL


@pytest.mark.parametrize("big", [False, True])
def test_journal_messages_that_are_bytes(
    tmp_path: Path, big: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        json.dumps({"__CURSOR": "s", "MESSAGE": list(f"\x1b[36m{row}\x1b[0m".encode())})
        for row in WINDOWS
    ]
    if big:
        monkeypatch.setattr("assay.speculation.sources.HEAD", 4096)
    assert counted(tmp_path / "log", "\n".join(rows).encode()) == ALL


def test_otlp_logs_and_metrics(tmp_path: Path) -> None:
    log_rows = [{"body": {"stringValue": row}} for row in WINDOWS]
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": log_rows}]}]}
    assert counted(tmp_path / "logs.json", json.dumps(logs).encode()) == ALL
    metrics = [
        {
            "name": f"vllm:spec_decode_num_{name}",
            "sum": {
                "dataPoints": [
                    {
                        "asInt": str(value),
                        "attributes": [{"key": "engine", "value": {"stringValue": "0"}}],
                    }
                ]
            },
        }
        for name, value in (("drafts", 300), ("draft_tokens", 600), ("accepted_tokens", 300))
    ]
    page = {"resourceMetrics": [{"scopeMetrics": [{"metrics": metrics}]}]}
    assert counted(tmp_path / "metrics.json", json.dumps(page).encode()) == ALL


def test_an_answer_of_prometheus(tmp_path: Path) -> None:
    result = [
        {
            "metric": {"__name__": f"vllm:spec_decode_num_{name}_total", "engine": "0"},
            "values": [[1, "1"], [2, str(value)]],
        }
        for name, value in (("drafts", 300), ("draft_tokens", 600), ("accepted_tokens", 300))
    ]
    answer = {"status": "success", "data": {"resultType": "matrix", "result": result}}
    assert counted(tmp_path / "query.json", json.dumps(answer).encode()) == ALL


def test_children_of_a_router_are_engines(tmp_path: Path) -> None:
    rows = []
    for port, accepted in (("5101", 70), ("5102", 0), ("5101", 90)):
        rows.append(
            f"[{port}] 1.02.003.004 I slot print_timing: id  0 | task 1 |        eval time =  "
            " 900.0 ms /   100 tokens (    9.0 ms per token,   111.1 tokens per second)"
        )
        rows.append(
            lines.llama_request(
                accepted,
                120,
                "new",
                f"[{port}] 1.02.003.005 I slot print_timing: id  0 | task 1 | ",
            )
        )
        rows.append(
            lines.llama_statistics("draft-mtp", 60, 120, accepted, f"[{port}] 1.02.003.006 I ")
        )
    report = examine([write(tmp_path / "log", "\n".join(rows).encode())])
    assert {k: v["health"] for k, v in report.results["per_engine"].items()} == {
        "5101": "healthy",
        "5102": "broken",
    }
    assert [f.id for f in report.findings if f.severity == "error"] == ["speculation.engine_dead"]
    one = examine([write(tmp_path / "one", "\n".join(r for r in rows if "5102" not in r).encode())])
    assert one.results["per_engine"] == {} and one.results["health"] == "healthy"
