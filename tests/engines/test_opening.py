"""What is wrong in the way an engine is written is found before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.engines import with_options
from assay.engines.scoring import ScoringPath
from assay.engines.specs import check_spec
from assay.errors import AssayError, UsageError


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("hf:MODEL?dtpe=float32", "unknown option 'dtpe'"),
        ("hf:MODEL?dtype=int8", "unknown dtype"),
        ("hf:MODEL?weights=round(bits=4)", "unknown transformation 'round'"),
        ("hf:MODEL?weights=int(bit=4)", "unknown option 'bit'"),
        ("hf:MODEL?weights=polar(block=64)", "bits is missing"),
        ("vllm:MODEL?kv_dtype=fp8", "unknown option 'kv_dtype'"),
        ("gguf:MODEL?kv=q3", "unknown cache type"),
        ("run:MODEL", "stored reference"),
        ("MODEL", "names no engine"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, spec: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        check_spec(spec.replace("MODEL", str(tmp_path)))
    assert caught.value.finding_id == "fidelity.usage"


@pytest.mark.parametrize(
    "spec",
    ["hf:./nowhere", "vllm:/nowhere/model?dtype=auto", "gguf:../nowhere.gguf", "hf:~/nowhere"],
)
def test_a_path_where_nothing_is_is_named(spec: str) -> None:
    with pytest.raises(AssayError, match=r"there is no .*nowhere"):
        check_spec(spec)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssayError, match="the folder holds no config") as caught:
        check_spec(f"hf:{tmp_path}")
    assert caught.value.finding_id == "fidelity.engine_load"
    (tmp_path / "adapter_config.json").write_text("{}")
    check_spec(f"hf:{tmp_path}")


@pytest.mark.parametrize("device", ["tpu9", "cuda:99999999999", "cuda", ""])
def test_a_device_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(AssayError, match=r"no device '.*': .+") as caught:
        check_spec(f"hf:{tmp_path}?device={device}")
    assert "\n" not in caught.value.message
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_spec(f"hf:{tmp_path}?device=cuda")


def test_an_option_that_the_path_does_not_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    spec = f"hf:{tmp_path}?kv_cache_dtype=fp8"
    with pytest.raises(
        AssayError, match=r"kv_cache_dtype=fp8_e4m3 .* the prefill path reads none"
    ) as caught:
        check_spec(spec, ScoringPath.PREFILL)
    assert "\n" not in caught.value.message
    for path in (ScoringPath.CHUNKED, ScoringPath.DECODE, None):
        check_spec(spec, path)
    check_spec(f"hf:{tmp_path}?kv_cache_dtype=auto", ScoringPath.PREFILL)
    check_spec(
        "vllm:ORG/NAME?kv_cache_dtype=fp8", ScoringPath.PREFILL
    )  # vLLM's prefill reads its cache


def test_what_may_be_right_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    for spec in (
        f"hf:{tmp_path}?weights=int(bits=4,group=32,minimum=True)",
        f"hf:~/{tmp_path.name}",
        "hf:ORG/NAME",
        "vllm:ORG/NAME?kv_cache_dtype=fp8",
        "http://localhost:8000",
    ):
        check_spec(spec)


def test_a_device_and_threads_go_to_the_engines_that_take_them() -> None:
    asked = {"device": "cuda:1", "threads": 3}
    for spec, placed in {
        "hf:m": "hf:m?device=cuda:1&threads=3",
        "hf:m?dtype=float32&device=cpu": "hf:m?dtype=float32&device=cpu&threads=3",
        "hf:m?threads=1": "hf:m?threads=1&device=cuda:1",
        "gguf:f": "gguf:f?threads=3",
        "vllm:m?dtype=auto": "vllm:m?dtype=auto",
        "http://host:1?model=a": "http://host:1?model=a",
        "run:dir": "run:dir",
    }.items():
        assert with_options(spec, **asked) == placed  # type: ignore[arg-type]
        assert with_options(spec, device="auto", threads="auto") == spec


def test_a_name_on_a_hub_that_does_not_answer_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    import huggingface_hub

    from assay.engines.hf import engine

    asked = []

    class Silent:
        def head(self, url: str, timeout: float) -> None:
            asked.append((url, timeout))
            raise OSError("no route")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.utils, "get_session", Silent)
    with pytest.raises(AssayError, match="the Hub cannot be reached") as caught:
        engine.HfEngine.load("hf:nobody/nothing-of-this-name")
    assert caught.value.finding_id == "fidelity.engine_load"
    assert len(asked) == 1 and asked[0][1] <= 10
