"""Compare the server's command line with the checkpoint, as a stage of `assay verify`."""

from __future__ import annotations

from pathlib import Path

from assay.checkpoint.draft import check_draft
from assay.checkpoint.flags.advice import advise
from assay.checkpoint.flags.command import ServeArgs
from assay.checkpoint.flags.lint import Target, lint
from assay.checkpoint.opening import open_checkpoint
from assay.checkpoint.state import VerifyState


def examine_flags(state: VerifyState, serve: ServeArgs | None) -> None:
    """Hold the command line of the server against the checkpoint."""
    if serve is None:
        return
    target = Target(
        state.opened.checkpoint,
        state.stored.declared,
        state.stored.cache,
        state.stored.head,
        serve,
        state.options.version,
        state.options.capability,
    )
    state.add(lint(target))
    _draft_of(state, serve)


def _draft_of(state: VerifyState, serve: ServeArgs) -> None:
    """A draft that --speculative-config names by a local path is compared with this target."""
    settings = serve.structure("--speculative-config") or {}
    model = settings.get("model")
    if isinstance(model, str) and Path(model).is_dir():
        state.add(check_draft(open_checkpoint(model).checkpoint, state.opened.checkpoint))


def advise_on(state: VerifyState) -> None:
    """The command that fits the checkpoint. A local path stays out of it: reports are passed on."""
    source = state.source
    model = (
        source.removeprefix("hub:") if source.startswith("hub:") else state.files.repo or "MODEL"
    )
    state.advice = advise(
        state.opened.checkpoint,
        model,
        state.stored.declared,
        state.stored.cache,
        state.stored.head,
        state.options.version,
    )
