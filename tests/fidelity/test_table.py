"""Many comparisons in one table: against numpy, bit for bit in any order, within a bounded memory,
and what is refused.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay.cli.main import invoke
from assay.stats import cluster_ratio, not_negative

DOCS = Path(__file__).parents[2] / "docs" / "scale.md"
pa = pytest.importorskip("pyarrow", reason="needs the extra scale: pyarrow and duckdb")
pytest.importorskip("duckdb", reason="needs the extra scale: pyarrow and duckdb")
import pyarrow.parquet as pq

from assay.fidelity.table.rows import COLUMNS, column_reference, rows_of, schema
from assay.fidelity.table.sums import TableOptions
from assay.fidelity.table.verb import run_table
from tiny_target import make_target

pytestmark = pytest.mark.engine


def result(
    run: str, *candidates: str, windows: int = 12, seed: int = 0, sha: str = "w"
) -> dict[str, Any]:
    """The parts of a result of `assay compare --json` that hold its windows."""
    rng = random.Random(f"{run}{seed}")
    bodies = [
        {
            "candidate": name,
            "per_window": [
                {
                    "dnll": rng.gauss(0.01, 0.02),
                    "kld": rng.expovariate(80),
                    "top1": rng.uniform(0.9, 1),
                    "tokens": rng.randint(50, 90),
                    "block": i // 2,
                }
                for i in range(windows)
            ],
        }
        for name in candidates
    ]
    return {
        "command": "compare",
        "results": {
            "plan_sha256": run * 64,
            "reference": {"label": "hf:ref"},
            "text": {"windows_sha256": sha},
            "candidates": bodies,
        },
    }


def stored(folder: Path, name: str, found: dict[str, Any]) -> str:
    (folder / name).write_text(json.dumps(found))
    return str(folder / name)


def table(*rows: str, **options: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_table(TableOptions.of({"rows": rows, **options})).results[
        "rows"
    ]
    return found


def test_means_and_intervals_are_those_of_the_clusters(tmp_path: Path) -> None:
    document = result("a", "int8", "int4")
    one, two = sorted(
        table(stored(tmp_path, "a.json", document)), key=lambda line: line["candidate"]
    )
    assert (one["candidate"], two["candidate"]) == ("int4", "int8")
    for line in (one, two):
        body = next(
            b for b in document["results"]["candidates"] if b["candidate"] == line["candidate"]
        )
        sums: dict[int, np.ndarray] = {}
        for w in body["per_window"]:
            own = np.array(
                [
                    w["kld"] * w["tokens"],
                    w["top1"] * w["tokens"],
                    w["dnll"] * w["tokens"],
                    w["tokens"],
                ]
            )
            sums[w["block"]] = sums.get(w["block"], 0) + own
        k, t, d, n = np.array([*sums.values()]).T
        for key, want, scale in (
            ("kld", not_negative(cluster_ratio(k, n)), 1),
            ("top1_pct", cluster_ratio(t, n), 100),
        ):
            got = line[key]
            assert got["value"] == pytest.approx(scale * want.value, rel=1e-12)
            assert got["lo"] == pytest.approx(scale * want.interval.lo, rel=1e-9)
            assert got["hi"] == pytest.approx(min(100.0, scale * want.interval.hi), rel=1e-9)
        want = cluster_ratio(d, n)
        assert line["dppl_pct"]["hi"] == pytest.approx(100 * np.expm1(want.interval.hi), rel=1e-9)
        assert (line["clusters"], line["windows"]) == (6, 12)


def test_a_pair_is_compared_window_by_window(tmp_path: Path) -> None:
    document = result("a", "int8", "int4")
    lines = {
        line["candidate"]: line
        for line in table(stored(tmp_path, "a.json", document), against="int8")
    }
    assert lines["int8"]["kld_above"] is None
    a, b = (
        {b["candidate"]: b["per_window"] for b in document["results"]["candidates"]}[n]
        for n in ("int4", "int8")
    )
    sums: dict[int, np.ndarray] = {}
    for x, y in zip(a, b, strict=True):
        sums[x["block"]] = sums.get(x["block"], 0) + np.array(
            [(x["kld"] - y["kld"]) * x["tokens"], x["tokens"]]
        )
    want = cluster_ratio(*np.array([*sums.values()]).T)
    got = lines["int4"]["kld_above"]
    assert got["value"] == pytest.approx(want.value) and got["hi"] == pytest.approx(
        want.interval.hi
    )


def test_order_and_form_of_the_rows_change_no_bit(tmp_path: Path) -> None:
    names = [stored(tmp_path, f"{run}.json", result(run, "int8", "int4", "fp8")) for run in "abcd"]
    first = table(*names, out=tmp_path / "all.parquet")
    assert table(*reversed(names)) == first == table(str(tmp_path / "all.parquet"))
    rows = pq.read_table(tmp_path / "all.parquet")
    assert rows.schema.equals(schema()) and rows.schema.metadata[b"format"] == b"assay-rows/1"
    shuffled = rows.take(np.random.default_rng(0).permutation(rows.num_rows))
    (tmp_path / "folder").mkdir()
    pq.write_table(shuffled.slice(0, 50), tmp_path / "folder" / "1.parquet")
    pq.write_table(shuffled.slice(50), tmp_path / "folder" / "2.parquet")
    assert table(str(tmp_path / "folder")) == first


def test_rows_may_go_into_a_file_that_they_came_from(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    one, two = (stored(tmp_path, f"{run}.json", result(run, "int8")) for run in "ab")
    file = tmp_path / "all.parquet"
    table(one, out=file)
    found = run_table(TableOptions.of({"rows": (str(file), two), "out": file})).results
    assert found["windows"] == 24 and table(str(file)) == found["rows"] == table(one, two)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == [] and not recwarn.list


def test_windows_without_tokens_and_infinite_values_are_told_as_such(tmp_path: Path) -> None:
    document = result("a", "int8", "int4")
    one, two = document["results"]["candidates"]
    one["per_window"][0] |= {"kld": None, "dnll": None, "top1": None, "tokens": 0}
    two["per_window"][3]["kld"] = float("inf")
    lines = {line["candidate"]: line for line in table(stored(tmp_path, "a.json", document))}
    assert lines["int8"]["windows"] == 11 and lines["int8"]["kld"]["value"] is not None
    assert lines["int4"]["kld"] == {"value": None, "lo": None, "hi": None}
    assert (
        table(stored(tmp_path, "b.json", result("b", "one", windows=1)))[0]["dppl_pct"]["hi"]
        is None
    )


def test_ten_thousand_windows_of_forty_candidates_take_bounded_memory(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    windows = 10_000
    for c in range(40):
        columns = {
            "run": ["r"] * windows,
            "reference": ["hf:ref"] * windows,
            "candidate": [f"c{c:02d}"] * windows,
            "windows_sha256": ["w"] * windows,
            "window": np.arange(windows, dtype=np.int32),
            "cluster": np.arange(windows, dtype=np.int32) // 4,
            "tokens": np.full(windows, 1023, np.int32),
            "kld": rng.exponential(0.01 * (1 + c), windows),
            "dnll": rng.normal(0, 0.01, windows),
            "top1": rng.uniform(0.9, 1, windows),
        }
        pq.write_table(pa.table(columns, schema=schema()), tmp_path / f"{c:02d}.parquet")
    code = (
        "import json, re, sys\n"
        "from assay.fidelity.table.sums import TableOptions\n"
        "from assay.fidelity.table.verb import run_table\n"
        "report = run_table(TableOptions.of({'rows': (sys.argv[1],), 'memory': 128, 'against':"
        " 'c00'}))\n"
        # Not ru_maxrss, which holds what the process was forked from as well.
        "peak = int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "rows = report.results['rows']\n"
        "print(json.dumps([report.results['windows'], [r['candidate'] for r in rows],"
        " rows[5]['kld'], peak / 1024, sorted(m for m in sys.modules if m == 'torch')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    count, order, sixth, megabytes, torch = json.loads(done.stdout)
    assert count == 400_000 and order == [f"c{c:02d}" for c in range(40)] and torch == []
    assert sixth["lo"] < 0.06 < sixth["hi"] and megabytes < 700


def test_what_makes_no_sense_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    good = result("a", "int8", "int4")
    stored(tmp_path, "good.json", good)
    stored(tmp_path, "again.json", good)
    stored(tmp_path, "other.json", {"command": "check", "results": {}})
    (tmp_path / "text.parquet").write_text("no rows")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "columns.parquet")
    (tmp_path / "empty").mkdir()
    for arguments, said in (
        (["good.json", "again.json"], "a window of int"),
        (["other.json"], "other.json is no result of `assay compare --json`"),
        (["text.parquet"], "text.parquet cannot be read"),
        (["columns.parquet"], "columns.parquet does not have the columns of assay-rows/1"),
        (["nothing.json"], "nothing.json cannot be read: No such file or directory"),
        (["empty"], "empty holds no .parquet and no .json file"),
        (["good.json", "--against", "int3"], "no row is of the candidate 'int3'"),
        (["good.json", "--out", "no/where.parquet"], "cannot write no/where.parquet"),
    ):
        assert invoke(["table", *arguments, "--json"]) == 2, arguments
        (finding,) = json.loads(capsys.readouterr().out)["findings"]
        assert said in finding["title"] and "\n" not in finding["title"] and finding["remedies"], (
            finding
        )


def test_the_command_shows_a_screen_and_has_every_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in "abcdefgh":
        stored(
            tmp_path,
            f"{run}.json",
            result(run, *(f"{run}{i}" for i in range(5)), sha="w" if run < "h" else "v"),
        )
    assert invoke(["table", "."]) == 0
    out = capsys.readouterr().out
    assert (
        len(out.splitlines()) <= 40
        and "16 more with -v" in out
        and "figures of different sets do not compare" in out
    )
    assert invoke(["table", ".", "--sort", "top1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]["rows"]
    assert len(rows) == 40
    same = [r["top1_pct"]["value"] for r in rows if r["windows_sha256"] == "w"]
    assert same == sorted(same, reverse=True)


def test_the_page_shows_the_schema() -> None:
    assert column_reference() in DOCS.read_text(encoding="utf-8")
    assert [f.name for f in schema()] == list(COLUMNS)
    assert list(next(rows_of(result("a", "x")))) and set(next(rows_of(result("a", "x")))) == set(
        COLUMNS
    )


def compared(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """A comparison of tiny models from the command line, in `folder`."""
    out = folder / "out.json"
    shape = (
        "--text",
        str(DOCS),
        "--windows",
        "8",
        "--length",
        "32",
        "--no-floors",
        "--json",
        str(out),
    )
    return invoke(["compare", *arguments, *shape]), (
        json.loads(out.read_text()) if out.exists() else {}
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a byte tokenizer."""
    return make_target(tmp_path_factory.mktemp("models") / "tiny", hidden=32, layers=1)


