import pytest

from assay.engines.server.wording import describe_body, looks_like_html, one_line


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "empty answer"),
        (b"  \n", "empty answer"),
        (b'{"error": {"message": "no such model", "code": 404}}', "no such model"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (
            b'{"detail": [{"loc": ["body"], "msg": "field required"}, {"msg": "bad"}]}',
            "field required; bad",
        ),
        (b'{"object": "error", "message": "two\\nlines"}', "two lines"),
        (b"plain\ntext", "plain text"),
        (
            b"<html><head><title>502 Bad\n Gateway</title></head></html>",
            "a web page titled '502 Bad Gateway'",
        ),
        (b"<!doctype html><p>hello", "a web page"),
        (b"\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        (b'{"other": 1}', '{"other": 1}'),
        (b"[" * 100_000, "[" * 159 + "\u2026"),
    ],
)
def test_one_safe_line(body: bytes, expected: str) -> None:
    assert describe_body(body) == expected


def test_secrets_are_masked_wherever_they_stand() -> None:
    said = describe_body(b'{"error": {"message": "Incorrect key sk-12345 given"}}', ("sk-12345",))
    assert said == "Incorrect key *** given"


def test_a_text_about_html_is_no_web_page() -> None:
    assert not looks_like_html('{"text": "<html>"}')
    assert not looks_like_html("The <html> tag begins a page")
    assert looks_like_html("\n <!-- x --><HTML lang='en'>")


def test_long_lines_are_cut() -> None:
    assert len(one_line("x" * 10_000)) == 160
