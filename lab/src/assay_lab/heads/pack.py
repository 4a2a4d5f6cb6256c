"""`assay heads pack`: a trained head in one file with the digests of all that it holds, in the
cache and never in a repository.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import Mapping
from pathlib import Path

from assay.engines.hf.spec import parse_hf
from assay.progress import NO_PROGRESS, Progress
from assay.runs import cache_path, tar_of, write_atomically
from assay.stats import Interval
from assay.verdict import Metric, Report, Verdict
from assay_lab.heads.export import MTP_FILE, cannot_write, read_head
from assay_lab.heads.report import percent, ratio, run_train
from assay_lab.heads.training import CHECKPOINT
from assay_lab.options import HeadPackPlan, HeadTrainPlan

FILES = ("config.json", "model.safetensors", "training.json")
SUMS = "SHA256SUMS"
"""As `sha256sum` writes it, and `sha256sum -c` reads it in the folder that `tar` unpacks."""


def run_pack(plan: HeadPackPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Pack the head, trained first where the cache has none. AssayError for a head that is
    incomplete or of another target.
    """
    target = Path(parse_hf(plan.model).model)
    head = plan.head or cache_path("heads") / target.name
    if plan.head is None and (not (head / FILES[1]).exists() or (head / CHECKPOINT).exists()):
        trained = run_train(HeadTrainPlan.of({"model": plan.model, "out": head}), progress)
        if trained.verdict is not Verdict.PASS:
            return trained
    read_head(head, target)
    out = plan.out or cache_path("heads") / f"{target.name}.tar.xz"
    names = (
        (FILES[0], MTP_FILE, FILES[2]) if (head / MTP_FILE).exists() else FILES
    )  # an MTP head without its target
    content = {name: (head / name).read_bytes() for name in names}
    sums = sums_of(content)
    kept = packed_sums(out) == sums
    if not kept:
        with progress("packing", 1) as advance:
            try:
                out.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(out, packed(target.name, {SUMS: sums.encode(), **content}))
            except OSError as error:
                raise cannot_write(out, error) from error
            advance()
    size, digest = out.stat().st_size, hashlib.sha256(out.read_bytes()).hexdigest()
    metrics = [
        Metric("pack", str(out), note=f"{size / 1e6:.1f} MB, {'as it was' if kept else 'written'}"),
        Metric("SHA-256", digest),
    ]
    if whole := json.loads(content["training.json"]).get("acceptance", {}).get("all"):
        first, length = Interval(**whole["positions"][0]), Interval(**whole["tokens_per_step"])
        metrics.append(
            Metric(
                "position 0",
                percent(first),
                note=f"{ratio(length)} tokens a step, as it was trained",
            )
        )
    return Report(
        command="heads pack",
        verdict=Verdict.PASS,
        subject={"model": plan.model, "head": str(head)},
        headline=metrics,
        results={"pack": str(out), "bytes": size, "sha256": digest, "kept": kept},
        summary=f"unpack it with tar -xJf, and check it with sha256sum -c {SUMS}",
    )


def packed(name: str, files: Mapping[str, bytes]) -> bytes:
    """A tar archive of the folder `name`, compressed by xz; the same bytes for the same files."""
    return lzma.compress(tar_of({f"{name}/{file}": body for file, body in files.items()}), preset=3)


def packed_sums(path: Path) -> str | None:
    """The digests that a pack states, if it holds just the files of these digests; None for
    anything else.
    """
    try:
        with tarfile.open(path, "r:xz") as tar:
            files = {
                Path(m.name).name: (tar.extractfile(m) or io.BytesIO()).read()
                for m in tar
                if m.isfile()
            }
        sums = files.pop(SUMS).decode()
    except (OSError, tarfile.TarError, lzma.LZMAError, EOFError, KeyError, ValueError):
        return None
    return sums if sums_of(files) == sums else None


def sums_of(files: Mapping[str, bytes]) -> str:
    """The text of `SUMS` for these files, by name."""
    return "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files))
