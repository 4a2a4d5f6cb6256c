"""What an engine can do, and the error for what it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from assay.errors import AssayError


class Capability(StrEnum):
    """What an engine may be able to do."""

    GENERATE = "generate"
    """Write text by any route."""
    CHAT = "chat"
    """Apply its own chat template to messages."""
    COMPLETIONS = "completions"
    """Continue a raw prompt."""
    STREAM = "stream"
    """Send the reply piece by piece."""
    STREAM_USAGE = "stream_usage"
    """Count tokens at the end of a stream."""
    CONTINUOUS_USAGE = "continuous_usage"
    """Count tokens with every chunk of a stream."""
    LOGPROBS = "logprobs"
    """Log-probabilities of the tokens it generates."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """Log-probabilities of the tokens of a prompt, asked for directly."""
    ECHO = "echo"
    """Log-probabilities of the tokens of a prompt, by echoing it."""
    SCORE = "score"
    """Log-probabilities of given tokens by any route."""
    TOKENIZE = "tokenize"
    """Text to token ids."""
    TOKEN_IDS_PROMPT = "token_ids_prompt"
    """Take a prompt as token ids."""
    TOOLS = "tools"
    """Accept tools and answer with tool calls."""
    METRICS = "metrics"
    """Expose Prometheus metrics."""
    IGNORE_EOS = "ignore_eos"
    """Go on past the end-of-text token."""


class MissingCapability(AssayError):
    """The engine cannot do what a verb needs; `capability` says what."""

    def __init__(
        self, capability: Capability, reason: str, *, needed_for: str = "", where: str = ""
    ) -> None:
        subject = where or "this engine"
        purpose = f", needed for {needed_for}" if needed_for else ""
        super().__init__(
            f"{subject} has no {capability.value}{purpose}: {reason}",
            finding_id="server.missing_capability",
            remedy="use an engine that has it, or leave out what needs it",
            evidence={"capability": capability.value, "reason": reason},
        )
        self.capability = capability
        self.reason = reason


@dataclass(frozen=True)
class CapabilityReport:
    """What an engine can do, and for each thing it cannot, why not."""

    present: frozenset[Capability]
    absent: Mapping[Capability, str] = field(default_factory=dict)
    where: str = ""
    """Names the engine in a refusal, such as its URL."""
    unfinished: frozenset[Capability] = frozenset()
    """Those of the absent whose probe did not end (a time-out, a cut stream), so that nothing is
    known of them.
    """

    def __contains__(self, capability: object) -> bool:
        return capability in self.present

    def reason(self, capability: Capability) -> str | None:
        """Why the capability is absent; None where it is present."""
        if capability in self.present:
            return None
        return self.absent.get(capability, "not probed")

    def require(self, capability: Capability, needed_for: str = "") -> None:
        """Raise `MissingCapability` unless the engine can do it."""
        reason = self.reason(capability)
        if reason is not None:
            raise MissingCapability(capability, reason, needed_for=needed_for, where=self.where)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        return {
            "present": sorted(c.value for c in self.present),
            "absent": {c.value: why for c, why in sorted(self.absent.items())},
        }
