"""A folder for the PYTHONPATH of another Python that has vLLM: assay, and the packages that hook
into vLLM, alone.

What else is installed beside assay belongs to the Python that runs now, and must not reach the
other one.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from assay import plugins
from assay.environment import VERSION

_REGISTER = "[vllm.general_plugins]\nassay = assay.engines.vllm.hooks:register\n"


def packages_alone(folder: Path) -> Path:
    """Fill `folder` with links to the packages, and with the metadata by which Python finds their
    entry points.

    Args:
        folder: It is made where it does not exist; links that lead elsewhere are replaced.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = packages()
    for name, package in found.items():
        _link(folder / name, package)
    _describe(folder, "llm_assay", _REGISTER)
    for distribution in _distributions(set(found) - {"assay"}):
        points = [p for p in distribution.entry_points if p.group.startswith("assay.")]
        groups = dict.fromkeys(p.group for p in points)
        text = "".join(
            f"[{group}]\n" + "".join(f"{p.name} = {p.value}\n" for p in points if p.group == group)
            for group in groups
        )
        _describe(folder, distribution.name.replace("-", "_"), text)
    return folder


def packages() -> dict[str, Path]:
    """The folder of each package that the other Python needs, by name."""
    return {"assay": Path(__file__).parents[2], **plugins.packages("assay.vllm_hooks")}


def _distributions(tops: set[str]) -> list[metadata.Distribution]:
    names = metadata.packages_distributions()
    return [
        metadata.distribution(name)
        for name in sorted({n for top in tops for n in names.get(top, ())})
    ]


def _link(link: Path, package: Path) -> None:
    if link.is_symlink() and link.resolve() != package.resolve():
        link.unlink()
    if not link.is_symlink():
        link.symlink_to(package, target_is_directory=True)


def _describe(folder: Path, name: str, entry_points: str) -> None:
    info = folder / f"{name}-{VERSION}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {VERSION}\n"
    )
    (info / "entry_points.txt").write_text(entry_points)
