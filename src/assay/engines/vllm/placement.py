"""Where vLLM runs: in this process, or in a worker with another Python."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from assay.cache import cache_dir
from assay.engines.vllm.spec import VllmSpec
from assay.errors import AssayError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from assay.engines.continuing import GreedyStep
    from assay.engines.scoring import Engagement, Head, ScoreJob, StateRows, TokenizerFacts, Window

PYTHON = "ASSAY_VLLM_PYTHON"


class Core(Protocol):
    """An engine that scores, here or in a worker: see `assay.engines.vllm.core.VllmCore`."""

    @property
    def tokenizer(self) -> TokenizerFacts:
        """The tokenizer's facts."""
        ...

    @property
    def head(self) -> Head:
        """The output head."""
        ...

    def facts(self) -> dict[str, Any]:
        """What scores."""
        ...

    def begin(self, job: ScoreJob, length: int) -> None:
        """Get ready for windows of `length` tokens."""
        ...

    def score(self, windows: Sequence[Window]) -> list[torch.Tensor]:
        """Final states of each window."""
        ...

    def reduce(
        self, windows: Sequence[Window], references: Sequence[StateRows], target: str
    ) -> list[dict[str, torch.Tensor]]:
        """Statistics of each window against reference states."""
        ...

    def greedy(self, prefixes: Sequence[tuple[int, ...]], count: int) -> list[list[GreedyStep]]:
        """Greedy tokens after each prefix."""
        ...

    def engagement(self) -> Engagement:
        """What took part since `begin`."""
        ...

    def end(self) -> Engagement:
        """Take off what `begin` put in place; what took part."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


def open_core(spec: VllmSpec) -> Core:
    """Start vLLM for `spec`; AssayError where there is none, or where it cannot load the model."""
    python = find_python(spec.python)
    if python is None:
        from assay.engines.vllm.core import VllmCore

        return VllmCore.start(spec)
    from assay.engines.vllm.remote import RemoteCore

    return RemoteCore(spec, python)


def find_python(named: str = "") -> Path | None:
    """The Python to start a worker with; None if this process can import vLLM itself.

    In this order: the one that is named, this process, the one in `ASSAY_VLLM_PYTHON`, the private environment that
    `assay demo` keeps in the cache.
    """
    if named:
        return _checked(Path(named), "python=")
    found = find_spec("vllm")
    if found is not None and found.origin is not None:  # a mere folder of that name has none
        return None
    if from_environment := os.environ.get(PYTHON):
        return _checked(Path(from_environment), PYTHON)
    ready = sorted(cache_dir(".").glob("vllm-*/.ready"))
    if ready:
        return ready[-1].parent / "bin" / "python"
    raise AssayError(
        "vllm: needs vLLM, which this Python does not have",
        finding_id="fidelity.engine_missing",
        remedy=f"install the extra vllm (pip install '.[vllm]' in assay's folder), or name a Python that has vLLM in {PYTHON}",
    )


def _checked(python: Path, source: str) -> Path:
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise AssayError(
            f"{source} names no Python that can be run: {python}",
            finding_id="fidelity.engine_missing",
            remedy="give the path of bin/python in the environment that has vLLM",
        )
    return python
