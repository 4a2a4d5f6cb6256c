"""A pack of a head: what it holds, that it is made once, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from assay.errors import AssayError
from assay_lab.heads.pack import packed_sums, run_pack
from assay_lab.options import HeadPackPlan

pytestmark = pytest.mark.engine


def pack(target: Path, head: Path | None, out: Path | None) -> Any:
    return run_pack(HeadPackPlan.of({"model": str(target), "head": head, "out": out})).results


def test_a_pack_holds_the_head_and_its_digests_and_is_made_once(
    target: Path, trained: Any, tmp_path: Path
) -> None:
    first = pack(target, trained[0], tmp_path / "head.tar.xz")
    assert not first["kept"] and first["bytes"] < 1 << 20
    again = pack(target, trained[0], tmp_path / "head.tar.xz")
    assert again == first | {"kept": True}
    assert pack(target, trained[0], tmp_path / "other.tar.xz")["sha256"] == first["sha256"]
    shutil.unpack_archive(tmp_path / "head.tar.xz", tmp_path)
    folder = tmp_path / target.name
    assert sorted(p.name for p in folder.iterdir()) == [
        "SHA256SUMS",
        "config.json",
        "model.safetensors",
        "training.json",
    ]
    assert (
        subprocess.run(
            ["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True
        ).returncode
        == 0
    )
    assert (folder / "model.safetensors").read_bytes() == (
        trained[0] / "model.safetensors"
    ).read_bytes()


def test_a_damaged_pack_is_made_again(target: Path, trained: Any, tmp_path: Path) -> None:
    out = tmp_path / "head.tar.xz"
    pack(target, trained[0], out)
    whole = out.read_bytes()
    for damaged in (whole[:-100], whole[:200] + b"\0" + whole[201:], b"", b"no pack"):
        out.write_bytes(damaged)
        assert packed_sums(out) is None
        assert not pack(target, trained[0], out)["kept"] and out.read_bytes() == whole


def test_a_head_of_another_target_is_not_packed(target: Path, trained: Any, tmp_path: Path) -> None:
    from tiny_target import make_target

    other = make_target(tmp_path / "other", hidden=32)
    with pytest.raises(AssayError, match="hidden_size"):
        pack(other, trained[0], tmp_path / "head.tar.xz")
    assert not (tmp_path / "head.tar.xz").exists()
