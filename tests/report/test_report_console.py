from __future__ import annotations

import io
import re

import pytest
from report_samples import full, healthy

from assay.report import console
from assay.report import console as beside
from assay.verdict import Finding, Metric, Quote, Report, Severity, Table, Verdict

VLLM = (
    "vllm serve ./SmolLM2-135M --tensor-parallel-size 1 --pipeline-parallel-size 1 --kv-cache-dtype"
    " auto --enforce-eager --max-model-len 8000"
)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def printed(report, stream=None, width=None):
    stream = stream or io.StringIO()
    console.print_report(report, stream, width, verbose=True)
    return stream.getvalue()


def test_the_piped_report_says_everything_in_order():
    text = printed(full())
    parts = [
        "FAIL  assay check: 14 of 18 texts degenerate; the model itself does so in 1 of 18.",
        "Subject: url http://127.0.0.1:8000/v1, model smollm2-135m",
        "~~183.2 tok/s~~",
        "invalid: 14 of 18 timed texts degenerate",
        "41 ms",
        "Probes",
        "Wilson intervals.",
        "Share of degenerate texts",
        "1 point not drawn",
        "story, greedy  degenerate  700 tokens, stop: length",
        "⟦goes wrong at character 219⟧the the the",
        "code, seed 0  empty",
        "(no text)",
        "INFO  the server has no tool calls",
        "WARNING  the needle is not found",
        "ERROR  14 of 18 texts degenerate",
        "Evidence: texts 18; degenerate 14; interval 0.548, 0.91; reference.degenerate 1",
        "1. a corrupt shard: model-00001-of-00002.safetensors",
        "2. a wrong quantisation flag",
        "assay verify ./SmolLM2-135M",
        VLLM,
        "See https://docs.example.org/coherence",
        "assay check: FAIL (1 error, 1 warning)",
    ]
    places = [text.find(part) for part in parts]
    assert -1 not in places, parts[places.index(-1)]
    assert places == sorted(places)


def test_piped_text_has_no_escape_no_box_and_no_trailing_space():
    text = printed(full())
    assert "\x1b" not in text
    assert not re.search("[╭╮╰╯┃━┏┓┗┛]", text)
    assert not re.search(" $", text, re.MULTILINE)


@pytest.mark.parametrize("width", [40, 60, 100])
def test_lines_keep_to_the_width_except_commands_and_references(width):
    for line in printed(full(), width=width).splitlines():
        assert len(line) <= width or VLLM in line or "https://" in line


@pytest.mark.parametrize("width", [30, 50, 80, 200])
@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_command_is_alone_on_one_line_at_any_width(width, stream):
    text = re.sub("\x1b\\[[0-9;]*m", "", printed(full(), stream(), width))
    assert VLLM in [line.strip() for line in text.splitlines()]


def test_a_terminal_gets_colours_a_frame_and_a_struck_out_figure():
    text = printed(full(), Terminal(), 100)
    assert "╭" in text
    assert re.search("\x1b\\[[0-9;]*9;?[0-9;]*m183.2 tok/s", text)
    assert re.search("\x1b\\[[0-9;]*31[0-9;]*m✗ error", text)


