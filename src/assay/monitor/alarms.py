"""The alarms of a watch: what each says, its likely causes and its remedies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from assay.verdict import Severity


@dataclass(frozen=True)
class Alarm:
    """What an alarm says, and what to do about it."""

    id: str
    title: str
    causes: tuple[str, ...]
    remedies: tuple[str, ...]
    severity: Severity = Severity.ERROR


_CHANGED = (
    "other weights or another quantisation are served under the same name",
    "another release of the engine, another kernel, KV dtype or attention backend",
    "memory or a shard that was damaged",
)
_LOOK = (
    "assay check URL --identity REFERENCE",
    "if the change was wanted: assay watch URL --new-baseline",
)
ALARMS: Mapping[str, Alarm] = {
    "down": Alarm(
        "server.down",
        "nothing answers",
        ("the process ended", "the network or a proxy"),
        ("look into the server's log",),
    ),
    "broken": Alarm(
        "server.broken",
        "its answers are garbage or errors",
        (
            "weights, cache or kernels are damaged",
            "the engine's process hangs or died behind its front end",
        ),
        ("take it out of the load balancer and run assay check URL",),
    ),
    "bits_per_byte.up": Alarm(
        "server.drift", "it predicts fixed texts worse than at first", _CHANGED, _LOOK
    ),
    "bits_per_byte.down": Alarm(
        "server.drift", "it predicts fixed texts better than at first", _CHANGED, _LOOK
    ),
    "bits_per_byte.spread": Alarm(
        "server.drift", "its scores of fixed texts moved, some up and some down", _CHANGED, _LOOK
    ),
    "bits_per_token.up": Alarm(
        "server.drift", "its likeliest tokens are less likely than at first", _CHANGED, _LOOK
    ),
    "bits_per_token.down": Alarm(
        "server.drift", "its likeliest tokens are more likely than at first", _CHANGED, _LOOK
    ),
    "bits_per_token.spread": Alarm(
        "server.drift", "the probabilities of its likeliest tokens moved", _CHANGED, _LOOK
    ),
    "first_tokens.changed": Alarm(
        "server.tokens_changed", "its greedy first tokens are others than at first", _CHANGED, _LOOK
    ),
    "tool_call.changed": Alarm(
        "server.tool_call_changed",
        "a tool call has another outcome than at first",
        ("the tool parser or the chat template changed", *_CHANGED),
        ("assay check URL --suite tools", *_LOOK),
    ),
    "model": Alarm(
        "server.model_changed",
        "it no longer lists the model that is watched",
        ("another model was deployed here",),
        _LOOK,
    ),
    "root": Alarm(
        "server.root_changed",
        "another checkpoint is served under the same name",
        ("another model, revision or quantisation was deployed here",),
        _LOOK,
    ),
    "several_servers": Alarm(
        "server.several_servers",
        "several servers answer at this address",
        ("a load balancer before replicas",),
        ("watch each replica by itself",),
        Severity.WARNING,
    ),
    "speculation": Alarm(
        "speculation.broken",
        "next to no speculative token is accepted any more",
        ("the draft head was not loaded", "target and drafter are no longer of one model"),
        ("assay spec URL",),
    ),
}
CHANGES = frozenset(ALARMS) - {"down", "broken", "several_servers", "speculation"}
"""Alarms that say that the model is another one."""
