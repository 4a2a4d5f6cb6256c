"""Files from outside: what is no regular file, is too long or holds hostile JSON gives one line."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from assay.errors import AssayError
from assay.files import open_regular, read_beginning, read_bounded, read_json


def test_a_file_within_the_limit_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bounded(tmp_path / "a", 5) == b"12345"
    assert read_bounded(str(tmp_path / "a"), 6) == b"12345"
    with open_regular(tmp_path / "a") as file:
        assert file.read(2) == b"12"


def test_a_longer_file_is_refused_or_read_up_to_the_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    with pytest.raises(AssayError, match=r"a: it has more than 4 bytes, the most that the list ma"):
        read_bounded(tmp_path / "a", 4, what="the list")
    assert read_beginning(tmp_path / "a", 4) == (b"1234", True)
    assert read_beginning(tmp_path / "a", 5) == (b"12345", False)


def test_a_sparse_file_of_a_terabyte_costs_its_limit(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(AssayError, match="more than 1,000 bytes"):
        read_bounded(tmp_path / "a", 1000)


def refusal(path: str | Path) -> str:
    with pytest.raises(AssayError) as caught:
        read_bounded(path, 100, what="the baseline", finding_id="gate.baseline", remedy="name one")
    assert (caught.value.finding_id, caught.value.remedy) == ("gate.baseline", "name one")
    assert "\n" not in caught.value.message
    with pytest.raises(AssayError):
        open_regular(path)
    return caught.value.message


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        assert "a socket, and the baseline must be a regular file" in refusal(tmp_path / "socket")
    assert "it is a named pipe" in refusal(tmp_path / "pipe")
    assert "it is a device" in refusal("/dev/zero")
    assert "it is a directory" in refusal(tmp_path)
    (tmp_path / "link").symlink_to("/dev/zero")
    assert "it is a device" in refusal(tmp_path / "link")


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none").endswith("none: No such file or directory")
    assert "null" in refusal("a\0b")
    (tmp_path / "circle").symlink_to("circle")
    assert "symbolic link" in refusal(tmp_path / "circle")


def test_a_pipe_is_read_where_the_caller_takes_pipes(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(b"x" * 100_000))
    writer.start()
    data = read_bounded(pipe, 1 << 20, pipe_wait_s=30)
    writer.join()
    assert data == b"x" * 100_000
    with pytest.raises(AssayError, match=r"nothing was written for 0\.05 s"):
        read_bounded(pipe, 100, pipe_wait_s=0.05)


def test_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('\ufeff{"a": [1, 2.5, null]}\n', encoding="utf-8")
    assert read_json(tmp_path / "a") == {"a": [1, 2.5, None]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "Expecting value"),
        (b"{} {}", "Extra data"),
        (b"\xff", "utf-8"),
        (b"[" * 100_000, "nested deeper than 200 levels"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "nested deeper than 200 levels"),
        (b"[1" + b"0" * 400 + b"]", "an integer of 401 digits"),
        (b"[1" + b"0" * 100_000 + b"]", "an integer of 100,001 digits"),
    ],
)
def test_hostile_json_gives_one_line(tmp_path: Path, text: bytes, reason: str) -> None:
    (tmp_path / "a").write_bytes(text)
    with pytest.raises(AssayError, match=reason) as caught:
        read_json(tmp_path / "a")
    assert "\n" not in caught.value.message
