"""Settings that differ between a run and its reference, with what each may do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from assay.verdict import Finding, Severity

# What a setting may do when it differs from the run that is the reference: severity, and the words
# of the finding.
_SETTINGS: Mapping[str, tuple[Severity, str]] = {
    "model": (
        Severity.WARNING,
        "another model, or another name for it: what is compared may not be the same weights",
    ),
    "server": (
        Severity.INFO,
        "another engine has other kernels: numbers differ in rounding, and speed in all",
    ),
    "version": (Severity.INFO, "kernels, defaults and parsers change between versions"),
    "dtype": (Severity.WARNING, "weights in another number format change every output a little"),
    "quantization": (
        Severity.WARNING,
        "weights with fewer bits lose accuracy, first in exact answers and rare words",
    ),
    "kv_cache_dtype": (
        Severity.WARNING,
        (
            "a KV cache with fewer bits loses accuracy that prose hides: look at tool calls,"
            " doubled words and long contexts, and measure it with `assay kv eval`"
        ),
    ),
    "max_model_len": (
        Severity.INFO,
        "other lengths of needles and depths are asked, and longer texts may be cut",
    ),
    "block_size": (Severity.INFO, "another layout of the KV cache takes other kernels"),
    "enable_prefix_caching": (
        Severity.INFO,
        "later turns read what earlier requests left in the cache",
    ),
    "sliding_window": (Severity.WARNING, "tokens before the window are not seen"),
    "sampling": (
        Severity.WARNING,
        "other sampling fields reach the model: texts are drawn from another distribution",
    ),
    "thinking": (Severity.WARNING, "the chat template asks for reasoning on one side only"),
    "token_budget": (Severity.INFO, "answers are cut at other lengths"),
}


def settings_of(subject: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that may change its texts, as the server reports them and the plan
    asked for them.
    """
    server = subject.get("server") or {}
    root = subject.get("model_root") or subject.get("model")
    sent = subject.get("sent") or {}
    found = {
        "model": str(root).rstrip("/").rpartition("/")[2] if root else None,
        "server": server.get("kind"),
        "max_model_len": subject.get("max_model_len"),
        "sampling": {route: fields.get("neutral") for route, fields in sent.items()} or None,
        **{
            name: server.get(name)
            for name in ("version", "dtype", "quantization", "kv_cache_dtype")
        },
        **{
            name: server.get(name)
            for name in ("block_size", "enable_prefix_caching", "sliding_window")
        },
        **{name: plan.get(name) for name in ("thinking", "token_budget")},
    }
    return {name: value for name, value in found.items() if value is not None}


def changed_settings(now: Mapping[str, Any], before: Mapping[str, Any]) -> tuple[Finding, ...]:
    """A finding for every setting that both runs report and that differs."""
    return tuple(
        Finding(
            id="server.setting_changed",
            severity=severity,
            title=(
                f"{name} is {_shown(now[name])} and was {_shown(before[name])} in the reference:"
                f" {effect}"
            ),
            evidence={"setting": name, "now": now[name], "reference": before[name]},
        )
        for name, (severity, effect) in _SETTINGS.items()
        if name in now and name in before and now[name] != before[name]
    )


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
