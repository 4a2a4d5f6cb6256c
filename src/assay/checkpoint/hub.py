"""A repository on the Hub: its files, digests, headers and small documents.

A mirror may serve trees only; if the repository does not exist, the tree's request says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from assay.checkpoint.hub_requests import (
    REQUEST_S,
    bounded,
    http_errors,
    retried,
    status_of,
    translated,
    unreadable,
)
from assay.checkpoint.safetensors import Header, parse_header
from assay.checkpoint.trusted import Expected, Source
from assay.errors import AssayError

# A mirror may serve trees only; if the repository does not exist, the tree's request says so.
_NO_INFO = {400, 404, 405, 501}


@dataclass(frozen=True)
class HubFile:
    """One file of a revision: `sha256` where the Hub stores it by content, else git's blob id."""

    path: str
    size: int
    sha256: str | None
    git_sha1: str | None


@dataclass(frozen=True)
class HubRevision:
    """A repository at one commit (None where the Hub did not say which)."""

    repo: str
    commit: str | None
    asked: str
    files: Mapping[str, HubFile]

    @property
    def revision(self) -> str:
        """What requests are made with: the commit, so that a moving branch cannot mix two."""
        return self.commit or self.asked

    def source(self) -> Source:
        """The digests that files are compared with."""
        name = "the Hub"
        files = {
            f.path: Expected(
                name, sha256=f.sha256, git_sha1=None if f.sha256 else f.git_sha1, size=f.size
            )
            for f in self.files.values()
        }
        return Source(name, files, complete=True)


def endpoint() -> str | None:
    """The Hub's address if HF_ENDPOINT moves it."""
    return os.environ.get("HF_ENDPOINT") or None


def list_revision(repo: str, revision: str | None) -> HubRevision:
    """The files of a revision (default `main`). Raises AssayError with one line if they cannot be
    had.
    """
    api, file_type = _api(repo)
    asked = revision or "main"
    with bounded(repo):
        try:
            commit = _commit(api, repo, asked)
            entries: list[Any] = retried(
                lambda: list(api.list_repo_tree(repo, recursive=True, revision=commit or asked))
            )
        except http_errors() as error:
            raise translated(error, repo, asked) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise unreadable(repo, "the Hub's answer is not what its API promises") from error
    files = {entry.path: _file(entry) for entry in entries if isinstance(entry, file_type)}
    if not files:
        raise unreadable(repo, f"revision {asked} has no files")
    return HubRevision(repo, commit, asked, files)


def _commit(api: Any, repo: str, asked: str) -> str | None:
    try:
        info = retried(lambda: api.model_info(repo, revision=asked, timeout=REQUEST_S))
    except http_errors() as error:
        if status_of(error) not in _NO_INFO:
            raise
        return None
    sha: str | None = info.sha
    return sha


def _file(entry: Any) -> HubFile:
    sha256 = entry.lfs.sha256 if entry.lfs else None
    return HubFile(entry.path, int(entry.size), sha256, entry.blob_id)


def _api(repo: str) -> tuple[Any, Any]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.hf_api import RepoFile
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        message = f"{repo!r} is not a repository id"
        raise AssayError(
            message, finding_id="checkpoint.not_examined", remedy="write ORG/NAME"
        ) from error
    return HfApi(endpoint=endpoint()), RepoFile


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
    """Headers of remote safetensors files, by one or two range requests each, several files at a
    time.
    """

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
    """A file, or its first bytes: never more of a body than was asked for, even if the
    server sends more.

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
        with get_session().stream("GET", url, headers=headers, timeout=REQUEST_S) as response:
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
