"""The Hub through huggingface_hub: which files a revision has, their digests, and headers by range requests."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from assay.checkpoint.headers import Header, parse_header
from assay.checkpoint.integrity import Expected, Source
from assay.errors import AssayError, InconclusiveError

BUDGET_S = 60.0
"""Seconds that all metadata requests together may take."""
REQUEST_S = 10.0
TRIES = 3
HEAD_BYTES = 1 << 17
"""First range of a remote header; most headers fit into it."""


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
    files: dict[str, HubFile]

    @property
    def revision(self) -> str:
        """What requests are made with: the commit, so that a moving branch cannot mix two."""
        return self.commit or self.asked

    def source(self) -> Source:
        """The digests as something that files are held against."""
        name = "the Hub"
        files = {
            f.path: Expected(name, sha256=f.sha256, git_sha1=None if f.sha256 else f.git_sha1, size=f.size)
            for f in self.files.values()
        }
        return Source(name, files, complete=True)


def list_revision(repo: str, revision: str | None) -> HubRevision:
    """The files of a revision (default `main`) with their digests, and the commit that it stands for."""
    api, folder_type = _api(repo)
    asked = revision or "main"
    with _bounded():
        commit = None
        try:
            commit = api.model_info(repo, revision=asked, timeout=REQUEST_S).sha
        except _http_errors() as error:
            if _status(error) not in {400, 404, 405, 501}:
                raise _translated(error, repo, asked) from error
            # A mirror may serve trees only; if the repository does not exist, the next request says so.
        try:
            entries = list(api.list_repo_tree(repo, recursive=True, revision=commit or asked))
        except _http_errors() as error:
            raise _translated(error, repo, asked) from error
        except (ValueError, KeyError, TypeError) as error:
            raise _unreadable(repo, "the Hub's answer is not what its API promises") from error
    files = {
        entry.path: HubFile(
            entry.path, int(entry.size), entry.lfs.sha256 if entry.lfs else None, entry.blob_id
        )
        for entry in entries
        if not isinstance(entry, folder_type)
    }
    if not files:
        raise _unreadable(repo, f"revision {asked} has no files")
    return HubRevision(repo, commit, asked, files)


def read_file(hub: HubRevision, path: str) -> bytes:
    """A small file of the revision. Raises OSError if it cannot be had."""
    with _bounded():
        try:
            response = _get(hub, path, None)
        except _http_errors() as error:
            raise OSError(str(_translated(error, hub.repo, hub.revision))) from error
        content: bytes = response.content
        return content


def read_headers(hub: HubRevision, names: list[str]) -> dict[str, Header]:
    """Headers of remote safetensors files, by a few range requests each, several files at a time."""

    def one(name: str) -> tuple[str, Header]:
        head = b""

        def fetch(start: int, count: int) -> bytes:
            nonlocal head
            if start + count > len(head) and len(head) < hub.files[name].size:
                want = max(start + count, HEAD_BYTES)
                head = _get(hub, name, want).content[:want]
            return head[start : start + count]

        return name, parse_header(fetch, hub.files[name].size, name)

    with _bounded(), ThreadPoolExecutor(8) as pool:
        try:
            return dict(pool.map(one, names))
        except _http_errors() as error:
            raise _translated(error, hub.repo, hub.revision) from error


def _get(hub: HubRevision, path: str, first_bytes: int | None) -> Any:
    """A file, or its first bytes; never more of a body than was asked for."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(hub.repo, path, revision=hub.revision, endpoint=_endpoint())
    headers = build_hf_headers()
    if first_bytes is not None:
        headers["range"] = f"bytes=0-{first_bytes - 1}"
    for attempt in range(TRIES):
        try:
            with get_session().stream("GET", url, headers=headers, timeout=REQUEST_S) as response:
                hf_raise_for_status(response)
                body = bytearray()
                for chunk in response.iter_bytes():
                    body += chunk
                    if first_bytes is not None and len(body) >= first_bytes:
                        break
                return _Body(bytes(body))
        except _http_errors() as error:
            if attempt == TRIES - 1 or _status(error) not in {None, 429, 500, 502, 503, 504}:
                raise
            time.sleep(0.5 * 2**attempt)
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class _Body:
    content: bytes


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _api(repo: str) -> tuple[Any, type]:
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.hf_api import RepoFolder
        from huggingface_hub.utils import validate_repo_id
    except ImportError as error:
        raise _unreadable(repo, "huggingface_hub is not installed") from error
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        message = f"{repo!r} is not a repository id"
        raise AssayError(message, finding_id="checkpoint.not_examined", remedy="write ORG/NAME") from error
    return HfApi(endpoint=_endpoint()), RepoFolder


