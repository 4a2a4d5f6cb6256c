"""A tiny target, and a head trained on it: both made once a session, in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny_target import TRAIN, make_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny target."""
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder, report) of a head trained on it."""
    from assay_lab.heads.report import run_train
    from assay_lab.options import HeadTrainPlan

    out = tmp_path_factory.mktemp("head")
    return out, run_train(HeadTrainPlan.of({"model": str(target), "out": out, **TRAIN}))


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen2."""
    return make_target(tmp_path_factory.mktemp("qwen"), kind="Qwen2", layers=4)


@pytest.fixture(scope="session")
def trained_mtp(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder, report) of an MTP head trained on it."""
    from assay_lab.heads.report import run_train
    from assay_lab.options import HeadTrainPlan

    out = tmp_path_factory.mktemp("mtp")
    given = {**TRAIN, "kind": "mtp", "intermediate": 0}
    return out, run_train(HeadTrainPlan.of({"model": str(qwen), "out": out, **given}))
