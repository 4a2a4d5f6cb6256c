"""`assay watch`: ask round after round until it is interrupted."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from assay.engines.server.endpoint import parse_url
from assay.engines.server.engine import read_key
from assay.monitor.canary import Canary
from assay.monitor.exporter import Exporter, parse_listen
from assay.monitor.loop import Watch
from assay.monitor.options import WatchOptions
from assay.monitor.report import report_of
from assay.monitor.status import status_of
from assay.verdict import Report

__all__ = ["WatchOptions", "run_watch"]


def run_watch(
    url: str,
    options: WatchOptions | None = None,
    *,
    say: Callable[[str], None] = lambda line: None,
    canary: Canary | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = lambda seconds: time.sleep(seconds),
) -> Report:
    """Watch the OpenAI-compatible server at `url` until interrupted, or for `options.rounds`
    rounds.

    Raises UsageError for options that make no sense; a server that does not answer is watched until
    it does. The clocks (monotonic and wall, in seconds) and the canary can be given, for tests and
    simulations.
    """
    options = options or WatchOptions()
    parse_url(url)
    read_key(options.api_key_env)
    canary = canary or Canary(
        url,
        model=options.model,
        api_key_env=options.api_key_env,
        timeout=options.timeout,
        interval_s=options.interval,
        load=options.load,
        clock=clock,
    )
    watch = Watch(url, options, canary, say=say, clock=clock, wall=wall)
    with contextlib.ExitStack() as held:
        held.callback(canary.close)
        if options.listen != "none":
            parse_listen(options.listen)
            exporter = held.enter_context(Exporter(options.listen, partial(status_of, watch)))
            host = options.listen.rpartition(":")[0] or "127.0.0.1"
            say(f"metrics at http://{host}:{exporter.port}/metrics")
        interrupted = False
        try:
            while True:
                watch.step()
                if options.rounds is not None and watch.done >= options.rounds:
                    break
                sleep(watch.wait())
        except KeyboardInterrupt:
            interrupted = True
        with _once_is_enough():
            watch.save()
            if watch.webhook is not None:
                watch.webhook.flush(5.0)
            return report_of(watch, interrupted)


@contextlib.contextmanager
def _once_is_enough() -> Iterator[None]:
    """No further Ctrl-C or SIGTERM for the seconds that the report takes: `timeout` and shells send
    two at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {sign: signal.signal(sign, signal.SIG_IGN) for sign in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