def test_a_comparison_writes_the_rows_of_its_result(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    specs = [f"hf:{tiny}?weights=int(bits={bits},group=32)" for bits in (8, 3)]
    monkeypatch.setattr("assay.fidelity.compare.IN_MEMORY", 0)  # every candidate goes to the disk
    rows = tmp_path / "rows.parquet"
    _, on_disk = compared(tmp_path, f"hf:{tiny}", *specs, "--rows", str(rows))
    stored(tmp_path, "a.json", on_disk)
    assert table(str(rows)) == table(str(tmp_path / "a.json"))
    assert pq.read_table(rows).to_pylist() == list(rows_of(on_disk))
    monkeypatch.setattr("assay.fidelity.compare.IN_MEMORY", 1 << 40)
    _, in_memory = compared(tmp_path, f"hf:{tiny}", *specs)
    for part in ("candidates", "pairs"):
        assert on_disk["results"][part] == in_memory["results"][part]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "a.json",
        "cache",
        "out.json",
        "rows.parquet",
    ]


def test_what_is_kept_of_tokens_leaves_memory(tmp_path: Path) -> None:
    from assay.fidelity.observation import WindowObservation, on_disk, size_of

    rng = np.random.default_rng(0)
    numbers = [rng.random(1023) for _ in range(8)]
    some = rng.random(1023) < 0.5
    names = ("nll_ref", "nll_cand", "kl", "kl_rev", "p_ref", "p_cand", "conf", "tv")
    seen = [
        WindowObservation(
            index=i,
            first=1,
            tokens=np.arange(1024, dtype=np.int32),
            top1=some,
            beyond=~some,
            **dict(zip(names, numbers, strict=True)),
        )
        for i in range(3)
    ]
    assert size_of(seen) == 3 * (4 * 1024 + 66 * 1023)  # 70 bytes a token, as docs/scale.md says
    moved = on_disk(seen, tmp_path)
    assert list(tmp_path.iterdir()) == [] and [w.index for w in moved] == [0, 1, 2]
    for name in (*names, "tokens", "top1", "beyond"):
        np.testing.assert_array_equal(getattr(moved[2], name), getattr(seen[2], name))
        assert not getattr(moved[2], name).flags.owndata


@pytest.mark.parametrize("name", ["no/where.parquet", ".", ""])
def test_rows_that_cannot_be_written_are_refused_before_anything_is_scored(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "assay.fidelity.compare.open_reference", lambda *a: pytest.fail("it was scored")
    )
    code, body = compared(
        tmp_path, f"hf:{tiny}", f"hf:{tiny}?dtype=bfloat16", "--rows", str(tmp_path / name)
    )
    (finding,) = body["findings"]
    assert (
        code == 2
        and finding["title"].startswith(f"cannot write {Path(tmp_path / name)}")
        and finding["remedies"]
    )


def test_rows_without_pyarrow_are_one_line(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    code, body = compared(
        tmp_path, f"hf:{tiny}", f"hf:{tiny}?dtype=bfloat16", "--rows", str(tmp_path / "x.parquet")
    )
    (finding,) = body["findings"]
    assert code == 2 and finding["title"] == "--rows needs the package pyarrow"
    assert finding["remedies"] == ["pip install 'llm-assay[scale]'"]
