from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path

import pytest

from assay.cli.main import invoke
from assay.coherence import decoding
from assay.coherence.decoding import decode, read_text
from assay.coherence.grade_files import grade_completion, grade_files
from assay.errors import AssayError
from assay.verdict import Verdict

GOOD = "The ferry came in at noon, and the two men tied its ropes.\n"
LOOP = "The capital is" + " the" * 60


def run(capsys: pytest.CaptureFixture[str], *paths: str) -> tuple[int, dict]:
    code = invoke(["grade", *paths, "--json"])
    return code, json.loads(capsys.readouterr().out)


def completion(content: str | None, finish: str = "stop", **message: object) -> str:
    return json.dumps(
        {"choices": [{"finish_reason": finish, "message": {"content": content, **message}}]}
    )


@pytest.mark.parametrize(
    ("text", "label", "code"),
    [
        (GOOD, "ok", 0),
        (LOOP, "degenerate", 1),
        ("", "empty", 1),
        ("  \n", "empty", 1),
        ("<think>\nThe user asks", "truncated_reasoning", 3),
        (completion(GOOD), "ok", 0),
        (completion(None, reasoning_content="Hmm." + "!" * 200), "degenerate", 1),
        (completion(None, "length", reasoning="Let me think about"), "truncated_reasoning", 3),
        (completion("", reasoning="So the answer is 42."), "empty", 1),
        ('{"answer": 42, "choices": ["a", "b"]}', "ok", 0),
        ('{"broken": ', "ok", 0),
    ],
)
def test_label_and_exit_code(tmp_path: Path, capsys, text: str, label: str, code: int) -> None:
    path = tmp_path / "out.txt"
    path.write_text(text, encoding="utf-8")
    got, report = run(capsys, str(path))
    (row,) = report["results"]["files"]
    assert (got, row["label"], row["path"]) == (code, label, str(path))
    assert (row["kind"] is None) == (row["onset_char"] is None) == (label == "ok")
    assert (
        row["coherent_chars"] >= 0 and report["exit_code"] == code and report["schema"] == "assay/1"
    )


@pytest.mark.parametrize("kind", ["chat.completion", "text_completion", None])
def test_a_response_without_a_choice_is_empty(tmp_path: Path, capsys, kind: str | None) -> None:
    path = tmp_path / "out.json"
    path.write_text(
        json.dumps({"choices": [], **({"object": kind, "usage": None} if kind else {})})
    )
    code, report = run(capsys, str(path))
    (row,) = report["results"]["files"]
    assert (code, row["label"], row["kind"]) == (1, "empty", "no_choices")
    path.write_text(json.dumps({"object": "poll", "choices": []}))  # a model's own answer
    assert run(capsys, str(path))[0] == 0


def test_every_file_is_reported_and_the_worst_decides(tmp_path: Path, capsys) -> None:
    (tmp_path / "good").write_text(GOOD)
    (tmp_path / "cut").write_text("<think>\nWell,")
    (tmp_path / "bad").write_text(LOOP)
    missing, folder = str(tmp_path / "missing"), str(tmp_path)
    code, report = run(capsys, str(tmp_path / "good"), missing, folder, str(tmp_path / "cut"))
    assert code == 2 and [r["label"] for r in report["results"]["files"]] == [
        "ok",
        "truncated_reasoning",
    ]
    titles = [f["title"] for f in report["findings"] if f["id"] == "coherence.unreadable"]
    assert len(titles) == 2 and all("\n" not in t for t in titles)
    code, _ = run(capsys, str(tmp_path / "bad"), missing)
    assert code == 1
    code, report = run(capsys, *[str(tmp_path / "good")] * 3)
    assert code == 0 and len(report["results"]["files"]) == 1