def test_no_color_leaves_no_colour(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    codes = set(re.findall("\x1b\\[([0-9;]*)m", printed(full(), Terminal(), 100)))
    numbers = {int(n) for code in codes for n in code.split(";") if n}
    assert not any(30 <= n <= 49 or 90 <= n <= 107 for n in numbers)
    assert numbers


def test_a_dumb_terminal_gets_plain_text(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert printed(full(), Terminal()) == printed(full())


def test_the_width_of_a_pipe_follows_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    report = Report("grade", Verdict.PASS, summary="word " * 100)
    assert max(map(len, printed(report).splitlines())) <= 60
    monkeypatch.setenv("COLUMNS", "nonsense")
    assert 60 < max(map(len, printed(report).splitlines())) <= 100


def test_model_text_is_neither_markup_nor_escape():
    text = "[bold]x[/bold] [/] :smile: \x1b[31mred\x1b[0m \x1b]0;title\x07 a\rb"
    out = printed(Report("check", Verdict.PASS, blocks=(Quote("q", text),)), Terminal(), 120)
    plain = re.sub("\x1b\\[[0-9;]*m", "", out)
    shown = "[bold]x[/bold] [/] :smile: ⟨ESC⟩[31mred⟨ESC⟩[0m ⟨ESC⟩]0;title⟨BEL⟩ a⟨CR⟩b"
    assert shown in " ".join(plain.split())
    assert "\x1b" not in plain


def test_an_encoding_without_the_characters_is_no_error():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    console.print_report(full(), stream, verbose=True)
    stream.flush()
    text = raw.getvalue().decode("ascii")
    assert re.search(r"this server +capital +0\.1 \[0, 0\.49\]", text)
    assert "???" not in text


@pytest.mark.parametrize(
    ("verdict", "findings", "summary", "said"),
    [
        (Verdict.PASS, (), "", "What was examined holds."),
        (Verdict.PASS, (Severity.WARNING,) * 2, "", "What was examined holds, with 2 warnings."),
        (
            Verdict.FAIL,
            (Severity.WARNING, Severity.ERROR, Severity.ERROR),
            "",
            "Title 1, and 1 more error.",
        ),
        (Verdict.INCONCLUSIVE, (), "", "The evidence is too thin to judge."),
        (Verdict.INCONCLUSIVE, (Severity.INFO, Severity.WARNING), "", "Title 1."),
        (Verdict.ERROR, (), "", "It could not be examined."),
        (Verdict.ERROR, (Severity.ERROR,), "", "Title 0."),
        (Verdict.PASS, (), "All is well.", "All is well."),
    ],
)
def test_every_verdict_has_its_sentence(verdict, findings, summary, said):
    found = tuple(
        Finding("server.x", severity, f"title {i}.") for i, severity in enumerate(findings)
    )
    report = Report("check", verdict, findings=found, summary=summary)
    assert printed(report).startswith(f"{verdict.value.upper()}  assay check: {said}\n")


def test_an_interrupted_report_says_so():
    report = Report("check", Verdict.INCONCLUSIVE, interrupted=True)
    assert "Interrupted: The evidence is too thin" in printed(report)


def test_long_tables_and_many_texts_are_cut_visibly_and_keep_what_went_wrong():
    good = tuple(Quote(f"good {i}", "fine", "ok") for i in range(20))
    bad = (Quote("the bad one", "x x x", "degenerate", 0),)
    table = Table("files", ("path",), tuple((f"file {i}",) for i in range(75)))
    text = printed(Report("check", Verdict.PASS, blocks=(*good, *bad, table)))
    assert "9 more texts in the HTML report" in text
    assert "the bad one" in text
    assert "15 more rows in the HTML report" in text
    assert "file 59" in text and "file 60" not in text


def test_side_by_side_shows_both_verdicts_and_both_speeds_on_one_row():
    stream = io.StringIO()
    beside.side_by_side([("healthy", healthy()), ("corrupt", full())], stream, 100)
    lines = stream.getvalue().splitlines()
    assert lines[0].split() == ["healthy", "corrupt"]
    assert next(line for line in lines if line.strip().startswith("verdict")).split() == [
        "verdict", "✓", "PASS", "✗", "FAIL",
    ]  # fmt: skip
    speed = next(line for line in lines if line.strip().startswith("decode speed"))
    assert speed.split()[2:] == ["181.9", "tok/s", "~~183.2", "tok/s~~"]
    assert "not measured" in stream.getvalue()
    assert max(map(len, lines)) <= 100


def test_side_by_side_becomes_one_after_the_other_on_a_narrow_terminal():
    stream = Terminal()
    beside.side_by_side([("healthy", healthy()), ("corrupt", full())], stream, 50)
    lines = re.sub("\x1b\\[[0-9;]*m", "", stream.getvalue()).splitlines()
    assert max(map(len, lines)) <= 50
    first, second = (
        next(i for i, line in enumerate(lines) if word in line) for word in ("PASS", "FAIL")
    )
    assert first < second


def test_a_valid_figure_is_never_struck():
    report = Report("check", Verdict.PASS, headline=(Metric("speed", "10 tok/s", note="why"),))
    assert "~~" not in printed(report)
    assert "invalid" not in printed(report)


def test_a_flood_of_line_breaks_does_not_scroll_the_screen():
    text = printed(
        Report("check", Verdict.PASS, blocks=(Quote("q", "begin" + "\n" * 90 + "end\n\nkept"),))
    )
    assert "  begin\n  ⟦90 line breaks⟧\n  end\n\n  kept\n" in text


def test_many_findings_of_one_kind_are_counted_after_the_first():
    found = tuple(
        Finding("checkpoint.digest_mismatch", Severity.ERROR, f"shard {i} differs")
        for i in range(40)
    )
    other = Finding("checkpoint.unverified", Severity.WARNING, "one more thing")
    text = printed(Report("verify", Verdict.FAIL, findings=(*found, other)))
    assert "shard 4 differs" in text and "shard 5 differs" not in text
    assert "35 more findings [checkpoint.digest_mismatch]" in text
    assert "one more thing" in text
    assert "assay verify: FAIL (40 errors, 1 warning)" in text


def test_the_subject_is_named_without_its_inner_settings():
    subject = {"url": "http://x", "model": None, "server": {"kind": "vllm"}, "window": 8192}
    assert "Subject: url http://x, window 8192\n" in printed(Report("check", Verdict.PASS, subject))


def screen(report, width=100):
    stream = io.StringIO()
    console.print_report(report, stream, width)
    return stream.getvalue().splitlines()


def crowded(findings=30, rows=200, columns=4, words=60):
    found = tuple(
        Finding(
            f"checkpoint.kind_{i}",
            Severity.ERROR if i % 3 != 2 else Severity.WARNING,
            f"fault {i} " + "word " * words,
            detail="detail " * 40,
            evidence={"key": i},
            causes=("a cause",) * 4,
            remedies=("do this " * 30, "then run `assay verify ./model --values`", "and this"),
        )
        for i in range(findings)
    )
    path = "/".join(["folder"] * 20) + "/model-00001-of-00099.safetensors"
    table = Table(
        "files",
        ("path", *(f"column {i}" for i in range(columns))),
        [(path, *["value"] * columns)] * rows,
    )
    quotes = tuple(Quote(f"text {i}", "the " * 400, "degenerate", 4) for i in range(20))
    return Report(
        "verify", Verdict.FAIL, subject={"path": path}, findings=found, blocks=(table, *quotes),
        headline=tuple(Metric(f"figure {i}", "1.0") for i in range(20)),
    )  # fmt: skip


@pytest.mark.parametrize("report", [full(), healthy(), crowded(), crowded(1, 0), crowded(2, 5, 12)])
@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_first_screen_is_one_screen(report, width):
    lines = screen(report, width)
    assert len(lines) <= console.SCREEN_LINES
    assert lines[0].startswith(report.verdict.value.upper())
    assert "-v shows" in " ".join(lines[-2:]) and "--html FILE" in " ".join(lines[-2:])


def test_the_first_screen_has_the_gravest_findings_with_what_to_do_and_no_evidence():
    text = "\n".join(screen(crowded()))
    assert "ERROR  fault 0 " in text and "WARNING" not in text
    assert "assay verify ./model --values" in text
    assert "a cause" not in text and "detail detail" not in text and "Evidence" not in text
    assert "more findings" in text and "more rows with -v" in text


def test_a_path_in_the_first_table_is_cut_in_its_middle_on_one_line():
    lines = [line for line in screen(crowded(1)) if "safetensors" in line and "column" not in line]
    assert all("…" in line and line.rstrip().endswith("value") for line in lines[1:])


def test_a_table_that_is_too_wide_names_the_columns_that_are_left_out():
    text = " ".join(screen(crowded(1, 3, 12)))
    assert "With -v also: " in text and "column 11" in text
