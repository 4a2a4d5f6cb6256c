"""Measured rows in a file of the user's, so that a sweep goes on where it stopped, another day or with more codecs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from assay.cache import write_atomically
from assay.errors import UsageError

FORMAT = "assay-kv-rows/1"
FINDING = "kv.rows"
"""Id of whatever is wrong with such a file."""


class RowFile:
    """A JSON file with rows by key, all of one `plan`; it is written after every row."""

    def __init__(self, path: Path, plan: Mapping[str, Any]) -> None:
        self._path = path
        self._plan: dict[str, Any] = json.loads(json.dumps(plan))
        # A file that cannot be written should not cost a measurement first.
        if not path.parent.is_dir():
            raise self._other("is in a folder that does not exist")
        self._rows: dict[str, Any] = self._read() if path.exists() else {}

    def get(self, key: str, measure: Callable[[], Any]) -> Any:
        """The row of `key`: as it stands in the file, else measured and written."""
        if key not in self._rows:
            self._rows[key] = measure()
            document = {"format": FORMAT, "plan": self._plan, "rows": self._rows}
            try:
                write_atomically(self._path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
            except OSError as error:
                raise self._other(f"cannot be written: {error.strerror}") from error
        return self._rows[key]

    def forget(self) -> None:
        """Nothing: the file is the user's."""

    def _read(self) -> dict[str, Any]:
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            theirs, rows = document["plan"], document["rows"]
            known = document["format"] == FORMAT and isinstance(theirs, dict) and isinstance(rows, dict)
        except OSError as error:
            raise self._other(f"cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise self._other("holds no rows of a sweep") from error
        if not known:
            raise self._other("holds no rows of a sweep")
        if differing := sorted(k for k in {*theirs, *self._plan} if theirs.get(k) != self._plan.get(k)):
            raise self._other(f"holds rows of another sweep: it differs in {', '.join(differing)}")
        return dict(rows)

    def _other(self, why: str) -> UsageError:
        return UsageError(
            f"{self._path} {why}", remedy="name another file with --out, or none", finding_id=FINDING
        )
