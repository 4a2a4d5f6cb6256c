"""The packages of the extra `hf`, asked for before anything costly is done."""

from __future__ import annotations

from importlib.util import find_spec

from assay.errors import AssayError

PACKAGES = ("torch", "transformers")


def require_packages(what: str) -> None:
    """Raise AssayError where torch or transformers is not installed; imports neither. `what` needs them."""
    for name in PACKAGES:
        if find_spec(name) is None:
            raise missing_package(what, name)


def missing_package(what: str, name: str | None) -> AssayError:
    """The error for a package that is not installed."""
    return AssayError(
        f"{what} needs {name}, which is not installed",
        finding_id="fidelity.engine_missing",
        remedy="install assay with its extra hf: pip install '.[hf]' in its checkout",
    )
