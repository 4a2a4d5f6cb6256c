"""What vLLM meets when it starts in a process that did other work before."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from assay.engines.vllm.spec import VllmSpec
from assay.engines.vllm.start import REPORTS, _prepare_ranks, forget_ranks, let_numba_be_looked_into


def test_a_library_of_numba_has_no_attributes_but_functions() -> None:
    pytest.importorskip("numba")
    from llvmlite.binding import ffi

    for _ in range(2):  # an engine may be started again
        let_numba_be_looked_into()
        assert not hasattr(ffi.lib, "__dict__")
        assert callable(ffi.lib.LLVMPY_GetVersionInfo)


@pytest.mark.parametrize("own", ["", "0|1"])
def test_what_is_set_for_ranks_goes_with_them_and_a_users_own_stays(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    names = (
        REPORTS,
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
    )
    for name in names:
        monkeypatch.setenv(name, "")  # put back at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    if own:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", own)
    for ranks, bound in ((2, "0,1|2,3"), (4, "0|1|2|3")):
        _prepare_ranks(
            VllmSpec("model", tensor_parallel=ranks), SimpleNamespace(is_cpu=lambda: True)
        )
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == (own or bound)
        folder = Path(os.environ[REPORTS])
        assert folder.is_dir()
        forget_ranks()
        assert not folder.exists() and REPORTS not in os.environ
        assert os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "") == own
