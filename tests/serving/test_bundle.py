"""Bundles that were damaged, forged or made to fill memory: one line, and never a pass without
evidence.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import resource
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.cli.main import invoke
from assay.errors import AssayError
from assay.serving.bundle_check import MOST_BYTES, read_bundle, show_bundle, verify_bundle
from assay.verdict import Verdict

zstandard = pytest.importorskip("zstandard")

REPORT = {"verdict": "pass", "findings": [], "results": {}, "subject": {}, "environment": {}}
STARTS: dict[str, Any] = {"starts": [], "rules": [], "slower": 0.1}


def archive(files: dict[str, bytes], *, manifest: bytes | None = None) -> bytes:
    digests = {n: {"sha256": hashlib.sha256(b).hexdigest()} for n, b in files.items()}
    listed = json.dumps({"format": "assay-bundle/1", "files": digests}).encode()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, body in {"manifest.json": manifest or listed, **files}.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return out.getvalue()


def write(folder: Path, raw: bytes) -> Path:
    path = folder / "bundle.tar.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(raw))
    return path


def bundle(folder: Path, report: Any = REPORT, starts: Any = STARTS) -> Path:
    texts = {"report.json": report, "starts.json": starts}
    return write(
        folder,
        archive(
            {n: v if isinstance(v, bytes) else json.dumps(v).encode() for n, v in texts.items()}
        ),
    )


def test_a_bundle_without_a_start_is_not_passed(tmp_path: Path) -> None:
    report = verify_bundle(bundle(tmp_path))
    assert report.verdict is Verdict.INCONCLUSIVE
    assert {"server.bundle_empty", "server.bundle_unsigned"} <= {f.id for f in report.findings}


@pytest.mark.parametrize(
    ("report", "starts"),
    [
        (b"[" * 100_000, STARTS),
        (REPORT, b'{"starts":' + b"[" * 100_000),
        ({**REPORT, "results": {"x": 10**400}}, STARTS),
        (REPORT, {"starts": [{"observation": {}, "bad": [[]], "state": "bad"}], "rules": [[1]]}),
        ({**REPORT, "findings": [{"id": 5, "severity": "error", "evidence": [1]}]}, STARTS),
        ({**REPORT, "results": [], "subject": [], "environment": 5}, STARTS),
        ({**REPORT, "verdict": "maybe"}, STARTS),
        ([], []),
    ],
)
def test_a_bundle_of_another_shape_is_one_line(
    tmp_path: Path, report: Any, starts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bundle(tmp_path, report, starts)
    for verb in ("show", "verify"):
        code = invoke(["bundle", verb, str(path), "--json"])
        found = json.loads(capsys.readouterr().out)
        assert code == found["exit_code"] in (0, 2, 3), (verb, found)


def test_a_title_with_half_a_surrogate_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = b'{"verdict":"pass","findings":[{"id":"server.x","severity":"error","title":"\\ud800"}],'
    path = bundle(tmp_path, text + b'"results":{},"subject":{}}')
    assert invoke(["bundle", "show", str(path)]) in (0, 1)
    assert "\ufffd" in capsys.readouterr().out


def _sparse(size: int) -> bytes:
    """A tar member in the old form of GNU that claims `size` bytes and holds none."""
    header = bytearray(512)
    header[0:6], header[156:157], header[257:265] = b"sparse", b"S", b"ustar  \0"
    for at, width in ((100, 8), (108, 8), (116, 8), (124, 12), (136, 12), (386, 12), (398, 12)):
        header[at : at + width] = b"0" * (width - 1) + b"\0"
    header[483:495] = b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


@pytest.mark.parametrize("kind", ["sparse", "zstd bomb", "many members"])
def test_a_small_file_takes_little_memory_and_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "bomb.tar.zst"
    if kind == "sparse":
        write(tmp_path, _sparse(3 << 30)).rename(path)
    elif kind == "many members":
        write(tmp_path, archive({f"f{i}": b"" for i in range(30_000)})).rename(path)
    else:
        with path.open("wb") as file, zstandard.ZstdCompressor(level=1).stream_writer(file) as out:
            for _ in range(1 + 2 * MOST_BYTES // (1 << 20)):
                out.write(bytes(1 << 20))
    program = (
        "import sys; from pathlib import Path; from assay.errors import AssayError\n"
        "from assay.serving.bundle_check import read_bundle\n"
        "try: read_bundle(Path(sys.argv[1]))\n"
        "except AssayError as error: print(error.message)\n"
        "else: print('read')"
    )
    limit = MOST_BYTES * 4 + (1 << 30)
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert "no bundle that can be read" in done.stdout


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        with pytest.raises(AssayError, match="must be a regular file"):
            read_bundle(path)


@given(st.binary(max_size=400))
def test_any_bytes_are_a_bundle_or_one_line(raw: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "b"
        for content in (raw, zstandard.ZstdCompressor().compress(raw)):
            path.write_bytes(content)
            with pytest.raises(AssayError, match="no bundle"):
                show_bundle(path)
