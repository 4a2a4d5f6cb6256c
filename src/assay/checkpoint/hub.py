"""A repository on the Hub: its files, digests, headers and small documents, within bounds on time
and tries.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from assay.checkpoint.digests import Expected, Source
from assay.checkpoint.safetensors import Header, parse_header
from assay.errors import AssayError, InconclusiveError

REQUEST_S = 10.0
"""Seconds that one request may wait for the next bytes."""
BUDGET_S = 60.0
"""Seconds that all requests of one question may take together."""
PATIENCE_S = 10.0
"""A server that asks to wait longer than this is taken at its word: not now."""
TRIES = 3
"""How often one thing is asked for."""
PAUSE_S = 0.5
"""Seconds before the second try; doubled for the third."""


# One clear line for everything that can go wrong between here and the Hub.


def http_errors() -> tuple[type[Exception], ...]:
    """What a request through huggingface_hub may raise; its HTTP library differs between versions."""
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import get_session

    library = __import__(type(get_session()).__module__.partition(".")[0])
    return (
        library.HTTPError,
        library.InvalidURL,
        library.StreamError,
        OfflineModeIsEnabled,
        OSError,
    )


def status_of(error: BaseException) -> int | None:
    """Status of the answer that an exception is about, if there was one."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def translated(error: BaseException, repo: str, revision: str) -> AssayError:
    """The error that the user sees. Slow or limited is inconclusive, everything else could not be
    examined.
    """
    status, name = status_of(error), type(error).__name__
    if isinstance(error, AssayError):
        return error
    if "Timeout" in name:
        return late(repo, f"the Hub did not answer within {REQUEST_S:g} s")
    if status == 429:
        return late(repo, "the Hub limits the rate of requests (429)")
    if name == "RevisionNotFoundError":
        return unreadable(repo, f"it has no revision {revision}")
    if status in {401, 403}:
        reason = f"the Hub denies access ({status}): private, gated, or no such repository"
        return unreadable(repo, reason, "log in with `hf auth login`")
    if status == 404:
        return unreadable(
            repo, "the Hub knows no such repository or file (404)", "check the id and your access"
        )
    if status is not None:
        return unreadable(repo, f"the Hub answers with status {status}")
    if name == "OfflineModeIsEnabled":
        return unreadable(repo, "HF_HUB_OFFLINE is set", "use --manifest instead, or unset it")
    return unreadable(
        repo, f"the Hub cannot be reached ({name})", "use --manifest to verify without a network"
    )


def unreadable(repo: str, reason: str, remedy: str = "") -> AssayError:
    """The repository could not be examined (exit code 2)."""
    return AssayError(
        f"cannot read {repo}: {reason}", finding_id="checkpoint.not_examined", remedy=remedy
    )


def late(repo: str, reason: str) -> InconclusiveError:
    """The Hub is there, but not now (exit code 3)."""
    return InconclusiveError(
        f"cannot read {repo}: {reason}",
        finding_id="checkpoint.not_examined",
        remedy="try again later",
    )


# Bounds on time and tries around huggingface_hub's own retries, which wait as long as a server asks
# them to.

_RESET = re.compile(r"\bt=(\d+)")


@contextmanager
def bounded(repo: str) -> Iterator[None]:
    """Within this block every request through huggingface_hub's session is bounded, and its
    warnings are kept quiet.
    """
    from huggingface_hub.utils import get_session

    session = get_session()
    logger = logging.getLogger("huggingface_hub")
    level, kept = logger.level, {name: list(hooks) for name, hooks in session.event_hooks.items()}
    before, after = _hooks(repo, time.monotonic() + BUDGET_S)
    session.event_hooks = {
        "request": [*kept.get("request", []), before],
        "response": [*kept.get("response", []), after],
    }
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        session.event_hooks = kept


def _hooks(repo: str, deadline: float) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
    tries: Counter[str] = Counter()
    failures: Counter[str] = Counter()

    def before(request: Any) -> None:
        where = f"{request.method} {request.url} {request.headers.get('range', '')}"
        tries[where] += 1
        left = deadline - time.monotonic()
        if left <= 0 or tries[where] > TRIES:
            raise late(repo, "the Hub answers too slowly")
        given = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = {
            key: min(given.get(key) or REQUEST_S, left)
            for key in ("connect", "read", "write", "pool")
        }

    def after(response: Any) -> None:
        status = response.status_code
        if status != 429 and status < 500:
            return
        where = str(response.url)
        failures[where] += 1
        wait = asked_wait(response.headers)
        if failures[where] < TRIES and wait <= min(PATIENCE_S, deadline - time.monotonic()):
            return
        if status == 429:
            raise late(repo, "the Hub limits the rate of requests (429)")
        raise unreadable(repo, f"the Hub answers with status {status}")

    return before, after


def asked_wait(headers: Mapping[str, str]) -> float:
    """Seconds that a server asks to wait (`Retry-After`, or `t=` of `RateLimit`); a date counts as
    long.
    """
    after = headers.get("retry-after", "").strip()
    if after:
        return float(after) if re.fullmatch(r"\d+(\.\d+)?", after) else float("inf")
    reset = _RESET.search(headers.get("ratelimit", ""))
    return float(reset[1]) if reset else 0.0


# Ask again after a hiccup. Releases of huggingface_hub differ in what they retry by themselves.

T = TypeVar("T")

_TRANSIENT = {429, 500, 502, 503, 504}
_FINAL = ("Timeout", "Connect", "Offline", "InvalidURL")
"""Parts of the names of exceptions after which a second try would only take longer."""


def retried(question: Callable[[], T]) -> T:
    """The answer to `question`, asked up to `TRIES` times. Raises its last error."""
    for attempt in range(TRIES - 1):
        try:
            return question()
        except http_errors() as error:
            if not _transient(error):
                raise
        time.sleep(PAUSE_S * 2**attempt)
    return question()


def _transient(error: Exception) -> bool:
    status = status_of(error)
    if status is not None:
        return status in _TRANSIENT
    return not any(part in type(error).__name__ for part in _FINAL)


# Which files a revision has, with their digests, and the commit that it stands for.

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
        """The digests as something that files are held against."""
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


# Small files and headers of a revision, read without downloading a body.

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
    """A file, or its first bytes: never more of a body than was asked for, whatever the server
    sends.

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
