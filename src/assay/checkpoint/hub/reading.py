"""Small files and headers of a revision, read without downloading a body."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from assay.checkpoint.headers import Header, parse_header
from assay.checkpoint.hub import limits
from assay.checkpoint.hub.bounds import bounded
from assay.checkpoint.hub.errors import http_errors, translated
from assay.checkpoint.hub.listing import HubRevision, endpoint
from assay.checkpoint.hub.retry import retried

HEAD_BYTES = 1 << 17
"""First range of a remote header; most headers fit into it."""
AT_ONCE = 8


def read_file(hub: HubRevision, path: str) -> bytes:
    """A small file of the revision. Raises OSError if it cannot be had."""
    with bounded(hub.repo):
        try:
            content = _get(hub, path, None)
        except http_errors() as error:
            raise OSError(0, str(translated(error, hub.repo, hub.revision))) from error
    return content


def read_headers(hub: HubRevision, names: Sequence[str]) -> dict[str, Header]:
    """Headers of remote safetensors files, by one or two range requests each, several files at a time."""

    def one(name: str) -> tuple[str, Header]:
        size, head = hub.files[name].size, b""

        def fetch(start: int, count: int) -> bytes:
            nonlocal head
            if start + count > len(head) and len(head) < size:
                head = _get(hub, name, min(max(start + count, HEAD_BYTES), size))
            return head[start : start + count]

        return name, parse_header(fetch, size, name)

    with bounded(hub.repo), ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            return dict(pool.map(one, names))
        except http_errors() as error:
            pool.shutdown(wait=True, cancel_futures=True)
            raise translated(error, hub.repo, hub.revision) from error


def _get(hub: HubRevision, path: str, first_bytes: int | None) -> bytes:
    """A file, or its first bytes: never more of a body than was asked for, whatever the server sends.

    Raises one of `http_errors`. A body that was cut short is asked for again.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(hub.repo, path, revision=hub.revision, endpoint=endpoint())
    headers = build_hf_headers()
    headers["accept-encoding"] = "identity"
    wanted = hub.files[path].size if first_bytes is None else first_bytes
    if first_bytes is not None:
        headers["range"] = f"bytes=0-{first_bytes - 1}"

    def body() -> bytes:
        received = bytearray()
        with get_session().stream("GET", url, headers=headers, timeout=limits.REQUEST_S) as response:
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            for chunk in response.iter_bytes():
                received += chunk
                if len(received) >= wanted:
                    return bytes(received[:wanted])
        if len(received) < wanted:
            raise OSError(0, f"{path} ended after {len(received)} of {wanted} bytes")
        return bytes(received)

    return retried(body)
