"""The fault zoo as a table: what `assay verify` finds, and what huggingface_hub's own check (`hf
cache verify`) notices.

    python benchmarks/verify/verify_zoo.py

Each fault of tests/faults is put into a checkpoint. assay looks at it as the test does.
huggingface_hub compares the damaged folder with a Hub on loopback, twice: `damaged here`, where the
Hub has the whole checkpoint, and `published so`, where the fault is in what was uploaded, as an
exporter's mistake is. Writes results/verify_zoo.json and .md.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import huggingface_hub
from huggingface_hub import HfApi

from assay.checkpoint.options import VerifyOptions
from assay.checkpoint.verify import verify
from checkpoint.loopback_hub import LoopbackHub
from faults.zoo import FAULTS, Fault, healthy

RESULTS = Path(__file__).parent / "results"


def by_assay(fault: Fault, folder: Path, listing: Path) -> dict[str, Any]:
    options = VerifyOptions(
        manifest=listing if fault.manifest else None,
        allow_unverified=True,
        digest_cache=False,
        **fault.options,
    )
    report = verify(str(folder), options)
    raised = {(f.id.removeprefix("checkpoint."), f.severity.value) for f in report.findings}
    return {
        "found": (fault.finding, fault.severity) in raised,
        "findings": sorted(f"{n} ({s})" for n, s in raised if n != "unverified"),
        "verdict": report.verdict.value,
    }


def by_the_hub(hub: LoopbackHub, repo: str, folder: Path) -> dict[str, Any]:
    """`hf cache verify --local-dir`: it exits 1 on a mismatch; missing and extra files are warnings
    by default.
    """
    seen = HfApi(endpoint=hub.url).verify_repo_checksums(repo, local_dir=folder)
    return {
        "mismatches": [m["path"] for m in seen.mismatches],
        "missing": seen.missing_paths,
        "extra": seen.extra_paths,
        "fails": bool(seen.mismatches),
    }


def one(fault: Fault, number: int, hub: LoopbackHub, place: Path) -> dict[str, Any]:
    folder, listing = place / "model", place / "manifest.json"
    for stale in (folder, place / "other"):
        shutil.rmtree(stale, ignore_errors=True)
    fault.make(folder)
    if fault.manifest:
        verify(str(folder), VerifyOptions(write_manifest=listing, digest_cache=False))
    hub.upload(f"zoo/whole-{number}", folder)
    fault.damage(folder)
    hub.upload(f"zoo/fault-{number}", folder)
    return {
        "fault": fault.name, "expected": fault.finding, "severity": fault.severity,
        "needs_digests": fault.manifest, "assay": by_assay(fault, folder, listing),
        "hf": by_the_hub(hub, f"zoo/whole-{number}", folder),
        "hf_published": by_the_hub(hub, f"zoo/fault-{number}", folder),
    }  # fmt: skip


def whole(name: str, place: Path) -> dict[str, Any]:
    folder = place / "model"
    shutil.rmtree(folder, ignore_errors=True)
    healthy()[name](folder)
    report = verify(
        str(folder), VerifyOptions(values=True, allow_unverified=True, digest_cache=False)
    )
    return {
        "kind": name,
        "findings": [f.id for f in report.findings if f.id != "checkpoint.unverified"],
    }


def said(hf: dict[str, Any]) -> str:
    if hf["fails"]:
        return "fails"
    return "warns: missing" if hf["missing"] else "warns: extra" if hf["extra"] else "–"


def table(rows: list[dict[str, Any]], sound: list[dict[str, Any]]) -> str:
    found = sum(r["assay"]["found"] for r in rows)
    alone = sum(r["assay"]["found"] and not r["needs_digests"] for r in rows)
    here, published = (sum(r[key]["fails"] for r in rows) for key in ("hf", "hf_published"))
    lines = [
        "# The fault zoo",
        "",
        (
            f"{len(rows)} faults: assay finds {found} under the right id, {alone} of them with no"
            " digest to hold against."
        ),
        (
            f"{len(sound)} whole checkpoints: {sum(bool(s['findings']) for s in sound)} with a"
            " finding."
        ),
        "",
        (
            f"`hf cache verify` (huggingface_hub {huggingface_hub.__version__}) fails {here} of the"
            f" same faults where the Hub has the whole checkpoint, and {published} where the fault"
            " was published."
        ),
        "",
        "| fault | must raise | assay | hf: damaged here | hf: published so |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        shown = "found" if row["assay"]["found"] else "**missed**"
        cells = (
            f"`{row['expected']}` ({row['severity']})",
            shown,
            said(row["hf"]),
            said(row["hf_published"]),
        )
        lines.append(f"| {row['fault']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    huggingface_hub.constants.HF_HUB_OFFLINE = False
    with tempfile.TemporaryDirectory() as name, LoopbackHub(page=100) as hub:
        place = Path(name)
        rows = [one(fault, i, hub, place) for i, fault in enumerate(FAULTS)]
        sound = [whole(kind, place) for kind in healthy()]
    result = {"huggingface_hub": huggingface_hub.__version__, "faults": rows, "healthy": sound}
    (RESULTS / "verify_zoo.json").write_text(
        json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    )
    (RESULTS / "verify_zoo.md").write_text(table(rows, sound))
    print(table(rows, sound))


if __name__ == "__main__":
    main()
