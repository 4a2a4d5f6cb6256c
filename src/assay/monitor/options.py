"""What a user may set for `assay watch`."""

from __future__ import annotations

from dataclasses import dataclass

from assay.options import Options, option


@dataclass(frozen=True)
class WatchOptions(Options):
    """How often to look, how hard, and where alarms go."""

    VERB, AREA = "watch", "server"

    interval: float = option(
        60.0,
        "Seconds from one round to the next; longer where a round would take more than --load.",
        lo=1,
        hi=86_400,
    )
    load: float = option(
        0.01,
        "Largest share of the server's time that the canary may take.",
        form="fraction",
        metavar="PERCENT",
        lo=0.0001,
        hi=1,
    )
    false_alarms: float = option(
        1.0,
        "Largest number of false alarms of change per month, over all detectors.",
        lo=0.001,
        hi=100,
    )
    listen: str = option(
        "127.0.0.1:9877",
        "Where /metrics, /healthz and /health_generate are served; none opens no port.",
        metavar="HOST:PORT",
        apart=True,
    )
    webhook: str | None = option(
        None,
        "URL that gets a JSON message for every alarm and every change of state.",
        metavar="URL",
        apart=True,
    )
    rounds: int | None = option(
        None, "Stop after so many rounds; by default it never ends.", lo=1, apart=True
    )
    new_baseline: bool = option(
        False, "Forget what was learnt of this server and learn its model anew.", apart=True
    )
    model: str | None = option(None, "Model to ask; default: the first the server lists.")
    api_key_env: str | None = option(
        None, "Environment variable that holds the API key.", metavar="NAME", apart=True
    )
    timeout: float = option(20.0, "Seconds that one answer may take.", lo=1, hi=600, apart=True)
