"""Measurements of a long run, kept as they come, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from assay.cache import cache_dir, write_atomically


class Ledger:
    """A folder of JSON values by key, one for each distinct `plan`."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(plan, sort_keys=True, default=str).encode()).hexdigest()[:32]
        self._folder = cache_dir("kv") / digest
        self._folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: str, measure: Callable[[], Any]) -> Any:
        """The value of `key`: read where it was measured before, else measured and kept."""
        path = self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        value = measure()
        self._folder.mkdir(
            parents=True, exist_ok=True
        )  # the same run beside this one may be done and have deleted it
        write_atomically(path, json.dumps(value))
        return value

    def forget(self) -> None:
        """Delete everything: the run is done."""
        shutil.rmtree(self._folder, ignore_errors=True)
