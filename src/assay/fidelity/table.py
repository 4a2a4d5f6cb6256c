"""`assay table`: many comparisons as one table with intervals, from per-window rows that may be
larger than memory.

Rows are Parquet files of the schema below (pyarrow), or results of `assay compare --json`, which
are turned into such rows. DuckDB sums them by cluster within a bounded memory, on one thread, so
that the same rows give the same numbers bit for bit whatever their order.

Means are ratios of sums with the cluster-robust error of `assay.stats`: weights are tokens,
clusters those of the run.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from assay.environment import describe
from assay.errors import AssayError, UsageError
from assay.options import Options, option
from assay.stats import ClusterEstimate, Interval, not_negative, student_t
from assay.verdict import Metric, Report, Table, Verdict

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
SHOWN = 24
"""Rows on the first screen."""
_KEY = ("windows_sha256", "reference", "run", "candidate")


@dataclass(frozen=True)
class TableOptions(Options):
    """What is compared, and where the rows go."""

    VERB, AREA = "table", "fidelity"

    rows: tuple[str, ...]
    _: KW_ONLY
    against: str | None = option(
        None, "Candidate that every other one is paired with, window by window.", metavar="LABEL"
    )
    sort: str = option(
        "kld", "What the table is sorted by.", choices=("kld", "dppl", "top1", "candidate")
    )
    out: Path | None = option(None, "Write all rows into one Parquet file as well.", apart=True)
    memory: int = option(
        512, "MiB that DuckDB may take; more goes to the disk.", lo=64, hi=1 << 20, apart=True
    )


@dataclass(frozen=True)
class Line:
    """One candidate of one run over all of its windows."""

    run: str
    reference: str
    candidate: str
    windows_sha256: str
    windows: int
    clusters: int
    tokens: int
    kld: ClusterEstimate
    dnll: ClusterEstimate
    top1: ClusterEstimate
    paired: ClusterEstimate | None = None
    """Mean KL minus that of `--against`, over the windows that both have."""

    def to_json(self) -> dict[str, Any]:
        """One of `results.rows`."""
        plain = {
            k: v
            for k, v in vars(self).items()
            if not isinstance(v, ClusterEstimate) and k != "paired"
        }
        more = {
            "kld": _json(self.kld),
            "top1_pct": _json(self.top1, lambda x: 100 * x),
            "dppl_pct": _json(self.dnll, _percent),
        }
        return plain | more | {"kld_above": _json(self.paired) if self.paired else None}


def run_table(options: TableOptions) -> Report:
    """Read all rows and compare the candidates; AssayError where a file holds none, or a window
    stands in twice.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = _parquet_of(options.rows, Path(folder))
        base = _connect(options, folder, files)
        _no_window_twice(base)
        lines = sorted(_lines(base, options.against), key=_order(options.sort))
        if options.against and not any(line.candidate == options.against for line in lines):
            raise UsageError(
                f"no row is of the candidate {options.against!r}", finding_id="fidelity.usage",
                remedy=f"one of: {', '.join(sorted({line.candidate for line in lines})[:8])}",
            )  # fmt: skip
        count = base.execute("SELECT count(*) FROM rows").fetchone()[0]
        if options.out:
            _write_all(base, options.out)
    sets = {line.windows_sha256 for line in lines}
    notes = (
        [Metric("window sets", f"{len(sets)}: figures of different sets do not compare")]
        if len(sets) > 1
        else []
    )
    return Report(
        command="table",
        verdict=Verdict.PASS,
        subject={"rows": list(options.rows), "against": options.against},
        results={"rows": [line.to_json() for line in lines], "windows": count, "format": FORMAT},
        environment=describe(),
        headline=[Metric("rows", f"{count:,} windows of {len(lines):,} candidates"), *notes],
        blocks=_tables(lines, options),
        summary=f"{len(lines):,} candidates compared.",
    )


# Rows.


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
            raise _missing("--rows", error) from error
        self.path, self._groups = path, 0
        try:
            if path.is_dir():
                raise IsADirectoryError(None, "it is a folder")
            self._part = path.with_name(f".{path.name}.{os.getpid()}.part")
            self._writer = pq.ParquetWriter(self._part, schema())
        except OSError as error:
            raise _unwritable(path, error, "--rows") from error

    def add(self, results: Mapping[str, Any]) -> None:
        """Append the rows of the candidates in `results`, as one group."""
        import pyarrow as pa

        rows = list(rows_of({"results": results}))
        try:
            self._writer.write_table(pa.Table.from_pylist(rows, schema=schema()))
            self._groups += 1
        except OSError as error:
            raise _unwritable(self.path, error, "--rows") from error

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
            raise _unwritable(self.path, failed, "--rows") from failed
        finally:
            self._part.unlink(missing_ok=True)


def _missing(what: str, error: ImportError) -> AssayError:
    return AssayError(
        f"{what} needs the package {(error.name or 'pyarrow').partition('.')[0]}",
        finding_id="fidelity.usage",
        remedy="pip install 'llm-assay[scale]'",
    )


def _unwritable(path: Path, error: OSError, flag: str) -> AssayError:
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


