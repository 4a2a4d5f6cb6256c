"""One clear line for everything that can go wrong between here and the Hub."""

from __future__ import annotations

from assay.checkpoint.hub import limits
from assay.errors import AssayError, InconclusiveError


def http_errors() -> tuple[type[Exception], ...]:
    """What a request through huggingface_hub may raise; its HTTP library differs between versions."""
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import get_session

    library = __import__(type(get_session()).__module__.partition(".")[0])
    return (library.HTTPError, library.InvalidURL, library.StreamError, OfflineModeIsEnabled, OSError)


def status_of(error: BaseException) -> int | None:
    """Status of the answer that an exception is about, if there was one."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def translated(error: BaseException, repo: str, revision: str) -> AssayError:
    """The error that the user sees. Slow or limited is inconclusive, everything else could not be examined."""
    status, name = status_of(error), type(error).__name__
    if isinstance(error, AssayError):
        return error
    if "Timeout" in name:
        return late(repo, f"the Hub did not answer within {limits.REQUEST_S:g} s")
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
    return AssayError(f"cannot read {repo}: {reason}", finding_id="checkpoint.not_examined", remedy=remedy)


def late(repo: str, reason: str) -> InconclusiveError:
    """The Hub is there, but not now (exit code 3)."""
    return InconclusiveError(
        f"cannot read {repo}: {reason}", finding_id="checkpoint.not_examined", remedy="try again later"
    )
