"""What vLLM meets when it starts in a process that did other work before."""

from __future__ import annotations

import pytest

from assay.engines.vllm.start import _let_numba_be_looked_into


def test_a_library_of_numba_has_no_attributes_but_functions() -> None:
    pytest.importorskip("numba")
    from llvmlite.binding import ffi

    for _ in range(2):  # an engine may be started again
        _let_numba_be_looked_into()
        assert not hasattr(ffi.lib, "__dict__")
        assert callable(ffi.lib.LLVMPY_GetVersionInfo)
