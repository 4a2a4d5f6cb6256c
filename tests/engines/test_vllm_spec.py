"""How a model of vLLM is written, and where it runs."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from assay.engines.vllm import scorer as placement
from assay.engines.vllm.spec import VllmSpec, parse_vllm
from assay.errors import AssayError, UsageError


def test_options_are_read_by_type() -> None:
    spec = parse_vllm(
        'vllm:./m?kv_cache_dtype=fp8&max_model_len=512&gpu_memory_utilization=0.5&enforce_eager=no&args={"block_size":32}'
    )
    assert spec == VllmSpec(
        "./m",
        kv_cache_dtype="fp8",
        max_model_len=512,
        gpu_memory_utilization=0.5,
        enforce_eager=False,
        args={"block_size": 32},
    )
    assert VllmSpec(**spec.to_json()) == spec
    assert spec.batched_tokens == 8192


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vllm:", "names no model"),
        ("vllm:m?", "without options"),
        ("vllm:m?speed=9", "the unknown option 'speed'"),
        ("vllm:m?max_model_len=long", "is not a whole number"),
        ("vllm:m?enforce_eager=maybe", "neither true nor false"),
        ("vllm:m?args=[1]", "is not a JSON object"),
        ("vllm:m?tensor_parallel=0", "at least 1"),
        ("vllm:m?tensor_parallel=2&kv_cache_dtype=turboquant_4bit_nc", "one GPU alone"),
        ("vllm:m?pipeline_parallel=2&kv_pages=x", "packed pages are read by one GPU"),
        ('vllm:m?args={"tensor_parallel_size":2}', "write tensor_parallel=… as an option"),
        ('vllm:m?args={"enable_prefix_caching":true}', "comes out of the cache"),
        ('vllm:m?args={"enforce_eager":false}', "an option of its own"),
        ("vllm:m?gpu_memory_utilization=1.5", "at most 1"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_vllm(text)


def test_a_named_python_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        placement, "find_spec", lambda name: SimpleNamespace(origin="vllm/__init__.py")
    )
    assert placement.find_python() is None
    python = tmp_path / "python"
    python.write_text("")
    with pytest.raises(AssayError, match="can be run"):
        placement.find_python(str(python))
    python.chmod(0o755)
    assert placement.find_python(str(python)) == python


def test_then_this_process_the_environment_and_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "find_spec", lambda name: None)
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    monkeypatch.delenv("ASSAY_VLLM_PYTHON", raising=False)
    with pytest.raises(AssayError, match="needs vLLM") as caught:
        placement.find_python()
    assert "ASSAY_VLLM_PYTHON" in caught.value.remedy
    unfinished = tmp_path / "vllm-9" / "bin"
    unfinished.mkdir(parents=True)
    (tmp_path / "vllm-1" / "bin").mkdir(parents=True)
    (tmp_path / "vllm-1" / ".ready").touch()
    with pytest.raises(AssayError, match="needs vLLM"):  # its Python was removed
        placement.find_python()
    (tmp_path / "vllm-1" / "bin" / "python").touch()
    assert placement.find_python() == tmp_path / "vllm-1" / "bin" / "python"
    monkeypatch.setenv("ASSAY_VLLM_PYTHON", "/no/such/python")
    with pytest.raises(AssayError, match="/no/such/python"):
        placement.find_python()