def _http_errors() -> tuple[type[Exception], ...]:
    """What a request through huggingface_hub may raise; its HTTP library differs between versions."""
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import get_session

    library = __import__(type(get_session()).__module__.partition(".")[0])
    return (library.HTTPError, library.InvalidURL, OfflineModeIsEnabled, OSError)


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else None


def _translated(error: BaseException, repo: str, revision: str) -> AssayError:
    """One clear line for what went wrong with the Hub."""
    status, name = _status(error), type(error).__name__
    if isinstance(error, AssayError):
        return error
    if "Timeout" in name:
        return _late(repo, f"the Hub did not answer within {REQUEST_S:g} s")
    if status == 429:
        return _late(repo, "the Hub limits the rate of requests (429)")
    if name == "RevisionNotFoundError":
        return _unreadable(repo, f"it has no revision {revision}")
    if status in {401, 403}:
        return _unreadable(
            repo,
            f"the Hub denies access ({status}): private, gated, or no such repository",
            "log in with `hf auth login`",
        )
    if status == 404:
        return _unreadable(repo, "the Hub knows no such repository (404)", "check the id and your access")
    if status is not None:
        return _unreadable(repo, f"the Hub answers with status {status}")
    if name == "OfflineModeIsEnabled":
        return _unreadable(repo, "HF_HUB_OFFLINE is set", "use --manifest instead, or unset it")
    return _unreadable(
        repo, f"the Hub cannot be reached ({name})", "use --manifest to verify without a network"
    )


def _unreadable(repo: str, reason: str, remedy: str = "") -> AssayError:
    return AssayError(f"cannot read {repo}: {reason}", finding_id="checkpoint.not_examined", remedy=remedy)


def _late(repo: str, reason: str) -> InconclusiveError:
    return InconclusiveError(
        f"cannot read {repo}: {reason}", finding_id="checkpoint.not_examined", remedy="try again later"
    )


@contextmanager
def _bounded() -> Iterator[None]:
    """Bounds on time and tries around huggingface_hub's own retries, which wait as long as a server asks them to."""
    from huggingface_hub.utils import get_session

    session = get_session()
    deadline = time.monotonic() + BUDGET_S
    failures: Counter[int] = Counter()
    tries: Counter[str] = Counter()

    def before(request: Any) -> None:
        tries[str(request.url)] += 1
        left = deadline - time.monotonic()
        if left <= 0 or tries[str(request.url)] > TRIES:
            raise _late(request.url.host, "the Hub answers too slowly")
        limits = request.extensions.get("timeout") or {}
        bounded = {k: min(limits.get(k) or REQUEST_S, left) for k in ("connect", "read", "write", "pool")}
        request.extensions["timeout"] = bounded

    def after(response: Any) -> None:
        status = response.status_code
        if status == 429 or status >= 500:
            failures[status] += 1
            wait = str(response.headers.get("retry-after", "0"))
            if failures[status] >= TRIES or (wait.isdigit() and float(wait) > deadline - time.monotonic()):
                if status == 429:
                    raise _late(response.url.host, "the Hub limits the rate of requests (429)")
                raise _unreadable(response.url.host, f"the Hub answers with status {status}")

    kept = {name: list(hooks) for name, hooks in session.event_hooks.items()}
    session.event_hooks = _extended(kept, before, after)
    try:
        yield
    finally:
        session.event_hooks = kept


def _extended(
    kept: dict[str, list[Callable[..., Any]]], before: Callable[[Any], None], after: Callable[[Any], None]
) -> dict[str, list[Callable[..., Any]]]:
    return {"request": [*kept.get("request", []), before], "response": [*kept.get("response", []), after]}
