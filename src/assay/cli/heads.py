"""`assay heads …`: draft heads for speculative decoding. The work is done in `assay.lab.heads`."""

from __future__ import annotations

from typing import Any

from assay.cli.verb import verb
from assay.verdict import Report

HELP = "Draft heads: train one for a target, measure it beside changed targets."


@verb("heads train", "assay.lab.options:HeadTrainPlan", model="hf:MODEL or a folder, with options after '?'.")
def train(**given: Any) -> Report:
    """Train a draft head on text that the target writes itself, and export it for vLLM.

    Goes on where an interrupted run stopped. Exit code 0 trained, 2 could not be trained, 3 too little to measure.
    """
    from assay.cli.progress import show
    from assay.lab.heads.train import run_train
    from assay.lab.options import HeadTrainPlan

    return run_train(HeadTrainPlan.of(given), show)


@verb("heads try", "assay.lab.options:HeadTryPlan", model="The head's target: hf:MODEL or a folder.")
def measure(**given: Any) -> Report:
    """Measure one head beside changed targets and KV caches, and in the states in which loaders leave heads.

    Goes on where an interrupted run stopped. Exit code 0 measured, 2 could not be measured.
    """
    from assay.cli.progress import show
    from assay.lab.heads.experiment import run_try
    from assay.lab.options import HeadTryPlan

    return run_try(HeadTryPlan.of(given), show)


COMMANDS = (train, measure)
