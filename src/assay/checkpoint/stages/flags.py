"""The flags that the checkpoint is to be served with, and those that would fit it."""

from __future__ import annotations

from pathlib import Path

from assay.checkpoint.draft import check_draft
from assay.checkpoint.opening import open_checkpoint
from assay.checkpoint.outcome import Outcome
from assay.checkpoint.serving import lint
from assay.checkpoint.serving.advice import advise
from assay.checkpoint.serving.arguments import ServeArgs


def examine(outcome: Outcome, serve: ServeArgs | None) -> None:
    """Hold the command line of the server against the checkpoint."""
    if serve is None:
        return
    target = lint.Target(
        outcome.opened.checkpoint,
        outcome.declared,
        outcome.cache,
        outcome.head,
        serve,
        outcome.options.version,
        outcome.options.capability,
    )
    outcome.add(lint.lint(target))
    _draft_of(outcome, serve)


def _draft_of(outcome: Outcome, serve: ServeArgs) -> None:
    """A draft that --speculative-config names by a local path is held against this target."""
    settings = serve.structure("--speculative-config") or {}
    model = settings.get("model")
    if isinstance(model, str) and Path(model).is_dir():
        outcome.add(check_draft(open_checkpoint(model).checkpoint, outcome.opened.checkpoint))


def advise_on(outcome: Outcome) -> None:
    """The command that fits the checkpoint. A local path stays out of it: reports are passed on."""
    source = outcome.source
    model = source.removeprefix("hub:") if source.startswith("hub:") else outcome.repo or "MODEL"
    outcome.advice = advise(
        outcome.opened.checkpoint,
        model,
        outcome.declared,
        outcome.cache,
        outcome.head,
        outcome.options.version,
    )
