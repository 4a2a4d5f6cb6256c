"""`assay verify`: from files to findings, stage by stage.

What is quick comes first, so that an interrupt loses little.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from assay.checkpoint.contents import examine_contents
from assay.checkpoint.draft import is_draft
from assay.checkpoint.flags.command import parse as parse_command
from assay.checkpoint.flags.stage import advise_on, examine_flags
from assay.checkpoint.local_files import examine_local
from assay.checkpoint.manifest import load as load_manifest
from assay.checkpoint.manifest import require_writable
from assay.checkpoint.opening import open_checkpoint
from assay.checkpoint.options import Show, VerifyOptions, silent
from assay.checkpoint.remote_files import examine_remote
from assay.checkpoint.report import build_report
from assay.checkpoint.state import VerifyState
from assay.checkpoint.stored import examine_tensors
from assay.checkpoint.values.stage import examine_values
from assay.errors import UsageError
from assay.verdict import Report


def verify(source: str, options: VerifyOptions, show: Show = silent) -> Report:
    """The report on the checkpoint at a path or `hub:ORG/NAME`.

    Raises AssayError if there is nothing to examine or an option makes no sense. An interrupt ends
    the stage that runs; the report then says so and holds what was found before.
    """
    if options.write_manifest:
        require_writable(options.write_manifest)
    stated = load_manifest(options.manifest) if options.manifest else None
    serve = parse_command(options.serve_args) if options.serve_args is not None else None
    began = time.perf_counter()
    state = VerifyState(source, open_checkpoint(source, options.revision), options)
    _check_options(state)
    state.seconds["open"] = time.perf_counter() - began
    files = examine_remote if state.opened.hub else examine_local
    stages: dict[str, Callable[[], None]] = {
        "contents": lambda: examine_contents(state),
        "tensors": lambda: examine_tensors(state),
        "flags": lambda: examine_flags(state, serve),
        "files": lambda: files(state, stated, show),
        "values": lambda: examine_values(state, show),
    }
    for name, stage in stages.items():
        began = time.perf_counter()
        try:
            stage()
        except KeyboardInterrupt:
            state.interrupted = True
            break
        finally:
            state.seconds[name] = time.perf_counter() - began
    advise_on(state)
    return build_report(state)


def _check_options(state: VerifyState) -> None:
    """UsageError for an option that this checkpoint gives no meaning to: it would be passed over in
    silence.
    """
    options, opened = state.options, state.opened
    if options.target and not is_draft(opened.checkpoint):
        raise UsageError(
            f"--target is for a draft model, and {state.source} is none",
            remedy="name the draft first: assay verify DRAFT --target MODEL",
            finding_id="checkpoint.usage",
        )
    recorded = opened.layout is not None and opened.layout.revision is not None
    if options.revision and not (opened.hub or options.repo or recorded):
        raise UsageError(
            f"--revision says nothing about {state.source}, a plain folder or file",
            remedy="add --repo ORG/NAME to hold it against that revision of a repository",
            finding_id="checkpoint.usage",
        )
