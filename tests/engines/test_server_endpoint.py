import pytest

from assay.engines.server.endpoint import origin, parse_url, without_credentials
from assay.errors import UsageError


@pytest.mark.parametrize(
    ("url", "root", "api"),
    [
        ("http://localhost:8000", "http://localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/", "http://localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1", "http://localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1/", "http://localhost:8000", "http://localhost:8000/v1"),
        ("localhost:8000", "http://localhost:8000", "http://localhost:8000/v1"),
        ("https://host/a/b", "https://host/a/b", "https://host/a/b/v1"),
        ("https://host/a/b/v1/", "https://host/a/b", "https://host/a/b/v1"),
        ("https://host/api/v4", "https://host/api", "https://host/api/v4"),
        ("http://[::1]:8000/v1", "http://[::1]:8000", "http://[::1]:8000/v1"),
        ("http://[fe80::1]", "http://[fe80::1]", "http://[fe80::1]/v1"),
        ("  http://host ", "http://host", "http://host/v1"),
        ("http://host/v1/chat/completions", "http://host", "http://host/v1"),
        ("http://host/v1/models", "http://host", "http://host/v1"),
        ("http://me:s3cret@host:1/v1", "http://host:1", "http://host:1/v1"),
    ],
)
def test_root_and_api(url: str, root: str, api: str) -> None:
    endpoint = parse_url(url)
    assert (endpoint.root, endpoint.api) == (root, api)


def test_credentials_are_kept_apart_and_never_shown() -> None:
    endpoint = parse_url("http://me:s3%40cret@host/v1")
    assert endpoint.credentials == ("me", "s3@cret")
    assert "s3" not in repr(endpoint)
    assert without_credentials("http://me:s3cret@host:9/x?key=1#f") == "http://host:9/x"
    assert without_credentials("http://host:notaport/x") == "an invalid URL"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://",
        "ftp://host",
        "http://host:port",
        "http://[::1",
        "http://ho st/",
        "http://host/v1?key=x",
        "file:///x",
    ],
)
def test_what_is_no_server_url_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_url(url)
    assert "\n" not in caught.value.message
    assert caught.value.remedy


def test_origin_knows_default_ports() -> None:
    assert origin("https://Host/x") == ("https", "host", 443) == origin("https://host:443/y")
    assert origin("http://host") != origin("https://host")
