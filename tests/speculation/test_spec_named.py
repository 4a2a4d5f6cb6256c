"""Forms without a parser of their own: figures that are named, lines that name drafting and are not
read, needles.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import spec_lines as lines
from hypothesis import given
from hypothesis import strategies as st

from assay.speculation.health import Health, assess
from assay.speculation.observation import Observation
from assay.speculation.parsers import Line, Parser
from assay.speculation.parsers.figures import role_of
from assay.speculation.parsers.registry import new_parsers, own_parsers
from assay.speculation.read import Reading
from assay.speculation.search import Wanted, interesting_lines
from assay.speculation.spec import examine
from assay.speculation.unread import looks_like_drafting

# line: engine, accepted, drafted, drafts, speculative tokens
FORMS = [
    (
        "  essay_long         pred= 210 draft= 160 acc= 119 rate=0.744 tok/s=19.2",
        "llama.cpp",
        119,
        160,
        None,
        None,
    ),
    (
        (
            "2026-01-02T03:04:05Z  INFO core::drafter: DFlash Stats: steps=64, proposed=512,"
            " accepted=301, average_acceptance_rate=58.79%"
        ),
        "xinfer",
        301,
        512,
        64,
        8,
    ),
    (
        (
            "[Seq 3] DFlash v2 Speculation: steps=40 proposed=320 accepted=66 rate=20.6%"
            " avg_tok/step=2.65"
        ),
        "xinfer",
        66,
        320,
        40,
        8,
    ),
    (
        (
            "MTP[4] finish=stop tokens=310 cycles=120 tok/cycle=2.58 accept=190/240 (79.2%)"
            " depth[d1=110/120,d2=80/120]"
        ),
        "omlx",
        190,
        240,
        120,
        2,
    ),
    (
        (
            "vlm_mtp stats: request=77aa finish=length rounds=50 accepted=61/100 (61.0%)"
            " tokens_per_round=2.22 emitted=111 block_size=3"
        ),
        "omlx",
        61,
        100,
        50,
        2,
    ),
    (
        (
            "[atom 01:02:03] [MTP Stats         ] Average toks/fwd: 1.62, Accepted/Total Draft"
            " tokens: 310/500, Acceptance rate: 62.00%, Accepted tokens distribution: {0: '38.00%',"
            " 1: '62.00%'}"
        ),
        "atom",
        310,
        500,
        500,
        1,
    ),
    (
        (
            "2026-01-02 03:04:05 INFO: Metrics (ID: 3f): 300 tokens generated in 9.1 seconds"
            " (Queue: 0.0 s, Process: 12 cached tokens and 40 new tokens at 90.1 T/s, Generate:"
            " 33.0 T/s, Context: 52 tokens, Draft: 180 / 310 tokens accepted (58.06%))"
        ),
        "exllamav3",
        180,
        310,
        None,
        None,
    ),
    (
        "spec: cycles=35 drafted=70 accepted_drafts=41 emitted=76 accept_rate=58.6%",
        "other",
        41,
        70,
        35,
        2,
    ),
    ("Speculative decoding: 45/60 tokens accepted (75.0%)", "other", 45, 60, None, None),
    ("eagle: accepted 512 of 819 draft tokens", "other", 512, 819, None, None),
    (
        "hybrid-spec: drafted 90 tokens, accepted 60 tokens, acceptance 66.7%",
        "other",
        60,
        90,
        None,
        None,
    ),
    ("draft stats n_drafted=90 n_accepted=60 n_rejected=30", "other", 60, 90, None, None),
    (
        "[NativeMTP] depth=2 verifyCalls=50 outputTokens=120 acceptedByDepth=[40, 22] rejected=38",
        "other",
        62,
        100,
        50,
        2,
    ),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f[1] + " " + f[0][:24])
def test_named_figures(form: tuple[str, str, int, int, int | None, int | None]) -> None:
    line, engine, accepted, drafted, drafts, depth = form
    record = lines.read(line).record
    assert (record.engine, record.counts.accepted, record.counts.drafts) == (
        engine,
        accepted,
        drafts,
    )
    assert record.num_speculative_tokens == depth or (record.counts.drafted, depth) == (None, 2)
    assert record.counts.drafted in (drafted, None)


def test_positions_of_named_lines() -> None:
    omlx = lines.read(FORMS[3][0]).record
    assert omlx.positions == ((110, 120), (80, 120))
    atom = lines.read(FORMS[5][0]).record
    assert atom.positions == ((310, 500),)


def test_totals_and_intervals_are_not_added() -> None:
    def row(kind: str, accepted: int, drafted: int) -> str:
        return (
            f"[atom] [MTP Stats{kind}] Average toks/fwd: 1.60, Accepted/Total Draft tokens:"
            f" {accepted}/{drafted}"
        )

    rows = [
        row(" Interval", 60, 100),
        row("         ", 560, 900),
        row(" Interval", 70, 100),
        row("         ", 630, 1000),
    ]
    record = lines.read(*rows).record
    assert (record.counts.accepted, record.counts.drafted) == (630, 1000)
    assert lines.read(rows[0], rows[2]).record.counts.drafted == 200, "intervals alone are added"


def test_lines_that_only_grow_count_since_start() -> None:
    def row(n: int) -> str:
        return f"mtp: rounds={n} drafted={2 * n} accepted={n}"

    assert lines.read(row(10), row(20), row(45)).record.counts.drafted == 90
    assert lines.read(row(10), row(45), row(20)).record.counts.drafted == 150


def test_a_last_line_that_repeats_the_sum_is_left_out() -> None:
    rows = [f"req {i}: drafted={d} accepted={d // 2}" for i, d in enumerate((40, 90, 20))]
    assert (
        lines.read(
            *(f"mtp {r}" for r in rows), "mtp all done: drafted=150 accepted=75"
        ).record.counts.drafted
        == 150
    )


@pytest.mark.parametrize(
    ("line", "health"),
    [
        ("scheduler: decode bs=1 accept_len=1.00 accept_rate=0.25 gen_tps=44.1", Health.BROKEN),
        ("scheduler: decode bs=1 accept_len=2.61 accept_rate=0.54 gen_tps=44.1", Health.HEALTHY),
        ("lightllm_request_mtp: mtp_avg_token_per_step:2.4 prompt_cache_ratio:0.0", Health.HEALTHY),
        ("draft acceptance rate: 71.0%", Health.HEALTHY),
    ],
)
def test_values_without_counts(line: str, health: Health) -> None:
    assert assess(lines.read(line)).health is health


SUMMARIES = {
    "bench": (
        "Acceptance rate (%):                     55.00",
        "Acceptance length:                       2.65",
        "Drafts:                                  400",
        "Draft tokens:                            1200",
        "Accepted tokens:                         660",
        "Per-position acceptance (%):",
        "  Position 0:                            80.00",
        "  Position 1:                            52.50",
        "  Position 2:                            32.50",
    ),
    "offline": (
        "total_num_output_tokens: 1060",
        "num_drafts: 400",
        "num_draft_tokens: 1200",
        "num_accepted_tokens: 660",
        "mean acceptance length: 2.65",
        "-----",
        "acceptance at token 0: 0.80",
        "acceptance at token 1: 0.525",
        "acceptance at token 2: 0.325",
    ),
    "offline_old": (
        "Number of draft proposals: 400",
        "Number of draft tokens generated: 1,200",
        "Number of accepted tokens: 660",
        "Mean acceptance length: 2.65",
        "",
        "Acceptance rate at token 0: 0.800",
        "Acceptance rate at token 1: 0.525",
        "Acceptance rate at token 2: 0.325",
    ),
    "script": (
        "  Num drafts:           400",
        "  Num draft tokens:     1200",
        "  Num accepted tokens:  660",
        "  Acceptance rate:      55.00%",
        "  Per-position acceptance rate:",
        "    Position 0: 0.8000 (320/400)",
        "    Position 1: 0.5250 (210/400)",
        "    Position 2: 0.3250 (130/400)",
    ),
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_summaries(name: str, tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("\n".join(["starting", *SUMMARIES[name], "bye"]))
    record = examine([str(path)]).results["record"]
    assert (record["accepted"], record["drafted"], record["drafts"]) == (660, 1200, 400)
    assert record["per_position"] == pytest.approx([0.8, 0.525, 0.325])
    assert record["num_speculative_tokens"] == 3


TABLES = {
    "markdown": (
        "| task | drafted | accepted | rate |\n|---|---:|---:|---:|\n| code | 420 | 331 | 78.8 %"
        " |\n| prose | 380 | 251 | 66.1 % |\n"
    ),
    "columns": (
        "task    drafted   accepted   rate\ncode        420        331   78.8%\nprose       380    "
        "    251   66.1%\n"
    ),
    "csv": (
        "task,draft_tokens,accepted_tokens,acceptance_rate\ncode,420,331,0.788\nprose,380,251,0.661\n"
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_runs(name: str, tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text(TABLES[name])
    report = examine([str(path)])
    assert (report.results["record"]["accepted"], report.results["record"]["drafted"]) == (582, 800)
    path.write_text(
        TABLES[name]
        .replace("331", "3")
        .replace("251", "1")
        .replace("78.8", "0.7")
        .replace("66.1", "0.3")
    )
    assert examine([str(path)]).results["health"] == "broken"


def test_two_summaries_are_two_runs() -> None:
    assert lines.read(*SUMMARIES["bench"], *SUMMARIES["bench"]).record.counts.drafted == 2400


def test_sglang_says_length_only() -> None:
    record = lines.read(
        "Backend:                 sglang", "Accept length:                           2.46"
    ).record
    assert (record.engine, record.mean_acceptance_length, record.counted) == ("sglang", 2.46, False)
    assert assess(lines.read("Average Accept length: 1.02")).health is Health.BROKEN


def test_aggregates_after_a_table_are_not_added() -> None:
    rows = [
        f"  t{i}  pred= {p} draft= {d} acc= {a} rate=0.7 tok/s=9.0"
        for i, (p, d, a) in enumerate([(90, 60, 42), (80, 50, 35)])
    ]
    tail = [
        "Aggregate: {",
        '  "total_predicted": 170,',
        '  "total_draft": 110,',
        '  "total_draft_accepted": 77,',
        "}",
    ]
    assert lines.read(*rows, *tail).record.counts.drafted == 110


@pytest.mark.parametrize(
    ("document", "engine", "accepted", "drafted"),
    [
        ({"stats": {"total_draft_tokens_count": 90, "accepted_draft_tokens_count": 60, "rejected_draft_tokens_count": 30}}, "other", 60, 90),  # noqa: E501
        ({"runs": [{"proposedDraftTokens": 40, "acceptedDraftTokens": 30}]}, "other", 30, 40),
        ({"usage": {"speculative_decoding": {"proposed_tokens": 50, "accepted_tokens": 20}}}, "other", 20, 50),  # noqa: E501
        ({"choices": [{"speculate_metrics": {"accepted_tokens": 100, "rejected_tokens": 60, "accept_ratio": 0.5,  # noqa: E501
                                             "accepted_tokens_per_head": [50, 30, 20]}}]}, "fastdeploy", 50, 110),  # noqa: E501
        ({"speculative_decoding": {"verify_calls": 20, "accepted_by_depth": {"1": 15, "2": 9}, "drafted_by_depth": {"1": 20, "2": 20}}},  # noqa: E501
         "other", 24, None),
    ],
)  # fmt: skip
def test_documents(
    document: dict[str, Any], engine: str, accepted: int, drafted: int | None
) -> None:
    record = lines.read_document(document).record
    assert (record.engine, record.counts.accepted, record.counts.drafted) == (
        engine,
        accepted,
        drafted,
    )


def test_fastdeploy_counts_bonus_tokens_as_accepted() -> None:
    value = {
        "speculate_metrics": {
            "accepted_tokens": 100,
            "rejected_tokens": 60,
            "accepted_tokens_per_head": [50, 30, 20],
        }
    }
    record = lines.read_document(value).record
    assert record.positions == (
        (30, 50),
        (20, 50),
    ) and record.mean_acceptance_length == pytest.approx(2.0)


def test_pages_of_other_engines() -> None:
    page = (
        "# TYPE my_mlx_spec_decode_attempts_total"
        ' counter\nmy_mlx_spec_decode_attempts_total{model="m"}'
        ' 900\nmy_mlx_spec_decode_accepts_total{model="m"}'
        ' 700\nmy_mlx_spec_decode_verify_calls_total{model="m"}'
        ' 450\nmy_mlx_spec_decode_drafted_by_depth_total{model="m",depth="1"}'
        ' 450\nmy_mlx_spec_decode_drafted_by_depth_total{model="m",depth="2"}'
        ' 450\nmy_mlx_spec_decode_accepted_by_depth_total{model="m",depth="1"}'
        ' 400\nmy_mlx_spec_decode_accepted_by_depth_total{model="m",depth="2"}'
        ' 300\nmy_http_requests_accepted_total{model="m"} 5\n'
    )
    record = lines.read_metrics(page).record
    assert (record.counts.accepted, record.counts.drafted, record.counts.drafts) == (700, 900, 450)
    assert record.positions == ((400, 450), (300, 450))


@pytest.mark.parametrize(
    ("key", "role"),
    [
        ("totalDraftTokensCount", "drafted"), ("accepted_draft_tokens_count", "accepted"), ("Draft acceptance rate", "rate"),  # noqa: E501
        ("Number of draft proposals", "drafts"), ("num_spec_tokens", "depth"), ("tok/cycle", "length"), ("rounds", "drafts"),  # noqa: E501
        ("total_tokens", None), ("prompt_tokens", None), ("temperature", None), ("accepted_connections", None),  # noqa: E501
    ],
)  # fmt: skip
def test_roles(key: str, role: str | None) -> None:
    assert role_of(key, whole=True) == role


# What names drafting and is read by nobody, and what does neither.
UNREAD = [
    "mtp head: 55.3% of proposals were accepted",
    "medusa heads | accepted | 62 % |",
    "speculative stage accepted: 12.5 a.u.",
]
INNOCENT = [
    "INFO accepted connection 3/5 from 10.0.0.1",
    "speculative_accept_threshold_single=1.0, typical_acceptance_sampler_posterior_threshold=0.09",
    "draft saved, acceptance pending",
    "The draft treaty was accepted by the council",
    "INFO eagle loaded, access granted",
]


@pytest.mark.parametrize("line", UNREAD)
def test_unread_lines_are_counted_and_quoted(line: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(f"starting\n{line}\n{line}\n")
    report = examine([str(path)])
    assert (report.results["health"], report.exit_code) == ("unknown", 3)
    found = report.findings[0]
    assert found.id == "speculation.unrecognised" and line.split()[0] in found.detail
    assert found.evidence["lines"] == 2 and report.results["unrecognised"] == [
        {"line": line, "count": 2}
    ]


@pytest.mark.parametrize("line", INNOCENT)
def test_what_is_not_about_drafting_is_left_alone(line: str) -> None:
    reading = Reading()
    reading.line(line.encode())
    assert (reading.observations, reading.unread) == ([], {})
    assert not looks_like_drafting(line)


def test_unread_lines_beside_read_ones_are_a_remark() -> None:
    reading = Reading()
    for line in (lines.vllm_v1([80, 60], 100), UNREAD[0]):
        reading.line(line.encode())
    assert len(reading.unread) == 1 and len(reading.observations) == 1


def test_what_a_user_wrote_is_no_evidence() -> None:
    assert lines.read(
        "Received request: prompt: 'my mtp log says accepted=5/9 drafted tokens'"
    ).record.nothing_drafted


def test_unread_metrics_and_keys() -> None:
    reading = Reading()
    reading.metrics("foo_mtp_acceptance_bogus 0.4\n")
    assert list(reading.unread) == ["foo_mtp_acceptance_bogus"]


# The search in large logs must never drop what a parser knows.
LOGGED = [
    *(f[0] for f in FORMS),
    *(
        row
        for rows in SUMMARIES.values()
        for row in rows
        if "ccept" in row and "osition" not in row
    ),
    *(lines.vllm_v1([8, 5], 10, wording=w) for w in ("0.8.2", "0.8.3", "0.8.5", "0.11", "0.28")),
    lines.vllm_v1([8, 5], 10).partition("metrics: ")[2],
    lines.vllm_v0(50, 90, 70, 3),
    lines.sglang(2.5, 0.5),
    lines.sglang(2.5),
    "server_args=ServerArgs(speculative_algorithm='EAGLE', speculative_num_steps=5, tp_size=1)",
    (
        "Finish: obj=GenerateReqInput(rid='a'), out={'meta_info': {'spec_verify_ct': 12,"
        " 'completion_tokens': 30}}"
    ),
    "avg_spec_accept_length=2.71",
    lines.llama_request(5, 9),
    lines.llama_request(5, 9, "new"),
    lines.llama_statistics("draft-mtp", 4, 9, 5),
    "n_accept  = 96",
    "average acceptance length: 2.0 / 4",
    "spec-ngram: req 2 gave up (poor: verifies=8 accepted=0/8 misses=8)",
    "mtp_avg_token_per_step:1.9",
]


@pytest.mark.parametrize("row", LOGGED, ids=lambda r: r[:40])
def test_a_line_that_is_read_is_found_by_the_search(row: str) -> None:
    reading = Reading()
    reading.line(row.encode())
    parsers = new_parsers()
    for parser in parsers if " at token " in row else ():
        parser.line(Line("Drafts: 400"))  # a position belongs to the summary above it
    read = [p for p in parsers if p.wants(row.lower()) and p.line(Line(row)) is not None]
    assert read, "no parser knows this line"
    filler = b"INFO 10.0.0.1 success\n" * 9
    found = list(interesting_lines(io.BytesIO(filler + row.encode() + b"\n" + filler)))
    assert row.encode() in found


class Foreign(Parser):
    """A parser from outside whose needle has no seed."""

    engine = "foreign"
    needles = ("quux yield",)

    def line(self, line: Line) -> list[Observation] | None:
        return None


@given(
    st.sampled_from([*own_parsers(), Foreign]),
    st.data(),
    st.text("abc =:0123", max_size=30),
    st.integers(0, 500),
)
def test_every_declared_needle_is_found(
    parser: type[Parser], data: st.DataObject, noise: str, before: int
) -> None:
    if not parser.needles:
        return
    needle = data.draw(st.sampled_from(parser.needles))
    company = data.draw(st.sampled_from(parser.company or ("",)))
    row = f"{noise} {company} {needle} 1".encode()
    wanted = Wanted.of([*own_parsers(), Foreign])
    text = b"x" * before + b"\n" + row + b"\nend"
    assert row in list(interesting_lines(io.BytesIO(text), block=256, margin=1024, wanted=wanted))


def test_json_of_a_finish_line_and_of_the_average() -> None:
    row = (
        "[2026-03-04 10:00:00] Finish: obj=GenerateReqInput(rid='a'), out={'meta_info': {'id': 'a',"
        " 'completion_tokens': 60, 'spec_accept_rate': 0.55, 'spec_accept_length': 2.4,"
        " 'spec_verify_ct': 25, 'spec_num_correct_drafts': 35, 'spec_num_proposed_drafts': 75}}"
    )
    record = lines.read(row).record
    assert (record.engine, record.counts.accepted, record.counts.drafted, record.counts.drafts) == (
        "sglang",
        35,
        75,
        25,
    )
    state = {"internal_states": [{"avg_spec_accept_length": 2.7, "last_gen_throughput": 80.1}]}
    assert assess(lines.read_document(state)).health is Health.HEALTHY
    assert assess(lines.read("avg_spec_accept_length=1.0")).health is Health.BROKEN
    json.dumps(state)