def test_console_shows_the_text_around_the_onset(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a worker's folder may break a line
    Path("bad.txt").write_text(GOOD + LOOP)
    assert invoke(["grade", "bad.txt"]) == 1
    shown = capsys.readouterr().out
    assert "the the the" in shown and "bad.txt" in shown


def test_several_choices_are_graded_and_the_worst_is_told(tmp_path: Path, capsys) -> None:
    response = {
        "choices": [
            {"finish_reason": "stop", "text": GOOD},
            {"finish_reason": "length", "text": LOOP},
        ]
    }
    assert grade_completion(response).kind == "the_the_the"
    assert grade_completion({"choices": "ab"}).label == "not_examined"
    path = tmp_path / "two.json"
    path.write_text(json.dumps(response))
    code, report = run(capsys, str(path))
    (row,) = report["results"]["files"]
    assert (code, row["label"], row["choices_total"]) == (1, "degenerate", 2)
    assert [c["label"] for c in row["choices"]] == ["ok", "degenerate"]


def test_a_file_of_several_answers_says_which_one_decided_and_how_many_are_bad(
    tmp_path: Path, capsys
) -> None:
    file = tmp_path / "answers.jsonl"
    answers = ["Paris is the capital of France.", "Paris is" + " the" * 60, ""]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in answers))
    invoke(["grade", str(file), "--json"])
    title = json.loads(capsys.readouterr().out)["findings"][0]["title"]
    assert title.endswith("of content: record 2, the worst of 3 answers, of which 2 are not ok")


def test_content_parts_and_odd_fields_are_read() -> None:
    message = {
        "content": [{"type": "text", "text": GOOD}, {"type": "image"}],
        "tool_calls": "none",
        "reasoning": 3,
    }
    assert grade_completion({"choices": [{"message": message, "finish_reason": 7}]}).label == "ok"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xef\xbb\xbfHi", "Hi"),
        ("Grüße".encode("utf-16"), "Grüße"),
        (b"one\r\ntwo\r\n", "one\r\ntwo\r\n"),
        (b"", ""),
    ],
)
def test_byte_order_marks_and_line_ends(data: bytes, text: str) -> None:
    assert decode(data, "x") == decoding.Reading(text)


def test_invalid_bytes_are_counted_and_said(tmp_path: Path, capsys) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes(
        ("Long ago " * 3 + "caf\xe9 and its friends, who met there once a week.").encode("latin-1")
        * 1
    )
    read = read_text(str(path))
    assert read.invalid_bytes == 1 and read.first_invalid == 30
    code, report = run(capsys, str(path))
    assert code == 0 and [f["id"] for f in report["findings"]] == ["coherence.invalid_utf8"]


@pytest.mark.parametrize(
    "data", [bytes(1000), random.Random(0).randbytes(4000), b"\x7fELF" + bytes(200)]
)
def test_binary_is_refused_in_one_line(tmp_path: Path, capsys, data: bytes) -> None:
    path = tmp_path / "b.bin"
    path.write_bytes(data)
    code, report = run(capsys, str(path))
    assert code == 2 and report["results"]["files"] == []
    assert len(report["findings"]) == 1 and "\n" not in report["findings"][0]["title"]


def test_long_file_is_examined_in_part_and_says_so(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(decoding, "MAX_BYTES", 5000)
    path = tmp_path / "long.txt"
    path.write_text("é" * 2 + "Words upon words. " * 1000)
    read = read_text(str(path))
    assert read.truncated and len(read.text.encode()) <= 5000
    _, report = run(capsys, str(path))
    assert "coherence.not_all_examined" in [f["id"] for f in report["findings"]]


def test_named_pipe_is_read_and_a_silent_one_is_left(tmp_path: Path, monkeypatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(GOOD))
    writer.start()
    assert read_text(str(pipe)).text == GOOD
    writer.join()
    monkeypatch.setattr(decoding, "FIFO_WAIT_S", 0.05)
    with pytest.raises(AssayError, match="nothing was written"):
        read_text(str(pipe))


def test_stdin(monkeypatch, capsys) -> None:
    import io
    import sys

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LOOP.encode())))
    report = grade_files(["-", "-"])
    assert report.verdict is Verdict.FAIL and len(report.results["files"]) == 1


def test_deeply_nested_json_is_text(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text('{"a":' * 20_000)
    assert grade_files([str(path)]).verdict in {Verdict.PASS, Verdict.FAIL}


def test_junit_has_a_case_for_a_good_file_too(tmp_path: Path) -> None:
    from assay.report import junit

    (tmp_path / "good.txt").write_text(GOOD)
    (tmp_path / "bad.txt").write_text(LOOP)
    written = junit.render(grade_files([str(tmp_path / "good.txt"), str(tmp_path / "bad.txt")]))
    assert f'name="{tmp_path / "good.txt"}"' in written and 'tests="2" failures="1"' in written
