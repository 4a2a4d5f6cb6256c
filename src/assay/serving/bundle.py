"""Write the evidence of a doctor into one file: reports, logs, texts, environment, digests.

A bundle is a tar archive, compressed by zstd where the package `zstandard` is installed and by xz
elsewhere (the name then ends in `.tar.xz`). `manifest.json` holds the SHA-256 of every other file.
Secrets and home paths are removed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from assay.environment import VERSION, describe
from assay.errors import AssayError
from assay.files import open_regular
from assay.runs import tar_of
from assay.serving.diagnosis import Diagnosis
from assay.serving.launch import gpus
from assay.serving.scrub import Scrubber
from assay.verdict import Report, jsonable

FORM = "assay-bundle/1"
_HASHED = 1 << 30


def write_bundle(path: Path, report: Report, found: Diagnosis) -> Path:
    """Write the bundle and return its path; AssayError where it cannot be written."""
    command = found.command
    words = (*command.start, *command.fixed, *(w for s in command.settings for w in s.words))
    scrub = Scrubber(words)
    files: dict[str, str] = {
        "report.json": json.dumps(report.to_json(), ensure_ascii=False, indent=1),
        "report.html": report.to_html(),
        "environment.json": json.dumps(jsonable(describe() | {"gpu": gpus()}), indent=1),
        "checkpoint.json": json.dumps(_digests(command.model), indent=1),
        "options.json": json.dumps(jsonable(found.options.facts()), indent=1),
    }
    observations = []
    for number, start in enumerate(found.starts):
        log = f"logs/{number:03}.log"
        files[log] = start.observation.log
        body = start.observation.to_json() | {"log": log}
        observations.append(
            {
                "settings": sorted(start.configuration),
                "index": start.index,
                "state": start.seen.state,
                "bad": dict(start.seen.bad),
                "observation": body,
            }
        )
    files["starts.json"] = json.dumps(
        jsonable(
            {
                "rules": sorted(found.rules),
                "slower": found.options.slower,
                "all": sorted(found.all),
                "starts": observations,
            }
        ),
        ensure_ascii=False,
    )
    raw = {name: scrub.text(text).encode("utf-8", "replace") for name, text in files.items()}
    manifest = {
        "format": FORM,
        "assay": VERSION,
        "verdict": report.verdict.value,
        "files": {
            n: {"sha256": hashlib.sha256(b).hexdigest(), "size": len(b)} for n, b in raw.items()
        },
    }
    raw = {"manifest.json": json.dumps(manifest, indent=1).encode(), **raw}
    path, content = _compressed(path, tar_of(raw))
    try:
        path.write_bytes(content)
    except OSError as error:
        raise AssayError(
            f"cannot write the bundle {path}: {error.strerror}",
            finding_id="server.bundle",
            remedy="name another file",
        ) from error
    return path


def _compressed(path: Path, raw: bytes) -> tuple[Path, bytes]:
    try:
        import zstandard
    except ImportError:
        import lzma

        stem = path.name.removesuffix(".zst").removesuffix(".tar")
        return path.with_name(f"{stem}.tar.xz"), lzma.compress(raw)
    return path, zstandard.ZstdCompressor(level=9).compress(raw)


def _digests(model: str | None) -> list[dict[str, Any]]:
    """Names, sizes and SHA-256 of the checkpoint's files; of very large ones the size only."""
    path = Path(model).expanduser() if model else None
    if path is None or not path.exists():
        return []
    found: list[dict[str, Any]] = []
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file():
            size = file.stat().st_size
            digest = _sha256(file) if size <= _HASHED else None
            found.append({"path": file.name, "size": size, "sha256": digest})
    return found


def _sha256(file: Path) -> str:
    with open_regular(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
