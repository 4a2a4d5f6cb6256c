"""Which files a revision has, with their digests, and the commit that it stands for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from assay.checkpoint.hub import limits
from assay.checkpoint.hub.bounds import bounded
from assay.checkpoint.hub.errors import http_errors, status_of, translated, unreadable
from assay.checkpoint.hub.retry import retried
from assay.checkpoint.integrity import Expected, Source
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
        """The digests as something that files are held against."""
        name = "the Hub"
        files = {
            f.path: Expected(name, sha256=f.sha256, git_sha1=None if f.sha256 else f.git_sha1, size=f.size)
            for f in self.files.values()
        }
        return Source(name, files, complete=True)


def endpoint() -> str | None:
    """The Hub's address if HF_ENDPOINT moves it."""
    return os.environ.get("HF_ENDPOINT") or None


def list_revision(repo: str, revision: str | None) -> HubRevision:
    """The files of a revision (default `main`). Raises AssayError with one line if they cannot be had."""
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
        info = retried(lambda: api.model_info(repo, revision=asked, timeout=limits.REQUEST_S))
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
        raise AssayError(message, finding_id="checkpoint.not_examined", remedy="write ORG/NAME") from error
    return HfApi(endpoint=endpoint()), RepoFile
