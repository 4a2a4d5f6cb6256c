"""The options of `assay spec`."""

from __future__ import annotations

from dataclasses import dataclass

from assay.options import Options, option

MAX_INTERVAL = 86_400.0
"""Longest time between two scrapes, in seconds."""

SERVER, LOSSLESS = "Running server", "Losslessness"


@dataclass(frozen=True)
class SpecOptions(Options):
    """What is asked for beside the sources."""

    VERB, AREA = "spec", "speculation"

    baseline: tuple[str, ...] = option(
        (),
        "A source of the same kind to compare with, or a server for a real A/B run.",
        metavar="SOURCE",
    )
    follow: bool = option(False, "Keep reading a log as it grows.")
    seconds: float | None = option(None, "Stop following after this many seconds.", flag="for")
    model: str | None = option(
        None, "The checkpoint: its head is examined as `assay verify` does.", metavar="CHECKPOINT"
    )
    num_speculative_tokens: int | None = option(
        None,
        "Number of speculative tokens that was asked for; the source is checked against it.",
        lo=1,
        hi=1000,
    )
    temperature: float | None = option(
        None,
        "Temperature of the traffic: a head is accepted less often where text is sampled.",
        lo=0,
        hi=100,
    )
    cost_ratio: float | None = option(
        None, "Cost of one draft token in target steps (default: measured, or 0.1).", lo=0, hi=100
    )
    predict: str | None = option(
        None,
        "Result of `assay compare` (or a total variation): predict acceptance beside that changed"
        " target.",
        metavar="FILE|TV",
    )
    interval: float = option(
        10.0, "Seconds between the two scrapes.", lo=0, hi=MAX_INTERVAL, panel=SERVER
    )
    requests: int = option(
        0, "Requests of our own to send between the scrapes.", lo=0, panel=SERVER
    )
    api_key_env: str | None = option(
        None, "Environment variable with the API key.", metavar="NAME", panel=SERVER
    )
    timeout: float = option(120.0, "Seconds for each request.", panel=SERVER)
    lossless: str | None = option(
        None,
        "The same model without speculation: is the text the same?",
        metavar="URL",
        panel=LOSSLESS,
    )
    prompts: int = option(6, "Greedy prompts.", lo=1, panel=LOSSLESS)
    samples: int = option(48, "Sampled texts from each server.", lo=0, panel=LOSSLESS)
