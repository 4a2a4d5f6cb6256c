"""Engine versions as tables are keyed by them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from assay.errors import UsageError


@dataclass(frozen=True, order=True)
class Version:
    """A release number; suffixes such as `.dev3` or `rc1` are dropped."""

    parts: tuple[int, int, int]

    @staticmethod
    def parse(text: str) -> Version:
        """`0.32`, `v0.32.0`, `0.32.0rc1+cpu`. Raises UsageError for anything else."""
        found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text.strip())
        if not found:
            raise UsageError(
                f"cannot read the engine version {text!r}", remedy="write it as vllm==0.32.0"
            )
        return Version((int(found[1]), int(found[2]), int(found[3] or 0)))

    def __str__(self) -> str:
        return ".".join(map(str, self.parts))


TABLED = Version((0, 32, 0))
"""The version whose own code the tables were checked against."""


def engine_version(text: str | None) -> Version | None:
    """The version of `vllm==X`; None if nothing was said. Raises UsageError for another engine."""
    if text is None:
        return None
    name, _, number = text.partition("==")
    if not number or name.strip().lower() != "vllm":
        raise UsageError(
            f"--engine-version {text!r} is not understood", remedy="write it as vllm==0.32.0"
        )
    return Version.parse(number)
