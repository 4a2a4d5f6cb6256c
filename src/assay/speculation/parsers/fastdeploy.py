"""FastDeploy's `speculate_metrics` object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from assay.speculation.observation import Counts, Definition, Kind, Observation
from assay.speculation.parsers.base import Parser
from assay.speculation.parsers.counts import count, counts

REQUEST = Definition(
    "fastdeploy_request",
    "FastDeploy counts of one request; its accepted tokens include bonus tokens, which are left out",  # noqa: E501
)


class FastDeployParser(Parser):
    """FastDeploy's `speculate_metrics`: `accepted_tokens` are all tokens of the reply, bonus tokens
    included, and head 0 of `accepted_tokens_per_head` counts the steps.
    """

    engine = "fastdeploy"

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """A `speculate_metrics` object."""
        heads, emitted = (
            counts(value.get("accepted_tokens_per_head")),
            count(value.get("accepted_tokens")),
        )
        rejected = count(value.get("rejected_tokens"))
        if not heads or emitted is None or rejected is None or heads[0] > emitted:
            return
        accepted = emitted - heads[0]
        yield Observation(
            engine=self.engine,
            kind=Kind.REQUEST,
            definition=REQUEST,
            counts=Counts(
                drafts=heads[0],
                accepted=accepted,
                drafted=accepted + rejected,
                at_position=heads[1:] or None,
                generated=emitted,
            ),
        )
