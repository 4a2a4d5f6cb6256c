"""llama.cpp's library: loaded once, its errors kept, a model opened."""

from __future__ import annotations

import ctypes
from collections import deque
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import AssayError

if TYPE_CHECKING:
    pass
from assay.engines.gguf.spec import GgufSpec

_last_errors: deque[str] = deque(maxlen=4)


_ERROR_LEVEL = 4  # GGML_LOG_LEVEL_ERROR of ggml.h


@cache
def load_library() -> Any:
    """The module `llama_cpp`, its log kept out of the terminal; AssayError where it is missing."""
    try:
        import llama_cpp
    except (ImportError, RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise AssayError(
            f"gguf: needs llama-cpp-python, which cannot be loaded: {reason}",
            finding_id="fidelity.engine_missing",
            remedy="pip install 'llm-assay[gguf]'",
        ) from error
    llama_cpp.llama_log_set(_log_callback(llama_cpp), ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


@cache
def _log_callback(llama_cpp: Any) -> Any:
    """Keeps the last error lines. It lives as long as the process: the library holds only a pointer
    to it.
    """

    def keep(level: int, text: bytes, _user_data: Any) -> None:
        line = text.decode("utf-8", "replace").strip()
        if level == _ERROR_LEVEL and line:
            _last_errors.append(line)

    return llama_cpp.llama_log_callback(keep)


def load_model(spec: GgufSpec, *, vocabulary_only: bool = False) -> Any:
    """A handle of the model in `spec.model`; AssayError with llama.cpp's own reason where it cannot
    be loaded.
    """
    library = load_library()
    if not Path(spec.model).is_file():
        raise cannot_load(spec, "there is no such file")
    parameters = library.llama_model_default_params()
    parameters.n_gpu_layers = spec.gpu_layers
    parameters.vocab_only = vocabulary_only
    _last_errors.clear()
    model = library.llama_model_load_from_file(spec.model.encode(), parameters)
    if not model:
        raise cannot_load(spec, last_error())
    return model


def last_error() -> str:
    """The first of the last error lines that llama.cpp wrote, the one nearest to the cause."""
    return _last_errors[0] if _last_errors else "llama.cpp gave no reason"


def describe_model(library: Any, model: Any) -> dict[str, Any]:
    """Architecture and quantisation in llama.cpp's words, size in bytes, number of parameters."""
    buffer = ctypes.create_string_buffer(256)
    library.llama_model_desc(model, buffer, len(buffer))
    return {
        "description": buffer.value.decode("utf-8", "replace"),
        "model_bytes": int(library.llama_model_size(model)),
        "parameters": int(library.llama_model_n_params(model)),
    }


def cannot_load(spec: GgufSpec, reason: str) -> AssayError:
    """The error for a file that llama.cpp does not load."""
    return AssayError(
        f"cannot load {spec.model}: {reason}",
        finding_id="fidelity.engine_load",
        remedy="give a GGUF file that this llama-cpp-python can load: gguf:FILE",
    )
