"""The fused round trip of the plain rotation codec."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from assay.demo.vllm_env import vllm_python  # noqa: E402
from assay.kv.codec import BlockCoder, Site  # noqa: E402
from assay.kv.codecs.hadamard import Hadamard, HadamardCoder  # noqa: E402

HERE = Path(__file__).parent


@pytest.mark.engine
def test_kernel_gives_the_bits_of_torch() -> None:
    done = subprocess.run(
        [str(vllm_python()), str(HERE / "kv_fused_inside.py")],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip().endswith("equal"), done.stderr[-2000:]


def test_a_kernel_that_fails_or_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    coder = HadamardCoder(Site("k", 0, 30, 2, 64), Hadamard(bits=4))
    plain = BlockCoder.reconstruct
    monkeypatch.setattr(coder, "_fused", lambda x: plain(coder, x))
    assert coder._same_by_both(torch.device("cpu"))
    monkeypatch.setattr(coder, "_fused", lambda x: plain(coder, x) + 1e-6)
    with pytest.warns(RuntimeWarning, match="other values"):
        assert not coder._same_by_both(torch.device("cpu"))

    def broken(x: object) -> object:
        raise OSError("no compiler")

    monkeypatch.setattr(coder, "_fused", broken)
    with pytest.warns(RuntimeWarning, match="no compiler"):
        assert not coder._same_by_both(torch.device("cpu"))
