"""What the demo and the tests need, installed and built at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from assay.demo.models import build_smollm2
from assay.demo.pip import telling
from assay.demo.vllm_environment import vllm_python
from assay.progress import NO_PROGRESS, Progress


def prepare(progress: Progress = NO_PROGRESS) -> Path:
    """Make vLLM's environment and, while it is installed, the model SmolLM2.

    Returns:
        The folder of the model.

    Raises:
        AssayError: One of them cannot be made.
    """
    with ThreadPoolExecutor(1, "ThreadPoolExecutor-demo") as beside:
        model = beside.submit(build_smollm2, _in_lines(progress))
        vllm_python(progress)
        return model.result()


def _in_lines(progress: Progress) -> Progress:
    """The same progress in lines alone: a terminal shows one bar at a time."""
    tell = telling(progress)

    @contextmanager
    def told(what: str, steps: int) -> Iterator[Callable[[], None]]:
        tell(what)
        yield lambda: None

    return told
