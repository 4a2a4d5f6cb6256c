"""The former place of the laboratory: a package of its own now. The old names work for one version,
with a warning.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from assay.plugins import packages

_PACKAGE = next((name for name in packages("assay.verbs") if name.endswith("_lab")), None)
if _PACKAGE is None:
    raise ImportError("assay.lab is a package of its own: pip install 'llm-assay[lab]'")
warnings.warn(
    f"assay.lab is called {_PACKAGE} now; the old name goes with version 0.4",
    DeprecationWarning,
    stacklevel=2,
)


class _Renamed(MetaPathFinder, Loader):
    """Finds `assay.lab.…` as the module of the same name in the laboratory's own package."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(f"{_PACKAGE}{spec.name.removeprefix(__name__)}")

    def exec_module(self, module: ModuleType) -> None:
        """The module was run when it was imported by its own name."""


sys.meta_path.insert(0, _Renamed())


def __getattr__(name: str) -> Any:
    return getattr(import_module(str(_PACKAGE)), name)