def _parquet_of(given: Sequence[str], folder: Path) -> list[str]:
    """Parquet files with all rows: those that were given, and one with the rows of the JSON
    results.
    """
    try:
        import duckdb  # noqa: F401
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise _missing("assay table", error) from error
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
            raise _unusable(path, "holds no .parquet and no .json file")
        for member in members:
            (found if member.suffix == ".parquet" else json_files).append(member)
    for path in found:
        try:
            own = pq.read_schema(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise _unusable(path, _reason(error)) from error
        if [(f.name, f.type) for f in own] != [(f.name, f.type) for f in schema()]:
            raise _unusable(path, f"does not have the columns of {FORMAT}: {', '.join(COLUMNS)}")
    if json_files:
        target = folder / "results.parquet"
        with pq.ParquetWriter(target, schema()) as writer:
            for path in json_files:
                try:
                    rows = list(rows_of(json.loads(path.read_text(encoding="utf-8"))))
                except OSError as error:
                    raise _unusable(path, _reason(error)) from error
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                    raise _unusable(path, "is no result of `assay compare --json`") from error
                if rows:
                    writer.write_table(pa.Table.from_pylist(rows, schema=schema()))
        found.append(target)
    return [str(path) for path in found]


def _reason(error: BaseException) -> str:
    return f"cannot be read: {getattr(error, 'strerror', None) or str(error).splitlines()[0]}"


def _unusable(path: Path, why: str) -> AssayError:
    return AssayError(
        f"{path.name} {why}",
        finding_id="fidelity.rows",
        remedy="give results of assay compare --json, or rows that assay table --out wrote",
    )


# Sums.


def _connect(options: TableOptions, folder: str, files: Sequence[str]) -> Any:
    import duckdb

    base = duckdb.connect(
        config={"memory_limit": f"{options.memory}MB", "threads": 1, "temp_directory": folder}
    )
    base.execute("SET enable_progress_bar = false")
    names = ", ".join("'" + f.replace("'", "''") + "'" for f in files)
    base.execute(f"CREATE VIEW rows AS SELECT * FROM read_parquet([{names}])")
    return base


def _no_window_twice(base: Any) -> None:
    twice = base.execute(
        f'SELECT candidate, run FROM rows GROUP BY {", ".join(_KEY)}, "window" HAVING count(*) > 1'
        " LIMIT 1"
    ).fetchone()
    if twice:
        raise AssayError(
            f"a window of {twice[0]} (run {twice[1]}) is given twice",
            finding_id="fidelity.rows",
            remedy="give the rows of each run once",
        )


_SUMS = """
WITH sums AS (
  SELECT {key}, cluster, count(*) AS n, sum(tokens) AS w, sum(kld * tokens ORDER BY "window") AS k, sum(dnll * tokens ORDER BY "window") AS d,
    sum(top1 * tokens ORDER BY "window") AS t
  FROM rows WHERE tokens > 0 GROUP BY {key}, cluster
), means AS (
  SELECT {key}, count(*) AS g, sum(n) AS windows, sum(w) AS w, sum(k ORDER BY cluster) / sum(w) AS k, sum(d ORDER BY cluster) / sum(w) AS d,
    sum(t ORDER BY cluster) / sum(w) AS t
  FROM sums GROUP BY {key}
)
SELECT {means_key}, g, windows, means.w, means.k, means.d, means.t, sum(pow(sums.k - means.k * sums.w, 2) ORDER BY cluster),
  sum(pow(sums.d - means.d * sums.w, 2) ORDER BY cluster), sum(pow(sums.t - means.t * sums.w, 2) ORDER BY cluster)
FROM sums JOIN means USING ({key}) GROUP BY ALL ORDER BY {means_key}
"""
_PAIRS = """
WITH sums AS (
  SELECT {a_key}, a.cluster AS cluster, sum(a.tokens) AS w, sum((a.kld - b.kld) * a.tokens ORDER BY a."window") AS k
  FROM rows a JOIN rows b ON a.windows_sha256 = b.windows_sha256 AND a.reference = b.reference AND a."window" = b."window"
  WHERE b.candidate = ? AND a.candidate <> ? AND a.tokens > 0 AND b.tokens > 0 GROUP BY {a_key}, a.cluster
), means AS (
  SELECT {key}, count(*) AS g, sum(w) AS w, sum(k ORDER BY cluster) / sum(w) AS k FROM sums GROUP BY {key}
)
SELECT {means_key}, g, means.w, means.k, sum(pow(sums.k - means.k * sums.w, 2) ORDER BY cluster)
FROM sums JOIN means USING ({key}) GROUP BY ALL ORDER BY {means_key}
"""


def _lines(base: Any, against: str | None) -> Iterator[Line]:
    names = {
        "key": ", ".join(_KEY),
        "means_key": ", ".join(f"means.{k}" for k in _KEY),
        "a_key": ", ".join(f"a.{k} AS {k}" for k in _KEY),
    }
    pairs = {}
    if against:
        group = {**names, "a_key": names["a_key"]}
        text = _PAIRS.format(**group).replace(
            f"GROUP BY {names['a_key']}", f"GROUP BY {', '.join(f'a.{k}' for k in _KEY)}"
        )
        for *key, g, w, k, kk in base.execute(text, [against, against]).fetchall():
            pairs[tuple(key)] = _estimate(k, kk, g, w)
    for *key, g, windows, w, k, d, t, kk, dd, tt in base.execute(_SUMS.format(**names)).fetchall():
        windows_sha256, reference, run, candidate = key
        yield Line(
            run,
            reference,
            candidate,
            windows_sha256,
            windows,
            g,
            w,
            not_negative(_estimate(k, kk, g, w)),
            _estimate(d, dd, g, w),
            _estimate(t, tt, g, w, (0.0, 1.0)),
            pairs.get(tuple(key)),
        )


def _estimate(
    mean: float | None,
    squares: float | None,
    clusters: int,
    weight: float,
    ends: tuple[float, float] = (-math.inf, math.inf),
) -> ClusterEstimate:
    """A mean from the sum of squared residuals of its clusters, as `assay.stats.cluster_ratio`
    gives it.
    """
    value = math.nan if mean is None else float(mean)
    if clusters < 2 or squares is None or not math.isfinite(value) or not math.isfinite(squares):
        return ClusterEstimate(value, math.nan, Interval(value, *ends), clusters, float(weight))
    se = math.sqrt(clusters / (clusters - 1) * squares) / float(weight)
    half = student_t(clusters - 1, 0.95) * se
    lo, hi = max(ends[0], value - half), min(ends[1], value + half)
    return ClusterEstimate(value, se, Interval(value, lo, hi), clusters, float(weight))


def _write_all(base: Any, out: Path) -> None:
    """All rows in one file, sorted, in batches. It takes its name once it is whole: it may be one
    of those that are read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    order = ", ".join((*_KEY, '"window"'))
    own = base.cursor()
    found = own.sql(f"SELECT * FROM rows ORDER BY {order}")
    read = (
        getattr(found, "to_arrow_reader", None) or found.fetch_arrow_reader
    )  # as DuckDB 1 calls it
    reader = read(65_536)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        if out.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        with pq.ParquetWriter(part, schema()) as writer:
            for batch in reader:
                writer.write_table(pa.Table.from_batches([batch]).cast(schema()))
        part.replace(out)
    except OSError as error:
        raise _unwritable(out, error, "--out") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


# What a person sees.


def _percent(nats: float) -> float:
    """Δppl in per cent of a difference of negative log-likelihoods."""
    return 100 * math.expm1(nats) if nats < 700 else math.inf


def _json(found: ClusterEstimate, scale: Any = lambda x: x) -> dict[str, float | None]:
    values = {"value": found.value, "lo": found.interval.lo, "hi": found.interval.hi}
    known = math.isfinite(found.value)
    return {k: scale(v) if known and math.isfinite(v) else None for k, v in values.items()}


def _order(by: str) -> Any:
    def key(line: Line) -> tuple[Any, ...]:
        worth = {
            "kld": line.kld.value,
            "dppl": abs(line.dnll.value),
            "top1": -line.top1.value,
            "candidate": 0.0,
        }[by]
        finite = math.inf if math.isnan(worth) else worth
        return (line.windows_sha256, line.reference, finite, line.candidate, line.run)

    return key


def _cell(found: ClusterEstimate | None, digits: int, scale: Any = lambda x: x) -> str:
    if found is None:
        return ""
    value, lo, hi = (
        scale(x) if math.isfinite(x) else x
        for x in (found.value, found.interval.lo, found.interval.hi)
    )
    known = math.isfinite(lo) and math.isfinite(hi)
    return (
        f"{value:.{digits}f} [{lo:.{digits}f}, {hi:.{digits}f}]" if known else f"{value:.{digits}f}"
    )


def _tables(lines: Sequence[Line], options: TableOptions) -> tuple[Table, ...]:
    above = (f"KL above {options.against}",) if options.against else ()
    columns = ("candidate", "windows", "mean KL", "Δppl %", "top-1 %", *above)
    rows = [
        (
            line.candidate,
            f"{line.windows:,}",
            _cell(line.kld, 5),
            _cell(line.dnll, 2, _percent),
            _cell(line.top1, 2, lambda x: 100 * x),
            *((_cell(line.paired, 5),) if above else ()),
        )
        for line in lines
    ]
    numeric = frozenset(range(1, len(columns)))
    note = (
        f"95 % intervals, clustered; {len(rows) - SHOWN:,} more with -v"
        if len(rows) > SHOWN
        else "95 % intervals, clustered"
    )
    first = Table(
        f"Candidates by {options.sort}", columns, rows[:SHOWN], numeric=numeric, note=note
    )
    if len(rows) <= SHOWN:
        return (first,)
    return (first, Table("All candidates", columns, rows, numeric=numeric, detail=True))


def column_reference() -> str:
    """The table of docs/scale.md, from the columns as they are declared."""
    lines = ["| column | type | meaning |", "|---|---|---|"]
    return (
        "\n".join(
            lines + [f"| `{name}` | {kind} | {says} |" for name, (kind, says) in COLUMNS.items()]
        )
        + "\n"
    )
