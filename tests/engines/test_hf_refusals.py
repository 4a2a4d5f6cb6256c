"""What transformers cannot score is said in one line, on a tiny random model."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from assay.cli.main import invoke
from assay.engines.hf import scorer as window_scoring
from assay.engines.hf.engine import HfEngine
from assay.engines.hf.loading import on_device
from assay.engines.hf.spec import HfSpec
from assay.engines.scoring import ScoreJob, Window
from assay.errors import AssayError


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=50,
        max_position_embeddings=16,
    )
    yield transformers.LlamaForCausalLM(config).eval()


def windows(length: int, count: int = 5) -> list[Window]:
    return [Window(i, tuple(range(i, i + length))) for i in range(count)]


def test_windows_longer_than_the_positions_are_refused(model: Any) -> None:
    assert len(list(window_scoring.window_states(model, windows(16), ScoreJob(), None))) == 5
    with pytest.raises(AssayError, match="17 tokens are longer than the 16 positions") as caught:
        list(window_scoring.window_states(model, windows(17), ScoreJob(), None))
    assert caught.value.remedy == "give --length 16 or less"


def test_ids_that_the_model_has_no_embedding_for_are_refused(model: Any) -> None:
    given = [Window(0, (3, 49, 7)), Window(1, (3, 50, 7))]
    with pytest.raises(
        AssayError, match="the tokenizer gives token 50, and LlamaForCausalLM has 50 embeddings"
    ):
        list(window_scoring.window_states(model, given, ScoreJob(), None))


def test_a_batch_is_halved_until_it_fits(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = window_scoring._batch_states
    tried = []

    def full(model: Any, part: Any, job: Any, hook: Any) -> Any:
        tried.append(len(part))
        if len(part) > 1:
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"
            )
        return whole(model, part, job, hook)

    expected = [
        s for _, s in window_scoring.window_states(model, windows(8), ScoreJob(batch=1), None)
    ]
    monkeypatch.setattr(window_scoring, "_batch_states", full)
    found = list(window_scoring.window_states(model, windows(8), ScoreJob(batch=4), None))
    assert tried == [4, 2, 1, 1, 1, 1, 1]
    assert [w.index for w, _ in found] == [0, 1, 2, 3, 4]
    for (_, states), own in zip(found, expected, strict=True):
        torch.testing.assert_close(states, own)


def test_one_window_that_does_not_fit_is_an_error_with_a_remedy(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(window_scoring, "_batch_states", full)
    with pytest.raises(AssayError, match="single window of 8 tokens") as caught:
        list(window_scoring.window_states(model, windows(8), ScoreJob(), None))
    assert caught.value.finding_id == "fidelity.out_of_memory"
    assert "--length" in caught.value.remedy


def test_a_device_that_is_not_there_is_named(model: Any) -> None:
    with pytest.raises(AssayError, match="'nosuch'"):
        on_device(model, HfSpec("m", device="nosuch"))
    if not torch.cuda.is_available():
        with pytest.raises(AssayError, match="'cuda'"):
            on_device(model, HfSpec("m", device="cuda"))


@pytest.fixture
def tiny(tmp_path: Path, model: Any) -> Path:
    """A checkpoint with a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel({f"w{i}": i for i in range(50)} | {"<unk>": 50}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    return tmp_path


Compared = Callable[[Path], tuple[int, dict[str, Any], str]]


@pytest.fixture
def compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Compared:
    """Exit code, report and all that is said by a comparison that is offered a `y`."""
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))

    def compared(folder: Path) -> tuple[int, dict[str, Any], str]:
        capfd.readouterr()
        code = invoke(["compare", f"hf:{folder}", f"hf:{folder}?dtype=float32", "--json"])
        said = capfd.readouterr()
        return code, json.loads(said.out), said.out + said.err

    return compared


@pytest.mark.parametrize("where", ["model", "tokenizer"])
def test_a_checkpoint_never_runs_code_of_its_own(
    tiny: Path, where: str, compared: Compared
) -> None:
    ran = tiny / "ran"
    (tiny / "own.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast\n"
        "class Config(PretrainedConfig):\n    model_type = 'own'\n"
        "class Model(PreTrainedModel):\n    config_class = Config\n"
        "class Tokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    if where == "model":
        change = {
            "model_type": "own",
            "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
        }
        file = tiny / "config.json"
    else:
        change = {
            "tokenizer_class": "OwnTokenizer",
            "auto_map": {"AutoTokenizer": [None, "own.Tokenizer"]},
        }
        file = tiny / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    code, report, said = compared(tiny)
    assert not ran.exists()
    assert code == 2
    (finding,) = report["findings"]
    assert finding["id"] == "fidelity.code_refused"
    assert "code of its own" in finding["title"]
    assert "[y/N]" not in said


class _Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


def test_a_pickle_that_is_more_than_weights_is_refused(
    tiny: Path, model: Any, compared: Compared
) -> None:
    (tiny / "model.safetensors").unlink()
    ran = tiny / "ran"
    torch.save(dict(model.state_dict()) | {"more": _Payload(ran)}, tiny / "pytorch_model.bin")
    code, report, _ = compared(tiny)
    assert not ran.exists()
    assert (code, [f["id"] for f in report["findings"]]) == (2, ["fidelity.code_refused"])
    assert "safetensors" in report["findings"][0]["remedies"][0]
    torch.save(model.state_dict(), tiny / "pytorch_model.bin")
    assert HfEngine.load(f"hf:{tiny}").describe()["model"] == tiny.name


@pytest.mark.parametrize("bytes_", [b"", b"not a checkpoint", b"PK\x03\x04broken"])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_damaged_weights_are_an_error_of_one_line(tiny: Path, name: str, bytes_: bytes) -> None:
    (tiny / "model.safetensors").unlink()
    (tiny / name).write_bytes(bytes_)
    with pytest.raises(AssayError, match="cannot load the model") as caught:
        HfEngine.load(f"hf:{tiny}")
    assert "\n" not in caught.value.message
