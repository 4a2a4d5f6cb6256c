"""`assay verify`: from files to findings, stage by stage. What is quick comes first, so that an interrupt loses little."""

from __future__ import annotations

import time
from collections.abc import Callable

from assay.checkpoint import manifest
from assay.checkpoint.draft import is_draft
from assay.checkpoint.opening import open_checkpoint
from assay.checkpoint.options import Options, Show, silent
from assay.checkpoint.outcome import Outcome
from assay.checkpoint.serving import arguments
from assay.checkpoint.stages import contents, flags, local_files, remote_files, tensors, values
from assay.errors import UsageError

__all__ = ["Options", "Outcome", "Show", "silent", "verify"]


def verify(source: str, options: Options, show: Show = silent) -> Outcome:
    """Examine the checkpoint at a path or `hub:ORG/NAME`.

    Raises AssayError if there is nothing to examine or an option makes no sense. An interrupt ends the stage that
    runs; the outcome then says so and holds what was found before.
    """
    if options.write_manifest:
        manifest.require_writable(options.write_manifest)
    stated = manifest.load(options.manifest) if options.manifest else None
    serve = arguments.parse(options.serve_args) if options.serve_args is not None else None
    began = time.perf_counter()
    outcome = Outcome(source, open_checkpoint(source, options.revision), options)
    _check_options(outcome)
    outcome.seconds["open"] = time.perf_counter() - began
    files = remote_files.examine if outcome.opened.hub else local_files.examine
    stages: dict[str, Callable[[], None]] = {
        "contents": lambda: contents.examine(outcome),
        "tensors": lambda: tensors.examine(outcome),
        "flags": lambda: flags.examine(outcome, serve),
        "files": lambda: files(outcome, stated, show),
        "values": lambda: values.examine(outcome, show),
    }
    for name, stage in stages.items():
        began = time.perf_counter()
        try:
            stage()
        except KeyboardInterrupt:
            outcome.interrupted = True
            break
        finally:
            outcome.seconds[name] = time.perf_counter() - began
    flags.advise_on(outcome)
    return outcome


def _check_options(outcome: Outcome) -> None:
    """UsageError for an option that this checkpoint gives no meaning to: it would be passed over in silence."""
    options, opened = outcome.options, outcome.opened
    if options.target and not is_draft(opened.checkpoint):
        raise UsageError(
            f"--target is for a draft model, and {outcome.source} is none",
            remedy="name the draft first: assay verify DRAFT --target MODEL",
            finding_id="checkpoint.usage",
        )
    recorded = opened.layout is not None and opened.layout.revision is not None
    if options.revision and not (opened.hub or options.repo or recorded):
        raise UsageError(
            f"--revision says nothing about {outcome.source}, a plain folder or file",
            remedy="add --repo ORG/NAME to hold it against that revision of a repository",
            finding_id="checkpoint.usage",
        )
