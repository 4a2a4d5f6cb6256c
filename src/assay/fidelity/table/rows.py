"""Rows of windows in Parquet: their columns, and how a comparison writes and a table reads them.

A result of `assay compare --json` is turned into such rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from assay.errors import AssayError
from assay.files import json_of

FORMAT = "assay-rows/1"


COLUMNS: Mapping[str, tuple[str, str]] = {
    "run": ("string", "Which comparison: the digest of its plan."),
    "reference": ("string", "The reference, without folders."),
    "candidate": ("string", "The candidate, without folders."),
    "windows_sha256": (
        "string",
        "Digest of the token ids of all windows; only rows of the same windows are compared.",
    ),
    "window": ("int32", "Number of the window."),
    "cluster": (
        "int32",
        "Windows of one cluster (neighbours in a text) are one piece of evidence.",
    ),
    "tokens": ("int32", "Scored tokens with finite logits on both sides."),
    "kld": ("double", "Mean KL of the window, in nats a token."),
    "dnll": (
        "double",
        (
            "Mean difference of the negative log-likelihood, candidate minus reference, in nats a"
            " token."
        ),
    ),
    "top1": ("double", "Share of tokens with the same likeliest token on both sides."),
}
"""Columns of the rows: their Parquet type and meaning."""


def rows_of(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a result of `assay compare --json`; KeyError where it is none."""
    results = report["results"]
    shared = {
        "run": str(results["plan_sha256"])[:16],
        "reference": str(results["reference"].get("label", "")),
        "windows_sha256": str(results["text"]["windows_sha256"]),
    }
    for body in results["candidates"]:
        for number, found in enumerate(body["per_window"]):
            own = {
                "candidate": str(body["candidate"]),
                "window": int(found.get("window", number)),
                "cluster": int(found.get("block", number)),
            }
            yield (
                shared
                | own
                | {
                    "tokens": int(found["tokens"]),
                    **{k: _float(found[k]) for k in ("kld", "dnll", "top1")},
                }
            )


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


class RowFile:
    """A Parquet file of rows that is written as results come; one result is in memory at a time.

    Left without an error it takes its name, where there is a row; until then that name is not
    touched. AssayError, before anything is scored, where pyarrow is missing or the file cannot be
    written.
    """

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow.parquet as pq
        except ImportError as error:
            raise missing_package("--rows", error) from error
        self.path, self._groups = path, 0
        try:
            if path.is_dir():
                raise IsADirectoryError(None, "it is a folder")
            self._part = path.with_name(f".{path.name}.{os.getpid()}.part")
            self._writer = pq.ParquetWriter(self._part, schema())
        except OSError as error:
            raise unwritable(path, error, "--rows") from error

    def add(self, results: Mapping[str, Any]) -> None:
        """Append the rows of the candidates in `results`, as one group."""
        import pyarrow as pa

        rows = list(rows_of({"results": results}))
        try:
            self._writer.write_table(pa.Table.from_pylist(rows, schema=schema()))
            self._groups += 1
        except OSError as error:
            raise unwritable(self.path, error, "--rows") from error

    def __enter__(self) -> RowFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._writer.close()
            if kind is None and self._groups:
                self._part.replace(self.path)
        except OSError as failed:
            raise unwritable(self.path, failed, "--rows") from failed
        finally:
            self._part.unlink(missing_ok=True)


def missing_package(what: str, error: ImportError) -> AssayError:
    """The error for a package that an extra brings."""
    return AssayError(
        f"{what} needs the package {(error.name or 'pyarrow').partition('.')[0]}",
        finding_id="fidelity.usage",
        remedy="pip install 'llm-assay[scale]'",
    )


def unwritable(path: Path, error: OSError, flag: str) -> AssayError:
    """The error for a file that the option `flag` names and that cannot be written."""
    return AssayError(
        f"cannot write {path}: {error.strerror or error}",
        finding_id="fidelity.rows",
        remedy=f"give another file with {flag}",
    )


def schema() -> Any:
    """The schema of the rows for pyarrow, with its name in the metadata."""
    import pyarrow as pa

    types = {"string": pa.string(), "int32": pa.int32(), "double": pa.float64()}
    fields = [
        pa.field(name, types[kind], nullable=kind == "double")
        for name, (kind, _) in COLUMNS.items()
    ]
    return pa.schema(fields, metadata={"format": FORMAT})


def parquet_of(given: Sequence[str], folder: Path) -> list[str]:
    """Parquet files with all rows: those that were given, and one with the rows of the JSON
    results.
    """
    try:
        import duckdb  # noqa: F401
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise missing_package("assay table", error) from error
    found: list[Path] = []
    json_files: list[Path] = []
    for name in given:
        path = Path(name)
        members = (
            sorted(p for p in path.rglob("*") if p.suffix in (".parquet", ".json"))
            if path.is_dir()
            else [path]
        )
        if not members:
            raise unusable(path, "holds no .parquet and no .json file")
        for member in members:
            (found if member.suffix == ".parquet" else json_files).append(member)
    for path in found:
        try:
            own = pq.read_schema(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise unusable(path, _reason(error)) from error
        if [(f.name, f.type) for f in own] != [(f.name, f.type) for f in schema()]:
            raise unusable(path, f"does not have the columns of {FORMAT}: {', '.join(COLUMNS)}")
    if json_files:
        target = folder / "results.parquet"
        with pq.ParquetWriter(target, schema()) as writer:
            for path in json_files:
                try:
                    rows = list(rows_of(json_of(path)))
                except OSError as error:
                    raise unusable(path, _reason(error)) from error
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                    raise unusable(path, "is no result of `assay compare --json`") from error
                if rows:
                    writer.write_table(pa.Table.from_pylist(rows, schema=schema()))
        found.append(target)
    return [str(path) for path in found]


def _reason(error: BaseException) -> str:
    return f"cannot be read: {getattr(error, 'strerror', None) or str(error).splitlines()[0]}"


def unusable(path: Path, why: str) -> AssayError:
    """The error for a file that holds no rows."""
    return AssayError(
        f"{path.name} {why}",
        finding_id="fidelity.rows",
        remedy="give results of assay compare --json, or rows that assay table --out wrote",
    )


def column_reference() -> str:
    """The table of docs/scale.md, from the columns as they are declared."""
    lines = ["| column | type | meaning |", "|---|---|---|"]
    return (
        "\n".join(
            lines + [f"| `{name}` | {kind} | {says} |" for name, (kind, says) in COLUMNS.items()]
        )
        + "\n"
    )
