"""Which extra of assay brings a package that is not installed."""

from __future__ import annotations

from collections.abc import Mapping

from assay.errors import AssayError

EXTRA_OF: Mapping[str, str] = {
    "torch": "hf",
    "transformers": "hf",
    "accelerate": "hf",
    "safetensors": "hf",
    "tokenizers": "hf",
    "numba": "hf",
    "vllm": "vllm",
    "llama_cpp": "gguf",
    "constriction": "lab",
    "cryptography": "sign",
    "pyarrow": "scale",
    "duckdb": "scale",
    "ray": "ray",
    "gguf": "demo",
}
"""Name of the extra by the name under which a package is imported."""


def install(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'llm-assay[{extra}]'"


def not_installed(what: str, error: ImportError, finding_id: str) -> AssayError | None:
    """The error of something that needs a package of an extra.

    Args:
        what: What needs it, such as `assay compare`.
        error: The import that failed.
        finding_id: Id of the finding that the error becomes.

    Returns:
        The error, whose remedy is the command to run; None if no extra brings the package, so that
        its absence is a bug.
    """
    package = (error.name or "").partition(".")[0]
    extra = EXTRA_OF.get(package)
    if not isinstance(error, ModuleNotFoundError) or extra is None or "." in (error.name or ""):
        return None
    also = (
        " for transformers; [vllm] or [gguf] for an engine of these" if package == "torch" else ""
    )
    return AssayError(
        f"{what} needs the package {package}, which is not installed",
        finding_id=finding_id,
        remedy=install(extra) + also,
    )
