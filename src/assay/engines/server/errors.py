"""What can go wrong with a server, each with its own finding id.

Exit code 2 (`AssayError`): nothing could be examined: unreachable, refused, no OpenAI-compatible
answer. Exit code 3 (`InconclusiveError`): it answers, but not enough came back: timeout, cut
stream, rate limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from assay.errors import AssayError, InconclusiveError


class ServerError(AssayError):
    """A request to a server failed. Subclasses fix the finding id and the remedy."""

    id: ClassVar[str] = "server.unreachable"
    default_remedy: ClassVar[str] = (
        "check the URL, and that the server runs and is reachable from here"
    )

    def __init__(
        self, message: str, *, remedy: str | None = None, evidence: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(
            message,
            finding_id=self.id,
            remedy=self.default_remedy if remedy is None else remedy,
            evidence=evidence,
        )


class Unreachable(ServerError):
    """No connection: refused, no such host, TLS failure, or closed without an answer."""


class Unauthorized(ServerError):
    """401 or 403."""

    id = "server.unauthorized"
    default_remedy = "put the key into an environment variable and name it with --api-key-env"


class NotFound(ServerError):
    """404: nothing at that path."""

    id = "server.not_found"
    default_remedy = "give the root of an OpenAI-compatible server, or its /v1"


class ModelUnknown(ServerError):
    """The server does not have the model that was named, or has none."""

    id = "server.model_unknown"
    default_remedy = "name one of the server's models with --model"

    def __init__(
        self, message: str, *, available: Sequence[str] = (), remedy: str | None = None
    ) -> None:
        super().__init__(message, remedy=remedy, evidence={"available": list(available)})
        self.available = tuple(available)


class NotJson(ServerError):
    """The answer is not the JSON that was asked for."""

    id = "server.not_json"
    default_remedy = (
        "give the root of an OpenAI-compatible server, or its /v1; a proxy or a web page may answer"
        " here"
    )


class Failing(ServerError):
    """5xx, again and again."""

    id = "server.failing"
    default_remedy = "look into the server's log: it accepts the request and then fails"


class Redirected(ServerError):
    """A redirect to another origin, which is not followed."""

    id = "server.redirected"
    default_remedy = "give the URL it points to, if you trust it"


class TooLarge(ServerError):
    """The answer is larger than any sane one."""

    id = "server.too_large"
    default_remedy = "this is no answer of a language model; check what listens at this URL"


class InvalidStream(ServerError):
    """The stream is not made of server-sent events that hold JSON."""

    id = "server.invalid_stream"
    default_remedy = "check for a proxy that rewrites the stream, and look into the server's log"


class NotStreamed(InvalidStream):
    """The answer is whole and came in one piece, though a stream was asked for."""


class RequestRefused(ServerError):
    """The server understood the request and refuses it (400, 413, 422, ...)."""

    id = "server.request_refused"
    default_remedy = "the server's message says what it does not accept"

    def __init__(
        self, message: str, *, status: int, evidence: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message, evidence=evidence)
        self.status = status


class BadScores(ServerError):
    """Log-probabilities that cannot be those of the tokens that were sent."""

    id = "server.bad_scores"
    default_remedy = "do not trust scores of this server; score with another engine"


class ServerInconclusive(InconclusiveError):
    """The server answered too little to judge. Subclasses fix the finding id and the remedy."""

    id: ClassVar[str] = "server.timeout"
    default_remedy: ClassVar[str] = "raise --timeout, or look whether the server is overloaded"

    def __init__(
        self,
        message: str,
        *,
        remedy: str | None = None,
        evidence: Mapping[str, Any] | None = None,
        partial_text: str = "",
    ) -> None:
        super().__init__(
            message,
            finding_id=self.id,
            remedy=self.default_remedy if remedy is None else remedy,
            evidence=evidence,
        )
        self.partial_text = partial_text
        """What had arrived of a streamed text before it ended."""


class TimedOut(ServerInconclusive):
    """Nothing came for too long, or the whole answer took too long."""


class RateLimited(ServerInconclusive):
    """429, also after waiting as long as the server asked for."""

    id = "server.rate_limited"
    default_remedy = "lower --concurrency, or try again when the limit has reset"


class StreamCut(ServerInconclusive):
    """The connection closed before the answer was complete."""

    id = "server.stream_cut"
    default_remedy = (
        "look into the log of the server and of any proxy before it: the answer broke off"
    )


class StreamFailed(ServerInconclusive):
    """The server reported an error inside a stream that it had begun."""

    id = "server.stream_error"
    default_remedy = "look into the server's log: it began to answer and then failed"
