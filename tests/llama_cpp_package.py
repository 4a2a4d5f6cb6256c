"""Find llama-cpp-python, installed or built into the cache by
benchmarks/build/build_llama_cpp_python.sh.
"""

from __future__ import annotations

import sys

import pytest

from assay.runs import cache_dir


def require_llama_cpp() -> None:
    """Make `llama_cpp` importable, or skip the test."""
    built = cache_dir("llama-cpp-python")
    if (built / "llama_cpp").is_dir() and str(built) not in sys.path:
        sys.path.append(str(built))
    try:
        import llama_cpp  # noqa: F401
    except ImportError:
        pytest.skip("llama-cpp-python is missing: run benchmarks/build/build_llama_cpp_python.sh")
