"""Sums of rows by cluster, made by DuckDB within a bounded memory.

It runs on one thread, so that the same rows give the same numbers bit for bit in any order.
Means are ratios of sums with the cluster-robust error of `assay.stats`: weights are tokens,
clusters those of the run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from assay.fidelity.table.rows import schema, unwritable
from assay.options import Options, option
from assay.stats import ClusterEstimate, Interval, not_negative, student_t

KEY = ("windows_sha256", "reference", "run", "candidate")


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
            "kld": scaled_json(self.kld),
            "top1_pct": scaled_json(self.top1, lambda x: 100 * x),
            "dppl_pct": scaled_json(self.dnll, ppl_percent),
        }
        return plain | more | {"kld_above": scaled_json(self.paired) if self.paired else None}


def connect(options: TableOptions, folder: str, files: Sequence[str]) -> Any:
    """A connection of DuckDB whose view `rows` are those of `files`."""
    import duckdb

    base = duckdb.connect(
        config={"memory_limit": f"{options.memory}MB", "threads": 1, "temp_directory": folder}
    )
    base.execute("SET enable_progress_bar = false")
    names = ", ".join("'" + f.replace("'", "''") + "'" for f in files)
    base.execute(f"CREATE VIEW rows AS SELECT * FROM read_parquet([{names}])")
    return base


_SUMS = """
WITH sums AS (
  SELECT {key}, cluster, count(*) AS n, sum(tokens) AS w,
    sum(kld * tokens ORDER BY "window") AS k,
    sum(dnll * tokens ORDER BY "window") AS d,
    sum(top1 * tokens ORDER BY "window") AS t
  FROM rows WHERE tokens > 0 GROUP BY {key}, cluster
), means AS (
  SELECT {key}, count(*) AS g, sum(n) AS windows, sum(w) AS w,
    sum(k ORDER BY cluster) / sum(w) AS k,
    sum(d ORDER BY cluster) / sum(w) AS d,
    sum(t ORDER BY cluster) / sum(w) AS t
  FROM sums GROUP BY {key}
)
SELECT {means_key}, g, windows, means.w, means.k, means.d, means.t,
  sum(pow(sums.k - means.k * sums.w, 2) ORDER BY cluster),
  sum(pow(sums.d - means.d * sums.w, 2) ORDER BY cluster),
  sum(pow(sums.t - means.t * sums.w, 2) ORDER BY cluster)
FROM sums JOIN means USING ({key}) GROUP BY ALL ORDER BY {means_key}
"""


_PAIRS = """
WITH sums AS (
  SELECT {a_key}, a.cluster AS cluster, sum(a.tokens) AS w,
    sum((a.kld - b.kld) * a.tokens ORDER BY a."window") AS k
  FROM rows a JOIN rows b ON a.windows_sha256 = b.windows_sha256
    AND a.reference = b.reference AND a."window" = b."window"
  WHERE b.candidate = ? AND a.candidate <> ? AND a.tokens > 0 AND b.tokens > 0
  GROUP BY {a_key}, a.cluster
), means AS (
  SELECT {key}, count(*) AS g, sum(w) AS w, sum(k ORDER BY cluster) / sum(w) AS k
  FROM sums GROUP BY {key}
)
SELECT {means_key}, g, means.w, means.k, sum(pow(sums.k - means.k * sums.w, 2) ORDER BY cluster)
FROM sums JOIN means USING ({key}) GROUP BY ALL ORDER BY {means_key}
"""


def lines_of(base: Any, against: str | None) -> Iterator[Line]:
    """The lines of the table, one a candidate and run; `against` names the other of each pair."""
    names = {
        "key": ", ".join(KEY),
        "means_key": ", ".join(f"means.{k}" for k in KEY),
        "a_key": ", ".join(f"a.{k} AS {k}" for k in KEY),
    }
    pairs = {}
    if against:
        group = {**names, "a_key": names["a_key"]}
        text = _PAIRS.format(**group).replace(
            f"GROUP BY {names['a_key']}", f"GROUP BY {', '.join(f'a.{k}' for k in KEY)}"
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
    """A mean from the sum of squared residuals of its clusters, as
    `assay.stats.cluster.cluster_ratio` gives it.
    """
    value = math.nan if mean is None else float(mean)
    if clusters < 2 or squares is None or not math.isfinite(value) or not math.isfinite(squares):
        return ClusterEstimate(value, math.nan, Interval(value, *ends), clusters, float(weight))
    se = math.sqrt(clusters / (clusters - 1) * squares) / float(weight)
    half = student_t(clusters - 1, 0.95) * se
    lo, hi = max(ends[0], value - half), min(ends[1], value + half)
    return ClusterEstimate(value, se, Interval(value, lo, hi), clusters, float(weight))


def write_all(base: Any, out: Path) -> None:
    """All rows in one file, sorted, in batches. It takes its name once it is whole: it may be one
    of those that are read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    order = ", ".join((*KEY, '"window"'))
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
        raise unwritable(out, error, "--out") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def ppl_percent(nats: float) -> float:
    """Δppl in per cent of a difference of negative log-likelihoods."""
    return 100 * math.expm1(nats) if nats < 700 else math.inf


def scaled_json(found: ClusterEstimate, scale: Any = lambda x: x) -> dict[str, float | None]:
    """An estimate as value, lo and hi, each through `scale`; null where it is not known."""
    values = {"value": found.value, "lo": found.interval.lo, "hi": found.interval.hi}
    known = math.isfinite(found.value)
    return {k: scale(v) if known and math.isfinite(v) else None for k, v in values.items()}
