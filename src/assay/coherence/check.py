"""`assay check`: examine a running server and judge it."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import replace

from assay.coherence.exact import run_exact
from assay.coherence.measure import Measurement
from assay.coherence.options import CheckOptions
from assay.coherence.ready import run_ready
from assay.coherence.reference import EngineReference, read_reference, reference_folder
from assay.coherence.run import Check, seconds_of
from assay.coherence.sandbox import require_sandbox
from assay.deadline import OVERRUN, limit
from assay.engines.server.engine import ServerEngine
from assay.errors import AssayError
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Report

__all__ = ["CheckOptions", "run_check"]


def run_check(
    url: str, options: CheckOptions | None = None, progress: Progress = NO_PROGRESS
) -> Report:
    """Check the OpenAI-compatible server at `url` (its root or its /v1).

    Raises AssayError where the server cannot be examined at all. Once something is measured, an
    interrupt or a dying server ends the run, and the report holds what there is.
    """
    options = options or CheckOptions()
    if options.quick:
        options = replace(options, samples=1, repeats=min(3, options.repeats))
    if options.ready:
        return run_ready(url, options)
    if options.exact:
        return run_exact(url, options, progress)
    if options.run_code and not options.run_code_unsafe:
        require_sandbox()
    # A reference that cannot be read should not cost the minutes of a run.
    kept = read_reference(options.reference) if options.reference else None
    folder = reference_folder(options.reference_engine) if options.reference_engine else None
    began, seconds = time.monotonic(), seconds_of(options)
    with ExitStack() as opened:
        with limit(seconds):
            engine = opened.enter_context(
                ServerEngine.connect(
                    url, options.model, api_key_env=options.api_key_env, timeout=options.timeout
                )
            )
            subject = engine.describe()
            with suppress(AssayError):
                cache = engine.metrics().labels("vllm:cache_config_info")
                subject["server"] |= {name: cache[name] for name in _CACHE_FACTS if name in cache}
        check = Check(
            options,
            Measurement(engine, options, engine.max_model_len, progress),
            progress,
            kept=kept,
            began=began,
        )
        if folder and options.reference_engine:
            check.engine = EngineReference(
                options.reference_engine, folder, options, engine.max_model_len, progress
            )
        before = engine.corrupted_requests()
        try:
            with limit(seconds * (1 + OVERRUN) - (time.monotonic() - began)):
                check.run()
        except (AssayError, KeyboardInterrupt) as error:
            if isinstance(error, AssayError) and not check.record.samples:
                raise
            check.ended = error
        finally:
            if check.engine:
                check.engine.close()
        after = engine.corrupted_requests() if check.ended is None else None
        if before is not None and after is not None:
            check.server.record = replace(
                check.record, counters={"corrupted_requests": after - before}
            )
    return check.report(subject)


_CACHE_FACTS = ("block_size", "enable_prefix_caching", "sliding_window")
