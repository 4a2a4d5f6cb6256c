import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.engines.server.sse import SseParser


def parse(*pieces: bytes) -> list[str]:
    parser = SseParser()
    out = [data for piece in pieces for data in parser.feed(piece)]
    return out + list(parser.close())


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: one\n\ndata: two\n\n", ["one", "two"]),
        (b"data: one\r\n\r\ndata: two\r\n\r\n", ["one", "two"]),
        (b"data: one\r\rdata: two\r\r", ["one", "two"]),
        (b"data: a\ndata: b\ndata: c\n\n", ["a\nb\nc"]),
        (b"data:no space\n\n", ["no space"]),
        (b"data:  two spaces keep one\n\n", [" two spaces keep one"]),
        (b": keep-alive\n\ndata: x\n\n: ping\n\n", ["x"]),
        (b"event: message\nid: 7\nretry: 10\ndata: x\n\n", ["x"]),
        (b"\n\n\n", []),
        (b"", []),
        (b"event: nothing\n\n", []),
        (b"data: cut off", ["cut off"]),
        (b"data: cut off\n", ["cut off"]),
        (b"data: cut off\r", ["cut off"]),
        (b"data\n\n", [""]),
        ("\ufeffdata: after a byte order mark\n\n".encode(), ["after a byte order mark"]),
        ('data: {"t": "naïve 東京 🙂"}\n\n'.encode(), ['{"t": "naïve 東京 🙂"}']),
        (b'data: {"a": "b: c"}\n\n', ['{"a": "b: c"}']),
        # A line separator of Unicode is not the end of a line here.
        ("data: a\u2028b\x0bc\n\n".encode(), ["a\u2028b\x0bc"]),
        (b"<html>\n<body>data: x</body>\n\n", []),
        (b"data: \xff broken\n\n", ["\ufffd broken"]),
    ],
)
def test_streams(stream: bytes, expected: list[str]) -> None:
    assert parse(stream) == expected
    assert parse(*(stream[i : i + 1] for i in range(len(stream)))) == expected


LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
VALUES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), max_size=12)


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[str]]:
    """A stream written by the rules, and the events that it holds."""
    out, expected = [], []
    for _ in range(draw(st.integers(0, 5))):
        end = draw(LINE_ENDS)
        if draw(st.booleans()):
            out.append(b": comment" + end)
        lines = draw(st.lists(VALUES, min_size=1, max_size=3))
        out += [b"data: " + line.encode() + end for line in lines]
        out.append(end)
        expected.append("\n".join(lines))
    return b"".join(out), expected


@given(streams(), st.data())
def test_the_result_does_not_depend_on_where_the_bytes_are_cut(
    stream: tuple[bytes, list[str]], data: st.DataObject
) -> None:
    raw, expected = stream
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert parse(*pieces) == expected


@given(st.binary(max_size=200), st.data())
def test_any_bytes_at_all_give_the_same_result_in_one_piece_and_in_many(
    raw: bytes, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert parse(*pieces) == parse(raw)
