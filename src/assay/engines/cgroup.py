"""The limits that a container sets on this process: its cores, its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


ROOT = Path("/")


def cpu_quota() -> float:
    """Cores that the cgroup of this process, or one above it, may use; infinite without a limit."""
    quotas = [float("inf")]
    for text in cgroup("cpu", "cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdecimal():
            quotas.append(int(quota) / int(period or 100_000))
    for quota, period in zip(
        cgroup("cpu", "cpu.cfs_quota_us", 1), cgroup("cpu", "cpu.cfs_period_us", 1), strict=False
    ):
        if int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas)


def cgroup(controller: str, name: str, version: int = 2) -> Iterator[str]:
    """A control file of this process's cgroup and of those above it, as far as they can be read."""
    for line in read_text("proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if version == 2 and not names:
            base = Path("sys/fs/cgroup")
        elif version == 1 and controller in names.split(","):
            base = Path("sys/fs/cgroup") / controller
        else:
            continue
        own = Path(path.strip("/"))
        # A container may see its own group as the root of the tree while its path names it from
        # outside.
        for folder in (own, *own.parents):
            if text := read_text(str(base / folder / name)):
                yield text


def read_text(path: str) -> str:
    """A file under the root of the system, empty where it cannot be read."""
    try:
        return (ROOT / path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
