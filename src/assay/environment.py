"""Where a result was measured: versions and machine, without host names or paths; which quick forms
work there.
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from assay.plugins import active
from assay.verdict import Report, jsonable

VERSION = "0.3.0"

# The packages whose version can change a number in a report.
_PACKAGES = (
    "numpy",
    "scipy",
    "httpx",
    "torch",
    "transformers",
    "safetensors",
    "huggingface_hub",
    "vllm",
    "llama-cpp-python",
)


_ELSEWHERE: dict[str, Any] = {}


def measured_on(machine: Mapping[str, Any]) -> None:
    """Have `describe` say that numbers are measured on another machine than this one; nothing: on
    this one.
    """
    _ELSEWHERE.clear()
    _ELSEWHERE.update(machine)


def describe() -> dict[str, Any]:
    """Versions of assay, Python and the packages that matter, and the kind of machine.

    Where torch has been used, also how many threads it has and the name of its GPU (null for none).
    """
    torch = sys.modules.get("torch")
    used = {} if torch is None else {"threads": torch.get_num_threads(), "gpu": _gpu(torch)}
    return {
        "assay": VERSION,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "plugins": jsonable(active()),
        "packages": {
            name: version for name in _PACKAGES if (version := _version(name)) is not None
        },
        **used,
        **_ELSEWHERE,
    }


def _gpu(torch: Any) -> str | None:
    return str(torch.cuda.get_device_name()) if torch.cuda.is_initialized() else None


def recorded(report: Report) -> Report:
    """`report` with the environment it was made in, unless the verb filled it."""
    return report if report.environment else replace(report, environment=describe())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            return next(
                (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
                None,
            )
    except OSError:
        return platform.processor() or None


def gives_the_same(what: str, compare: Callable[[], bool]) -> bool:
    """Whether the compiled form `what` may be used: `compare` holds it against torch. A warning
    says why it may not.
    """
    try:
        same, why = compare(), "it gives other values than torch here"
    except Exception as error:  # compilers fail in their own ways, and torch can do the same
        same, why = False, f"{type(error).__name__}: {error}"[:300]
    if not same:
        warnings.warn(f"{what} is not used: {why}", RuntimeWarning, stacklevel=3)
    return same
